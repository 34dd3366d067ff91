"""One vLLM engine that samples the student: token ids in, token ids and their logprobs out."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.config.schema import RolloutConfig
from mopd.errors import WeightSyncError
from mopd.protocols import Sequences
from mopd.rollout.engine_arguments import engine_arguments, engine_environment
from mopd.rollout.manifest import checkpoint_manifest, require_same_sums
from mopd.rollout.updates import WeightUpdates
from mopd.types import Prompt, Rollout, TopK, UpdateProof, finish_reason


class RolloutEngine:
    """Samples with the student's weights and remembers which version they are.

    Args:
        model: Hugging Face checkpoint folder (weights of version 0, config, no tokenizer needed).
        config: engine size; units as in the schema.
        dtype: ``float32`` or ``bfloat16``.
        max_model_len: longest prompt + response, tokens.
        valid_vocab: ids from here on are padding rows of the head and are never sampled.
        vocab_size: rows of the head.
        seed: run seed; a sample's own seed comes from it and the sample's id, so that the same
            sample is drawn whatever engine and batch it lands in.
        record_routes: rollouts carry the experts that each of their tokens went to.
        fp32_head: logits are computed in float32 whatever `dtype` is.
        transfer: vLLM's weight-transfer backend that updates will come by, `nccl` or `ipc`.
    """

    def __init__(
        self,
        model: Path,
        config: RolloutConfig,
        *,
        dtype: str,
        max_model_len: int,
        valid_vocab: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seed: int,
        record_routes: bool = False,
        fp32_head: bool = False,
        transfer: str | None = None,
    ) -> None:
        gpu = config.gpus_per_engine > 0
        os.environ.update(engine_environment(config.threads_per_engine, gpu=gpu))
        import torch
        from vllm import LLM

        if not gpu:
            torch.set_num_threads(config.threads_per_engine)
        expected = checkpoint_manifest(model)
        self._allowed = list(range(valid_vocab)) if valid_vocab < vocab_size else None
        self._eos = list(eos_token_ids)
        self._ignore_eos = config.ignore_eos
        self._seed = seed
        self.weight_version = 0
        self._record_routes = record_routes
        self._llm = LLM(
            **engine_arguments(
                model,
                config,
                dtype=dtype,
                max_model_len=max_model_len,
                seed=seed,
                record_routes=record_routes,
                fp32_head=fp32_head,
                transfer=transfer,
            )
        )
        self._updates = WeightUpdates(self._llm, expected, self._said)
        self._recorded = record_routes and not gpu
        if self._recorded:
            self._llm.collective_rpc("mopd_record_routes")

    def generate(
        self,
        requests: Sequence[tuple[str, Prompt]],
        *,
        temperature: float,
        max_tokens: int,
        top_k: int = 0,
    ) -> Iterator[list[Rollout]]:
        """Yield rollouts in groups as they finish, in any order; keyed by sample id.

        ``temperature`` 0 is greedy (its logprobs are then of no use for training). With ``top_k``
        each rollout carries the sampler's top-k, the sampled id first.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        waiting: dict[str, Prompt] = {}
        for sample_id, prompt in requests:
            params = SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                logprobs=top_k,
                seed=None if temperature == 0 else self._sample_seed(sample_id),
                detokenize=False,
                stop_token_ids=[] if self._ignore_eos else self._eos,
                ignore_eos=self._ignore_eos,
                allowed_token_ids=self._allowed,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # each request has its own
            )
            engine.add_request(sample_id, {"prompt_token_ids": list(prompt.token_ids)}, params)
            waiting[sample_id] = prompt
        while engine.has_unfinished_requests():
            outputs = [output for output in engine.step() if output.finished]
            routes = self._routes(outputs)
            finished = [
                self._rollout(output, waiting.pop(output.request_id), top_k, routes)
                for output in outputs
            ]
            if finished:
                yield finished

    def _routes(self, outputs: Sequence[Any]) -> dict[str, np.ndarray]:
        """Request id -> [P + R - 1, layers, k] choices; the last token was never an input."""
        if not self._record_routes or not outputs:
            return {}
        sizes = [
            (o.request_id, len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1)
            for o in outputs
        ]
        if self._recorded:
            (arrays,) = self._llm.collective_rpc("mopd_pop_routes", args=(sizes,))
        else:
            arrays = [
                o.outputs[0].routed_experts[:n] for o, (_, n) in zip(outputs, sizes, strict=True)
            ]
        return {name: array for (name, _), array in zip(sizes, arrays, strict=True)}

    def _sample_seed(self, sample_id: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{sample_id}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big")

    def _rollout(
        self, output: Any, prompt: Prompt, top_k: int, routes: dict[str, np.ndarray]
    ) -> Rollout:
        completion = output.outputs[0]
        ids = tuple(completion.token_ids)
        logprobs = tuple(
            entry[token].logprob for token, entry in zip(ids, completion.logprobs, strict=True)
        )
        return Rollout(
            sample_id=output.request_id,
            prompt=prompt,
            response_ids=ids,
            sampler_logprobs=logprobs,
            weight_version=self.weight_version,
            finish_reason=finish_reason(completion.finish_reason),
            topk=sampler_topk(ids, completion.logprobs, top_k) if top_k else None,
            routed_experts=routes.get(output.request_id),
        )

    def logprobs(self, sequences: Sequences) -> list[list[float]]:
        """[R] logprobs at temperature 1 of each (prompt ids, response ids)'s response ids."""
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": [*prompt, *response]} for prompt, response in sequences],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        if self._recorded:
            self._llm.collective_rpc("mopd_forget_routes")
        return [
            [
                entry[token].logprob
                for token, entry in zip(
                    response, output.prompt_logprobs[len(prompt) :], strict=True
                )
            ]
            for (prompt, response), output in zip(sequences, outputs, strict=True)
        ]

    def update_weights(
        self,
        path: Path | None,
        version: int,
        word_sums: Mapping[str, int] | None = None,
        probe: Sequences = (),
    ) -> UpdateProof:
        """Take version `version` and forget every cached prefix.

        path: a safetensors file to load; None where the weights have come by `transfer`.
        word_sums: the trainer's fingerprint of each tensor, for comparison with what is held here.
        probe: what to say the logprobs of with the new weights.

        Raises:
            WeightSyncError: the file's names or shapes are not the model's (nothing is loaded), a
                fingerprint differs, or the prefix cache could not be reset.
        """
        started = time.perf_counter()
        what = f"weights version {version}"
        if path is None:
            held = self._updates.arrived()
        else:
            self._updates.check(path, what)
            self.weight_version = -1  # until the new weights are in, the engine holds no version
            held = self._updates.load(path, probe)
        if word_sums is not None:
            for sums in held:
                require_same_sums(sums, word_sums, what)
        self._forget_prefixes(what)
        self.weight_version = version
        loaded = time.perf_counter()
        logprobs = self.logprobs(probe) if probe else []
        probed = time.perf_counter()
        return UpdateProof(logprobs, loaded - started, probed - loaded, self._updates.direct)

    def transfer(self, method: str, info: dict[str, Any] | None) -> None:
        """One call of vLLM's weight-transfer protocol, from the trainer's side of it.

        Raises:
            WeightSyncError: what is about to come has other names or shapes than the model; nothing
                of it is loaded.
        """
        if method == "start_weight_update":
            self.weight_version = -1  # until `update_weights` has seen what came
        self._updates.transfer(method, info)

    def _said(self, probe: Sequences) -> list[list[float]]:
        """`logprobs`, computed anew."""
        self._forget_prefixes("comparing two ways to load weights")
        return self.logprobs(probe)

    def _forget_prefixes(self, what: str) -> None:
        # Prefixes cached under the old weights would be reused, silently, by the new ones.
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError(
                f"{what}: the prefix cache could not be reset; "
                "requests were still running during the update"
            )


def sampler_topk(ids: Sequence[int], entries: Sequence[Any], top_k: int) -> TopK:
    """vLLM's logprob dictionaries -> arrays of [R, 1 + top_k]: the sampled id, then the others.

    ids: [R] sampled. entries: per position {id: entry with `.logprob`}, of the top-k and of the
    sampled id, which may be one of them; the last slot is then unused (-1).
    """
    slots = np.full((len(ids), 1 + top_k), -1, dtype=np.int32)
    values = np.zeros((len(ids), 1 + top_k), dtype=np.float32)
    for position, (token, entry) in enumerate(zip(ids, entries, strict=True)):
        listed = [token, *(other for other in entry if other != token)]
        slots[position, : len(listed)] = listed
        values[position, : len(listed)] = [entry[each].logprob for each in listed]
    return TopK(slots, values)
