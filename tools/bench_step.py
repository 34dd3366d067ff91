"""A step's time by stage, beside a plain single-process trainer on the same models and prompts.

    .venv/bin/python tools/bench_step.py --json                 both shapes, ours alone
    make bench-env && .venv/bin/python tools/bench_step.py --json --trl    and TRL's, in one run

Shapes are samples a step x response tokens, every response sampled to its full length. Ours is
the real system as `mopd train` starts it: rollout engines, servers of one teacher, two Megatron
ranks (experts spread over both), verified weight sync; one sample a prompt, no ORM. TRL's
DistillationTrainer runs in its own environment (.venv-trl) after ours has ended, so that neither
takes the other's cores, with each number of threads, of which the best counts; see
tools/bench_trl.py for what it does and does not do.

With --json the last line of standard output is one JSON object:
    {"shapes": [{"samples": .., "response_tokens": .., "mopd": {"seconds_per_step": median,
      "samples_per_s": .., "stages_s": {generate, score, judge, train, sync, other}},
      "trl": {.. as bench_trl prints it ..}, "speedup": trl / mopd}], "steps": ..}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from mopd.build import Prepared, prepare
from mopd.config.load import load_config
from mopd.loop import train
from mopd.observe.progress import Progress
from mopd.runtime.cluster import ray_cluster
from mopd.starting import start_system
from mopd.types import ScoredSample

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ((192, 16), (64, 128))
STAGES = ("generate", "score", "judge", "train", "sync", "other")


class NoEvaluation:
    """The loop's `Evaluator` of a benchmark, never asked."""

    async def evaluate_student(self, step: int) -> Mapping[str, float]:
        raise AssertionError("evaluation.every is 0")


class Recorder:
    """The loop's `Observer`: keeps every step's metrics."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []

    def stage(self, name: str) -> None:
        """Not of interest here."""

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=sys.stderr)

    def step(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[ScoredSample]
    ) -> None:
        self.steps.append(metrics)


def write_prompts(path: Path, count: int, seed: int = 0) -> list[str]:
    """`count` different short prompts as JSONL rows; returns their texts."""
    rng = random.Random(seed)
    words: set[str] = set()
    while len(words) < count:
        words.add("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(5, 8))))
    prompts = [f"back {word}:" for word in sorted(words)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return prompts


def configuration(
    arguments: argparse.Namespace, folder: Path, samples: int, response_tokens: int
) -> Prepared:
    """The run's configuration for one shape, checked."""
    config = {
        "name": f"bench-{samples}x{response_tokens}",
        "run_dir": str(folder),
        "student": {
            "model": str(arguments.student),
            "parallel": {"dp": 2, "ep": 2},
            "micro_batch_size": -(-samples // 2),
            "optimizer": {"lr": 1e-4, "warmup_steps": 1},
        },
        "rollout": {
            "engines": arguments.engines,
            "max_response_tokens": response_tokens,
            "ignore_eos": True,
        },
        "teachers": {
            "teacher": {"model": str(arguments.teacher), "replicas": arguments.teacher_replicas}
        },
        "domains": {
            "bench": {
                "teacher": "teacher",
                "prompts": str(folder / "prompts.jsonl"),
                "held_out": 1,
            }
        },
        "train": {
            "steps": arguments.warmup + arguments.steps,
            "prompts_per_step": samples,
            "samples_per_prompt": 1,
            "checkpoint_every": 10**6,
        },
        "evaluation": {"every": 0},
    }
    path = folder / "bench.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return prepare(load_config([path]))


async def run_ours(prepared: Prepared, progress: Progress, folder: Path) -> Recorder:
    """Start the system and run its steps."""
    recorder = Recorder()
    async with AsyncExitStack() as stack:
        host = stack.enter_context(ray_cluster(prepared.config))
        system = await start_system(prepared, progress, folder, stack, host)
        parts = system.parts(NoEvaluation(), recorder, lambda: False)
        await train(parts, prepared.config)
    return recorder


def measure_ours(
    arguments: argparse.Namespace, folder: Path, samples: int, response_tokens: int
) -> dict[str, Any]:
    """Medians over the measured steps."""
    prepared = configuration(arguments, folder, samples, response_tokens)
    with Progress(arguments.steps, ["bench"], plain=True, file=sys.stderr) as progress:
        recorder = asyncio.run(run_ours(prepared, progress, folder))
    measured = recorder.steps[arguments.warmup :]
    assert all(step["samples"] == samples for step in measured)
    assert all(step["tokens"] == samples * response_tokens for step in measured)
    seconds = statistics.median(step["time/step_s"] for step in measured)
    return {
        "seconds_per_step": round(seconds, 4),
        "samples_per_s": round(samples / seconds, 1),
        "tokens_per_s": round(samples * response_tokens / seconds, 1),
        "stages_s": {
            stage: round(statistics.median(step[f"time/{stage}_s"] for step in measured), 4)
            for stage in STAGES
        },
        "all_seconds": [round(step["time/step_s"], 4) for step in measured],
    }


def measure_trl(
    arguments: argparse.Namespace, prompts: Path, samples: int, response_tokens: int
) -> dict[str, Any]:
    """TRL's figures, from its own environment."""
    python = ROOT / ".venv-trl" / "bin" / "python"
    if not python.exists():
        raise SystemExit("bench_step: no .venv-trl; make it first: make bench-env")
    command = [
        str(python), str(ROOT / "tools" / "bench_trl.py"),
        "--student", str(arguments.student), "--teacher", str(arguments.teacher),
        "--prompts", str(prompts), "--samples", str(samples),
        "--response-tokens", str(response_tokens), "--steps", str(arguments.steps),
        "--warmup", str(arguments.warmup),
    ]  # fmt: skip
    figures = []
    for threads in arguments.threads:
        done = subprocess.run(
            [*command, "--threads", str(threads)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=ROOT,
        )
        figures.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return min(figures, key=lambda figure: figure["seconds_per_step"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--student", type=Path, default=ROOT / "demo/models/base")
    parser.add_argument("--teacher", type=Path, default=ROOT / "demo/models/teacher_caesar")
    parser.add_argument(
        "--shape", action="append", metavar="SAMPLESxTOKENS", help="default: 192x16 and 64x128"
    )
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each shape")
    parser.add_argument("--warmup", type=int, default=3, help="steps before, not measured")
    parser.add_argument("--engines", type=int, default=2, help="rollout engines, a core each")
    parser.add_argument("--teacher-replicas", type=int, default=2, help="servers, a core each")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="of the plain trainer; best counts"
    )
    parser.add_argument("--trl", action="store_true", help="measure TRL's trainer as well")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args(argv)
    shapes = [tuple(map(int, s.split("x"))) for s in arguments.shape or ()] or list(SHAPES)
    results = []
    for samples, tokens in shapes:
        with tempfile.TemporaryDirectory() as folder:
            texts = write_prompts(Path(folder) / "prompts.jsonl", samples * 4 + 1)
            result: dict[str, Any] = {"samples": samples, "response_tokens": tokens}
            result["mopd"] = measure_ours(arguments, Path(folder), samples, tokens)
            if arguments.trl:
                prompts = Path(folder) / "prompts.json"
                prompts.write_text(json.dumps(texts))
                result["trl"] = measure_trl(arguments, prompts, samples, tokens)
                ratio = result["trl"]["seconds_per_step"] / result["mopd"]["seconds_per_step"]
                result["speedup"] = round(ratio, 3)
        results.append(result)
        ours = result["mopd"]
        stages = ", ".join(f"{k} {v:.2f}" for k, v in ours["stages_s"].items())
        line = f"{samples} x {tokens}: mopd {ours['seconds_per_step']:.2f} s a step ({stages})"
        if "trl" in result:
            line += f"; TRL {result['trl']['seconds_per_step']:.2f} s: x{result['speedup']}"
        print(line, flush=True)
    if arguments.json:
        print(json.dumps({"shapes": results, "steps": arguments.steps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
