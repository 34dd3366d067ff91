"""Asking, judging and keeping: what was asked once is never asked again, whatever happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from mopd.config.schema import VerifierConfig
from mopd.errors import DataError, ModelError
from mopd.evaluation.answer_cache import AnswerFile, CachedAnswer
from mopd.evaluation.answering import (
    RawAnswer,
    answer_key,
    answer_missing,
    missing_keys,
    results_of,
)
from mopd.evaluation.fingerprints import (
    endpoint_fingerprint,
    model_fingerprint,
    sampling_fingerprint,
    set_fingerprint,
)
from mopd.protocols import VerifierFailed
from mopd.types import Prompt, Verdict

PARTS = ("m" * 32, "s" * 32, "t" * 32)


def prompts(name: str = "d", n: int = 6) -> list[Prompt]:
    return [Prompt(f"{name}/{k}", name, f"say {k}", (k,), str(k)) for k in range(n)]


class Model:
    """Answers each prompt with its number, two at a time; may die after `dies_after`."""

    def __init__(self, dies_after: int | None = None, silent: tuple[str, ...] = ()) -> None:
        self.asked: list[str] = []
        self._dies_after, self._silent = dies_after, silent

    async def __call__(
        self, requests: Sequence[tuple[str, Prompt]]
    ) -> AsyncIterator[Sequence[RawAnswer]]:
        for start in range(0, len(requests), 2):
            if self._dies_after is not None and len(self.asked) >= self._dies_after:
                raise ModelError("the engine died")
            group = requests[start : start + 2]
            self.asked += [key for key, _ in group]
            await asyncio.sleep(0)
            yield [
                RawAnswer(key, prompt.answer or "", (7, 8), 2, "stop")
                for key, prompt in group
                if key not in self._silent
            ]


async def judge(items: Sequence[tuple[str, Prompt, str]]) -> dict[str, Verdict | VerifierFailed]:
    await asyncio.sleep(0)
    return {key: Verdict(text == prompt.answer, 1.0) for key, prompt, text in items}


def run(folder: Path, model: Model, how=judge, items=None) -> AnswerFile:
    items = items or prompts()
    file = AnswerFile(folder, PARTS, {})
    wanted = {answer_key(p.id): p for p in items}
    asyncio.run(answer_missing("student", {"d": file}, wanted, model, how))
    return AnswerFile(folder, PARTS, {})


def test_answers_are_judged_kept_and_never_asked_again(tmp_path):
    first = Model()
    file = run(tmp_path, first)
    assert len(first.asked) == 6 and all(a.correct for a in file.answers.values())
    (item, *_) = results_of(file, prompts())
    assert (item.item_id, item.correct, item.response, item.response_tokens) == (
        "d/0",
        True,
        "0",
        2,
    )
    assert item.lenient is True and item.format_error is False
    second = Model()
    run(tmp_path, second)
    assert second.asked == []
    third = Model()
    run(tmp_path, third, items=prompts(n=8))  # two more: only they are asked
    assert third.asked == ["d/6#0", "d/7#0"]


def test_what_came_before_a_death_is_kept_and_the_rest_asked_later(tmp_path):
    with pytest.raises(ModelError, match="the engine died"):
        run(tmp_path, Model(dies_after=4))
    rest = Model()
    file = run(tmp_path, rest)
    assert rest.asked == ["d/4#0", "d/5#0"] and len(file.answers) == 6


def test_a_torn_line_is_dropped_and_asked_again(tmp_path):
    path = run(tmp_path, Model()).path
    text = path.read_text()
    path.write_text(text[:-20])
    again = Model()
    file = run(tmp_path, again)
    assert again.asked == ["d/5#0"] and len(file.answers) == 6
    assert path.read_text().count("\n") == 7


def test_a_file_that_was_killed_at_its_first_line_begins_anew(tmp_path):
    path = AnswerFile(tmp_path, PARTS, {}).path
    path.write_text(path.read_text()[:10])
    model = Model()
    assert len(run(tmp_path, model).answers) == 6 and path.read_text().count("\n") == 7


def test_two_at_a_time_do_not_tear_each_others_lines(tmp_path):
    files = [AnswerFile(tmp_path, PARTS, {}) for _ in range(2)]
    for k in range(20):
        for name, file in zip("ab", files, strict=True):
            text = "x" * 3000
            file.add([CachedAnswer(f"{name}/{k}#0", text, (1,), 1, "stop", True, 1.0)])
    assert len(AnswerFile(tmp_path, PARTS, {}).answers) == 40


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = run(tmp_path, Model()).path
    lines = path.read_text().splitlines()
    lines[2] = "{}"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="line 3"):
        AnswerFile(tmp_path, PARTS, {})


def test_a_failed_verifier_is_asked_again_but_not_the_model(tmp_path):
    async def broken(items):
        return {key: VerifierFailed("no verdict after 1 s") for key, _, _ in items}

    file = run(tmp_path, Model(), broken)
    assert {a.correct for a in file.answers.values()} == {None}
    model = Model()
    file = run(tmp_path, model)
    assert model.asked == [] and {a.correct for a in file.answers.values()} == {True}


def test_a_set_without_a_verifier_is_answered_once(tmp_path):
    async def nobody(items):
        return {}

    run(tmp_path, Model(), nobody)
    model = Model()
    run(tmp_path, model, nobody)
    assert model.asked == []


def test_prompts_without_an_answer_are_named_and_the_others_kept(tmp_path):
    with pytest.raises(ModelError, match=r"student: 1 of 6 prompts got no answer.*'d/3#0'"):
        run(tmp_path, Model(silent=("d/3#0",)))
    assert len(AnswerFile(tmp_path, PARTS, {}).answers) == 5


def test_a_judge_that_breaks_ends_it_at_once(tmp_path):
    async def bug(items):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run(tmp_path, Model(), bug)


def test_missing_is_by_key(tmp_path):
    file = run(tmp_path, Model())
    wanted = {answer_key(p.id, k): p for p in prompts() for k in range(2)}
    assert set(missing_keys({"d": file}, wanted)) == {f"d/{k}#1" for k in range(6)}


def test_fingerprints_see_what_matters(tmp_path, monkeypatch):
    exact = VerifierConfig(name="exact_match")
    whole = set_fingerprint(prompts(), exact)
    assert whole == set_fingerprint(prompts()[::-1], exact)
    assert len({whole, set_fingerprint(prompts(n=5), exact), set_fingerprint(prompts(), None)}) == 3
    (tmp_path / "own_verifier.py").write_text("def judge(prompt, answer): return True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = VerifierConfig(target="own_verifier:judge")
    before = set_fingerprint(prompts(), own)
    (tmp_path / "own_verifier.py").write_text("def judge(prompt, answer): return False\n")
    assert set_fingerprint(prompts(), own) != before
    assert sampling_fingerprint({"temperature": 0.0}) != sampling_fingerprint({"temperature": 1.0})
    assert endpoint_fingerprint("http://a:1/", "m") == endpoint_fingerprint("http://a:1", "m")


def test_a_model_is_its_contents_whatever_its_folder(tmp_path):
    def model(name: str, weights: bytes) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text("{}")
        return folder

    first = model_fingerprint(model("a", b"x" * 1000))
    assert first == model_fingerprint(model("b", b"x" * 1000))
    assert first != model_fingerprint(model("c", b"x" * 999 + b"y"))
    with pytest.raises(ModelError, match="no .*safetensors"):
        model_fingerprint(tmp_path)


def test_a_large_model_is_seen_by_blocks_header_and_time(tmp_path, monkeypatch):
    monkeypatch.setattr("mopd.evaluation.fingerprints.WHOLE_UP_TO", 10)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * (3 * 2**20))
    first = model_fingerprint(tmp_path)
    assert first == model_fingerprint(tmp_path)
    file.write_bytes(b"x" * (3 * 2**20 - 1) + b"y")
    assert model_fingerprint(tmp_path) != first
