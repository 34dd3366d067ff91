"""Verifiers in a process of their own: slow or crashing user code cannot stop the run."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import ray

from mopd.config.schema import DomainConfig
from mopd.data.verifier_process import START_S, LastingVerifier, NoVerdict, named
from mopd.data.verifiers import build_verifier
from mopd.protocols import VerifierFailed
from mopd.runtime.logs import write_output_to
from mopd.types import Prompt, Rollout, Verdict

_CHUNK_S = 0.2
"""Verdicts travel in chunks of about this long: one message a verdict costs more than it."""

Outcome = tuple[str, Verdict | VerifierFailed]


@ray.remote
class JudgeActor:
    """Builds the domains' verifiers and runs them one answer after another."""

    def __init__(
        self, domains: Mapping[str, DomainConfig], working_directory: str, log: Path | None
    ) -> None:
        write_output_to(log)
        os.chdir(working_directory)  # a user's `package.module:function` is found from there
        sys.path.insert(0, working_directory)
        # A user's code runs in a further process, which has no network; this one needs Ray's.
        self._verifiers = {
            name: LastingVerifier(name, domain)
            if domain.verifier.target is not None
            else build_verifier(domain.verifier, name, domain.prompts)
            for name, domain in domains.items()
            if domain.verifier is not None
        }

    def ready(self) -> None:
        """Returns once the verifiers are built; raises what building them raised."""

    def judge(self, items: Sequence[tuple[str, Prompt, str]]) -> Iterator[list[Outcome]]:
        """Yield (sample id, verdict) chunks in the order of `items`."""
        chunk: list[Outcome] = []
        sent = time.monotonic()
        for sample_id, prompt, answer in items:
            verifier = self._verifiers[prompt.domain]
            try:
                assert verifier is not None
                outcome: Verdict | VerifierFailed = verifier(prompt, answer)
            except NoVerdict as error:
                outcome = VerifierFailed(error.cause)
            except (Exception, SystemExit) as error:  # sys.exit() would end this worker
                # A verifier that could not judge has not judged: this is never a wrong answer.
                outcome = VerifierFailed(named(error)[:200])
            chunk.append((sample_id, outcome))
            if time.monotonic() - sent >= _CHUNK_S:
                yield chunk
                chunk, sent = [], time.monotonic()
        if chunk:
            yield chunk


class JudgePool:
    """`mopd.protocols.Judge`: a deadline for every verdict, a fresh worker after each miss."""

    def __init__(
        self,
        domains: Mapping[str, DomainConfig],
        decode: Callable[[Sequence[int]], str],
        log_dir: Path | None = None,
    ) -> None:
        """log_dir: an absolute folder for what verifiers print; None leaves it to Ray."""
        self._log = log_dir and log_dir / "verifiers.log"
        self._domains = {n: d for n, d in domains.items() if d.verifier is not None}
        self._decode = decode
        self._lock = asyncio.Lock()  # one batch at a time, or waiting would eat the deadline
        self._actor = self._start()

    def _start(self):  # type: ignore[no-untyped-def]
        options = JudgeActor.options(num_cpus=1)  # type: ignore[attr-defined]
        return options.remote(self._domains, os.getcwd(), self._log)

    async def ready(self) -> None:
        """Returns once every verifier is built."""
        await self._actor.ready.remote()

    async def judge(self, rollouts: Sequence[Rollout]) -> Mapping[str, Verdict | VerifierFailed]:
        """Verdicts of the rollouts whose domain has a verifier, keyed by sample id."""
        return await self.judge_texts(
            [
                (r.sample_id, r.prompt, self._decode(r.response_ids))
                for r in rollouts
                if r.prompt.domain in self._domains
            ]
        )

    async def judge_texts(
        self, answers: Sequence[tuple[str, Prompt, str]]
    ) -> Mapping[str, Verdict | VerifierFailed]:
        """The same for (sample id, prompt, answer text) triples."""
        items = [item for item in answers if item[1].domain in self._domains]
        outcomes: dict[str, Verdict | VerifierFailed] = {}
        one_by_one = False
        async with self._lock:
            while items:
                batch = items[:1] if one_by_one else items
                done, trouble = await self._run(batch)
                if trouble and one_by_one:
                    done = {batch[0][0]: VerifierFailed(trouble)}
                # After trouble in a batch only asking one by one tells whose fault it was: a
                # worker that ends takes verdicts along that it had already given.
                one_by_one = one_by_one != bool(trouble)
                outcomes |= done
                items = [item for item in items if item[0] not in done]
        return outcomes

    def _timeout(self, domain: str) -> float:
        verifier = self._domains[domain].verifier
        assert verifier is not None
        # A user's may have to be started first, in the process that has the deadline.
        return verifier.timeout_s + (0.0 if verifier.target is None else START_S)

    async def _run(
        self, items: Sequence[tuple[str, Prompt, str]]
    ) -> tuple[dict[str, Verdict | VerifierFailed], str | None]:
        """(verdicts, why the worker had to be replaced before it gave them all)."""
        limit = max(self._timeout(prompt.domain) for _, prompt, _ in items)
        done: dict[str, Verdict | VerifierFailed] = {}
        await self._actor.ready.remote()  # a fresh worker's start is not the verifier's time
        stream = self._actor.judge.options(num_returns="streaming").remote(items)
        while True:
            try:
                reference = await asyncio.wait_for(anext(stream), limit + _CHUNK_S)
                done |= dict(await reference)
            except StopAsyncIteration:
                return done, None
            except TimeoutError:
                trouble = f"no verdict after {limit:g} s"
                break
            except ray.exceptions.ActorDiedError:
                trouble = "its process ended while judging"
                break
        ray.kill(self._actor)
        self._actor = self._start()
        return done, trouble
