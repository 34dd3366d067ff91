"""Task items: content keys, a split that cannot leak, and errors that say what to do."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from mopd.data.tasks import (
    TaskItem,
    majority_baseline,
    make_items,
    reasoning_gym_score,
    split_items,
)
from mopd.errors import ConfigError, DataError

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def _sums(size: int = 400, seed: int = 0, **kwargs) -> list[TaskItem]:
    options = {"template": "{expression} =", "key_fields": ["expression"], "unordered_key": True}
    return make_items("chain_sum", SUM, size=size, seed=seed, **{**options, **kwargs})


def _item(key: str, answer: str = "a") -> TaskItem:
    return TaskItem(key, f"prompt {key}", answer, {})


def test_items_are_rendered_and_deterministic() -> None:
    items = _sums()
    assert items == _sums()
    first = items[0]
    assert first.prompt.endswith(" =")
    assert first.answer == str(eval(first.prompt.removesuffix("=")))
    assert first.metadata["answer"] == first.answer


def test_question_can_be_the_prompt() -> None:
    item = make_items("spell_backward", {}, size=1, seed=0, template="{question}")[0]
    assert item.prompt.startswith("Spell this word backward") and item.key == item.prompt


def test_both_orders_of_a_pair_are_one_key() -> None:
    ordered = _sums(4000, unordered_key=False)
    unordered = _sums(4000)
    prompts = {item.prompt for item in ordered}
    assert {"1 + 2 =", "2 + 1 ="} <= prompts
    assert len([item for item in unordered if item.prompt in ("1 + 2 =", "2 + 1 =")]) == 1
    assert len(unordered) == 2 * 55  # 55 unordered pairs of digits, two operators
    assert len({item.key for item in unordered}) == len(unordered)


@pytest.mark.parametrize("trial", range(5))
def test_split_depends_on_content_only(trial: int) -> None:
    rng = random.Random(trial)
    items = [_item(str(rng.randrange(300))) for _ in range(200)]
    shuffled = rng.sample(items, len(items))
    keys = {item.key for item in items}
    for held_out in (0, 1, 17, len(keys) - 1):
        train, test = split_items(items, held_out)
        assert len(test) == held_out
        assert len(train) + len(test) == len(keys)
        assert {i.key for i in train}.isdisjoint(i.key for i in test)
        again = split_items(shuffled, held_out)
        assert {i.key for i in again[1]} == {i.key for i in test}


def test_split_is_the_same_for_another_seed_and_order_of_drawing() -> None:
    # 4000 draws see every pair, in another order each time
    held_out = [{i.key for i in split_items(_sums(4000, seed=s), 30)[1]} for s in (1, 10_000)]
    assert held_out[0] == held_out[1]


def test_split_is_the_same_in_another_process() -> None:
    code = (
        "from mopd.data.tasks import *;"
        "items = [TaskItem(str(i), '', '', {}) for i in range(50)];"
        "print(','.join(i.key for i in split_items(items, 7)[1]))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": salt},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(runs) == 1 and len(runs.pop().split(",")) == 7


@pytest.mark.parametrize("held_out", [-1, 3, 4])
def test_split_refuses_what_does_not_exist(held_out: int) -> None:
    with pytest.raises(DataError, match="held_out"):
        split_items([_item("a"), _item("a"), _item("b"), _item("c")], held_out)


def test_scores_are_the_packages_own() -> None:
    params = {"min_word_len": 5, "max_word_len": 8}
    item = make_items("spell_backward", params, size=1, seed=3, template="{word}")[0]
    assert reasoning_gym_score("spell_backward", params, item, item.answer) == 1.0
    near = reasoning_gym_score("spell_backward", params, item, item.answer[:-1] + "~")
    assert 0.5 < near < 1.0
    assert reasoning_gym_score("spell_backward", params, item, None) == 0.0


def test_majority_baseline() -> None:
    assert majority_baseline([_item("a", "x"), _item("b", "y"), _item("c", "x")]) == 2 / 3
    with pytest.raises(DataError):
        majority_baseline([])


@pytest.mark.parametrize(
    ("task", "params", "template", "text"),
    [
        ("chain_sun", {}, "{question}", "did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 2}, "{question}", "did you mean 'min_terms'"),
        ("chain_sum", {"seed": 2}, "{question}", "beside params"),
        ("chain_sum", {"min_terms": 3, "max_terms": 2}, "{question}", "max_terms must be"),
        ("chain_sum", {}, "{expresion}", "did you mean 'expression'"),
        ("chain_sum", {}, "no field", "every prompt would be the same"),
        ("chain_sum", {}, "{", "does not parse"),
        ("chain_sum", {}, "{a.b}", "plain field name"),
        ("base_conversion", {"min_base": 10, "max_base": 10}, "{question}", "never return"),
        ("base_conversion", {"min_base": 16}, "{question}", "never return"),
    ],
)
def test_bad_specifications(task: str, params: dict, template: str, text: str) -> None:
    with pytest.raises(ConfigError, match="domains.x: ") as caught:
        make_items(task, params, size=5, seed=0, template=template, where="domains.x")
    assert text in str(caught.value)


def test_bad_key_field_and_size() -> None:
    with pytest.raises(ConfigError, match="key_fields: no field 'expresion'"):
        _sums(key_fields=["expresion"])
    with pytest.raises(ConfigError, match="size"):
        _sums(size=0)
