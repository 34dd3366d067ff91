"""The mixture: shares to the integer, epochs without repeats, resumption that loses nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.data.mixture import Mixture
from mopd.errors import ConfigError, DataError
from mopd.types import Prompt


def prompts(domain: str, count: int) -> list[Prompt]:
    return [Prompt(f"{domain}/{n:05d}", domain, "q", (n, 1), "a") for n in range(count)]


def mixture(sizes: dict[str, int], weights: dict[str, float], seed: int = 0) -> Mixture:
    return Mixture({name: prompts(name, size) for name, size in sizes.items()}, weights, seed)


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, float], int, list[int]]:
    """(sizes, weights, seed, draws), each draw within what the smallest domain can give."""
    names = ["a", "b", "c", "d"][: draw(st.integers(1, 4))]
    sizes = {name: draw(st.integers(1, 12)) for name in names}
    weights = {name: float(draw(st.integers(0, 5))) / 2 for name in names}
    if not any(weights.values()):
        weights[names[0]] = 1.0
    total = sum(Fraction(str(weight)) for weight in weights.values())
    most = min(
        math.floor(Fraction(sizes[name]) * total / Fraction(str(weights[name])))
        for name in names
        if weights[name]
    )
    draws = draw(st.lists(st.integers(1, max(1, most)), min_size=1, max_size=25))
    return sizes, weights, draw(st.integers(0, 5)), draws


@given(cases())
@settings(max_examples=300, deadline=None)
def test_shares_epochs_and_steps(case: tuple) -> None:
    sizes, weights, seed, draws = case
    source = mixture(sizes, weights, seed)
    total = sum(Fraction(str(weight)) for weight in weights.values())
    order: dict[str, list[str]] = {name: [] for name in sizes}
    drawn = 0
    for n in draws:
        step = source.draw(n)
        drawn += n
        assert len(step) == n
        assert len({prompt.id for prompt in step}) == n  # sample ids of a step must differ
        counts = Counter(prompt.domain for prompt in step)
        for name in sizes:
            share = Fraction(str(weights[name])) / total
            assert math.floor(n * share) <= counts[name] <= math.ceil(n * share)
            order[name] += [prompt.id for prompt in step if prompt.domain == name]
            # In the long run too: never further from its share than the number of domains.
            assert abs(len(order[name]) - drawn * share) <= len(sizes)
    for name, ids in order.items():
        for start in range(0, len(ids), sizes[name]):
            epoch = ids[start : start + sizes[name]]
            assert len(set(epoch)) == len(epoch)  # within an epoch no prompt comes twice


@given(cases(), st.data())
@settings(max_examples=200, deadline=None)
def test_resuming_anywhere_draws_the_same(case: tuple, data: st.DataObject) -> None:
    sizes, weights, seed, draws = case
    straight = mixture(sizes, weights, seed)
    expected = [straight.draw(n) for n in draws]
    cut = data.draw(st.integers(0, len(draws)))
    before = mixture(sizes, weights, seed)
    got = [before.draw(n) for n in draws[:cut]]
    state = json.loads(json.dumps(before.state_dict()))
    after = mixture(sizes, weights, seed)
    after.load_state_dict(state)
    assert after.state_dict() == before.state_dict()
    got += [after.draw(n) for n in draws[cut:]]
    assert got == expected


def test_loading_goes_back_as_well() -> None:
    source = mixture({"a": 7, "b": 5}, {"a": 1, "b": 1})
    source.draw(4)
    state = source.state_dict()
    first = [source.draw(6) for _ in range(5)]
    source.load_state_dict(state)
    assert [source.draw(6) for _ in range(5)] == first


def test_a_long_run_is_exactly_proportional() -> None:
    source = mixture({"a": 50, "b": 50, "c": 50}, {"a": 1, "b": 1, "c": 1.5})
    counts: Counter[str] = Counter()
    for _ in range(70):
        counts.update(prompt.domain for prompt in source.draw(8))
    assert counts == {"a": 160, "b": 160, "c": 240}


def test_a_small_share_still_comes_up() -> None:
    source = mixture({"a": 50, "b": 5}, {"a": 0.99, "b": 0.01})
    drawn = [prompt.domain for _ in range(100) for prompt in source.draw(1)]
    assert drawn.count("b") == 1


def test_domains_are_interleaved() -> None:
    step = [p.domain for p in mixture({"a": 9, "b": 9}, {"a": 2, "b": 1}).draw(9)]
    assert step == ["a", "b", "a"] * 3


def test_orders_differ_by_epoch_seed_and_domain() -> None:
    def numbers(seed: int) -> list[list[str]]:
        source = mixture({"a": 20, "b": 20}, {"a": 1, "b": 1}, seed)
        steps = [source.draw(40) for _ in range(2)]
        return [[p.id[2:] for p in s if p.domain == name] for s in steps for name in ("a", "b")]

    orders = [*numbers(0), *numbers(1)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert numbers(0) == numbers(0)


def test_a_domain_of_weight_zero_gives_none_and_may_be_empty() -> None:
    source = mixture({"a": 3, "b": 0}, {"a": 1, "b": 0})
    assert {prompt.domain for _ in range(4) for prompt in source.draw(3)} == {"a"}


def test_state_is_small() -> None:
    source = mixture({"a": 5000, "b": 5000}, {"a": 1, "b": 1})
    for _ in range(120):
        source.draw(64)
    assert len(json.dumps(source.state_dict())) < 1000


def test_what_is_refused() -> None:
    with pytest.raises(DataError, match="'a' has no prompts"):
        mixture({"a": 0}, {"a": 1})
    with pytest.raises(ConfigError, match="weight 0"):
        mixture({"a": 1}, {"a": 0})
    with pytest.raises(ConfigError, match="domains.a.weight"):
        mixture({"a": 1}, {"a": float("nan")})
    with pytest.raises(ConfigError, match="different domains: b"):
        mixture({"a": 1}, {"a": 1, "b": 1})
    with pytest.raises(ConfigError, match="at least 1"):
        mixture({"a": 1}, {"a": 1}).draw(0)
    small = mixture({"a": 100, "b": 3}, {"a": 1, "b": 1})
    small.draw(6)
    with pytest.raises(DataError, match="'b' has 3 prompts, but its share of 7 a step is up to 4"):
        small.draw(7)
    with pytest.raises(DataError, match="two prompts of one id"):
        Mixture({"a": prompts("a", 2) + prompts("a", 1)}, {"a": 1}, 0)


def test_a_state_of_other_data_is_refused_by_name() -> None:
    sizes, weights = {"a": 5, "b": 5}, {"a": 1.0, "b": 1.0}
    state = mixture(sizes, weights).state_dict()
    with pytest.raises(DataError, match="domain 'b': its prompts are not those"):
        mixture({"a": 5, "b": 6}, weights).load_state_dict(state)
    changed = prompts("b", 5)
    changed[2] = Prompt(changed[2].id, "b", "q", (99,), "a")
    with pytest.raises(DataError, match="domain 'b': its prompts are not those"):
        Mixture({"a": prompts("a", 5), "b": changed}, weights, 0).load_state_dict(state)
    with pytest.raises(DataError, match="other domains .'c'"):
        mixture(sizes | {"c": 5}, weights | {"c": 1.0}).load_state_dict(state)
    with pytest.raises(DataError, match="domain 'a': the checkpoint was made with share 1/2"):
        mixture(sizes, {"a": 3.0, "b": 1.0}).load_state_dict(state)
    with pytest.raises(DataError, match="seed 0, this run has 1"):
        mixture(sizes, weights, 1).load_state_dict(state)
