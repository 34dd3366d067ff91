"""Top-k logprobs and divergences with a tail bucket, every backend against float64 (C09)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_cases import (
    BACKENDS,
    DEVICE,
    DIRECTIONS,
    INF,
    LargestNewStorage,
    assert_as_accurate,
    error,
    far_rows,
    gradient_factor,
    integers,
    normal,
)

from mopd.errors import DataError
from mopd.kernels.reference import topk_divergence_reference
from mopd.kernels.select import (
    bucket_divergence,
    bucket_logprobs,
    full_divergence,
    gathered_logprobs,
    topk_divergence,
    topk_logprobs,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    pytest.mark.parametrize("backend", BACKENDS),
]


def case(rows: int, width: int, slots: int, valid: int | None = None):
    """Logits, ids with unused slots and repeats, the teacher's logprobs of them, upstream grads."""
    valid = valid or width
    logits = normal(rows, width)
    ids = integers(valid, rows, slots)
    if rows > 2 and slots > 2:
        ids[0, 1] = -1
        ids[1, 2] = ids[1, 0]  # the sampled token is in the top k
        ids[2, -1] = valid - 1
    teacher = torch.log_softmax(normal(rows, valid, seed=1), 1).gather(1, ids.clamp(min=0))
    teacher[ids < 0] = float("nan")
    return logits, ids, teacher, normal(rows, seed=2, scale=1.0)


def check(backend, logits, ids, teacher, grad, *, inplace=False, atol=5e-6, **options):
    leaf = logits.to(DEVICE, copy=True).requires_grad_()
    got = topk_divergence(
        leaf * 1.0 if inplace else leaf,
        ids.to(DEVICE),
        teacher.to(DEVICE),
        backend=backend,
        inplace_backward=inplace,
        **options,
    )
    got.backward(grad.to(got))
    wide = logits.double().requires_grad_()
    options["beta"] = options["beta"] or 0.0
    want = topk_divergence_reference(wide, ids, teacher.double(), **options)
    want.backward(grad.double())
    np.testing.assert_allclose(got.detach().cpu(), want.detach(), atol=atol)
    np.testing.assert_allclose(leaf.grad.cpu(), wide.grad.nan_to_num(0.0), atol=atol)
    return leaf.grad.cpu()


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
@pytest.mark.parametrize("shape", [(4, 130, 5), (3, 17, 3), (1, 64, 1), (3, 9, 9), (0, 7, 2)])
def test_values_and_gradients(backend, direction, beta, shape):
    if shape[0] == 0:
        empty = topk_divergence(*(t.to(DEVICE) for t in case(*shape)[:3]), backend=backend)
        assert empty.shape == (0,)
        return
    for inplace in (False, True):
        check(backend, *case(*shape), direction=direction, beta=beta, inplace=inplace)


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
def test_many_tiles_chunks_temperature_and_padding(backend, direction, beta, monkeypatch):
    module = "triton_buckets.MAX_TILE" if backend == "triton" else "chunks.CHUNK_ELEMENTS"
    monkeypatch.setattr(f"mopd.kernels.{module}", 16 if backend == "triton" else 130)
    logits, ids, teacher, grad = case(5, 65, 4, valid=60)
    logits[0] = torch.linspace(-20, 20, 65)  # the maximum moves at every tile
    logits[3, :16] = -INF  # a first tile without a finite logit
    ids[3] = torch.tensor([20, 30, 59, 16])
    ids[4], teacher[4], logits[4] = -1, float("nan"), float("nan")  # an ignored row
    logits[:, 60:] = float("nan")
    grad[4] = float("nan")
    got = topk_divergence(
        (leaf := logits.to(DEVICE, copy=True).requires_grad_()),
        ids.to(DEVICE),
        teacher.to(DEVICE),
        direction=direction,
        beta=beta,
        temperature=0.7,
        valid_vocab=60,
        backend=backend,
    )
    got.backward(grad.to(got))
    assert got[4] == 0 and (leaf.grad[4] == 0).all() and (leaf.grad[:, 60:] == 0).all()
    live = check(
        backend,
        logits[:4].nan_to_num(0.0, neginf=-INF),
        ids[:4],
        teacher[:4],
        grad[:4],
        direction=direction,
        beta=beta,
        temperature=0.7,
        valid_vocab=60,
    )
    torch.testing.assert_close(leaf.grad[:4].cpu(), live)


def test_c09_top1_of_two_is_the_exact_kl(backend):
    logits = torch.tensor([[0.6, 0.4]], device=DEVICE).log().requires_grad_()
    ids, teacher = torch.tensor([[0]], device=DEVICE), torch.tensor([[0.9]], device=DEVICE).log()
    got = topk_divergence(logits, ids, teacher, backend=backend)
    assert got.item() == pytest.approx(0.31124, abs=1e-5)
    got.sum().backward()
    # p (log p/q - KL), by hand
    want = [0.6 * (math.log(0.6 / 0.9) - got.item()), 0.4 * (math.log(4.0) - got.item())]
    assert logits.grad[0].tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
def test_the_optimum_is_agreement_on_the_listed_ids(backend, direction, beta):
    """P = Q on the listed ids, whatever the tail looks like inside: 0, and no gradient."""
    p = torch.tensor([[0.5, 0.2, 0.1, 0.15, 0.05]])
    logits = (p.log() + 7).to(DEVICE).requires_grad_()
    ids = torch.tensor([[1, 0]], device=DEVICE)
    teacher = torch.tensor([[0.2, 0.5]], device=DEVICE).log()
    got = topk_divergence(logits, ids, teacher, direction=direction, beta=beta, backend=backend)
    got.sum().backward()
    assert got.item() == pytest.approx(0.0, abs=1e-6)
    assert logits.grad.abs().max() < 1e-6


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
def test_listing_the_whole_vocabulary_is_the_whole_divergence(backend, direction, beta):
    student, teacher = normal(3, 9).to(DEVICE), normal(3, 9, seed=1).to(DEVICE)
    ids = torch.arange(9, device=DEVICE).expand(3, 9)
    options = {"direction": direction, "beta": beta, "backend": backend}
    got = topk_divergence(student, ids, torch.log_softmax(teacher, 1), **options)
    want = full_divergence(student, teacher, **options)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    fewer = topk_divergence(student, ids[:, :4], torch.log_softmax(teacher, 1)[:, :4], **options)
    assert (fewer <= want + 1e-6).all() and (fewer > 0).all()


@pytest.mark.parametrize("tile", [16, 4096])
def test_topk_logprobs_and_entropy(backend, tile, monkeypatch):
    monkeypatch.setattr("mopd.kernels.triton_buckets.MAX_TILE", tile)
    logits, ids, _, _ = case(4, 130, 6)
    logits[0] = torch.linspace(-20, 20, 130)  # the maximum moves at every tile
    leaf = logits.to(DEVICE, copy=True).requires_grad_()
    got = topk_logprobs(leaf, ids.to(DEVICE), temperature=0.7, backend=backend)
    log_p = torch.log_softmax(logits.double() / 0.7, 1)
    want = torch.where(ids >= 0, log_p.gather(1, ids.clamp(min=0)), 0.0)
    np.testing.assert_allclose(got.cpu(), want, atol=5e-6)
    assert not got.requires_grad and (got[ids.to(DEVICE) < 0] == 0).all()
    assert got[1, 2] == got[1, 0]
    buckets = bucket_logprobs(
        leaf, ids.to(DEVICE), temperature=0.7, backend=backend, return_entropy=True
    )
    entropy = -(log_p.exp() * log_p).sum(1)
    np.testing.assert_allclose(buckets.entropy_N.cpu(), entropy, atol=1e-5)
    assert not buckets.entropy_N.requires_grad
    assert not buckets.counted_NK[1, 2] and buckets.counted_NK[1, 0]
    whole = torch.where(buckets.counted_NK, buckets.listed_NK.exp(), 0.0).sum(1)
    torch.testing.assert_close(whole + buckets.tail_N.exp(), torch.ones_like(whole))


def test_one_call_serves_the_sampled_token_too(backend):
    """Slot 0 is the sampled token: its logprob and gradient are the gathered kernel's."""
    logits, ids, teacher, grad = (t.to(DEVICE) for t in case(4, 40, 5))
    teacher = teacher.nan_to_num(0.0)
    leaf = logits.clone().requires_grad_()
    buckets = bucket_logprobs(leaf * 1.0, ids, backend=backend, inplace_backward=True)
    loss = (buckets.listed_NK[:, 0] * grad).sum() + bucket_divergence(buckets, teacher).sum()
    loss.backward()
    apart = logits.clone().requires_grad_()
    sampled = gathered_logprobs(apart, ids[:, 0].contiguous(), backend=backend)
    torch.testing.assert_close(buckets.listed_NK[:, 0], sampled, atol=2e-6, rtol=0)
    (
        (sampled * grad).sum() + topk_divergence(apart, ids, teacher, backend=backend).sum()
    ).backward()
    torch.testing.assert_close(leaf.grad, apart.grad, atol=2e-6, rtol=0)


def test_the_tail_keeps_its_digits(backend):
    """Where the listed ids have all the mass but 1e-9, 1 - sum would be 0 or noise."""
    logits = torch.full((1, 40), -24.0)
    logits[0, :2] = torch.tensor([1.0, 0.5])
    buckets = bucket_logprobs(
        logits.to(DEVICE), torch.tensor([[0, 1]], device=DEVICE), backend=backend
    )
    want = torch.log_softmax(logits.double(), 1)[0, 2:].logsumexp(0)
    assert buckets.tail_N.item() == pytest.approx(want.item(), rel=1e-6)


def test_degenerate_rows(backend):
    logits = torch.tensor(
        [
            [2.5] * 9,  # all equal
            [0.0] * 8 + [1e4],  # one huge logit in the tail
            [1e4] + [0.0] * 8,  # and listed
            [-INF] * 4 + [3.0] + [-INF] * 4,  # nothing but a listed id
            [-1e30] * 9,
        ]
    )
    ids = torch.tensor([[0, 3], [0, 1], [0, 1], [4, -1], [2, 5]])
    teacher = torch.tensor([[0.5, 0.25]] * 5).log()
    leaf = logits.to(DEVICE, copy=True).requires_grad_()
    for direction in ("reverse", "jsd"):
        got = topk_divergence(
            leaf,
            ids.to(DEVICE),
            teacher.to(DEVICE),
            direction=direction,
            beta=0.5 if direction == "jsd" else None,
            backend=backend,
        )
        want = topk_divergence_reference(
            logits.double(), ids, teacher.double(), direction=direction, beta=0.5
        )
        want[3] = {"reverse": 0.0, "jsd": 0.0}[direction]  # all mass is listed: the teacher's too
        np.testing.assert_allclose(got.detach().cpu(), want, atol=1e-5)
        (grad,) = torch.autograd.grad(got.sum(), leaf)
        assert grad.isfinite().all() and (grad[3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accuracy_rule(backend, dtype):
    logits, ids, teacher, grad = case(6, 130, 5)
    logits = (0.5 * logits).to(dtype)  # smaller ones make plain float16 torch NaN
    wide, plain = logits.double().requires_grad_(), logits.clone().requires_grad_()
    want = topk_divergence_reference(wide, ids, teacher.double())
    want.backward(grad.double())
    same = topk_divergence_reference(plain, ids, teacher)
    same.backward(grad.to(dtype))
    leaf = logits.to(DEVICE, copy=True).requires_grad_()
    got = topk_divergence(leaf, ids.to(DEVICE), teacher.to(DEVICE), backend=backend)
    got.backward(grad.to(DEVICE))
    assert got.dtype == torch.float32 and leaf.grad.dtype == dtype
    assert_as_accurate(got, same, want, floor=1e-6)
    factor = gradient_factor(backend, dtype)
    assert_as_accurate(leaf.grad, plain.grad, wide.grad, floor=2e-7, factor=factor)


def test_no_second_vocabulary_sized_tensor(backend, monkeypatch):
    rows, width = 24, 500
    monkeypatch.setattr("mopd.kernels.chunks.CHUNK_ELEMENTS", 2 * width)
    logits, ids, teacher, _ = case(rows, width, 4)
    work = logits.to(DEVICE).requires_grad_()
    with LargestNewStorage(work) as seen:
        got = topk_divergence(
            work, ids.to(DEVICE), teacher.to(DEVICE), backend=backend, inplace_backward=True
        )
        (grad,) = torch.autograd.grad(got.sum(), work)
    assert grad.data_ptr() == work.data_ptr()
    assert 0 < seen.largest <= 2 * width < rows * width


def test_c25_row_offsets_past_two_to_the_31(backend, monkeypatch):
    values, ids, teacher, grad = case(4, 130, 5)
    logits = far_rows(4, 130, monkeypatch)
    logits.copy_(values)
    wide = logits.detach().cpu().double().requires_grad_()
    want = topk_divergence_reference(wide, ids, teacher.double())
    want.backward(grad.double())
    got = topk_divergence(
        logits.requires_grad_().view_as(logits),
        ids.to(DEVICE),
        teacher.to(DEVICE),
        backend=backend,
        inplace_backward=True,
    )
    assert error(got, want) < 5e-6
    got.backward(grad.to(DEVICE))
    assert error(logits, wide.grad) < 2e-2


def test_non_contiguous_views(backend):
    logits, ids, teacher, grad = case(5, 40, 3)
    want = check(backend, logits, ids, teacher, grad, direction="reverse", beta=None)
    view = torch.stack([logits, logits], dim=2).to(DEVICE)[:, :, 1].requires_grad_()
    assert view.stride(1) == 2
    got = topk_divergence(view, ids.to(DEVICE), teacher.to(DEVICE), backend=backend)
    (grads,) = torch.autograd.grad(got, view, grad.to(DEVICE))
    torch.testing.assert_close(grads.cpu(), want)


def test_c28_backward_twice_and_inputs_unchanged(backend):
    logits, ids, teacher, grad = (t.to(DEVICE) for t in case(4, 33, 3))
    leaf = logits.clone().requires_grad_()
    got = topk_divergence(leaf, ids, teacher, backend=backend)
    first, second = (torch.autograd.grad(got, leaf, grad, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and torch.equal(leaf.detach(), logits)
    with pytest.raises(NotImplementedError, match="topk_divergence_reference"):
        torch.autograd.grad(got.sum(), leaf, create_graph=True)
    got = topk_divergence(leaf * 1, ids, teacher, backend=backend, inplace_backward=True)
    got.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace_backward=False"):
        got.sum().backward()


def test_what_a_teacher_must_not_send(backend):
    if DEVICE == "cuda":
        pytest.skip("looking would stall the stream")
    logits, ids = torch.zeros(2, 5), torch.tensor([[0, 1], [2, -1]])
    fine = torch.tensor([[-1.0, -2.0], [-3.0, float("nan")]])
    assert topk_divergence(logits, ids, fine, backend=backend).isfinite().all()
    for value, words in (
        (-INF, r"row 1, slot 0 is -inf"),
        (float("nan"), "is nan"),
        (0.1, r"slot 0 is 0.1"),
    ):
        bad = fine.clone()
        bad[1, 0] = value
        with pytest.raises(DataError, match=words):
            topk_divergence(logits, ids, bad, backend=backend)
    with pytest.raises(DataError, match=r"row 0 add up to 1.2"):
        topk_divergence(logits, ids, torch.tensor([[0.6, 0.6], [0.1, 0.1]]).log(), backend=backend)
    with pytest.raises(DataError, match="target id 5 in row 0"):
        topk_divergence(logits, torch.tensor([[0, 5], [2, -1]]), fine, backend=backend)


def test_contract_violations(backend):
    logits, ids = torch.zeros(2, 5, device=DEVICE), torch.zeros(2, 2, device=DEVICE).long()
    teacher = -torch.ones(2, 2, device=DEVICE)
    for options, words in (
        ({"direction": "backward"}, "'backward'"),
        ({"direction": "jsd"}, "beta is None"),
        ({"direction": "jsd", "beta": 1.0}, "beta is 1.0"),
        ({"beta": 0.5}, "no use for"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ):
        with pytest.raises(ValueError, match=words):
            topk_divergence(logits, ids, teacher, backend=backend, **options)
    with pytest.raises(ValueError, match=r"teacher logprobs \(2, 1\)"):
        topk_divergence(logits, ids, teacher[:, :1], backend=backend)
    with pytest.raises(ValueError, match="K >= 1"):
        topk_logprobs(logits, ids[:, :0], backend=backend)
