"""Tokens scored a second: ours, a vLLM server as shipped, and the bound of both, a bare prefill.

    .venv/bin/python tools/bench_teachers.py --json
    .venv/bin/python tools/bench_teachers.py --model DIR --sequences 16 --rounds 2 --json

Three processes serve the same model with the same settings (float32, eager, one thread, no
prefix cache), and the same sequences go through each in turn, round by round, so that a busy
machine is busy for all of them:

    engine    vLLM's engine in its own process, called without HTTP: prefill, one token generated,
              no logprobs asked for. What a scoring server could reach if scoring cost nothing.
    shipped   `python -m vllm.entrypoints.openai.api_server`, asked by our client through
              /v1/completions with prompt_logprobs.
    ours      `mopd_teachers.serve`, asked by our client through its own route.

The peak of each process's memory is read from the kernel at the end. With --json the last line
of standard output is one JSON object:
    {"model": .., "sequences": .., "tokens": .., "response_tokens": .., "rounds": ..,
     "engine": {"tokens_per_s": median, "peak_gib": ..},
     "top_k": {"0": {"shipped": {..}, "ours": {.., "of_engine": .., "of_shipped": ..}}, "20": ..}}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from mopd_teachers.client import Endpoint, TeacherClient
from mopd_teachers.scores import ScoreItem, TeacherFailure
from mopd_teachers.server import MALLOC_ENV, ServerProcess, ServerSpec, served_model

ROOT = Path(__file__).resolve().parents[1]
START_S = 300.0
KV_CACHE_GIB = 0.5

BARE_ENGINE = """
import json, sys, time
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
options = json.loads(sys.argv[1])
engine = LLM(**options)
params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
print("ready", flush=True)
for line in sys.stdin:
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in json.loads(line)]
    begin = time.perf_counter()
    done = engine.generate(prompts, params, use_tqdm=False)
    assert len(done) == len(prompts)
    print(time.perf_counter() - begin, flush=True)
"""


class BareEngine:
    """vLLM's engine in a process of its own, fed through a pipe."""

    def __init__(self, model: Path, options: dict[str, Any], log: Path) -> None:
        env = os.environ | MALLOC_ENV | ENGINE_ENV
        self._process = subprocess.Popen(
            [sys.executable, "-c", BARE_ENGINE, json.dumps({"model": str(model)} | options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            env=env,
            text=True,
        )
        self.pid = self._process.pid

    def _line(self, want: str = "") -> str:
        """The next line that is ours: vLLM's log goes to standard output, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if want and line.strip() == want:
                return line
            if not want and line.strip().replace(".", "", 1).isdigit():
                return line
        raise SystemExit("the bare engine has died")

    def wait_ready(self) -> None:
        self._line("ready")

    def seconds(self, sequences: Sequence[Sequence[int]]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(sequences) + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def start_shipped(
    model: Path, context: int, overrides: dict[str, Any], log: Path
) -> tuple[subprocess.Popen[bytes], str]:
    """vLLM's own server; (process, URL)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--dtype", "float32", "--max-model-len", str(context), "--enforce-eager",
            "--kv-cache-memory-bytes", str(int(KV_CACHE_GIB * 2**30)), "--host", "127.0.0.1",
            "--port", str(port), "--no-enable-prefix-caching", "--disable-uvicorn-access-log",
            "--distributed-executor-backend", "uni", "--hf-overrides", json.dumps(overrides),
            "--disable-log-stats",
        ],
        env=os.environ | ENGINE_ENV, stdout=log.open("wb"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    return process, f"http://127.0.0.1:{port}"


def wait_answering(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            served_model(url)
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"vLLM's own server did not start; see {log}") from None
            time.sleep(0.3)


def peak_gib(pid: int) -> float:
    """Largest resident memory that the process and its children have had, in GiB."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        text = Path(f"/proc/{process.pid}/status").read_text()
        total += int(text.split("VmHWM:")[1].split()[0]) * 1024
    return total / 2**30


def sequences_of(count: int, prompt: int, response: int, vocabulary: int) -> list[ScoreItem]:
    rng = random.Random(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocabulary) for _ in range(n))

    return [ScoreItem(f"0:{i}:0", ids(prompt), ids(response)) for i in range(count)]


async def scored_in(client: TeacherClient, items: Sequence[ScoreItem], top_k: int) -> float:
    """Seconds until every sample has its score."""
    begin = time.perf_counter()
    scores = await client.score_batch(items, top_k=top_k)
    seconds = time.perf_counter() - begin
    failed = [s for s in scores.values() if isinstance(s, TeacherFailure)]
    if failed:
        raise SystemExit(f"{len(failed)} samples have no score: {failed[0].detail}")
    return seconds


async def measure(
    options: argparse.Namespace,
    items: Sequence[ScoreItem],
    engine: BareEngine,
    urls: dict[str, Endpoint],
    say: Any,
) -> dict[str, Any]:
    """{"engine": [seconds], "shipped/0": [seconds], ...}; one warm-up round is not counted."""
    ids = [[*item.prompt_ids, *item.response_ids] for item in items]
    times: dict[str, list[float]] = {}
    clients = {
        who: TeacherClient(who, [url], timeout_s=1800.0, retries=0) for who, url in urls.items()
    }
    try:
        for client in clients.values():
            await client.probe(top_k=max(options.top_k))
            await scored_in(client, items[: max(1, len(items) // 8)], 0)
        await asyncio.to_thread(engine.seconds, ids[: max(1, len(items) // 8)])
        for _ in range(options.rounds):
            times.setdefault("engine", []).append(await asyncio.to_thread(engine.seconds, ids))
            say(f"engine: {times['engine'][-1]:.2f} s")
            for top_k in options.top_k:
                for who, client in clients.items():
                    seconds = await scored_in(client, items, top_k)
                    times.setdefault(f"{who}/{top_k}", []).append(seconds)
                    say(f"{who}, top-k {top_k}: {seconds:.2f} s")
    finally:
        for client in clients.values():
            await client.close()
    return times


def run(options: argparse.Namespace, say: Any) -> dict[str, Any]:
    model = options.model.resolve()
    context = options.prompt_tokens + options.response_tokens + 8
    config = json.loads((model / "config.json").read_text())
    # For its speed a model may read further than it was trained to.
    longer = max(context, config["max_position_embeddings"])
    overrides = {"max_position_embeddings": longer}
    items = sequences_of(
        options.sequences, options.prompt_tokens, options.response_tokens, config["vocab_size"] - 8
    )
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        spec = ServerSpec(
            "bench",
            str(model),
            max_model_len=context,
            kv_cache_gib=KV_CACHE_GIB,
            engine_args={"hf_overrides": overrides},
        )
        ours = ServerProcess(spec, logs / "ours.log")
        engine = BareEngine(
            model,
            {
                "dtype": "float32",
                "max_model_len": context,
                "enforce_eager": True,
                "kv_cache_memory_bytes": int(KV_CACHE_GIB * 2**30),
                "enable_prefix_caching": False,
                "hf_overrides": overrides,
                "disable_log_stats": True,
                "generation_config": "vllm",
                "distributed_executor_backend": "uni",
            },
            logs / "engine.log",
        )
        shipped, url = start_shipped(model, context, overrides, logs / "shipped.log")
        try:
            ours.start()
            say("three servers are starting")
            engine.wait_ready()
            ours.wait_healthy(START_S)
            wait_answering(shipped, url, logs / "shipped.log")
            urls = {"shipped": Endpoint(url), "ours": Endpoint(ours.url, ours.served_name)}
            times = asyncio.run(measure(options, items, engine, urls, say))
            assert ours.pid is not None
            memory = {"engine": engine.pid, "shipped": shipped.pid, "ours": ours.pid}
            peaks = {who: peak_gib(pid) for who, pid in memory.items()}
        finally:
            shipped.terminate()
            shipped.wait(60)
            engine.stop()
            ours.stop()
    return report(options, times, peaks)


def report(
    options: argparse.Namespace, times: dict[str, list[float]], peaks: dict[str, float]
) -> dict[str, Any]:
    per_round = options.sequences * (options.prompt_tokens + options.response_tokens)
    speed = {key: per_round / statistics.median(seconds) for key, seconds in times.items()}
    result: dict[str, Any] = {
        "model": options.model.name,
        "sequences": options.sequences,
        "tokens": options.prompt_tokens + options.response_tokens,
        "response_tokens": options.response_tokens,
        "rounds": options.rounds,
        "engine": {"tokens_per_s": speed["engine"], "peak_gib": peaks["engine"]},
        "top_k": {},
    }
    for top_k in options.top_k:
        ours, shipped = speed[f"ours/{top_k}"], speed[f"shipped/{top_k}"]
        result["top_k"][str(top_k)] = {
            "shipped": {"tokens_per_s": shipped, "peak_gib": peaks["shipped"]},
            "ours": {
                "tokens_per_s": ours,
                "peak_gib": peaks["ours"],
                "of_engine": ours / speed["engine"],
                "of_shipped": ours / shipped,
            },
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "demo/models/teacher_backward")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--response-tokens", type=int, default=480)
    parser.add_argument("--top-k", type=int, nargs="+", default=[0, 20])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = run(options, say)
    if options.json:
        print(json.dumps(result))
        return
    print(f"engine alone: {result['engine']['tokens_per_s']:,.0f} tokens/s")
    for top_k, pair in result["top_k"].items():
        print(
            f"top-k {top_k}: shipped {pair['shipped']['tokens_per_s']:,.0f}, ours "
            f"{pair['ours']['tokens_per_s']:,.0f} tokens/s ({pair['ours']['of_engine']:.2f} of the "
            f"engine, {pair['ours']['of_shipped']:.1f} x shipped)"
        )


if __name__ == "__main__":
    main()
