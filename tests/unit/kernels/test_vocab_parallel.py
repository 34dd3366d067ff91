"""Gloo ranks that each hold a part of the vocabulary, against one process with all of it (C26).

One spawn of four processes: the first two are also a group of their own. What each kernel gives for
a whole vocabulary is held against float64 references elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from mopd.errors import DataError
from mopd.kernels.reference import IGNORE
from mopd.kernels.select import (
    Head,
    bucket_logprobs,
    full_divergence,
    fused_head_scores,
    gathered_scores,
    topk_divergence,
)

# gloo reduces CPU tensors, where Triton has only its interpreter
BACKENDS = ["torch", "triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["torch"]
SIZES = [2, 4]
VOCABULARY = 8
INF = float("inf")

Case = dict[str, Tensor]


def cases() -> dict[str, tuple[Case, dict]]:
    """name -> (tensors of the whole vocabulary, options)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    base = {
        "logits": 3 * normal(4, 8),
        "teacher_logits": 3 * normal(4, 8),
        "hidden": normal(4, 5),
        "weight": normal(8, 5),
        "teacher_hidden": normal(4, 3),
        "teacher_weight": normal(8, 3),
        "targets": torch.tensor([0, 3, 2, 1]),
        "ids": torch.tensor([[0, 1, 2], [3, -1, 2], [2, 1, 2], [1, 0, 3]]),
        "teacher_logprobs": torch.tensor([0.3, 0.2, 0.1]).log().expand(4, 3).contiguous(),
        "mask": torch.tensor([True, True, True, True]),
        "grad": torch.tensor([0.3, -2.0, 0.0, 1.0]),
    }
    second = base | {
        "targets": torch.tensor([4, 7, 5, 6]),
        "ids": torch.tensor([[4, 5, 7], [7, 6, 0], [5, 1, 2], [6, 4, 6]]),
    }
    ignored = second | {
        "targets": torch.tensor([0, IGNORE, 5, 3]),
        "ids": torch.tensor([[0, 5, 7], [-1, -1, -1], [5, 1, 2], [3, 4, 6]]),
        "mask": torch.tensor([True, False, True, True]),
    }
    far = second | {"logits": base["logits"].clone()}
    far["logits"][0, :4], far["logits"][1, 4:] = -INF, -INF  # shards without a finite logit
    far["logits"][2, 5], far["logits"][3, 1] = 300.0, -300.0
    far["targets"], far["ids"] = torch.tensor([5, 2, 0, 7]), far["ids"].clone()
    warm = {"temperature": 0.7}
    return {
        "targets on the first shards": (base, warm),
        "targets on the last shards": (second, warm),
        "one row ignored": (ignored, warm),
        "padding in the last shard": (base, {**warm, "valid_vocab": 7}),
        "shards of nothing but padding": (base, {**warm, "valid_vocab": 4}),
        "-inf shards": (far, warm),
    }


def gathered(case: Case, inplace: bool, **options) -> dict[str, Tensor]:
    leaf = case["logits"].requires_grad_()
    scores = gathered_scores(
        leaf * 1.0, case["targets"], inplace_backward=inplace, return_entropy=True, **options
    )
    scores.logprobs_N.backward(case["grad"].to(scores.logprobs_N))
    return {
        "value": scores.logprobs_N.detach(),
        "entropy": scores.entropy_N,
        "logsumexp": scores.logsumexp_N,
        "columns of logits": leaf.grad,
    }


def buckets(case: Case, **options) -> dict[str, Tensor]:
    got = bucket_logprobs(case["logits"], case["ids"], return_entropy=True, **options)
    return {"value": got.listed_NK, "tail": got.tail_N, "entropy": got.entropy_N}


def topk(case: Case, **options) -> dict[str, Tensor]:
    leaf = case["logits"].requires_grad_()
    got = topk_divergence(leaf, case["ids"], case["teacher_logprobs"], **options)
    got.backward(case["grad"].to(got))
    return {"value": got.detach(), "columns of logits": leaf.grad}


def full(case: Case, direction: str, **options) -> dict[str, Tensor]:
    leaf = case["logits"].requires_grad_()
    beta = 0.3 if direction == "jsd" else None
    got = full_divergence(
        leaf,
        case["teacher_logits"],
        mask_N=case["mask"],
        direction=direction,
        beta=beta,
        **options,
    )
    got.backward(case["grad"].to(got))
    return {"value": got.detach(), "columns of logits": leaf.grad}


def fused(case: Case, **options) -> dict[str, Tensor]:
    leaves = [case["hidden"].requires_grad_(), case["weight"].requires_grad_()]
    scores = fused_head_scores(*leaves, case["targets"], return_entropy=True, **options)
    scores.logprobs_N.backward(case["grad"].to(scores.logprobs_N))
    return {
        "value": scores.logprobs_N.detach(),
        "entropy": scores.entropy_N,
        "d_hidden": leaves[0].grad,
        "rows of weight": leaves[1].grad,
    }


def fused_unreduced(case: Case, **options) -> dict[str, Tensor]:
    """The layer before adds the ranks' d_hidden up."""
    return {"sum of d_hidden": fused(case, reduce_hidden_grad=False, **options)["d_hidden"]}


def fused_divergence(case: Case, **options) -> dict[str, Tensor]:
    leaves = [case["hidden"].requires_grad_(), case["weight"].requires_grad_()]
    teacher = Head(case["teacher_hidden"], case["teacher_weight"])
    got = full_divergence(Head(*leaves), teacher, mask_N=case["mask"], **options)
    got.backward(case["grad"].to(got))
    return {"value": got.detach(), "d_hidden": leaves[0].grad, "rows of weight": leaves[1].grad}


KERNELS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "gathered": partial(gathered, inplace=False),
    "gathered in place": partial(gathered, inplace=True),
    "buckets": buckets,
    "topk": topk,
    "reverse": partial(full, direction="reverse"),
    "forward": partial(full, direction="forward"),
    "jsd": partial(full, direction="jsd"),
    "fused": fused,
    "fused, unreduced": fused_unreduced,
    "fused divergence": fused_divergence,
}


def fits(kernel: str, name: str) -> bool:
    """A student that excludes tokens has an infinite forward KL from a teacher that does not."""
    return not (kernel == "forward" and name == "-inf shards")


def shard(case: Case, rank: int, size: int) -> Case:
    """What one rank holds."""
    width = VOCABULARY // size
    mine = slice(width * rank, width * (rank + 1))
    columns = {k: case[k][:, mine].clone() for k in ("logits", "teacher_logits")}
    rows = {k: case[k][mine].clone() for k in ("weight", "teacher_weight")}
    return {k: v.clone() for k, v in case.items()} | columns | rows


def _rank(rank: int, init_file: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=4)
    groups = {2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    for size in SIZES:
        if rank < size:
            for backend in BACKENDS:
                results = _results(rank, size, groups[size], backend)
                torch.save(results, f"{out}/{backend}-{size}-{rank}.pt")
    dist.destroy_process_group()


def _results(rank: int, size: int, group: dist.ProcessGroup, backend: str) -> dict[str, object]:
    common = {"vocab_start": VOCABULARY // size * rank, "group": group, "backend": backend}
    results: dict[str, object] = {}
    for name, (case, options) in cases().items():
        for kernel, compute in KERNELS.items():
            if fits(kernel, name):
                results[f"{kernel}: {name}"] = compute(shard(case, rank, size), **common, **options)
    try:  # raised on all ranks alike: none is left waiting
        gathered_scores(torch.zeros(1, VOCABULARY // size), torch.tensor([8]), **common)
    except DataError as error:
        results["stray"] = str(error)
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """Folder with what each rank got by each backend."""
    folder = tmp_path_factory.mktemp("vocab_parallel")
    mp.spawn(_rank, (str(folder / "init"), str(folder)), nprocs=4, join=True)
    return str(folder)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
def test_c26_shards_equal_one_vocabulary(backend, size, saved):
    ranks = [torch.load(f"{saved}/{backend}-{size}-{rank}.pt") for rank in range(size)]
    assert len({rank["stray"] for rank in ranks}) == 1 and "target id 8" in ranks[0]["stray"]
    for name, (case, options) in cases().items():
        for kernel, compute in KERNELS.items():
            if not fits(kernel, name):
                continue
            wide = {k: v.double() if v.is_floating_point() else v for k, v in case.items()}
            want = compute({k: v.clone() for k, v in wide.items()}, backend="torch", **options)
            got = [rank[f"{kernel}: {name}"] for rank in ranks]
            for output, whole in want.items():
                parts = [g[output] for g in got]
                where = f"{kernel}: {name}: {output}"
                if output.startswith(("columns", "rows")):
                    together = torch.cat(parts, dim=1 if output.startswith("columns") else 0)
                    np.testing.assert_allclose(together, whole, atol=2e-5, err_msg=where)
                    continue
                if output.startswith("sum"):
                    parts = [torch.stack(parts).sum(0)]
                for part in parts:
                    assert torch.equal(part, parts[0]), f"{where}: ranks disagree"
                np.testing.assert_allclose(parts[0], whole, atol=2e-5, err_msg=where)
