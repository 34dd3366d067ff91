"""vLLM's scheduler, for scores that may begin after what its prefix cache holds.

vLLM reads no cache for a request that wants prompt logprobs, because the rows of what it reads are
not computed, and their logprobs are missing. Of ours only the response's are wanted: the cache may
give the prompt, all but its last token, whose row predicts the first response token.

Given to vLLM as ``--scheduler-cls``; it runs in the engine's process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from mopd_teachers.asked import asked_of


class _Shorter:
    """A request that looks as if it had only its first `num_tokens` tokens."""

    def __init__(self, request: Any, num_tokens: int) -> None:
        self._request, self.num_tokens = request, num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def up_to_the_response(found: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`KVCacheManager.get_computed_blocks`, which looks for at most a request's `num_tokens` - 1,
    kept within the prompt for requests of ours."""

    def get_computed_blocks(request: Any) -> Any:
        asked = asked_of(request.sampling_params)
        return found(request if asked is None else _Shorter(request, asked["first"] + 1))

    return get_computed_blocks


def scheduler(**given: Any) -> Scheduler:
    """The scheduler that vLLM would make of the same arguments, bounded as above."""
    asynchronous = given["vllm_config"].scheduler_config.async_scheduling
    made = (AsyncScheduler if asynchronous else Scheduler)(**given)
    manager: Any = made.kv_cache_manager
    manager.get_computed_blocks = up_to_the_response(manager.get_computed_blocks)
    return made
