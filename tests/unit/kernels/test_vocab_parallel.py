"""Two gloo ranks, each with half the vocabulary, against one process with all of it (C26)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mopd.errors import DataError
from mopd.kernels.reference import IGNORE, gathered_logprobs_reference
from mopd.kernels.select import gathered_logprobs

# gloo reduces CPU tensors, where Triton has only its interpreter
BACKENDS = ["torch", "triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["torch"]
INF = float("inf")


def cases() -> dict[str, dict]:
    """name -> full logits, targets, upstream gradient and options."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 8, generator=generator)
    grad = torch.tensor([0.3, -2.0, 0.0, 1.0])
    far = logits.clone()
    far[0, :4], far[1, 4:] = -INF, -INF  # a shard without a finite logit, on either rank
    far[2, 5], far[3, 1] = 300.0, -300.0
    common = {"grad": grad, "temperature": 0.7, "valid_vocab": None}
    return {
        "target on shard 0": {**common, "logits": logits, "targets": [0, 3, 2, 1]},
        "target on shard 1": {**common, "logits": logits, "targets": [4, 7, 5, 6]},
        "one row ignored": {**common, "logits": logits, "targets": [0, IGNORE, 5, 3]},
        "padding in shard 1": {**common, "logits": logits, "targets": [0, 6, 4, 3]}
        | {"valid_vocab": 7},
        "shard 1 all padding": {**common, "logits": logits, "targets": [0, 3, 2, 1]}
        | {"valid_vocab": 4},
        "-inf shards": {**common, "logits": far, "targets": [5, 2, 0, 7]},
    }


def _rank(rank: int, init_file: str, out: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
    for backend in BACKENDS:
        torch.save(_results(rank, backend), f"{out}/{backend}-{rank}.pt")
    dist.destroy_process_group()


def _results(rank: int, backend: str) -> dict[str, object]:
    results: dict[str, object] = {}
    for name, case in cases().items():
        for inplace in (False, True):
            shard = case["logits"][:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
            logprobs, entropy = gathered_logprobs(
                shard * 1.0,
                torch.tensor(case["targets"]),
                temperature=case["temperature"],
                valid_vocab=case["valid_vocab"],
                vocab_start=4 * rank,
                group=dist.group.WORLD,
                backend=backend,
                inplace_backward=inplace,
                return_entropy=True,
            )
            logprobs.backward(case["grad"])
            results[f"{name}/{inplace}"] = (logprobs.detach(), entropy, shard.grad)
    try:  # raised on both ranks alike: neither is left waiting
        gathered_logprobs(
            torch.zeros(1, 4),
            torch.tensor([8]),
            vocab_start=4 * rank,
            group=dist.group.WORLD,
            backend=backend,
        )
    except DataError as error:
        results["stray"] = str(error)
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """Folder with what each rank got by each backend."""
    folder = tmp_path_factory.mktemp("vocab_parallel")
    mp.spawn(_rank, (str(folder / "init"), str(folder)), nprocs=2, join=True)
    return str(folder)


@pytest.mark.parametrize("backend", BACKENDS)
def test_c26_two_shards_equal_one_vocabulary(backend, saved):
    ranks = [torch.load(f"{saved}/{backend}-{rank}.pt") for rank in (0, 1)]
    assert ranks[0]["stray"] == ranks[1]["stray"] and "target id 8" in ranks[0]["stray"]
    for name, case in cases().items():
        full = case["logits"].double().requires_grad_()
        want = gathered_logprobs_reference(
            full,
            torch.tensor(case["targets"]),
            temperature=case["temperature"],
            valid_vocab=case["valid_vocab"],
        )
        want.backward(case["grad"].double())
        p = (full.detach()[:, : case["valid_vocab"]] / case["temperature"]).softmax(1)
        entropy = -torch.special.xlogy(p, p).sum(1)
        entropy[torch.tensor(case["targets"]) == IGNORE] = 0
        for inplace in (False, True):
            got = [rank[f"{name}/{inplace}"] for rank in ranks]
            assert torch.equal(got[0][0], got[1][0]), f"{name}: ranks disagree"
            np.testing.assert_allclose(got[0][0], want.detach(), atol=2e-5, err_msg=name)
            np.testing.assert_allclose(got[0][1], entropy, atol=2e-5, err_msg=name)
            together = torch.cat([got[0][2], got[1][2]], dim=1)
            np.testing.assert_allclose(together, full.grad, atol=2e-6, err_msg=name)
