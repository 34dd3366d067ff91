"""The teachers' answers as rollouts: whose, how seeded, and what is lost."""

from __future__ import annotations

import asyncio

from mopd.protocols import TeacherFailed
from mopd.runtime.teacher_rollouts import TeacherRollouts
from mopd.types import Prompt, Rollout, TeacherScore
from mopd_teachers.client import sample_seed


class Fleet:
    """Answers with seed and request id, as the real one; cannot score what `unscored` names."""

    def __init__(self, unscored: str = "") -> None:
        self.asked: list[tuple[str, list[str], float, int | None]] = []
        self._unscored = unscored

    async def answers(self, domain, requests, *, temperature, seed):
        self.asked.append((domain, [key for key, _ in requests], temperature, seed))
        seeds = [0 if seed is None else sample_seed(seed, key) for key, _ in requests]
        return [
            Rollout(k, p, (own, 9), (), 0, "stop")
            for (k, p), own in zip(requests, seeds, strict=True)
        ]

    async def score(self, rollouts, *, teacher):
        return {
            r.sample_id: TeacherFailed("timeout")
            if r.sample_id == self._unscored
            else TeacherScore((-0.1, -0.2 if teacher == "t_a" else -0.3))
            for r in rollouts
        }


def drawn(fleet: Fleet, *, temperature: float = 1.0, seed: int = 0) -> dict[str, Rollout]:
    prompts = [Prompt(f"{d}/{k}", d, "", (k,)) for d in ("a", "b") for k in range(40)]
    requests = [(f"0:{i}:{p.id}:{k}", p) for i, p in enumerate(prompts) for k in range(2)]

    async def run() -> dict[str, Rollout]:
        source = TeacherRollouts(fleet, {"a": "t_a", "b": "t_b"}, seed)
        return {
            r.sample_id: r
            async for group in source.generate(requests, temperature=temperature)
            for r in group
        }

    return asyncio.run(run())


def test_each_prompt_is_answered_by_its_own_teacher_with_its_logprobs():
    found = drawn(Fleet())
    assert len(found) == 160
    assert found["0:3:a/3:0"].sampler_logprobs == (-0.1, -0.2)
    assert found["0:43:b/3:1"].sampler_logprobs == (-0.1, -0.3)


def test_every_answer_has_a_seed_of_its_own_and_runs_repeat():
    """Prompts that shared a seed would share their sampling noise."""
    fleet = Fleet()
    found = drawn(fleet)
    assert {seed for *_, seed in fleet.asked} == {0}
    assert sorted(key for _, keys, _, _ in fleet.asked for key in keys) == sorted(found)
    assert len({rollout.response_ids for rollout in found.values()}) == 160
    assert found["0:0:a/0:0"].response_ids != found["0:0:a/0:1"].response_ids
    assert drawn(Fleet()) == found != drawn(Fleet(), seed=1)


def test_greedy_answers_need_no_seed():
    fleet = Fleet()
    drawn(fleet, temperature=0.0)
    assert {seed for *_, seed in fleet.asked} == {None}


def test_an_answer_without_a_score_is_left_out():
    found = drawn(Fleet(unscored="0:0:a/0:0"))
    assert len(found) == 159 and "0:0:a/0:0" not in found
