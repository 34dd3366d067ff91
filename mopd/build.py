"""Composition root: from a configuration to parts that run. Nothing here starts a process.

What can be found wrong without loading a model is found here: configuration, tokenizers, prompts,
lengths, verifiers (`prepare`). `mopd.starting` then starts the processes, and `mopd.system` hands
them to the loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mopd.config.checks import config_warnings, require_valid
from mopd.config.model_files import ModelLimits
from mopd.config.schema import Config, DomainConfig
from mopd.config.teachers import members_of
from mopd.data.mixture import Mixture
from mopd.data.prompts import DomainData
from mopd.errors import ConfigError, DataError
from mopd.evaluation.leaks import describe_leaks, find_leaks
from mopd.inputs import judged_of, read_inputs
from mopd.model_folders import end_of_sequence_ids, teacher_folders
from mopd.types import Prompt, Rollout
from mopd.weight_sync.publish import make_probe

_TELLTALE = "Hello,  world! 12345 + 6.7e-8 = naïve café\n\tdef f(x): return x**2  # 你好 🙂"
"""Tokenizers that agree on spaces, digits, accents, code, CJK and emoji rarely differ elsewhere."""


@dataclass(frozen=True)
class Prepared:
    """Everything known before the first model is loaded."""

    config: Config
    tokenizer: Any
    """The student's Hugging Face tokenizer."""
    limits: ModelLimits
    """Of the student's checkpoint."""
    domains: Mapping[str, DomainData]
    max_model_len: int
    """What the rollout engine must hold: the longest prompt plus `rollout.max_response_tokens`,
    plus one; tokens."""
    eos_token_ids: tuple[int, ...]
    probe: Sequence[tuple[list[int], list[int]]]
    warnings: tuple[str, ...] = ()
    sets: Mapping[str, DomainData] = field(default_factory=dict)
    """Held-out sets beside the domains' own: general ones and benchmarks."""

    @property
    def valid_vocab(self) -> int:
        """Ids the tokenizer knows; rows of the head past them are padding and never sampled."""
        return len(self.tokenizer)

    def mixture(self) -> Mixture:
        """The prompts of every domain, at their start."""
        return mixture_of(self.config, self.domains)

    def evaluated(self) -> dict[str, Sequence[Prompt]]:
        """Domain or further set -> prompts never trained on; those without any are left out."""
        everything = {**self.domains, **self.sets}
        return {name: data.held_out for name, data in everything.items() if data.held_out}

    def held_out(self) -> dict[str, Sequence[Prompt]]:
        """Those of them that are answered in text, by a student in training and by any server; the
        others compare likelihoods of given choices."""
        return {n: prompts for n, prompts in self.evaluated().items() if not prompts[0].choices}

    def domain_of(self, name: str) -> str | None:
        """The domain that a held-out set measures (a domain measures itself); None: a general set,
        which has no teacher."""
        benchmark = self.config.evaluation.benchmarks.get(name)
        return benchmark.domain if benchmark else name if name in self.domains else None

    def domain_sets(self) -> dict[str, list[str]]:
        """Domain -> the sets whose mean is its score; domains without held-out items are left
        out."""
        own = {name: [name] if data.held_out else [] for name, data in self.domains.items()}
        for name, benchmark in self.config.evaluation.benchmarks.items():
            assert benchmark.domain is not None
            own[benchmark.domain].append(name)
        return {name: sets for name, sets in own.items() if sets}

    def judged(self) -> dict[str, DomainConfig]:
        """Domain or further set -> its prompts' and verifier's configuration."""
        return judged_of(self.config)

    def majority(self) -> dict[str, float]:
        """Domain or further set -> what always giving its most frequent answer scores."""
        return {
            name: data.majority_baseline
            for name, data in {**self.domains, **self.sets}.items()
            if data.majority_baseline is not None
        }

    def tokenized(self) -> list[tuple[str, list[int]]]:
        """Texts of this run (and one of many kinds of characters) with the student's ids."""
        prompts = [p for data in self.domains.values() for p in (*data.train, *data.held_out)[:4]]
        texts = [_TELLTALE, *(p.text for p in prompts), *(p.answer for p in prompts if p.answer)]
        return [(text, self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def teacher_tokens(self) -> dict[str, int]:
        """Teacher -> tokens its context must hold: its longest sample and the one token that a
        scoring server must generate."""
        longest: dict[str, int] = {}
        for name, data in {**self.domains, **self.sets}.items():
            domain = self.domain_of(name)
            if domain is None:
                continue  # a general set: no teacher sees it
            own = max(len(p.token_ids) for p in (*data.train, *data.held_out))
            needed = own + self.config.rollout.max_response_tokens + 1
            for teacher in members_of(self.config, self.config.domains[domain].teacher):
                longest[teacher] = max(needed, longest.get(teacher, 0))
        return longest

    def teachers_in_ranks(self) -> dict[str, Path]:
        """Domain -> the checkpoint that the student's ranks load (`signal: full`), else empty."""
        if self.config.objective.teacher.signal != "full":
            return {}
        folders = teacher_folders(self.config)
        return {name: folders[d.teacher] for name, d in self.config.domains.items()}

    def refuse(self, rollout: Rollout) -> str | None:
        """Why a rollout cannot be trained on, or None. Such a sample is dropped and counted."""
        if not rollout.response_ids or rollout.finish_reason == "abort":
            return "no answer"
        if max(rollout.response_ids) >= self.valid_vocab:
            return "an id outside the tokenizer"
        if len(rollout.sampler_logprobs) != len(rollout.response_ids) or not all(
            map(math.isfinite, rollout.sampler_logprobs)
        ):
            return "a missing logprob"
        return None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a response without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def prepare(config: Config) -> Prepared:
    """Check everything that needs no model, and read the prompts.

    Raises:
        ConfigError, DataError, ModelError: naming the key, file, row or checkpoint, and what to do;
            every fault of `read_inputs` at once.
    """
    require_valid(config)
    require_kernel(config)
    inputs = read_inputs(config)
    tokenizer, domains, sets = inputs.tokenizer, inputs.domains, inputs.sets
    prompts = [
        p.token_ids
        for data in (*domains.values(), *sets.values())
        for p in (*data.train, *data.held_out)
    ]
    response = config.rollout.max_response_tokens
    prepared = Prepared(
        config=config,
        tokenizer=tokenizer,
        limits=inputs.limits,
        domains=domains,
        # One more: an engine that scores (the probe of each weight sync) must also generate one.
        max_model_len=max(map(len, prompts)) + response + 1,
        eos_token_ids=end_of_sequence_ids(tokenizer, Path(config.student.model)),
        probe=make_probe(
            prompts,
            config.weight_sync.probe_sequences,
            response,
            len(tokenizer),
            config.seed,
        ),
        warnings=(*config_warnings(config), *leak_warnings(domains, sets)),
        sets=sets,
    )
    if not prepared.domain_sets():
        raise ConfigError(
            "no domain has held-out prompts (held_out is 0 everywhere), so that nothing could be "
            "said of the result; raise domains.NAME.held_out, or add evaluation.benchmarks"
        )
    prepared.mixture().require_room(config.train.prompts_per_step)
    return prepared


def leak_warnings(domains: Mapping[str, DomainData], sets: Mapping[str, DomainData]) -> list[str]:
    """Held-out items that are trained on in other words' case; equal ones are refused.

    Raises:
        DataError: a further set holds prompts that are trained on, with both rows.
    """
    everything = {**domains, **sets}
    places = {id: place for data in everything.values() for id, place in data.places.items()}
    held_out = {name: data.held_out for name, data in everything.items()}
    leaks = find_leaks({name: data.train for name, data in domains.items()}, held_out)
    refused = [leak for leak in leaks if leak.exact and leak.held_out.domain in sets]
    if refused:
        raise DataError(
            f"{len(refused)} evaluation items are trained on, so that their score would say "
            f"nothing; take them out of one of the two:\n  {describe_leaks(refused, places)}"
        )
    if not leaks:
        return []
    total = sum(map(len, held_out.values()))
    return [
        f"{len(leaks)} of {total} held-out items are trained on, by content:\n  "
        + describe_leaks(leaks, places)
    ]


def mixture_of(config: Config, domains: Mapping[str, DomainData]) -> Mixture:
    """The training prompts of every domain, drawn by weight and by train.sampling's rules."""
    return Mixture(
        {name: data.train for name, data in domains.items()},
        {name: domain.weight for name, domain in config.domains.items()},
        config.seed,
        config.train.sampling,
        config.train.steps,
    )


def require_kernel(config: Config) -> None:
    """Raises ConfigError if `student.kernel` cannot run on ranks without a GPU."""
    if config.student.kernel == "triton" and config.student.gpus_per_rank == 0:
        from mopd.kernels.select import choose_backend

        choose_backend("triton", "cpu")
