"""How a model is asked: a vLLM engine started here, a teacher's servers, or any server by URL."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from mopd.build import Prepared
from mopd.config.model_files import read_model_limits
from mopd.data.prompts import ContextLimit, check_lengths
from mopd.errors import TeacherError
from mopd.evaluating.models import ModelUnderTest
from mopd.evaluation.answering import RawAnswer
from mopd.evaluation.openai_models import OpenAIModel
from mopd.model_folders import end_of_sequence_ids
from mopd.protocols import Sequences
from mopd.runtime.answering_engine import AnsweringEngine, EngineSpec
from mopd.runtime.teacher_actor import wait_of
from mopd.types import Prompt
from mopd_teachers.client import Endpoint, TeacherClient, sample_seed
from mopd_teachers.errors import TeacherError as ServerError
from mopd_teachers.scores import ScoreItem


class Source(Protocol):
    """A model that answers."""

    async def start(self) -> None: ...

    def generate(
        self, requests: Sequence[tuple[str, Prompt]], *, temperature: float
    ) -> AsyncIterator[Sequence[RawAnswer]]: ...

    async def logprobs(self, sequences: Sequences) -> Sequence[Sequence[float]]: ...

    async def busy_s(self) -> float:
        """Seconds in which the engine itself was generating; 0 where that cannot be seen."""
        ...

    async def close(self) -> None: ...


def open_source(model: ModelUnderTest, prepared: Prepared, told: Callable[[str], None]) -> Source:
    """The model's way of being asked, not started yet. `told` hears of servers that are waited for
    while they load."""
    if model.texts is not None:
        return _Url(model, prepared.config.evaluation.seed)
    if model.endpoints:
        return _Endpoints(model, prepared, told)
    return _Engine(model, prepared)


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


class _Engine:
    """A vLLM engine in a process of its own."""

    def __init__(self, model: ModelUnderTest, prepared: Prepared) -> None:
        assert model.folder is not None
        self._model = model
        response = model.engine.max_response_tokens
        longest = max(len(p.token_ids) for prompts in model.sets.values() for p in prompts)
        limits = read_model_limits(model.folder)
        room = ContextLimit(model.label, limits.max_position_embeddings, reserved=1)
        if longest + response + 1 > limits.max_position_embeddings:
            everything = {**prepared.domains, **prepared.sets}
            check_lengths(everything, response, [room])
        self._engine = AnsweringEngine(
            EngineSpec(
                model=model.folder,
                dtype=model.dtype,
                max_model_len=longest + response + 1,
                valid_vocab=len(model.tokenizer),
                vocab_size=limits.vocab_size,
                eos_token_ids=end_of_sequence_ids(model.tokenizer, model.folder),
                seed=prepared.config.evaluation.seed,
            ),
            model.engine,
        )

    async def start(self) -> None:
        await self._engine.start()

    async def generate(
        self, requests: Sequence[tuple[str, Prompt]], *, temperature: float
    ) -> AsyncIterator[Sequence[RawAnswer]]:
        async for group in self._engine.generate(requests, temperature=temperature):
            yield [
                RawAnswer(
                    r.sample_id,
                    _decoded(self._model.tokenizer, r.response_ids),
                    r.response_ids,
                    len(r.response_ids),
                    r.finish_reason,
                    # Greedy or at temperature 1, these are log pi over the ids that may be
                    # sampled. (Scored as a prompt, tokens are weighed against the padding rows of
                    # the head too, which no training ever held down.)
                    tuple(round(x, 6) for x in r.sampler_logprobs),
                )
                for r in group
            ]

    async def logprobs(self, sequences: Sequences) -> Sequence[Sequence[float]]:
        return await self._engine.logprobs(sequences)

    async def busy_s(self) -> float:
        return await self._engine.busy_s()

    async def close(self) -> None:
        self._engine.close()


class _Endpoints:
    """A configured teacher that runs elsewhere: vLLM servers, asked by token ids."""

    _AT_ONCE = 512

    def __init__(
        self, model: ModelUnderTest, prepared: Prepared, told: Callable[[str], None]
    ) -> None:
        name = model.label.removeprefix("teacher ")
        teacher = prepared.config.teachers[name]
        self._wait_s, self._told = wait_of(teacher), told
        self._model, self._seed = model, prepared.config.evaluation.seed
        key = os.environ[teacher.api_key_env] if teacher.api_key_env else None
        self._client = TeacherClient(
            name,
            [Endpoint(url, model.served, key) for url in model.endpoints],
            timeout_s=teacher.timeout_s,
            retries=teacher.retries,
            concurrency=teacher.concurrency,
        )

    async def start(self) -> None:
        try:
            await self._client.probe(wait_s=self._wait_s, told=self._told)
        except ServerError as error:
            raise TeacherError(str(error)) from error

    async def generate(
        self, requests: Sequence[tuple[str, Prompt]], *, temperature: float
    ) -> AsyncIterator[Sequence[RawAnswer]]:
        for start in range(0, len(requests), self._AT_ONCE):
            part = requests[start : start + self._AT_ONCE]
            try:
                answers = await self._client.generate(
                    [list(prompt.token_ids) for _, prompt in part],
                    max_tokens=self._model.engine.max_response_tokens,
                    temperature=temperature,
                    seeds=None
                    if temperature == 0
                    else [sample_seed(self._seed, k) for k, _ in part],
                )
            except ServerError as error:
                raise TeacherError(str(error)) from error
            yield [
                RawAnswer(
                    key,
                    _decoded(self._model.tokenizer, answer.token_ids),
                    tuple(answer.token_ids),
                    len(answer.token_ids),
                    answer.finish_reason,
                )
                for (key, _), answer in zip(part, answers, strict=True)
            ]

    async def logprobs(self, sequences: Sequences) -> Sequence[Sequence[float]]:
        items = [ScoreItem(str(k), prompt, own) for k, (prompt, own) in enumerate(sequences)]
        found = await self._client.score_batch(items)
        failed = [r for r in found.values() if not hasattr(r, "logprobs")]
        if failed:
            raise TeacherError(
                f"{self._model.label}: {len(failed)} of {len(items)} answers were not scored, the "
                f"first for this reason: {failed[0]}"
            )
        return [[float(x) for x in found[str(k)].logprobs] for k in range(len(items))]  # type: ignore[union-attr]

    async def busy_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        await self._client.close()


class _Url:
    """Any OpenAI-compatible server, asked by text."""

    def __init__(self, model: ModelUnderTest, seed: int) -> None:
        assert model.texts is not None
        url = model.where.partition("#")[0]
        self._texts, self._seed = model.texts, seed
        self._client = OpenAIModel(
            model.label, url, model.served, max_tokens=model.engine.max_response_tokens
        )

    async def start(self) -> None:
        await self._client.start()

    def generate(
        self, requests: Sequence[tuple[str, Prompt]], *, temperature: float
    ) -> AsyncIterator[Sequence[RawAnswer]]:
        asked = [(key, self._texts[prompt.id]) for key, prompt in requests]
        return self._client.generate(asked, temperature=temperature, seed=self._seed)

    async def logprobs(self, sequences: Sequences) -> Sequence[Sequence[float]]:
        raise AssertionError("a server by URL does not score")

    async def busy_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        await self._client.close()
