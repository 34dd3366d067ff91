"""Verifiers in their Ray worker: deadlines, crashes, and verdicts that are never guessed (C18)."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mopd.config.schema import DomainConfig, VerifierConfig
from mopd.protocols import VerifierFailed
from mopd.types import Prompt, Rollout, Verdict

VERIFIER = """
import os, sys, time

def judge(prompt, answer):
    print("asked about", answer)
    if answer == "exit":
        sys.exit()
    if answer == "hang":
        time.sleep(3600)
    if answer == "die":
        os._exit(3)
    if answer == "raise":
        raise RuntimeError("no idea")
    return answer == prompt.answer
"""
WORDS = ["right", "wrong", "hang", "die", "raise", "exit"]


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield
    ray.shutdown()


def rollouts(words: list[str], domain: str = "d") -> list[Rollout]:
    prompt = Prompt(f"{domain}/0", domain, "?", (1,), answer="right")
    return [
        Rollout(f"s{i}", prompt, (WORDS.index(word),), (-1.0,), 0, "stop")
        for i, word in enumerate(words)
    ]


def test_c18_hanging_and_crashing_verifiers_cost_their_own_sample_only(
    ray_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mopd.runtime.judge_pool import JudgePool

    (tmp_path / "user_verifiers.py").write_text(textwrap.dedent(VERIFIER))
    monkeypatch.chdir(tmp_path)
    verifier = VerifierConfig(target="user_verifiers:judge", timeout_s=1.0)
    domains = {
        "d": DomainConfig(teacher="t", verifier=verifier),
        "without": DomainConfig(teacher="t"),
    }
    asked = ["right", "hang", "wrong", "die", "raise", "right", "exit"]

    async def scenario() -> dict[str, Verdict | VerifierFailed]:
        pool = JudgePool(domains, lambda ids: WORDS[ids[0]], tmp_path)
        await pool.ready()
        batch = [*rollouts(asked), *rollouts(["right"], "without")]
        first = dict(await pool.judge(batch[:7]))
        assert await pool.judge(rollouts(["right"], "without")) == {}
        again = await pool.judge(rollouts(["right", "wrong"]))
        assert [v.correct for v in again.values() if isinstance(v, Verdict)] == [True, False]
        return first

    outcomes = asyncio.run(scenario())
    assert list(outcomes) != [] and set(outcomes) == {f"s{i}" for i in range(7)}
    verdicts = {k: v.correct for k, v in outcomes.items() if isinstance(v, Verdict)}
    assert verdicts == {"s0": True, "s2": False, "s5": True}
    assert "no verdict" in outcomes["s1"] and "no idea" in outcomes["s4"]  # type: ignore[operator]
    assert "ended" in outcomes["s3"]  # type: ignore[operator]
    assert "SystemExit" in outcomes["s6"]  # type: ignore[operator]
    assert "asked about hang" in (tmp_path / "verifiers.log").read_text()
