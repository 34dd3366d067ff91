"""Weights on their way out of two ranks: shared memory, file, and whole tensors one by one.

At layouts that cut every kind of tensor. What a reader of the file finds is compared with what the
ranks' parts join to, and the fingerprints with those of the joined tensors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "student"))

from student_harness import Case, Context, launch, require_passed  # noqa: E402
from student_tiny import make_checkpoint  # noqa: E402

WORLD = 2
LAYOUTS = {
    "tp": {"tp": 2, "etp": 2},
    "ep": {"dp": 2, "ep": 2},
    "pp": {"pp": 2},
}


def setup(c: Context) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{c.port()}", rank=c.rank, world_size=c.world
    )


def _move(student: Any) -> None:
    """New weights in the same places, the same on ranks that hold the same."""
    import torch

    with torch.no_grad():
        for tensor in student._parameters().values():
            tensor.mul_(1.5)


def every_transport_gives_the_joined_tensors(c: Context) -> None:
    import torch.distributed as dist
    from safetensors.torch import load_file

    from mopd.kernels.word_sums import word_sums

    for kind in ("moe", "tied"):
        for name, parallel in LAYOUTS.items():
            if kind == "tied" and name == "ep":
                continue  # no experts
            student = c.student(kind, parallel=_fitting(kind, parallel))
            shared = c.folder / f"{kind}-{name}-shared.safetensors"
            for version in range(3):  # the second and third are written in place
                expected = student.weights.collect(student._parameters())
                sums = student.publish(shared, "shared_memory")
                other = c.folder / f"{kind}-{name}-{version}.safetensors"
                assert student.publish(other, "file") == sums
                if c.rank == 0:
                    for path in (shared, other):
                        got = load_file(path)
                        assert got.keys() == expected.keys() == sums.keys()
                        assert all(got[n].equal(expected[n]) for n in got), (kind, name, path)
                    assert sums == dict(
                        zip(expected, word_sums(list(expected.values())), strict=True)
                    )
                dist.barrier()  # the file is looked at before it is written again
                _move(student)
            student.close()


def _fitting(kind: str, parallel: dict[str, int]) -> dict[str, int]:
    return {k: v for k, v in parallel.items() if kind == "moe" or k not in ("ep", "etp")}


def one_bucket_at_a_time(c: Context) -> None:
    """Rank 0 never holds more than a bucket of tensors that are not its own, and hands them out
    in the order that was announced."""
    from mopd.kernels.word_sums import word_sums
    from mopd.student import exchange

    student = c.student("moe", parallel={"dp": 2, "ep": 2})
    publisher = student.publisher()
    held: list[int] = []
    receive = exchange.receive

    def watched(parts: list[Any], source: int, device: Any) -> Any:
        held.append(sum(part.nbytes for part in parts))
        return receive(parts, source, device)

    import mopd.student.weights as weights

    weights.receive = watched  # type: ignore[attr-defined]
    try:
        largest = max(p.nbytes for parts in publisher._plan.owned for p in parts)
        limit = 2 * largest
        whole = dict(publisher.stream(limit))
        everywhere = dict(publisher.everywhere(limit))
    finally:
        weights.receive = receive  # type: ignore[attr-defined]
    # For engines on each rank's own GPU, every rank gets them; here compared by fingerprint.
    names, sums = list(everywhere), word_sums(list(everywhere.values()))
    assert dict(zip(names, sums, strict=True)) == publisher.word_sums()
    if c.rank == 0:
        total = sum(tensor.nbytes for tensor in whole.values())
        assert list(whole) == list(publisher.manifest)
        assert len(held) > 3 and max(held) <= limit < total / 4, (held, limit, total)
    else:
        assert not whole and not held
    student.close()


def padding_is_never_served(c: Context) -> None:
    """The folder of the student: rows of the head that no token has are the mean of the tokens',
    however large they had grown, everything else is as trained, and transformers loads it."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from student_tiny import VALID, VOCAB
    from transformers import AutoModelForCausalLM

    for kind, head in (("moe", "lm_head.weight"), ("tied", "model.embed_tokens.weight")):
        student = c.student(kind, parallel={"tp": 2, "etp": 2} if kind == "moe" else {"tp": 2})
        weight = student._parameters()[
            "output_layer.weight" if kind == "moe" else "embedding.word_embeddings.weight"
        ]
        with torch.no_grad():
            if c.rank == 1:  # of 67 rows and one of padding, 33 here
                weight[VALID - 34 : 33] *= 30.0
        trained = student.weights.collect(student._parameters())
        out = c.folder / f"{kind}-folder"
        student.save_hf(out)
        if c.rank == 0:
            saved = load_file(out / "model.safetensors")
            mean = trained[head][:VALID].double().mean(0).float()
            assert saved[head].shape == (VOCAB, 64)
            assert saved[head][:VALID].equal(trained[head][:VALID])
            assert all(row.equal(mean) for row in saved[head][VALID:])
            assert all(saved[n].equal(t) for n, t in trained.items() if n != head)
            ids = torch.randint(0, VALID, (8, 40), generator=torch.Generator().manual_seed(0))
            model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
            with torch.no_grad():
                logits = model(ids).logits
                model.get_output_embeddings().weight.copy_(trained[head])
                assert (model(ids).logits.argmax(-1) >= VALID).any()  # it was needed
            assert (logits.argmax(-1) < VALID).all()
            geometric = logits.log_softmax(-1)[..., :VALID].mean(-1)
            error = logits.log_softmax(-1)[..., VALID:] - geometric[..., None]
            assert error.abs().max() < 1e-4
        dist.barrier()
        student.close()


def no_room_and_no_folder(c: Context) -> None:
    """An error on every rank, that says what to do; nobody waits for the others."""
    from mopd.errors import ModelError

    student = c.student("moe", parallel={"dp": 2})
    with pytest.raises(ModelError, match=r"could not share the weights.*No such file.*transport="):
        student.publish(c.folder / "nowhere" / "weights.safetensors", "shared_memory")
    allocate, full = os.posix_fallocate, OSError(28, "No space left on device")

    def no_space(*_: Any) -> None:
        raise full

    os.posix_fallocate = no_space  # type: ignore[assignment]
    try:
        with pytest.raises(ModelError, match="No space left"):
            student.publish(c.folder / "full.safetensors", "shared_memory")
    finally:
        os.posix_fallocate = allocate
    student.publish(c.folder / "fine.safetensors", "shared_memory")
    student.close()


CASES: list[Case] = [
    every_transport_gives_the_joined_tensors,
    one_bucket_at_a_time,
    padding_is_never_served,
    no_room_and_no_folder,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("publishing")
    for kind in ("moe", "tied"):
        make_checkpoint(folder / kind, kind)
    launch(WORLD, folder, CASES, setup)
    yield folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks_publish(folder: Path, case: Case) -> None:
    require_passed(folder, case, WORLD)
