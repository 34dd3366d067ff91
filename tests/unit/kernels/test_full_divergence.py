"""Whole-vocabulary divergences, of logits and of hidden states, every backend against float64."""

from __future__ import annotations

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
    normal,
)

from mopd.kernels.reference import full_divergence_reference
from mopd.kernels.select import Head, full_divergence

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.parametrize("backend", BACKENDS),
]


def check(backend, student, teacher, grad, *, inplace=False, atol=5e-6, mask=None, **options):
    leaf = student.to(DEVICE, copy=True).requires_grad_()
    got = full_divergence(
        leaf * 1.0 if inplace else leaf,
        teacher.to(DEVICE),
        backend=backend,
        inplace_backward=inplace,
        mask_N=None if mask is None else mask.to(DEVICE),
        **options,
    )
    got.backward(grad.to(got))
    wide = student.double().requires_grad_()
    options["beta"] = options["beta"] or 0.0
    want = full_divergence_reference(wide, teacher.double(), **options)
    (want_grad,) = torch.autograd.grad(want, wide, grad.double())
    if mask is not None:
        want, want_grad = want.where(mask, 0.0), want_grad.where(mask[:, None], 0.0)
    valid = options.get("valid_vocab")
    assert valid is None or (leaf.grad[:, valid:] == 0).all()
    np.testing.assert_allclose(got.detach().cpu(), want.detach(), atol=atol)
    np.testing.assert_allclose(leaf.grad.cpu()[:, :valid], want_grad[:, :valid], atol=atol)
    return leaf.grad.cpu()


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
@pytest.mark.parametrize("shape", [(4, 130), (3, 17), (1, 1), (0, 7)])
def test_values_and_gradients(backend, direction, beta, shape):
    grad = normal(shape[0], seed=2, scale=1.0)
    for inplace in (False, True):
        check(
            backend,
            normal(*shape),
            normal(*shape, seed=1),
            grad,
            inplace=inplace,
            direction=direction,
            beta=beta,
            temperature=0.7,
            teacher_temperature=1.3,
        )


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
def test_many_tiles_masked_rows_and_padding(backend, direction, beta, monkeypatch):
    module = "triton_pairs.MAX_TILE" if backend == "triton" else "chunks.CHUNK_ELEMENTS"
    monkeypatch.setattr(f"mopd.kernels.{module}", 16 if backend == "triton" else 130)
    student, teacher = normal(5, 65), normal(5, 70, seed=1)
    student[0] = torch.linspace(-20, 20, 65)  # both maxima move at every tile, in either sense
    teacher[0] = torch.linspace(20, -20, 70)
    student[1, :16] = teacher[1, :16] = -INF  # a first tile without a finite logit
    student[2], teacher[2] = torch.linspace(20, -20, 65), torch.linspace(-20, 20, 70)
    student[:, 60:] = teacher[:, 60:] = float("nan")  # different paddings
    mask = torch.tensor([True, True, True, False, True])
    grad = torch.tensor([0.3, -2.0, 1.0, float("nan"), 0.5])
    options = {"direction": direction, "beta": beta, "valid_vocab": 60, "temperature": 0.9}
    # where both are -inf the reference's autograd is NaN: that row's gradient apart
    rows = [0, 2, 3, 4]
    student_rows, teacher_rows = student[rows], teacher[rows]
    student_rows[2], teacher_rows[2] = float("nan"), INF  # the masked row
    check(backend, student_rows, teacher_rows, grad[rows], atol=2e-5, mask=mask[rows], **options)
    excluded = student[1:2, 16:], teacher[1:2, 16:]
    options["valid_vocab"] = 44
    want = check(backend, *excluded, grad[1:2], **options)
    leaf = student[1:2].to(DEVICE).requires_grad_()
    options["valid_vocab"] = 60
    got = full_divergence(leaf, teacher[1:2].to(DEVICE), backend=backend, **options)
    got.backward(grad[1:2].to(got))
    torch.testing.assert_close(leaf.grad[:, 16:].cpu(), want, atol=1e-6, rtol=1e-5)
    assert (leaf.grad[:, :16] == 0).all()


def test_two_outcomes_by_hand(backend):
    student = torch.tensor([[0.6, 0.4]], device=DEVICE).log()
    teacher = torch.tensor([[0.9, 0.1]], device=DEVICE).log()
    want = {"reverse": 0.31124, "forward": 0.22629}
    for direction, value in want.items():
        got = full_divergence(student, teacher, direction=direction, backend=backend)
        assert got.item() == pytest.approx(value, abs=1e-5)
    got = full_divergence(student, teacher, direction="jsd", beta=0.5, backend=backend)
    m = np.array([0.75, 0.25])
    p, q = np.array([0.6, 0.4]), np.array([0.9, 0.1])
    jsd = 0.5 * (q * np.log(q / m)).sum() + 0.5 * (p * np.log(p / m)).sum()
    assert got.item() == pytest.approx(jsd, abs=1e-6)


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
def test_equal_distributions_and_degenerate_rows(backend, direction, beta):
    logits = torch.tensor(
        [
            [2.5] * 9,
            [0.0] * 8 + [1e4],
            [-INF] * 4 + [3.0] + [-INF] * 4,
            [-1e30] * 9,
        ]
    ).to(DEVICE)
    leaf = logits.clone().requires_grad_()
    options = {"direction": direction, "beta": beta, "backend": backend}
    got = full_divergence(leaf, logits, **options)
    got.sum().backward()
    assert got.abs().max() < 1e-6 and leaf.grad.abs().max() < 1e-6
    teacher = torch.zeros_like(logits)
    got = full_divergence(leaf, teacher, **options)
    finite = [0, 1, 3] if direction == "forward" else [0, 1, 2, 3]
    want = full_divergence_reference(
        logits.double(), teacher.double(), direction=direction, beta=beta or 0.0
    )
    want[2] = got[2] if direction == "forward" else want[2].nan_to_num(float(np.log(9)))
    torch.testing.assert_close(
        got.double()[finite], want[finite].nan_to_num(float(np.log(9))), atol=1e-5, rtol=1e-6
    )
    if direction != "forward":
        (grad,) = torch.autograd.grad(got[finite].sum(), leaf)
        assert grad.isfinite().all()
    else:
        assert got[2] == INF  # the teacher asks for what the student excludes


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accuracy_rule(backend, direction, beta, dtype):
    student = normal(6, 130, scale=1.5).to(dtype)
    teacher = normal(6, 130, seed=1, scale=1.5).to(dtype)
    grad = normal(6, seed=2, scale=1.0)
    options = {"direction": direction, "beta": beta or 0.0}
    wide, plain = student.double().requires_grad_(), student.clone().requires_grad_()
    want = full_divergence_reference(wide, teacher.double(), **options)
    want.backward(grad.double())
    same = full_divergence_reference(plain, teacher, **options)
    same.backward(grad.to(dtype))
    leaf = student.to(DEVICE, copy=True).requires_grad_()
    got = full_divergence(leaf, teacher.to(DEVICE), direction=direction, beta=beta, backend=backend)
    got.backward(grad.to(DEVICE))
    assert got.dtype == torch.float32 and leaf.grad.dtype == dtype
    assert_as_accurate(got, same, want, floor=1e-6)
    factor = gradient_factor(backend, dtype)
    assert_as_accurate(leaf.grad, plain.grad, wide.grad, floor=2e-7, factor=factor)


def test_c25_row_offsets_past_two_to_the_31(backend, monkeypatch):
    student, teacher = (far_rows(4, 130, monkeypatch) for _ in range(2))
    student.copy_(normal(4, 130)), teacher.copy_(normal(4, 130, seed=1))
    wide = student.cpu().double().requires_grad_()
    want = full_divergence_reference(wide, teacher.cpu().double())
    want.sum().backward()
    got = full_divergence(
        student.requires_grad_().view_as(student), teacher, backend=backend, inplace_backward=True
    )
    assert error(got, want) < 1e-5
    got.sum().backward()
    assert error(student, wide.grad) < 2e-2


def test_c28_backward_twice_views_and_inputs_unchanged(backend):
    student, teacher = normal(40, 4).to(DEVICE).t(), normal(4, 80, seed=1).to(DEVICE)[:, ::2]
    before = student.clone(), teacher.clone()
    leaf = student.requires_grad_()
    got = full_divergence(leaf, teacher, backend=backend)
    first, second = (torch.autograd.grad(got.sum(), leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(leaf.detach(), before[0]) and torch.equal(teacher, before[1])
    want = check(backend, *(t.cpu() for t in before), torch.ones(4), direction="reverse", beta=None)
    torch.testing.assert_close(first.cpu(), want)
    with pytest.raises(NotImplementedError, match="full_divergence_reference"):
        torch.autograd.grad(got.sum(), leaf, create_graph=True)
    got = full_divergence(leaf * 1, teacher, backend=backend, inplace_backward=True)
    got.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace_backward=False"):
        got.sum().backward()


def heads(rows: int, width: int, seed: int = 0):
    """Student's hidden and weight, teacher's hidden and weight, of different hidden sizes."""
    shapes = [(rows, 7), (width, 7), (rows, 5), (width, 5)]
    return [normal(*s, seed=seed + i, scale=1.2) for i, s in enumerate(shapes)]


@pytest.mark.parametrize(("direction", "beta"), DIRECTIONS)
@pytest.mark.parametrize("fused_student", [False, True])
def test_hidden_states_tile_by_tile(backend, direction, beta, fused_student, monkeypatch):
    rows, width, valid = 5, 70, 66
    monkeypatch.setattr("mopd.kernels.head.TILE_BYTES", {"cpu": 4 * 2 * 16, "cuda": 4 * 2 * 16})
    monkeypatch.setattr("mopd.kernels.head.COLUMN_MULTIPLE", 16)
    monkeypatch.setattr("mopd.kernels.head.BLOCK_ROWS", 2)
    tensors = heads(rows, width)
    mask = torch.tensor([True, False, True, True, True])
    grad = normal(rows, seed=9, scale=1.0)
    hidden, weight, t_hidden, t_weight = (t.to(DEVICE, copy=True) for t in tensors)
    hidden[1] = t_hidden[1] = float("nan")  # the masked row
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    if not fused_student:
        leaves = [(hidden @ weight.t()).detach().requires_grad_()]
    # also shows that the largest new tensor of the fused path is far below [N, V]
    with LargestNewStorage(*leaves) as seen:
        got = full_divergence(
            Head(*leaves) if fused_student else leaves[0],
            Head(t_hidden, t_weight),
            direction=direction,
            beta=beta,
            mask_N=mask.to(DEVICE),
            temperature=0.8,
            teacher_temperature=1.1,
            valid_vocab=valid,
            backend=backend,
        )
        grads = torch.autograd.grad(got, leaves, grad.to(DEVICE))
    wide = [t.double().requires_grad_() for t in tensors]
    logits = wide[0] @ wide[1].t()
    want = full_divergence_reference(
        logits,
        wide[2] @ wide[3].t(),
        direction=direction,
        beta=beta or 0.0,
        temperature=0.8,
        teacher_temperature=1.1,
        valid_vocab=valid,
    ).where(mask, 0.0)
    wants = torch.autograd.grad(want, wide[:2] if fused_student else [logits], grad.double())
    np.testing.assert_allclose(got.detach().cpu(), want.detach(), atol=2e-5)
    for mine, theirs in zip(grads, wants, strict=True):
        assert error(mine, theirs) < 2e-5
    assert seen.largest <= (width * 7 if fused_student else rows * width * 4)


def test_contract_violations(backend):
    x, y = torch.zeros(2, 5), torch.zeros(2, 6)
    hidden, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    for student, teacher, options, words in (
        (x, y, {}, "give valid_vocab"),
        (x, y[:1], {}, r"teacher of \(1, 6\)"),
        (x, x, {"mask_N": torch.ones(2)}, "float32; expected"),
        (x, x, {"teacher_temperature": -1.0}, "teacher_temperature is -1.0"),
        (x, Head(hidden, torch.zeros(5, 4)), {}, r"\(5, 4\)"),
        (x, Head(hidden, weight.double()), {}, "one"),
        (Head(hidden, weight), x, {"inplace_backward": True}, "none to overwrite"),
        (x, x, {"direction": "jsd", "beta": 0.0}, "0 < beta < 1"),
    ):
        with pytest.raises(ValueError, match=words):
            full_divergence(student, teacher, backend=backend, **options)
