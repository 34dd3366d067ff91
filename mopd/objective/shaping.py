"""Rewards shaped by the length of the answer, in tokens (MATH 8)."""

from __future__ import annotations

from collections.abc import Sequence

from mopd.errors import ConfigError


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """0 up to limit - buffer, then linear down to -1 at limit, -1 beyond.

    DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13); to be added to the reward.
    Raises ConfigError unless 0 < buffer <= limit.
    """
    if not 0 < buffer <= limit:
        raise ConfigError(
            f"objective.orm.overlong_buffer is {buffer} with a limit of {limit} tokens; expected "
            "0 < buffer <= limit (rollout.max_response_tokens)"
        )
    return -min(max(length - (limit - buffer), 0) / buffer, 1.0)


def kimi_length_rewards(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """Length reward of each answer of one group: lambda if correct, else min(0, lambda).

    lambda = 1/2 - (length - min) / (max - min) over the group; all 0 where the lengths are equal.
    Kimi K1.5 (arXiv 2501.12599 section 2.3.3): short correct answers gain, long ones lose, and a
    wrong answer gains nothing by being short. To be weighted and added to the reward; off at
    first, as its authors found that it slows the start.
    """
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest == longest:
        return [0.0] * len(list(zip(lengths, correct, strict=True)))
    rewards = []
    for length, right in zip(lengths, correct, strict=True):
        score = 0.5 - (length - shortest) / (longest - shortest)
        rewards.append(score if right else min(0.0, score))
    return rewards
