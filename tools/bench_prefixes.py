"""Does it pay to read a prompt once? Two servers of ours, samples that come in groups of a prompt.

    .venv/bin/python tools/bench_prefixes.py --json
    .venv/bin/python tools/bench_prefixes.py --prompt-tokens 256 --response-tokens 512 --json

Each group is a call of its own, all at once, as a training step scores its answers. Prompts are new
in every round, and the ways take turns in another order each round, so that a busy machine is busy
for all of them:

    affinity   ours as it is: prefix cache on, a prompt's samples go where its beginning is
    spread     prefix cache on, each request to the server with the least tokens to do
    none       servers without prefix cache (two more, of the same model)

With --json the last line of standard output is one JSON object:
    {"prompt_tokens": .., "response_tokens": .., "samples_per_prompt": .., "prompts": ..,
     "rounds": .., "seconds": {"affinity": median, ..}, "cached_share": {"affinity": .., ..},
     "speedup": {"affinity": of none, "spread": of none}}
where `cached_share` is of the prompts' tokens, as the servers count them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_teachers import KV_CACHE_GIB, ROOT, START_S, scored_in
from mopd_teachers.client import Endpoint, TeacherClient
from mopd_teachers.scores import ScoreItem
from mopd_teachers.server import ServerProcess, ServerSpec

WAYS = ("affinity", "spread", "none")


def groups_of(options: argparse.Namespace, rng: random.Random) -> list[list[ScoreItem]]:
    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(options.vocabulary) for _ in range(n))

    groups = []
    for p in range(options.prompts):
        prompt = ids(options.prompt_tokens)
        groups.append(
            [
                ScoreItem(f"0:{p}:{i}", prompt, ids(options.response_tokens))
                for i in range(options.samples_per_prompt)
            ]
        )
    return groups


async def all_scored_in(client: TeacherClient, groups: Sequence[Sequence[ScoreItem]]) -> float:
    """Seconds until every sample has its score."""
    return max(await asyncio.gather(*(scored_in(client, group, 0) for group in groups)))


async def measure(
    options: argparse.Namespace, servers: dict[str, list[ServerProcess]], say: Any
) -> dict[str, Any]:
    rng = random.Random(0)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    clients = {
        way: TeacherClient(
            way,
            [Endpoint(s.url, s.served_name) for s in servers["none" if way == "none" else "kept"]],
            timeout_s=1800.0,
            retries=0,
        )
        for way in WAYS
    }
    asked = options.rounds * options.prompts * options.samples_per_prompt * options.prompt_tokens
    try:
        for client in clients.values():
            await client.probe()
            await all_scored_in(client, groups_of(options, rng)[:2])
        for server in clients["spread"].servers:
            server.prefixes = None
        before = {way: clients[way].metrics()["prefix_tokens"] for way in WAYS}
        for number in range(options.rounds):
            # Who comes after whom matters: a server that had nothing to do starts slower.
            for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                seconds[way].append(await all_scored_in(clients[way], groups_of(options, rng)))
                say(f"{way}: {seconds[way][-1]:.2f} s")
        cached = {way: clients[way].metrics()["prefix_tokens"] - before[way] for way in WAYS}
    finally:
        for client in clients.values():
            await client.close()
    median = {way: statistics.median(found) for way, found in seconds.items()}
    return {
        "prompt_tokens": options.prompt_tokens,
        "response_tokens": options.response_tokens,
        "samples_per_prompt": options.samples_per_prompt,
        "prompts": options.prompts,
        "rounds": options.rounds,
        "seconds": median,
        "cached_share": {way: tokens / asked for way, tokens in cached.items()},
        "speedup": {way: median["none"] / median[way] for way in ("affinity", "spread")},
    }


def run(options: argparse.Namespace, say: Any) -> dict[str, Any]:
    model = options.model.resolve()
    config = json.loads((model / "config.json").read_text())
    options.vocabulary = config["vocab_size"] - 8
    context = options.prompt_tokens + options.response_tokens + 8
    # For its speed a model may read further than it was trained to.
    longer = {"max_position_embeddings": max(context, config["max_position_embeddings"])}
    with tempfile.TemporaryDirectory() as folder:
        servers: dict[str, list[ServerProcess]] = {"kept": [], "none": []}
        for kind, found in servers.items():
            arguments = {"hf_overrides": longer, "enable_prefix_caching": kind == "kept"}
            for index in range(2):
                spec = ServerSpec(
                    f"{kind}-{index}",
                    str(model),
                    max_model_len=context,
                    kv_cache_gib=KV_CACHE_GIB,
                    engine_args=arguments,
                )
                found.append(ServerProcess(spec, Path(folder) / f"{kind}-{index}.log"))
        everyone = [server for found in servers.values() for server in found]
        try:
            for server in everyone:
                server.start()
            say("four servers are starting")
            for server in everyone:
                server.wait_healthy(START_S)
            return asyncio.run(measure(options, servers, say))
        finally:
            for server in everyone:
                server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "demo/models/teacher_backward")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--samples-per-prompt", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = run(options, say)
    if options.json:
        print(json.dumps(result))
        return
    for way in WAYS:
        print(
            f"{way}: {result['seconds'][way]:.2f} s, {result['cached_share'][way]:.0%} of the "
            "prompts' tokens from the cache"
        )


if __name__ == "__main__":
    main()
