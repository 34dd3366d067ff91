"""Every backend against float64 numpy, on the inputs that break such kernels.

The Triton backend takes part everywhere: compiled on CUDA, elsewhere in Triton's interpreter, which
tests/conftest.py asks for before anything imports triton. Shapes: N rows, V columns.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, INTERPRETED, LargestNewStorage, far_rows, step

from mopd.errors import DataError
from mopd.kernels.reference import IGNORE, gathered_logprobs_reference
from mopd.kernels.select import gathered_logprobs, gathered_scores

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.parametrize("backend", ["torch", "triton"]),
]


def expected(logits, targets, grad, temperature=1.0, valid_vocab=None):
    """(logprobs, entropies, d logits) in float64 numpy, row by row, from the definition."""
    logits = logits.detach().double().cpu().numpy()
    rows, width = logits.shape
    valid = width if valid_vocab is None else min(valid_vocab, width)
    logprobs, entropies, dlogits = np.zeros(rows), np.zeros(rows), np.zeros((rows, width))
    for n in range(rows):
        target = int(targets[n])
        if target == IGNORE:
            continue
        x = logits[n, :valid]
        x = x / temperature - x.max() / temperature
        p = np.exp(x) / np.exp(x).sum()
        logprobs[n] = x[target] - np.log(np.exp(x).sum())
        entropies[n] = -sum(q * np.log(q) for q in p if q > 0)
        onehot = np.zeros(valid)
        onehot[target] = 1
        dlogits[n, :valid] = float(grad[n]) / temperature * (onehot - p)
    return logprobs, entropies, dlogits


def check(
    backend, logits, targets, *, grad=None, atol=2e-6, grad_atol=2e-6, inplace=False, **options
):
    """Values, entropies and gradient of one call; returns the gradient."""
    logits, targets = logits.to(DEVICE), torch.as_tensor(targets, dtype=torch.int64, device=DEVICE)
    if grad is None:
        generator = torch.Generator().manual_seed(9)
        grad = torch.randn(len(targets), generator=generator)
    want_logprobs, want_entropies, want_grad = expected(logits, targets, grad, **options)
    leaf = logits.clone().requires_grad_()
    work = leaf * 1.0 if inplace else leaf  # what the caller gives away
    logprobs, entropies = gathered_logprobs(
        work, targets, backend=backend, inplace_backward=inplace, return_entropy=True, **options
    )
    assert not entropies.requires_grad
    assert torch.equal(work.detach().nan_to_num(7), logits.nan_to_num(7)), "inputs were changed"
    logprobs.backward(grad.to(logprobs))
    np.testing.assert_allclose(logprobs.detach().cpu().double(), want_logprobs, atol=atol)
    np.testing.assert_allclose(entropies.cpu().double(), want_entropies, atol=10 * atol)
    np.testing.assert_allclose(leaf.grad.cpu().double(), want_grad, atol=grad_atol)
    ignored = (targets == IGNORE).cpu()
    assert (logprobs.detach().cpu()[ignored] == 0).all()
    assert (entropies.cpu()[ignored] == 0).all()
    assert (leaf.grad.cpu()[ignored] == 0).all()
    return leaf.grad


def random_case(rows: int, width: int, seed: int = 0, scale: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, width, generator=generator)
    targets = torch.randint(0, width, (rows,), generator=generator)
    return logits, targets


@pytest.mark.parametrize(
    ("rows", "width"), [(4, 130), (3, 17), (2, 64), (1, 259), (1, 1), (3, 1), (0, 7), (2, 9001)]
)
@pytest.mark.parametrize("inplace", [False, True])
def test_values_and_gradients(backend, rows, width, inplace):
    logits, targets = random_case(rows, width)
    check(backend, logits, targets, inplace=inplace)


@pytest.mark.parametrize("width", [31, 32, 33, 130])
def test_many_tiles_and_many_chunks(backend, width, monkeypatch):
    if backend == "triton":
        monkeypatch.setattr("mopd.kernels.gathered_logprob.MAX_TILE", 16)
    else:
        monkeypatch.setattr("mopd.kernels.chunks.CHUNK_ELEMENTS", 2 * width)
    logits, targets = random_case(5, width)
    logits[0] = torch.linspace(-20, 20, width)  # the maximum moves at every tile
    logits[1] = torch.linspace(20, -20, width)
    logits[2, :20] = -torch.inf  # a first tile without a finite logit
    targets[2] = width - 1
    for inplace in (False, True):
        check(backend, logits, targets, inplace=inplace, temperature=0.7)
        check(backend, logits, targets % 29, inplace=inplace, valid_vocab=29)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_its_rounding(backend, dtype):
    """Judged against float64 on the same rounded inputs, beside torch in the same dtype."""
    logits, targets = random_case(6, 130, seed=2)
    logits = logits.to(dtype)
    grad = torch.randn(6, generator=torch.Generator().manual_seed(1))
    want, _, want_grad = expected(logits, targets, grad)
    eps = torch.finfo(dtype).eps
    got_grad = check(backend, logits, targets, grad=grad, grad_atol=eps)
    assert got_grad.dtype == dtype
    plain = logits.clone().requires_grad_()
    picked = torch.log_softmax(plain, 1).gather(1, targets[:, None]).squeeze(1)
    picked.backward(grad.to(dtype))

    def error(values):
        return np.abs(values.detach().cpu().double().numpy() - want).max()

    ours = gathered_logprobs(logits.to(DEVICE), targets.to(DEVICE), backend=backend)
    assert ours.dtype == torch.float32
    assert error(ours) <= error(picked) + 1e-6
    ours_error = np.abs(got_grad.cpu().double().numpy() - want_grad).max()
    plain_error = np.abs(plain.grad.double().numpy() - want_grad).max()
    # the interpreter cuts float32 to bfloat16 where a GPU rounds to nearest: up to twice the error
    allowed = 2.0 if backend == "triton" and INTERPRETED else 1.01
    assert ours_error <= allowed * plain_error + 1e-7


def test_degenerate_rows(backend):
    inf = float("inf")
    logits = torch.tensor(
        [
            [2.5] * 9,  # all equal
            [0.0] * 8 + [1e4],  # one huge logit, which is the target
            [0.0] * 8 + [1e4],  # and which is not
            [-inf] * 4 + [3.0] + [-inf] * 4,  # nothing but the target
            [-1e30] * 9,
        ]
    )
    targets = torch.tensor([3, 8, 0, 4, 0])
    grad = check(backend, logits, targets, grad=torch.ones(5))
    assert grad.isfinite().all() and (grad[3] == 0).all() and (grad[1] == 0).all()
    lone = gathered_logprobs(logits[3:4].to(DEVICE), targets[3:4].to(DEVICE), backend=backend)
    assert lone.item() == 0.0


def test_a_target_of_probability_zero(backend):
    logits = torch.tensor([[0.0, -torch.inf, 1.0]], device=DEVICE, requires_grad=True)
    logprob = gathered_logprobs(logits, torch.tensor([1], device=DEVICE), backend=backend)
    logprob.sum().backward()
    assert logprob.item() == -torch.inf
    p = 1 / (1 + np.exp(1))
    assert logits.grad[0].tolist() == pytest.approx([-p, 1.0, p - 1], abs=1e-6)


def test_non_contiguous_views(backend):
    logits, targets = random_case(6, 40, seed=4)
    wide, _ = random_case(12, 100, seed=5)
    views = [wide[::2, 10:50], wide[:6, :80:2], logits.t().contiguous().t()]
    for view in views:
        assert not view.is_contiguous()
        want = expected(view, targets, torch.ones(6))
        for inplace in (False, True):
            base = wide.clone().to(DEVICE) if view._base is wide else None
            moved = (
                view.to(DEVICE)
                if base is None
                else base.as_strided(view.shape, view.stride(), view.storage_offset())
            )
            before = None if base is None else base.clone()
            leaf = moved.detach().requires_grad_()
            work = leaf if not inplace else leaf.view_as(leaf)
            logprobs = gathered_logprobs(
                work, targets.to(DEVICE), backend=backend, inplace_backward=inplace
            )
            (grad,) = torch.autograd.grad(logprobs.sum(), leaf)
            np.testing.assert_allclose(logprobs.detach().cpu(), want[0], atol=2e-6)
            np.testing.assert_allclose(grad.cpu(), want[2], atol=2e-6)
            if inplace and base is not None:
                touched = torch.zeros_like(base, dtype=torch.bool)
                touched.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
                assert torch.equal(base[~touched], before[~touched]), "wrote beside the view"
                assert not torch.equal(base[touched], before[touched]), "not in place"


@pytest.mark.parametrize("inplace", [False, True])
def test_ignored_rows_are_exact_zeros_whatever_they_hold(backend, inplace):
    logits, targets = random_case(5, 20)
    targets[1] = targets[3] = IGNORE
    logits[1], logits[3] = float("nan"), float("inf")
    grad = torch.tensor([1.0, float("nan"), -2.0, float("inf"), 0.5])
    got = check(backend, logits[[0, 2, 4]], targets[[0, 2, 4]], grad=grad[[0, 2, 4]])
    leaf = logits.to(DEVICE).requires_grad_()
    logprobs = gathered_logprobs(
        leaf.view_as(leaf), targets.to(DEVICE), backend=backend, inplace_backward=inplace
    )
    (all_grad,) = torch.autograd.grad(logprobs, leaf, grad.to(DEVICE))
    assert (logprobs[[1, 3]] == 0).all() and (all_grad[[1, 3]] == 0).all()
    torch.testing.assert_close(all_grad[[0, 2, 4]], got)


def test_every_row_ignored(backend):
    logits, _ = random_case(3, 20)
    check(backend, logits, [IGNORE] * 3)


@pytest.mark.parametrize("valid", [100, 128, 129, 130, 500])
def test_padded_columns_are_outside_the_softmax(backend, valid):
    logits, targets = random_case(4, 130)
    logits[:, min(valid, 130) :] = float("nan") if valid != 100 else 50.0
    targets = targets % min(valid, 130)
    for inplace in (False, True):
        grad = check(backend, logits, targets, valid_vocab=valid, inplace=inplace)
        assert (grad[:, valid:] == 0).all()


def test_c08_temperature_is_inside_the_softmax(backend):
    logits = torch.tensor([[2.0, 0.0, -1.0]] * 3, device=DEVICE)
    targets = torch.tensor([0, 1, 2], device=DEVICE)
    got = gathered_logprobs(logits, targets, temperature=0.5, backend=backend)
    assert got.tolist() == pytest.approx([-0.0206, -4.0206, -6.0206], abs=5e-5)
    for temperature in (0.5, 1.0, 3.0):
        check(backend, *random_case(4, 130), temperature=temperature)


def test_c25_row_offsets_past_two_to_the_31(backend, monkeypatch):
    """Rows 2^30 elements apart in a storage of which only the touched pages exist."""
    rows, width = 4, 130
    logits = far_rows(rows, width, monkeypatch)
    values, targets = random_case(rows, width)
    logits.copy_(values)
    want_logprobs, _, want_grad = expected(logits, targets, torch.ones(rows))
    leaf = logits.requires_grad_()
    logprobs = gathered_logprobs(
        leaf.view_as(leaf), targets.to(DEVICE), backend=backend, inplace_backward=True
    )
    np.testing.assert_allclose(logprobs.detach().cpu(), want_logprobs, atol=2e-6)
    logprobs.sum().backward()
    np.testing.assert_allclose(logits.detach().cpu().double(), want_grad, atol=4e-3)


def test_c27_upstream_gradients(backend):
    logits, targets = random_case(4, 33, seed=6)
    targets[2] = IGNORE
    grad = torch.tensor([0.3, -2.0, 0.0, 1.0])
    got = check(backend, logits, targets, grad=grad)
    leaf = logits.clone().requires_grad_()
    plain = torch.log_softmax(leaf, 1).gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    plain.backward(torch.where(targets == IGNORE, 0.0, grad))
    torch.testing.assert_close(got.cpu(), leaf.grad, rtol=1e-5, atol=1e-6)
    assert (got[2] == 0).all()


def test_c28_same_logits_twice_and_backward_twice(backend):
    logits, targets = (tensor.to(DEVICE) for tensor in random_case(4, 33))
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = gathered_logprobs(leaf, targets, backend=backend, return_entropy=True)
    again = gathered_logprobs(leaf, targets, backend=backend)
    assert torch.equal(leaf.detach(), logits) and torch.equal(again, logprobs)
    first = torch.autograd.grad(logprobs.sum(), leaf, retain_graph=True)[0]
    second = torch.autograd.grad(logprobs.sum(), leaf, retain_graph=True)[0]
    assert torch.equal(first, second) and torch.equal(leaf.detach(), logits)
    _, want_entropy, want_grad = expected(logits, targets, torch.ones(4))
    np.testing.assert_allclose(first.cpu(), want_grad, atol=2e-6)
    np.testing.assert_allclose(entropy.cpu(), want_entropy, atol=1e-5)


def test_second_derivative_and_second_inplace_backward_are_refused(backend):
    logits, targets = (tensor.to(DEVICE) for tensor in random_case(3, 20))
    leaf = logits.requires_grad_()
    logprobs = gathered_logprobs(leaf, targets, backend=backend)
    with pytest.raises(NotImplementedError, match="gathered_logprobs_reference"):
        torch.autograd.grad(logprobs.sum(), leaf, create_graph=True)
    inplace = gathered_logprobs(leaf * 1, targets, backend=backend, inplace_backward=True)
    inplace.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace_backward=False"):
        inplace.sum().backward()


def test_inplace_is_seen_by_whoever_else_saved_the_logits(backend):
    """exp saves its output for its own backward: torch must say that it was overwritten."""
    leaf = random_case(3, 20)[0].to(DEVICE).requires_grad_()
    logits = leaf.exp()
    targets = torch.tensor([0, 1, 2], device=DEVICE)
    logprobs = gathered_logprobs(logits, targets, backend=backend, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_vocabulary_sized_tensor(backend, dtype, monkeypatch):
    rows, width = 24, 500
    monkeypatch.setattr("mopd.kernels.chunks.CHUNK_ELEMENTS", 2 * width)
    logits, targets = random_case(rows, width)
    work = logits.to(DEVICE, dtype).requires_grad_()
    storage = work.untyped_storage().data_ptr()
    with LargestNewStorage(work) as seen:
        logprobs, _ = gathered_logprobs(
            work,
            targets.to(DEVICE),
            backend=backend,
            inplace_backward=True,
            return_entropy=True,
            valid_vocab=width - 3,
        )
        (grad,) = torch.autograd.grad(logprobs.sum(), work)
    assert grad.untyped_storage().data_ptr() == storage
    assert 0 < seen.largest <= 2 * width < rows * width
    with LargestNewStorage(work) as control:  # the measure does see a vocabulary-sized tensor
        gathered_logprobs_reference(work, targets.to(DEVICE))
    assert control.largest >= rows * (width - 3)


def test_ids_outside_the_vocabulary(backend):
    logits, targets = random_case(4, 20)
    targets %= 17
    for stray, valid in ((20, None), (17, 17), (-100, None), (2**40, None)):
        targets[2] = stray
        args = (logits.to(DEVICE), targets.to(DEVICE))
        if DEVICE == "cuda":
            got = gathered_logprobs(*args, valid_vocab=valid, backend=backend)
            assert got[2].isnan() and got[[0, 3]].isfinite().all()
        else:
            with pytest.raises(DataError, match=f"target id {stray} in row 2"):
                gathered_logprobs(*args, valid_vocab=valid, backend=backend)


def test_nan_logits_of_a_live_row_are_not_hidden(backend):
    logits, targets = random_case(3, 40)
    logits[1, 30] = float("nan")
    got = gathered_logprobs(logits.to(DEVICE), targets.to(DEVICE), backend=backend)
    assert got[1].isnan() and got[[0, 2]].isfinite().all()


def test_c29_one_loss_and_one_gradient_through_every_backend(backend):
    logits, targets = random_case(6, 130, seed=8)
    targets[4] = targets[5] = IGNORE
    reference = logits.double().requires_grad_()
    want = step(gathered_logprobs_reference(reference, targets, temperature=0.8))
    want.backward()
    for inplace in (False, True):
        leaf = logits.clone().to(DEVICE).requires_grad_()
        logprobs = gathered_logprobs(
            leaf * 1.0,
            targets.to(DEVICE),
            temperature=0.8,
            backend=backend,
            inplace_backward=inplace,
        )
        loss = step(logprobs)
        loss.backward()
        assert loss.item() == pytest.approx(want.item(), rel=2e-6)
        torch.testing.assert_close(leaf.grad.cpu().double(), reference.grad, rtol=0, atol=1e-6)
    assert reference.grad.abs().max() > 1e-2


def test_everything_about_the_targets_in_one_pass(backend):
    logits, targets = random_case(5, 40)
    targets[3] = IGNORE
    teacher = torch.tensor([-1.0, -0.5, -3.0, float("nan"), -2.0])
    scores = gathered_scores(
        logits.to(DEVICE, copy=True).requires_grad_(),
        targets.to(DEVICE),
        teacher_logprobs_N=teacher.to(DEVICE),
        temperature=0.7,
        valid_vocab=38 if targets.max() < 38 else None,
        backend=backend,
        return_entropy=True,
    )
    valid = 38 if targets.max() < 38 else 40
    scaled = logits.double()[:, :valid] / 0.7
    live = targets != IGNORE
    want = torch.where(live, scaled.logsumexp(1), 0.0)
    np.testing.assert_allclose(scores.logsumexp_N.cpu(), want, atol=3e-6)
    advantage = torch.where(live, teacher - scores.logprobs_N.detach().cpu(), 0.0)
    np.testing.assert_allclose(scores.advantage_N.cpu(), advantage, atol=1e-6)
    assert scores.logprobs_N.requires_grad and not scores.advantage_N.requires_grad
    with pytest.raises(ValueError, match=r"teacher logprobs \(4,\)"):
        gathered_scores(logits, targets, teacher_logprobs_N=teacher[:4])


def test_ignored_rows_are_not_read(backend):
    """In torch they are in no chunk: one live row makes no temporary of fifty."""
    logits, targets = random_case(50, 60)
    targets[:] = IGNORE
    targets[17] = 5
    work = logits.to(DEVICE).requires_grad_()
    with LargestNewStorage(work) as seen:
        logprobs = gathered_logprobs(work, targets.to(DEVICE), backend=backend)
    assert seen.largest < 50 * 60 / 2
    logprobs.sum().backward()
    assert (work.grad.abs().sum(1) > 0).nonzero().flatten().tolist() == [17]
