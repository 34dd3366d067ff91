"""Sampling rules: prioritised, curriculum, retirement, replacements; each resumes exactly (C35)."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.config.schema import SamplingConfig
from mopd.data.history import PassHistory
from mopd.data.mixture import Mixture
from mopd.data.orders import Curriculum, Prioritised, Shuffled
from mopd.errors import ConfigError, DataError
from mopd.types import Prompt

RULES = {
    "shuffle": SamplingConfig(),
    "retiring": SamplingConfig(retire_above=0.5, retire_after=2),
    "prioritised": SamplingConfig(order="prioritised"),
    "prioritised, retiring": SamplingConfig(order="prioritised", retire_above=0.5, retire_after=2),
    "curriculum": SamplingConfig(order="curriculum", curriculum_steps=5),
    "curriculum, retiring": SamplingConfig(
        order="curriculum", curriculum_start=0.1, retire_above=0.5, retire_after=2
    ),
}


def prompts(domain: str, count: int) -> list[Prompt]:
    """Difficulties 0, 1, 2, 0, 1, 2, ..."""
    return [
        Prompt(f"{domain}/{n:05d}", domain, "q", (n, 1), "a", {}, float(n % 3))
        for n in range(count)
    ]


def mixture(sizes: dict[str, int], rules: SamplingConfig | None = None, seed: int = 0) -> Mixture:
    domains = {name: prompts(name, size) for name, size in sizes.items()}
    return Mixture(domains, dict.fromkeys(sizes, 1.0), seed, rules, total_steps=8)


def ids(drawn: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in drawn]


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> float:
    assert set(counts) <= set(expected)
    return sum((counts[key] - mean) ** 2 / mean for key, mean in expected.items())


# pass history ----------------------------------------------------------------------------------


def test_a_prompt_retires_at_its_rate_and_not_before_enough_are_judged() -> None:
    history = PassHistory(retire_above=0.9, retire_after=8)
    history.record(0, 4, 4)
    assert not history.retired  # all right, but 4 of the 8 that are asked for
    history.record(0, 4, 4)
    history.record(1, 7, 8)
    assert history.retired == {0}
    history.record(1, 12, 12)  # 19 of 20: over everything ever judged
    assert history.retired == {0, 1}
    history.record(2, 8, 8)
    history.record(2, 0, 80)
    assert history.retired == {0, 1, 2}  # for good
    history.record(3, 0, 0)
    assert 3 not in history.counts and history.failure_rate(3) == 1
    assert history.failure_rate(1) == pytest.approx(0.05)
    assert history.mean_pass_rate() == pytest.approx((1 + 19 / 20 + 8 / 88) / 3)
    assert PassHistory().mean_pass_rate() is None


def test_the_mean_rate_does_not_depend_on_the_order_of_the_records() -> None:
    def mean(order: list[int]) -> float | None:
        history = PassHistory()
        for index in order:
            history.record(index, index, 10)  # .1 + .2 + .3 is not .3 + .2 + .1 in floats
        return history.mean_pass_rate()

    assert mean([1, 2, 3]) == mean([3, 2, 1])


@pytest.mark.parametrize(("rate", "passed", "judged"), [(0.9, 9, 10), (0.55, 11, 20), (1.0, 3, 3)])
def test_the_rate_itself_retires(rate: float, passed: int, judged: int) -> None:
    history = PassHistory(retire_above=rate, retire_after=1)
    history.record(0, passed, judged)
    history.record(1, passed - 1, judged)
    assert history.retired == {0}


# orders ----------------------------------------------------------------------------------------


def test_a_shuffled_epoch_passes_over_retired_prompts() -> None:
    order = Shuffled("d", 6, 0)
    epoch = order.pick(6, set(), set(), 0)
    assert sorted(epoch) == list(range(6))
    second = Shuffled("d", 6, 0)
    second.pick(6, set(), set(), 0)
    expected = second.pick(6, set(), set(), 0)
    got = order.pick(2, set(), {expected[0], expected[2]}, 0)
    assert got == [expected[1], expected[3]]
    assert order.pick(2, set(), set(), 0) == expected[4:]  # given back: again from the next epoch


def test_a_prompt_whose_turn_comes_too_early_is_owed() -> None:
    order = Shuffled("d", 4, 0)
    first = order.pick(3, set(), set(), 0)
    (fourth,) = order.pick(1, set(), set(), 0)
    reference = Shuffled("d", 4, 0)
    reference.pick(4, set(), set(), 0)
    epoch = reference.pick(4, set(), set(), 0)
    held = set(epoch[:2])  # as if the step had them already
    assert order.pick(2, held, set(), 0) == epoch[2:]
    assert order.pick(2, set(), set(), 0) == epoch[:2]  # owed, before the next epoch
    assert sorted([*first, fourth]) == [0, 1, 2, 3]


def test_prioritised_draws_are_proportional_to_failure() -> None:
    """Rates 0, .5, .75, 1 and one never judged: weights 1, .5, .25, .05 (the least), 1."""
    history = PassHistory()
    for index, passed in enumerate((0, 2, 3, 4)):
        history.record(index, passed, 4)
    order = Prioritised("d", 5, 0, history, min_priority=0.05)
    weights = {0: 1.0, 1: 0.5, 2: 0.25, 3: 0.05, 4: 1.0}
    n = 6000
    counts = Counter(order.pick(1, set(), set(), 0)[0] for _ in range(n))
    expected = {index: n * weight / 2.8 for index, weight in weights.items()}
    assert chi_square(counts, expected) < 18.5  # 4 degrees of freedom: .001
    uniform = dict.fromkeys(range(5), n / 5)
    assert chi_square(counts, uniform) > 1000  # the bound can fail


def test_prioritised_draws_of_a_step_are_weighted_draws_without_replacement() -> None:
    history = PassHistory()
    for index, passed in enumerate((0, 5, 8)):
        history.record(index, passed, 10)
    order = Prioritised("d", 4, 1, history, min_priority=0.05)
    weights = {0: 1.0, 1: 0.5, 2: 0.2}  # 3 is held
    n = 6000
    counts = Counter(tuple(order.pick(2, {3}, set(), 0)) for _ in range(n))
    expected = {
        (a, b): n * weights[a] / 1.7 * weights[b] / (1.7 - weights[a])
        for a, b in itertools.permutations(weights, 2)
    }
    assert chi_square(counts, expected) < 20.5  # 5 degrees of freedom: .001


def test_the_curriculum_opens_from_the_easiest_share_to_all() -> None:
    difficulties = [float(n) for n in range(20)][::-1]  # index 19 is the easiest
    order = Curriculum("d", difficulties, 0, start=0.2, steps=5)
    assert [order.open_count(step) for step in range(7)] == [4, 8, 12, 16, 20, 20, 20]
    for step in range(5):
        picked = order.pick(4, set(), set(), step)
        assert all(index >= 20 - order.open_count(step) for index in picked)
    assert Curriculum("d", difficulties, 0, start=0.2, steps=1).open_count(0) == 20
    # Shares that are not whole prompts are rounded up, without the noise of floats.
    thirds = Curriculum("d", [0.0] * 10, 0, start=0.1, steps=4)
    assert [thirds.open_count(step) for step in range(4)] == [1, 4, 7, 10]


def test_a_curriculum_gives_every_open_prompt_before_any_again() -> None:
    order = Curriculum("d", [float(n) for n in range(12)], 3, start=0.5, steps=10**6)
    for _ in range(4):
        rounds = [index for _ in range(3) for index in order.pick(2, set(), set(), 0)]
        assert sorted(rounds) == list(range(6))
    # Retirement leaves one open prompt of six: the easiest closed ones are opened early.
    assert sorted(order.pick(3, {4}, {0, 1, 2, 3}, 0)) == [5, 6, 7]


def test_ties_of_difficulty_are_drawn_by_the_seed() -> None:
    def opened(seed: int) -> list[int]:
        return Curriculum("d", [0.0] * 40, seed, start=0.1, steps=9).pick(4, set(), set(), 0)

    assert len({tuple(sorted(opened(seed))) for seed in range(6)}) == 6
    assert opened(2) == opened(2)


# mixture ---------------------------------------------------------------------------------------

Script = list[tuple[str, Any]]


@st.composite
def scripts(draw: st.DrawFn) -> tuple[dict[str, int], int, Script]:
    """(sizes, seed, operations): draws, replacements, and records of the step's own prompts."""
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    sizes = {name: draw(st.integers(3, 12)) for name in names}
    most = min(sizes.values()) * len(names)
    operation = st.one_of(
        st.tuples(st.just("draw"), st.integers(1, most)),
        st.tuples(st.just("more"), st.tuples(st.sampled_from(names), st.integers(1, 4))),
        st.tuples(st.just("record"), st.lists(st.integers(0, 4), min_size=1, max_size=8)),
    )
    return sizes, draw(st.integers(0, 3)), draw(st.lists(operation, max_size=30))


def play(source: Mixture, script: Script, step: list[Prompt]) -> list[list[str]]:
    """What each operation gives; `step` is the running step's prompts, carried between parts."""
    given: list[list[str]] = []
    for what, value in script:
        if what == "draw":
            step[:] = source.draw(value)
            given.append(ids(step))
        elif what == "more":
            more = source.draw_more(*value)
            step += more
            given.append(ids(more))
        else:
            for passed, prompt in zip(value, step, strict=False):
                source.record(prompt.id, passed, 4)
    return given


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@given(case=scripts(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_resuming_anywhere_gives_the_same(
    rules: SamplingConfig, case: tuple[dict[str, int], int, Script], data: st.DataObject
) -> None:
    sizes, seed, script = case
    straight = mixture(sizes, rules, seed)
    expected = play(straight, script, [])
    cut = data.draw(st.integers(0, len(script)))
    before, step = mixture(sizes, rules, seed), list[Prompt]()
    got = play(before, script[:cut], step)
    after = mixture(sizes, rules, seed)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.state_dict() == before.state_dict()
    assert got + play(after, script[cut:], step) == expected
    assert after.state_dict() == straight.state_dict()
    assert after.metrics() == straight.metrics()


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@given(case=scripts(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_step_is_taken_back_whole(
    rules: SamplingConfig, case: tuple[dict[str, int], int, Script], data: st.DataObject
) -> None:
    sizes, seed, script = case
    source, straight = mixture(sizes, rules, seed), mixture(sizes, rules, seed)
    step: list[Prompt] = []
    play(source, script, step)
    play(straight, script, [])
    n = data.draw(st.integers(1, min(sizes.values()) * len(sizes)))
    more = [("more", (name, k)) for name in sizes for k in data.draw(st.lists(st.integers(1, 4)))]
    first = play(source, [("draw", n), *more], [])
    source.take_back()
    assert source.state_dict() == straight.state_dict()
    assert play(source, [("draw", n), *more], []) == first
    source.take_back()
    later: Script = [("draw", n), ("record", [4, 4, 0, 4]), *script]
    assert play(source, later, []) == play(straight, later, [])
    assert source.state_dict() == straight.state_dict()


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@given(case=scripts())
@settings(max_examples=60, deadline=None)
def test_steps_hold_no_prompt_twice_and_no_retired_one(
    rules: SamplingConfig, case: tuple[dict[str, int], int, Script]
) -> None:
    sizes, seed, script = case
    source = mixture(sizes, rules, seed)
    step: list[Prompt] = []
    for what, value in script:
        before = source.state_dict()["domains"]
        start = len(step)
        (given,) = play(source, [(what, value)], step) or [[]]
        if what == "draw":
            assert len(given) == value
            counts = Counter(prompt.domain for prompt in step)
            share = Fraction(value, len(sizes))
            assert all(math.floor(share) <= counts[d] <= math.ceil(share) for d in sizes)
        elif what == "more":
            domain, n = value
            left = sizes[domain] - len(
                {prompt.id for prompt in step[:start] if prompt.domain == domain}
                | {f"{domain}/{i:05d}" for i in before[domain]["history"]["retired"]}
            )
            assert len(given) == min(n, left)
        assert len(set(ids(step))) == len(step)
        after = source.state_dict()["domains"]
        for domain in sizes:
            old, new = before[domain]["history"], after[domain]["history"]
            if old["reopened"] == new["reopened"]:
                retired = {f"{domain}/{index:05d}" for index in old["retired"]}
                assert not retired & set(given)
            else:
                assert what == "draw" and new["retired"] == []


def test_replacements_do_not_change_the_shares() -> None:
    source, plain = mixture({"a": 30, "b": 30}), mixture({"a": 30, "b": 30})
    for _ in range(9):
        counts = Counter(prompt.domain for prompt in source.draw(5))
        source.draw_more("a", 3)
        assert counts == Counter(prompt.domain for prompt in plain.draw(5))


def test_replacements_come_from_what_is_open_to_their_step() -> None:
    for seed in range(5):
        source = mixture({"a": 20}, SamplingConfig(order="curriculum", curriculum_steps=2), seed)
        step = source.draw(2) + source.draw_more("a", 2)
        assert {prompt.difficulty for prompt in step} == {0.0}  # 4 of 20 are open, all easy


def test_replacements_end_when_the_domain_does() -> None:
    source = mixture({"a": 5, "b": 5}, SamplingConfig(retire_above=1.0, retire_after=1))
    step = source.draw(4)
    other = next(p.id for p in prompts("a", 5) if p.id not in ids(step))
    source.record(other, 1, 1)
    more = source.draw_more("a", 9)
    assert len(more) == 2 and other not in ids(more)  # two of a in the step, one retired
    assert source.draw_more("a", 1) == []
    assert source.metrics()["domain/a/reopened"] == 0


def test_retired_prompts_are_given_back_when_too_few_are_left_and_it_is_told_once() -> None:
    source = mixture({"a": 4, "b": 4}, SamplingConfig(retire_above=0.5, retire_after=1))
    for n in range(3):
        source.record(f"a/{n:05d}", 1, 1)
    assert source.metrics()["domain/a/retired"] == 3
    assert [p.id for p in source.draw(2) if p.domain == "a"] == ["a/00003"]
    assert source.take_warnings() == []
    step = source.draw(4)  # needs two of a, one is left
    assert sum(prompt.domain == "a" for prompt in step) == 2
    metrics = source.metrics()
    assert (metrics["domain/a/reopened"], metrics["domain/a/retired"]) == (1, 0)
    (warning,) = source.take_warnings()
    assert "domain 'a': 3 of its 4 prompts are retired" in warning and "retire_above 0.5" in warning
    for n in range(4):
        source.record(f"a/{n:05d}", 1, 1)  # counts were kept: they retire at once
    source.draw(4)
    assert source.metrics()["domain/a/reopened"] == 2 and source.take_warnings() == []
    resumed = mixture({"a": 4, "b": 4}, SamplingConfig(retire_above=0.5, retire_after=1))
    resumed.load_state_dict(source.state_dict())
    for n in range(4):
        resumed.record(f"a/{n:05d}", 1, 1)
    resumed.draw(4)
    assert resumed.metrics()["domain/a/reopened"] == 3 and resumed.take_warnings() == []


def test_metrics() -> None:
    assert mixture({"a": 4}).metrics() == {}
    rules = SamplingConfig(order="curriculum", curriculum_steps=4, retire_above=0.9)
    source = mixture({"a": 10, "b": 10}, rules)
    for _ in range(2):
        source.draw(2)
    source.record("a/00000", 3, 4)
    source.record("a/00001", 4, 4)
    assert source.metrics() == {
        "domain/a/recorded_pass_rate": 0.875,
        "domain/a/retired": 1.0,
        "domain/a/reopened": 0.0,
        "domain/a/curriculum_open": 0.5,  # ceil(10 * (.2 + .8 / 3))
        "domain/b/retired": 0.0,
        "domain/b/reopened": 0.0,
        "domain/b/curriculum_open": 0.5,
    }


def test_priorities_follow_the_records() -> None:
    source = mixture({"a": 20}, SamplingConfig(order="prioritised", min_priority=0.001))
    for n in range(15):
        source.record(f"a/{n:05d}", 4, 4)
    drawn = Counter(p.id for _ in range(60) for p in source.draw(2))
    hard = sum(count for key, count in drawn.items() if key >= "a/00015")
    assert hard >= 116


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (SamplingConfig(order="random"), "'random' is not one of shuffle, prioritised, curriculum"),
        (SamplingConfig(min_priority=0.1), "min_priority would have no effect: .*order is shuffle"),
        (SamplingConfig(order="prioritised", curriculum_start=0.1), "only curriculum reads it"),
        (SamplingConfig(retire_after=4), "retire_after would have no effect"),
        (SamplingConfig(retire_above=0.9, retire_after=0), "retire_after must be at least 1"),
        (SamplingConfig(retire_above=0.0), "retire_above must be above 0 and at most 1, got 0"),
        (SamplingConfig(retire_above=float("nan")), "retire_above must be above 0"),
        (SamplingConfig(order="prioritised", min_priority=0.0), "min_priority must be above 0"),
        (SamplingConfig(order="curriculum", curriculum_start=1.5), "curriculum_start must be"),
        (SamplingConfig(order="curriculum", curriculum_steps=0), "1 or more, got 0"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules: SamplingConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        mixture({"a": 3}, rules)


def test_a_curriculum_needs_steps_and_difficulties() -> None:
    rules = SamplingConfig(order="curriculum")
    with pytest.raises(ConfigError, match="curriculum_steps .or train.steps. of 1 or more, got No"):
        Mixture({"a": prompts("a", 3)}, {"a": 1}, 0, rules)
    bare = [Prompt(f"b/{n:05d}", "b", "q", (n,)) for n in range(3)]
    weights = {"a": 1.0, "b": 1.0}
    with pytest.raises(DataError, match="domain 'b': .*'b/00000' has None; .*b.prompts.difficulty"):
        Mixture({"a": prompts("a", 3), "b": bare}, weights, 0, rules, 5)
    Mixture({"a": prompts("a", 3), "b": bare}, weights | {"b": 0}, 0, rules, 5)
    bare[1] = Prompt("b/00001", "b", "q", (1,), difficulty=math.inf)
    bare[0] = Prompt("b/00000", "b", "q", (0,), difficulty=1.0)
    with pytest.raises(DataError, match="'b/00001' has inf"):
        Mixture({"b": bare}, {"b": 1}, 0, rules, 5)


def test_bad_calls() -> None:
    source = mixture({"a": 3, "b": 3})
    with pytest.raises(DataError, match="'a/9', which is no prompt of this run"):
        source.record("a/9", 1, 1)
    for passed, judged in ((2, 1), (-1, 1), (0, -1)):
        with pytest.raises(DataError, match=f"got {passed} of {judged}"):
            source.record("a/00000", passed, judged)
    with pytest.raises(ConfigError, match="domain 'x'; those drawn: 'a', 'b'"):
        source.draw_more("x", 1)
    with pytest.raises(ConfigError, match="at least 1"):
        source.draw_more("a", 0)
    with pytest.raises(DataError, match="two prompts of one id .the other is of domain 'a'"):
        Mixture({"a": prompts("a", 2), "b": prompts("a", 1)}, {"a": 1, "b": 1}, 0)


def test_states_of_other_rules_are_refused() -> None:
    state = mixture({"a": 5}, SamplingConfig(order="prioritised", min_priority=0.1)).state_dict()
    for other, says in (
        (SamplingConfig(), "order prioritised, this run has shuffle"),
        (SamplingConfig(order="prioritised"), "min_priority 0.1, this run has 0.05"),
        (
            SamplingConfig(order="prioritised", min_priority=0.1, retire_above=0.9),
            "retire_above unset, this run has 0.9",
        ),
    ):
        with pytest.raises(DataError, match=says):
            mixture({"a": 5}, other).load_state_dict(state)
    curriculum = SamplingConfig(order="curriculum")
    longer = Mixture({"a": prompts("a", 5)}, {"a": 1}, 0, curriculum, total_steps=9)
    with pytest.raises(DataError, match="set train.sampling.curriculum_steps back"):
        longer.load_state_dict(mixture({"a": 5}, curriculum).state_dict())
    old = mixture({"a": 5}).state_dict()
    del old["sampling"]
    with pytest.raises(DataError, match="an older version of mopd, without the state of the"):
        mixture({"a": 5}).load_state_dict(old)
    harder = [Prompt(p.id, "a", "q", p.token_ids, "a", {}, 9.0) for p in prompts("a", 5)]
    with pytest.raises(DataError, match="their difficulty or the tokenizer have changed"):
        Mixture({"a": harder}, {"a": 1}, 0).load_state_dict(mixture({"a": 5}).state_dict())
