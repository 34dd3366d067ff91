"""The real loop over small fakes of its parts: routing by id, failures as data, budgets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from mopd.config.schema import Config, DomainConfig
from mopd.credit import Credit
from mopd.data.mixture import Mixture
from mopd.errors import FailureBudgetError
from mopd.loop import Parts, no_metrics, train
from mopd.protocols import TeacherFailed, VerifierFailed
from mopd.types import Prompt, Rollout, ScoredSample, TeacherScore, TrainSample, Verdict

MATH = [Prompt(f"math/{i}", "math", f"m{i}", (1, i)) for i in range(2)]
CODE = [Prompt("code/0", "code", "c0", (2, 0))]


class FakePrompts:
    def __init__(self) -> None:
        self.drawn = 0
        self.more: list[tuple[str, int]] = []
        self.left = 100
        self.recorded: list[tuple[str, int, int]] = []

    def draw(self, n: int) -> list[Prompt]:
        self.drawn += 1
        return [MATH[0], CODE[0], MATH[1]][:n]

    def draw_more(self, domain: str, n: int) -> list[Prompt]:
        self.more.append((domain, n))
        return [p for p in (*MATH, *CODE) if p.domain == domain][:1] * min(n, self.left)

    def record(self, prompt_id: str, passed: int, judged: int) -> None:
        self.recorded.append((prompt_id, passed, judged))

    def metrics(self) -> dict[str, float]:
        return {"prompts/math/retired": 1.0}

    def take_warnings(self) -> list[str]:
        return ["all retired"] if self.drawn == 1 else []


class FakeRollouts:
    """Answers in reverse order, one group each; `lost` ids never come back."""

    def __init__(self, lost: Sequence[str] = ()) -> None:
        self.lost = lost

    async def generate(
        self, requests: Sequence[tuple[str, Prompt]], *, temperature: float, top_k: int = 0
    ) -> AsyncIterator[Sequence[Rollout]]:
        for sample_id, prompt in reversed(requests):
            if sample_id not in self.lost:
                await asyncio.sleep(0)
                yield [Rollout(sample_id, prompt, (7, 8), (-1.0, -2.0), 0, "stop")]


class FakeTeachers:
    """The math teacher says -10, the code teacher -20; answers later for earlier samples."""

    def __init__(self, failing: Mapping[str, str] | None = None) -> None:
        self.failing = failing or {}

    async def score(
        self, rollouts: Sequence[Rollout], *, teacher: str | None = None
    ) -> Mapping[str, TeacherScore | TeacherFailed]:
        await asyncio.sleep(0.01 if rollouts[0].sample_id.startswith("0:0") else 0)
        value = {"math": -10.0, "code": -20.0}
        return {
            r.sample_id: TeacherFailed(self.failing[r.sample_id])
            if r.sample_id in self.failing
            else TeacherScore((value[r.prompt.domain],) * len(r.response_ids))
            for r in rollouts
        }


class FakeJudge:
    def __init__(self, rewards: Mapping[str, Any]) -> None:
        self.rewards = rewards

    async def judge(self, rollouts: Sequence[Rollout]) -> Mapping[str, Verdict | VerifierFailed]:
        outcomes: dict[str, Verdict | VerifierFailed] = {}
        for r in rollouts:
            reward = self.rewards.get(r.sample_id, 0)
            if isinstance(reward, str):
                outcomes[r.sample_id] = VerifierFailed(reward)
            else:
                outcomes[r.sample_id] = Verdict(bool(reward), float(reward))
        return outcomes


class FakeStudent:
    def __init__(self) -> None:
        self.batches: list[list[TrainSample]] = []

    async def step(self, samples: Sequence[TrainSample], step: int) -> Mapping[str, float]:
        self.batches.append(list(samples))
        return {"loss": 0.5}


class FakeSync:
    def __init__(self) -> None:
        self.versions: list[int] = []
        self.proofs: list[int] = []
        """Version, at each time that its proof was waited for."""

    async def publish(self, version: int) -> Mapping[str, float]:
        self.versions.append(version)
        return {"sync/load_s": 0.0}

    async def proven(self) -> Mapping[str, float]:
        self.proofs.append(self.versions[-1] if self.versions else 0)
        return {"sync/probe_error": 0.0}


class FakeEvaluator:
    def __init__(self) -> None:
        self.steps: list[int] = []

    async def evaluate_student(self, step: int) -> Mapping[str, float]:
        self.steps.append(step)
        return {}


class FakeObserver:
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.warned: list[str] = []

    def stage(self, name: str) -> None: ...

    def step(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[ScoredSample]
    ) -> None:
        self.metrics.append(dict(metrics))

    def warn(self, text: str) -> None:
        self.warned.append(text)


def run(
    *,
    steps: int = 1,
    group: int = 1,
    alpha: float = 0.0,
    lost: Sequence[str] = (),
    teacher_failures: Mapping[str, str] | None = None,
    rewards: Mapping[str, Any] | None = None,
    budget: float = 0.5,
    stop_after: int | None = None,
    **train_config: Any,
) -> tuple[Parts, int, list[int]]:
    config = Config(domains={"math": DomainConfig(teacher="t"), "code": DomainConfig(teacher="u")})
    config.train.steps, config.train.prompts_per_step = steps, 3
    config.train.samples_per_prompt = group
    config.train.checkpoint_every = train_config.get("checkpoint_every", 0)
    config.evaluation.every = train_config.get("evaluate_every", 0)
    config.objective.orm.alpha = alpha
    config.train.sampling.dynamic_rounds = train_config.get("dynamic_rounds", 0)
    config.failures.max_masked_fraction = config.failures.max_verifier_failures = budget
    saved: list[int] = []

    async def checkpoint(step: int) -> None:
        saved.append(step)

    student = FakeStudent()
    parts = Parts(
        prompts=train_config.get("prompts") or FakePrompts(),
        rollouts=FakeRollouts(lost),
        teachers=FakeTeachers(teacher_failures),
        judge=FakeJudge(rewards or {}),
        credit=Credit(config),
        student=student,  # type: ignore[arg-type]
        sync=FakeSync(),
        evaluator=FakeEvaluator(),
        observer=FakeObserver(),
        checkpoint=checkpoint,
        stop_requested=lambda: stop_after is not None and len(student.batches) >= stop_after,
        checkpoint_progress=train_config.get("checkpoint_progress", no_metrics),
    )
    done = asyncio.run(train(parts, config))
    return parts, done, saved


def test_c13_each_sample_meets_its_own_teacher_whatever_fails_and_in_whatever_order() -> None:
    parts, _, _ = run(lost=["0:0:math/0:0"])
    (batch,) = parts.student.batches  # type: ignore[attr-defined]
    assert {s.sample_id: s.teacher_logprobs for s in batch} == {
        "0:1:code/0:0": (-20.0, -20.0),
        "0:2:math/1:0": (-10.0, -10.0),
    }


def test_samples_come_in_the_order_of_the_requests_not_of_the_answers() -> None:
    parts, _, _ = run(group=2)
    (batch,) = parts.student.batches  # type: ignore[attr-defined]
    assert [s.sample_id for s in batch] == [
        "0:0:math/0:0",
        "0:0:math/0:1",
        "0:1:code/0:0",
        "0:1:code/0:1",
        "0:2:math/1:0",
        "0:2:math/1:1",
    ]


def test_a_sample_without_scores_is_dropped_and_counted_never_filled_in() -> None:
    parts, _, _ = run(teacher_failures={"0:1:code/0:0": "timeout"})
    (batch,) = parts.student.batches  # type: ignore[attr-defined]
    assert [s.domain for s in batch] == ["math", "math"]
    metrics = parts.observer.metrics[0]  # type: ignore[attr-defined]
    assert metrics["failures/teacher: timeout"] == 1.0
    assert metrics["failures/fraction"] == pytest.approx(1 / 3)


def test_c16_a_failed_verifier_keeps_the_distillation_part_and_gets_no_orm_part() -> None:
    rewards = {"0:0:math/0:0": 1, "0:0:math/0:1": "ValueError: no", "0:0:math/0:2": 0}
    parts, _, _ = run(group=3, alpha=2.0, rewards=rewards)
    (batch,) = parts.student.batches  # type: ignore[attr-defined]
    advantage = {s.sample_id: s.orm_advantage for s in batch}
    assert advantage["0:0:math/0:1"] == 0.0
    assert advantage["0:0:math/0:0"] == pytest.approx(-advantage["0:0:math/0:2"])
    assert advantage["0:0:math/0:0"] == pytest.approx(2.0, rel=1e-3)  # alpha * (1 - .5) / .5
    metrics = parts.observer.metrics[0]  # type: ignore[attr-defined]
    assert metrics["domain/math/reward"] == pytest.approx(1 / 5)


def test_c17_groups_are_prompts_of_one_step_also_when_samples_are_missing() -> None:
    rewards = {"0:0:math/0:0": 1, "0:2:math/1:1": 1, "0:2:math/1:0": 1}
    parts, _, _ = run(group=2, alpha=1.0, rewards=rewards, lost=["0:1:code/0:0"])
    (batch,) = parts.student.batches  # type: ignore[attr-defined]
    advantage = {s.sample_id: s.orm_advantage for s in batch}
    assert advantage["0:0:math/0:0"] > 0 > advantage["0:0:math/0:1"]
    assert advantage["0:2:math/1:0"] == advantage["0:2:math/1:1"] == 0.0  # all right: no signal
    assert advantage["0:1:code/0:1"] == 0.0  # its group has one member left


@pytest.mark.parametrize("dynamic_rounds", [0, 1])
def test_what_a_step_past_its_budget_has_drawn_can_be_taken_back(dynamic_rounds: int) -> None:
    """Then the prompts are as after the steps before it, which the error counts."""

    def source() -> Mixture:
        domains = {
            d: [Prompt(f"{d}/{i}", d, "q", (i,)) for i in range(20)] for d in ("math", "code")
        }
        return Mixture(domains, dict.fromkeys(domains, 1.0), 0)

    shorter, longer, twin = source(), source(), source()
    run(prompts=shorter, group=2, dynamic_rounds=dynamic_rounds)
    run(prompts=twin, group=2, dynamic_rounds=dynamic_rounds)
    drawn = twin.draw(3)
    if dynamic_rounds:  # every group's rewards are equal: one of each is lost after the replacement
        counts = Counter(prompt.domain for prompt in drawn)
        drawn += [p for d in ("math", "code") for p in twin.draw_more(d, counts[d])]
    lost = [f"1:{place}:{p.id}:0" for place, p in enumerate(drawn) if place >= 3 * dynamic_rounds]
    with pytest.raises(FailureBudgetError) as caught:
        run(steps=3, prompts=longer, group=2, lost=lost, dynamic_rounds=dynamic_rounds, budget=0.2)
    assert longer.state_dict() != shorter.state_dict()
    longer.take_back()
    assert longer.state_dict() == shorter.state_dict()
    assert caught.value.finished_steps == 1


def test_past_the_budget_the_run_stops_and_says_why() -> None:
    with pytest.raises(FailureBudgetError, match="2 x teacher: down"):
        run(
            teacher_failures={"0:0:math/0:0": "down", "0:2:math/1:0": "down"},
            budget=0.5,
        )


def test_every_step_publishes_its_version_and_the_end_is_always_saved() -> None:
    parts, done, saved = run(steps=5, checkpoint_every=2, evaluate_every=2)
    assert done == 5
    assert parts.sync.versions == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    assert saved == [2, 4, 5]
    assert parts.evaluator.steps == [2, 4]  # type: ignore[attr-defined]
    # The weights are proven before what they drew is trained on, evaluated or saved.
    assert sorted({*parts.sync.proofs}) == [0, 1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    assert parts.sync.proofs[0] == 0  # type: ignore[attr-defined]


def test_every_step_says_by_which_weights_its_samples_were_drawn() -> None:
    """The fake rollouts all say version 0: from the second step on they lag."""
    parts, _, _ = run(steps=3)
    told = [
        (m["weight_version"], m["weight_version_lag"])
        for m in parts.observer.metrics  # type: ignore[attr-defined]
    ]
    assert told == [(0, 0), (0, 1), (0, 2)]


def test_how_saving_goes_is_asked_once_a_step() -> None:
    asked: list[int] = []

    async def progress() -> dict[str, float]:
        asked.append(len(asked))
        return {"checkpoint/writing": 2.0}

    parts, _, _ = run(steps=3, checkpoint_progress=progress)
    assert asked == [0, 1, 2]
    assert all(m["checkpoint/writing"] == 2 for m in parts.observer.metrics)  # type: ignore[attr-defined]


def test_a_requested_stop_ends_after_the_step_in_hand_and_saves_it() -> None:
    parts, done, saved = run(steps=5, stop_after=2)
    assert (done, saved) == (2, [2])
    assert Counter(parts.sync.versions) == Counter([1, 2])  # type: ignore[attr-defined]


def test_dynamic_sampling_replaces_flat_groups_by_the_same_domain_and_is_capped() -> None:
    """Groups: math/0 and math/1 answered all wrong, code/0 differs; the fresh ones stay flat."""
    rewards = {"0:1:code/0:0": 1}
    parts, _, _ = run(group=2, alpha=1.0, rewards=rewards, dynamic_rounds=2)
    assert parts.prompts.more == [("math", 2), ("math", 2)]  # type: ignore[attr-defined]
    (batch,) = parts.student.batches  # type: ignore[attr-defined]
    # Two rounds replaced the two math groups, each time in their places; what the last round drew
    # stays, ids still unique.
    assert [s.sample_id for s in batch] == [
        f"0:{place}:{prompt}:{k}"
        for place, prompt in ((5, "math/0"), (1, "code/0"), (6, "math/0"))
        for k in range(2)
    ]
    (metrics,) = parts.observer.metrics  # type: ignore[attr-defined]
    assert metrics["sampling/rounds"] == 2 and metrics["sampling/replaced_groups"] == 4


def test_a_domain_without_fresh_prompts_keeps_its_flat_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for left, kept in ((1, {"2", "3"}), (0, {"0", "2"})):
        monkeypatch.setattr(FakePrompts, "__init__", _prompts_with(left))
        parts, _, _ = run(group=2, rewards={"0:1:code/0:0": 1}, dynamic_rounds=1)
        (batch,) = parts.student.batches  # type: ignore[attr-defined]
        assert {s.sample_id.split(":")[1] for s in batch} == {"1", *kept}


def _prompts_with(left: int) -> Any:
    made = FakePrompts.__init__

    def init(self: FakePrompts) -> None:
        made(self)
        self.left = left

    return init


def test_the_failure_budget_is_of_the_whole_step_not_of_a_round() -> None:
    """One verifier failure among the 2 samples of the second round, 8 in the step."""
    rewards = {"0:0:math/0:0": 1, "0:1:code/0:0": 1, "0:3:math/0:0": "timeout"}
    parts, done, _ = run(group=2, rewards=rewards, dynamic_rounds=1, budget=0.2)
    assert done == 1
    (metrics,) = parts.observer.metrics  # type: ignore[attr-defined]
    assert metrics["failures/fraction"] == 1 / 8
    # Of every answer drawn, those of the replaced group too: 1 right of math's 5 judged.
    assert metrics["domain/math/reward"] == 0.2


def test_dynamic_sampling_stops_when_every_group_differs() -> None:
    rewards = {f"0:{place}:{prompt}:0": 1 for place, prompt in enumerate(("math/0", "code/0"))}
    parts, _, _ = run(group=2, rewards=rewards | {"0:2:math/1:1": 1}, dynamic_rounds=3)
    assert parts.prompts.more == []  # type: ignore[attr-defined]


def test_the_prompt_source_is_told_of_every_verdict_and_its_warnings_reach_the_user() -> None:
    rewards = {"0:0:math/0:0": 1, "0:2:math/1:1": "timeout"}
    parts, _, _ = run(group=2, rewards=rewards)
    assert parts.prompts.recorded == [  # type: ignore[attr-defined]
        ("math/0", 1, 2),
        ("code/0", 0, 2),
        ("math/1", 0, 1),
    ]
    assert parts.observer.warned == ["all retired"]  # type: ignore[attr-defined]
    assert parts.observer.metrics[0]["prompts/math/retired"] == 1.0  # type: ignore[attr-defined]
