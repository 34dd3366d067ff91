"""What runs inside vLLM's worker: logprobs of the response positions alone, gathered there.

Given to vLLM as ``--worker-extension-cls``; importing it puts `GatheredScores` into the model
runner. vLLM's own way (`prompt_logprobs`) computes a [T, V] float32 log-softmax of each whole
prompt, counts ranks over it, and makes Python objects of every position. Here the rows of all
sequences of one engine step are taken together, a bounded number of rows at a time, and
what leaves the worker is [R, 1 + K].

A request asks for it by ``SamplingParams(prompt_logprobs=0, extra_args={"mopd": ...})``; other
requests take vLLM's way, untouched.

Legend: T rows of one engine step, P prompt ids, R response ids, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from mopd_teachers import wire
from mopd_teachers.asked import asked_of
from mopd_teachers.gather import scored

_LOGITS_BYTES = 64 << 20
"""Largest float32 block of logits at a time (a few such exist at once)."""


@dataclass
class _Part:
    """The scored rows of one sequence within one engine step."""

    rows: range
    """Of the step's hidden states."""
    into: slice
    """Response positions that they predict."""
    result: LogprobsTensors
    targets: list[int]
    candidates: Any
    """[rows, K] numpy int32, or None."""


class GatheredScores:
    """`GPUModelRunner._get_prompt_logprobs_dict`, for our requests and for the others."""

    def __init__(self, original: Callable[..., dict[str, Any]]) -> None:
        self._original = original

    def __call__(
        self, runner: Any, hidden_TH: Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        pending: dict[str, int] = runner.num_prompt_logprobs
        ours = {
            request_id: asked
            for request_id in pending
            if (asked := asked_of(runner.requests[request_id].sampling_params)) is not None
        }
        if not ours:
            return self._original(runner, hidden_TH, num_scheduled_tokens)

        runner.num_prompt_logprobs = {r: n for r, n in pending.items() if r not in ours}
        try:
            finished = self._original(runner, hidden_TH, num_scheduled_tokens)
            left = runner.num_prompt_logprobs
        finally:
            runner.num_prompt_logprobs = pending
        for request_id in [r for r in pending if r not in ours and r not in left]:
            del pending[request_id]

        groups: dict[tuple[int, int], list[_Part]] = defaultdict(list)
        for request_id, asked in ours.items():
            count = num_scheduled_tokens.get(request_id)
            if count is None:  # preempted in its prefill
                continue
            request = runner.requests[request_id]
            result = request.in_progress_prompt_logprobs_cpu
            if result is None:
                length = len(request.prompt_token_ids) - 1 - asked["first"]
                result = LogprobsTensors.empty_cpu(length, 1 + asked["width"])
                result.logprobs.fill_(torch.nan)  # what no row is computed for is no score
                request.in_progress_prompt_logprobs_cpu = result
            offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]])
            for part in self._parts(request, asked, count, offset, result):
                groups[asked["top_k"], asked["width"]].append(part)
            if request.num_computed_tokens + count >= len(request.prompt_token_ids):
                finished[request_id] = result
                del pending[request_id]
                request.in_progress_prompt_logprobs_cpu = None
        for (top_k, _), parts in groups.items():
            self._score(runner, hidden_TH, top_k, parts)
        return finished

    @staticmethod
    def _parts(
        request: Any, asked: dict[str, Any], count: int, offset: int, result: LogprobsTensors
    ) -> Iterator[_Part]:
        """Which of the `count` rows that this step computed predict response tokens.

        Row i (of the sequence) predicts token i + 1, so that response position t belongs to row
        P - 1 + t; ``asked["first"]`` is P - 1.
        """
        first, begin = asked["first"], request.num_computed_tokens
        low = max(begin, first)
        high = min(begin + count, len(request.prompt_token_ids) - 1)
        if low >= high:
            return
        into = slice(low - first, high - first)
        candidates = None
        if asked["candidates"]:
            candidates = wire.bytes_to_ids(asked["candidates"], -1, asked["width"])[into]
        yield _Part(
            rows=range(offset + low - begin, offset + high - begin),
            into=into,
            result=result,
            targets=request.prompt_token_ids[low + 1 : high + 1],
            candidates=candidates,
        )

    @staticmethod
    def _score(runner: Any, hidden_TH: Tensor, top_k: int, parts: list[_Part]) -> None:
        """Score the rows of several sequences together and write each its own."""
        device = hidden_TH.device
        rows_T = torch.tensor([row for part in parts for row in part.rows], device=device)
        targets_T = torch.tensor([t for part in parts for t in part.targets], device=device)
        candidates_TK = None
        if parts[0].candidates is not None:
            given = [torch.from_numpy(part.candidates) for part in parts]
            candidates_TK = torch.cat(given).long().to(device)
        vocabulary = runner.model_config.get_vocab_size()
        ids_TK, values_TK = scored(
            runner.model.compute_logits,
            hidden_TH[rows_T],
            targets_T,
            top_k,
            candidates_TK,
            rows_at_a_time=max(1, _LOGITS_BYTES // (4 * vocabulary)),
        )
        ids_TK, values_TK = ids_TK.to("cpu", torch.int32), values_TK.cpu()
        done = 0
        for part in parts:
            own = slice(done, done + len(part.rows))
            part.result.logprob_token_ids[part.into] = ids_TK[own]
            part.result.logprobs[part.into] = values_TK[own]
            done += len(part.rows)


def _install() -> None:
    current = GPUModelRunner._get_prompt_logprobs_dict
    if getattr(current, "_mopd", False):
        return
    gathered = GatheredScores(current)

    def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):  # type: ignore[no-untyped-def]
        return gathered(self, hidden_states, num_scheduled_tokens)

    _get_prompt_logprobs_dict._mopd = True  # type: ignore[attr-defined]
    GPUModelRunner._get_prompt_logprobs_dict = _get_prompt_logprobs_dict


_install()


class ScoringWorker:
    """Mixed into vLLM's worker."""

    def mopd_scoring_protocol(self) -> int | None:
        """The protocol that this worker's model runner knows; None when the hook is not in it."""
        hook = getattr(type(self.model_runner), "_get_prompt_logprobs_dict", None)  # type: ignore[attr-defined]
        return wire.PROTOCOL if getattr(hook, "_mopd", False) else None
