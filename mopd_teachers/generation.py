"""Answers of a teacher by `/v1/completions`, token ids in and out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mopd_teachers.errors import TeacherError
from mopd_teachers.replica import Replica
from mopd_teachers.transport import Ask


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer: the ids (with the end-of-sequence id when it was drawn) and why it ended."""

    token_ids: tuple[int, ...]
    finish_reason: str


def sample_seed(seed: int, sample_id: str) -> int:
    """The seed of one sample's answer, below 2**32: samples of one run do not share their noise,
    and a sample has the same whatever is asked with it."""
    digest = hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


async def generate_at(
    ask: Ask,
    server: Replica,
    prompts: Sequence[Sequence[int]],
    *,
    teacher: str,
    max_tokens: int,
    temperature: float,
    seed: int | None,
) -> list[Generation]:
    """One answer per prompt, in their order. A request has one seed, so that with a `seed` equal
    prompts of one request would be answered alike: `TeacherClient.generate` asks for each alone.

    Raises TeacherError for an answer that is none.
    """
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "temperature": temperature,
        # Said aloud, because servers may take other defaults from the model's folder.
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        "detokenize": False,
    }
    if seed is not None:
        body["seed"] = seed
    answer = await ask(server, "POST", "/v1/completions", body)
    by_index: dict[int, Generation] = {}
    try:
        for choice in answer["choices"]:
            if list(choice["prompt_token_ids"]) != list(prompts[choice["index"]]):
                raise TeacherError(
                    f"teacher {teacher!r}: a prompt's ids came back changed; the server must "
                    "take token ids as they are"
                )
            by_index[choice["index"]] = Generation(
                tuple(choice["token_ids"]), choice["finish_reason"]
            )
    except (LookupError, TypeError) as error:
        raise TeacherError(
            f"teacher {teacher!r}: /v1/completions returned no token ids; expected a vLLM server "
            "that knows `return_token_ids`"
        ) from error
    if sorted(by_index) != list(range(len(prompts))):
        raise TeacherError(
            f"teacher {teacher!r}: {len(by_index)} answers for {len(prompts)} prompts"
        )
    return [by_index[i] for i in range(len(prompts))]
