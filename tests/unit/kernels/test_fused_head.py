"""Logprobs of hidden states and the LM head: every backend against float64, never [N, V] (C29)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import (
    BACKENDS,
    DEVICE,
    LargestNewStorage,
    assert_as_accurate,
    gradient_factor,
    integers,
    normal,
    step,
)

from mopd.errors import ConfigError, DataError
from mopd.kernels.reference import IGNORE, gathered_logprobs_reference
from mopd.kernels.select import fused_head_logprobs, fused_head_scores, gathered_logprobs

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.parametrize("backend", BACKENDS),
]


def case(rows: int, width: int, size: int = 7, valid: int | None = None):
    """Hidden states, weights, targets, upstream gradient."""
    return (
        normal(rows, size, scale=1.5),
        normal(width, size, seed=1, scale=1.0),
        integers(valid or width, rows, seed=2),
        normal(rows, seed=3, scale=1.0),
    )


def tiny_tiles(monkeypatch, elements: int = 2 * 16) -> None:
    monkeypatch.setattr("mopd.kernels.head.TILE_BYTES", {"cpu": 4 * elements, "cuda": 4 * elements})
    monkeypatch.setattr("mopd.kernels.head.COLUMN_MULTIPLE", 16)
    monkeypatch.setattr("mopd.kernels.head.BLOCK_ROWS", 2)


def check(backend, hidden, weight, targets, grad, *, atol=5e-6, **options):
    leaves = [t.to(DEVICE, copy=True).requires_grad_() for t in (hidden, weight)]
    logprobs, entropy = fused_head_logprobs(
        *leaves, targets.to(DEVICE), backend=backend, return_entropy=True, **options
    )
    assert not entropy.requires_grad
    logprobs.backward(grad.to(logprobs))
    wide = [t.double().requires_grad_() for t in (hidden, weight)]
    logits = wide[0] @ wide[1].t()
    want = gathered_logprobs_reference(logits, targets, **options)
    want.backward(grad.double())
    valid = options.get("valid_vocab")
    p = (logits.detach()[:, :valid] / options.get("temperature", 1.0)).softmax(1)
    want_entropy = torch.where(targets == IGNORE, 0.0, -torch.special.xlogy(p, p).sum(1))
    np.testing.assert_allclose(logprobs.detach().cpu(), want.detach(), atol=atol)
    np.testing.assert_allclose(entropy.cpu(), want_entropy, atol=5 * atol)
    for mine, theirs in zip(leaves, wide, strict=True):
        np.testing.assert_allclose(mine.grad.cpu(), theirs.grad, atol=2 * atol)
    return [leaf.grad.cpu() for leaf in leaves]


@pytest.mark.parametrize("shape", [(4, 130), (3, 17), (1, 64), (2, 1), (0, 9)])
def test_values_and_gradients(backend, shape):
    check(backend, *case(*shape))


@pytest.mark.parametrize("shape", [(5, 70), (1, 33), (2, 16)])
def test_many_tiles(backend, shape, monkeypatch):
    tiny_tiles(monkeypatch)
    rows, width = shape
    hidden, weight, targets, grad = case(rows, width, valid=width - 3)
    if rows > 2:
        targets[2] = IGNORE
    for temperature in (1.0, 0.7):
        grads = check(
            backend,
            hidden,
            weight,
            targets,
            grad,
            temperature=temperature,
            valid_vocab=width - 3,
        )
        assert (grads[1][width - 3 :] == 0).all()


def test_ignored_rows_may_hold_anything(backend, monkeypatch):
    tiny_tiles(monkeypatch)
    hidden, weight, targets, grad = case(4, 40)
    want = check(backend, hidden[[0, 2]], weight, targets[[0, 2]], grad[[0, 2]])
    hidden[1], hidden[3], targets[1], targets[3] = float("nan"), float("inf"), IGNORE, IGNORE
    grad[1] = float("nan")
    leaves = [t.to(DEVICE, copy=True).requires_grad_() for t in (hidden, weight)]
    got = fused_head_logprobs(*leaves, targets.to(DEVICE), backend=backend)
    got.backward(grad.to(got))
    assert (got[[1, 3]] == 0).all() and (leaves[0].grad[[1, 3]] == 0).all()
    torch.testing.assert_close(leaves[0].grad[[0, 2]].cpu(), want[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(leaves[1].grad.cpu(), want[1], atol=1e-6, rtol=1e-5)


def test_frozen_parts_cost_no_product_and_get_no_gradient(backend):
    hidden, weight, targets, _ = (t.to(DEVICE) for t in case(3, 20))
    fused_head_logprobs(hidden, weight.requires_grad_(), targets, backend=backend).sum().backward()
    both = weight.grad
    assert hidden.grad is None and both.abs().max() > 0
    weight = weight.detach()
    leaf = hidden.requires_grad_()
    fused_head_logprobs(leaf, weight, targets, backend=backend).sum().backward()
    assert leaf.grad.abs().max() > 0 and weight.grad is None


def test_scores_and_backward_twice(backend):
    hidden, weight, targets, grad = (t.to(DEVICE) for t in case(4, 33))
    teacher = -torch.ones(4, device=DEVICE)
    scores = fused_head_scores(
        hidden.requires_grad_(), weight, targets, teacher_logprobs_N=teacher, backend=backend
    )
    want = (hidden.double() @ weight.double().t()).logsumexp(1)
    torch.testing.assert_close(scores.logsumexp_N.double(), want, atol=5e-6, rtol=0)
    torch.testing.assert_close(scores.advantage_N, teacher - scores.logprobs_N.detach())
    first = torch.autograd.grad(scores.logprobs_N, hidden, grad, retain_graph=True)[0]
    second = torch.autograd.grad(scores.logprobs_N, hidden, grad, retain_graph=True)[0]
    assert torch.equal(first, second)
    with pytest.raises(NotImplementedError, match="gathered_logprobs_reference"):
        torch.autograd.grad(scores.logprobs_N.sum(), hidden, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiles", ["one", "many"])
def test_accuracy_rule(backend, dtype, tiles, monkeypatch):
    if tiles == "many":
        tiny_tiles(monkeypatch, elements=8 * 32)
        monkeypatch.setattr("mopd.kernels.head.BLOCK_ROWS", 4)
    hidden, weight, targets, grad = case(12, 130, size=16)
    hidden, weight = hidden.to(dtype), (0.3 * weight).to(dtype)
    wide = [t.double().requires_grad_() for t in (hidden, weight)]
    plain = [t.clone().requires_grad_() for t in (hidden, weight)]
    want = gathered_logprobs_reference(wide[0] @ wide[1].t(), targets)
    want.backward(grad.double())
    logits = plain[0] @ plain[1].t()  # as an unfused head in this dtype
    same = torch.log_softmax(logits, 1).gather(1, targets[:, None]).squeeze(1)
    same.backward(grad.to(dtype))
    for logits_dtype in (None, torch.float32):
        leaves = [t.to(DEVICE, copy=True).requires_grad_() for t in (hidden, weight)]
        got = fused_head_logprobs(
            *leaves, targets.to(DEVICE), backend=backend, logits_dtype=logits_dtype
        )
        got.backward(grad.to(got))
        assert got.dtype == torch.float32 and leaves[0].grad.dtype == dtype
        assert_as_accurate(got, same, want, floor=1e-6)
        for mine, theirs, best in zip(leaves, plain, wide, strict=True):
            factor = gradient_factor(backend, dtype)
            assert_as_accurate(mine.grad, theirs.grad, best.grad, floor=1e-6, factor=factor)


def test_fp32_logits_of_low_precision_weights(backend):
    """An FP32 head: as exact as float64 products of the same bfloat16 numbers."""
    hidden, weight, targets, _ = case(8, 130, size=32)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    want = gathered_logprobs_reference(hidden.double() @ weight.double().t(), targets)
    args = hidden.to(DEVICE), weight.to(DEVICE), targets.to(DEVICE)
    rounded = fused_head_logprobs(*args, backend=backend)
    wide = fused_head_logprobs(*args, backend=backend, logits_dtype=torch.float32)
    assert (wide.cpu() - want).abs().max() < 2e-5
    assert (rounded.cpu() - want).abs().max() > 1e-3


def test_never_a_vocabulary_sized_tensor(backend, monkeypatch):
    """The largest new tensor is the weight's gradient, or, where that is frozen, a tile."""
    rows, width, size = 256, 2048, 8
    monkeypatch.setattr("mopd.kernels.head.TILE_BYTES", {"cpu": 4 * 2**15, "cuda": 4 * 2**15})
    monkeypatch.setattr("mopd.kernels.chunks.CHUNK_ELEMENTS", 2**13)
    hidden, weight, targets, _ = (t.to(DEVICE) for t in case(rows, width, size=size))
    if backend == "triton" and DEVICE == "cpu":  # the interpreter is slow
        rows = 32
        hidden, targets = hidden[:rows].clone(), targets[:rows].clone()
        monkeypatch.setattr("mopd.kernels.head.TILE_BYTES", {"cpu": 4 * 2**13, "cuda": 0})
    tile = 2**15 if rows == 256 else 2**13
    known = [hidden.requires_grad_(), weight.requires_grad_()]
    with LargestNewStorage(*known) as seen:
        logprobs, _ = fused_head_logprobs(*known, targets, backend=backend, return_entropy=True)
        logprobs.sum().backward()
    assert tile <= seen.largest <= max(width * size, tile) < rows * width / 2
    weight.requires_grad_(False)
    with LargestNewStorage(*known) as seen:
        fused_head_logprobs(hidden, weight, targets, backend=backend).sum().backward()
    assert seen.largest <= tile * 2 < rows * width / 2
    with LargestNewStorage(*known) as control:  # the measure does see [N, V]
        gathered_logprobs(hidden @ weight.t(), targets, backend="torch")
    assert control.largest >= rows * width


def test_c29_logits_and_fused_head_give_the_same_step(backend, monkeypatch):
    tiny_tiles(monkeypatch)
    hidden, weight, targets, _ = case(6, 130)
    targets[4] = targets[5] = IGNORE
    results = []
    for head in ("reference", "logits", "fused"):
        dtype = torch.float64 if head == "reference" else torch.float32
        device = "cpu" if head == "reference" else DEVICE
        leaves = [t.to(device, dtype, copy=True).requires_grad_() for t in (hidden, weight)]
        if head == "fused":
            logprobs = fused_head_logprobs(*leaves, targets.to(DEVICE), backend=backend)
        elif head == "logits":
            logits = leaves[0] @ leaves[1].t()
            logprobs = gathered_logprobs(
                logits, targets.to(DEVICE), backend=backend, inplace_backward=True
            )
        else:
            logprobs = gathered_logprobs_reference(leaves[0] @ leaves[1].t(), targets)
        loss = step(logprobs)
        loss.backward()
        results.append([loss.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    for got in results[1:]:
        for mine, want in zip(got, results[0], strict=True):
            torch.testing.assert_close(mine.double(), want.double(), rtol=5e-6, atol=2e-6)


def test_contract_violations(backend):
    hidden, weight, targets = torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, 1])
    for args, options, words in (
        ((hidden, torch.zeros(5, 4), targets), {}, r"\(5, 4\)"),
        ((hidden, weight, targets[:1]), {}, "2 rows of hidden states for 1"),
        ((hidden, weight.bfloat16(), targets), {}, "logits_dtype=torch.float32"),
        ((hidden, weight, targets.int()), {}, "int32"),
        ((hidden, weight, targets), {"logits_dtype": torch.float64}, "torch.float64"),
        ((hidden, weight, targets), {"temperature": -1.0}, "temperature is -1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            fused_head_logprobs(*args, backend=backend, **options)
    with pytest.raises(ConfigError, match="'tritn'"):
        fused_head_logprobs(hidden, weight, targets, backend="tritn")
    if DEVICE == "cpu":
        with pytest.raises(DataError, match="target id 4 in row 1"):
            fused_head_logprobs(
                hidden, weight, torch.tensor([0, 4]), valid_vocab=4, backend=backend
            )
