"""What the student section refuses: contradictions, and keys that would have no effect."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import pytest

from mopd.config.checks import check_config
from mopd.config.schema import Config

Load = Callable[..., Config]


def problems_of(config: Config, changes: dict[str, object]) -> list[str]:
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        setattr(attrgetter(section)(config) if section else config, name, value)
    return check_config(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"student.parallel.cp": 2}, "student.parallel.cp is 2; only 1 is implemented"),
        ({"student.recompute": "all"}, "student.recompute"),
        (
            {"student.max_tokens_per_microbatch": 512, "student.micro_batch_size": 8},
            "both micro_batch_size 8 and max_tokens_per_microbatch 512",
        ),
        ({"student.max_tokens_per_microbatch": 8}, "less than one answer"),
        ({"student.router_bias_update_rate": 1e-3}, "student.freeze_routers holds the routers"),
        ({"student.fp32_head": True}, "fp32_head has no effect with student.dtype float32"),
        (
            {
                "student.routing_replay": True,
                "student.recompute": "layers",
                "student.parallel.pp": 2,
            },
            "another micro-batch's choices",
        ),
        (
            {"student.checkpoint_async": True},
            "student.checkpoint_async with student.checkpoint_format huggingface: whole tensors",
        ),
    ],
)
def test_refused(loaded: Load, changes: dict[str, object], said: str) -> None:
    problems = problems_of(loaded(), changes)
    assert any(said in each for each in problems), problems


@pytest.mark.parametrize(
    "changes",
    [
        {"student.max_tokens_per_microbatch": 512, "student.packing": True},
        {"student.freeze_routers": False, "student.router_bias_update_rate": 1e-3},
        {"student.routing_replay": True, "student.recompute": "attention"},
        {"student.fp32_head": True, "student.dtype": "bfloat16"},
        {"student.optimizer.distributed": True},
        {"student.checkpoint_async": True, "student.checkpoint_format": "megatron"},
    ],
)
def test_fine(loaded: Load, changes: dict[str, object]) -> None:
    assert problems_of(loaded(), changes) == []


def test_routing_replay_needs_experts(loaded: Load, place: object) -> None:
    from conftest import make_checkpoint

    make_checkpoint(place / "base", num_experts=None)  # type: ignore[operator]
    problems = problems_of(loaded(), {"student.routing_replay": True})
    assert any("has no experts to route to" in each for each in problems), problems
    problems = problems_of(loaded(), {"student.freeze_routers": False})
    assert any("has no routers; leave it out" in each for each in problems), problems
