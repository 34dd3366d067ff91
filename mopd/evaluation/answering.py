"""One model answers what is missing of several sets; answers are judged while others still come.

Knows neither vLLM nor Ray: who is asked and who judges are callables.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mopd.errors import ModelError
from mopd.evaluation.answer_cache import AnswerFile, CachedAnswer
from mopd.evaluation.items import ItemResult, answer_text, seen_in_answer
from mopd.protocols import VerifierFailed
from mopd.types import Prompt, Verdict


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """An answer as it came, not judged yet."""

    key: str
    text: str
    ids: tuple[int, ...] | None
    tokens: int
    finish_reason: str
    logprobs: tuple[float, ...] | None = None


Ask = Callable[[Sequence[tuple[str, Prompt]]], AsyncIterator[Sequence[RawAnswer]]]
"""(key, prompt) pairs -> groups of answers, in any order."""

JudgeTexts = Callable[
    [Sequence[tuple[str, Prompt, str]]], Awaitable[Mapping[str, Verdict | VerifierFailed]]
]
"""(key, prompt, text) -> verdicts; prompts that have no verifier are left out."""


def answer_key(item_id: str, k: int = 0) -> str:
    """The k-th answer to an item."""
    return f"{item_id}#{k}"


def missing_keys(
    files: Mapping[str, AnswerFile], wanted: Mapping[str, Prompt]
) -> dict[str, Prompt]:
    """What has to be asked for, or judged again."""
    return {
        key: prompt
        for key, prompt in wanted.items()
        if (known := files[prompt.domain].answers.get(key)) is None or known.failure is not None
    }


async def answer_missing(
    who: str,
    files: Mapping[str, AnswerFile],
    wanted: Mapping[str, Prompt],
    ask: Ask,
    judge: JudgeTexts,
    progress: Callable[[int], None] = lambda new: None,
) -> None:
    """Ask for every wanted answer that no file has, judge it, and keep both together.

    Judging runs beside asking, in batches of whatever has come since the last: neither waits for
    the other but at the end.

    Args:
        who: the model, for messages.
        files: set (a prompt's `domain`) -> its file.
        wanted: key -> prompt.
        progress: called with the number of answers that were kept just now.

    Raises:
        ModelError: some prompts got no answer; the others are kept.
    """
    todo = missing_keys(files, wanted)
    again = {key for key in todo if key in files[todo[key].domain].answers}
    waiting: list[RawAnswer] = [_as_raw(files[todo[key].domain].answers[key]) for key in again]
    arrived, finished = asyncio.Event(), False

    async def judge_as_they_come() -> None:
        while waiting or not finished:
            if not waiting:
                arrived.clear()
                await arrived.wait()
                continue
            batch, waiting[:] = list(waiting), []
            verdicts = await judge([(a.key, todo[a.key], a.text) for a in batch])
            _keep(files, todo, batch, verdicts)
            progress(len(batch))

    judging = asyncio.ensure_future(judge_as_they_come())
    try:
        new = [(key, prompt) for key, prompt in todo.items() if key not in again]
        if new:
            async for group in ask(new):
                waiting += group
                arrived.set()
                if judging.done():
                    break  # it failed: no use in asking on
    finally:
        finished = True
        arrived.set()
        await judging
    lost = [key for key in todo if key not in files[todo[key].domain].answers]
    if lost:
        raise ModelError(
            f"{who}: {len(lost)} of {len(todo)} prompts got no answer, the first is {lost[0]!r}; "
            "the others are kept: the same command asks for the rest"
        )


def _as_raw(answer: CachedAnswer) -> RawAnswer:
    return RawAnswer(
        answer.key, answer.text, answer.ids, answer.tokens, answer.finish_reason, answer.logprobs
    )


def _keep(
    files: Mapping[str, AnswerFile],
    prompts: Mapping[str, Prompt],
    batch: Sequence[RawAnswer],
    verdicts: Mapping[str, Verdict | VerifierFailed],
) -> None:
    by_set: dict[str, list[CachedAnswer]] = {}
    for answer in batch:
        verdict = verdicts.get(answer.key)
        kept = CachedAnswer(
            answer.key,
            answer.text,
            answer.ids,
            answer.tokens,
            answer.finish_reason,
            correct=None,
            score=None,
            logprobs=answer.logprobs,
        )
        if isinstance(verdict, Verdict):
            kept = replace(kept, correct=verdict.correct, score=verdict.score)
        elif verdict is not None:
            kept = replace(kept, failure=str(verdict))
        by_set.setdefault(prompts[answer.key].domain, []).append(kept)
    for name, answers in by_set.items():
        files[name].add(answers)


def results_of(file: AnswerFile, prompts: Sequence[Prompt]) -> list[ItemResult]:
    """The first answer to each prompt as an `ItemResult`."""
    results = []
    for prompt in prompts:
        answer = file.answers[answer_key(prompt.id)]
        text, finish_reason = answer_text(prompt, answer.text, answer.finish_reason)
        seen = seen_in_answer(text, answer.ids, finish_reason, answer.correct, prompt.answer)
        results.append(
            ItemResult(
                prompt.id,
                answer.correct,
                answer.score,
                answer.tokens,
                finish_reason,
                text,
                response_ids=answer.ids,
                **seen,
            )
        )
    return results
