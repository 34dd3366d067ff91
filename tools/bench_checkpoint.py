"""How long training waits for a checkpoint: at once, in either format, and beside training.

    .venv/bin/python tools/bench_checkpoint.py --json      two ranks, about four minutes, 9 GB

A model of SmolLM2-135M's shape with random weights on two pipeline ranks, one thread each, float32.
Rounds of a step, a save in each way, and steps until what is written beside them is whole; medians.

With --json the last line of standard output is one JSON object. Of each way: `blocked_s`, seconds
in which no step could be made; `write_s`, what the slowest rank wrote for beside training;
`step_s`, a step meanwhile, and `quiet_step_s`, a step without. `megatron_mib`: the checkpoint, of
which every rank copies the part that it writes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

RANKS, IDS = 2, 49152
WAYS = ("huggingface", "megatron", "beside training")


def make_model(folder: Path) -> None:
    """SmolLM2-135M's config.json (Apache-2.0) with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=IDS,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def some_samples(count: int, seed: int) -> list[Any]:
    from mopd.types import TrainSample

    draw = random.Random(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, IDS) for _ in range(length))

    scores = (-10.0,) * 16
    return [
        TrainSample(f"0:{i}:x:0", "x", ids(16), ids(16), scores, scores, 0.5) for i in range(count)
    ]


class Bench:
    """One rank; every rank makes the same calls."""

    def __init__(self, folder: Path, rank: int, port: int) -> None:
        from mopd.config.objective import ObjectiveConfig
        from mopd.config.schema import ParallelConfig, StudentConfig
        from mopd.student.trainer import StudentRank

        objective = ObjectiveConfig()
        objective.truncation.kind = "none"
        self._student = StudentRank(
            StudentConfig(
                model=str(folder / "model"),
                parallel=ParallelConfig(pp=RANKS),
                micro_batch_size=4,
                checkpoint_format="megatron",
            ),
            objective,
            domains=["x"],
            total_steps=1000,
            temperature=1.0,
            valid_vocab=IDS,
            pad_id=0,
            rank=rank,
            world_size=RANKS,
            master_port=port,
        )
        self._out, self._step_index = folder / "checkpoints", 0

    def step(self) -> float:
        samples = some_samples(16, self._step_index)
        began = time.perf_counter()
        self._student.step(samples, self._step_index)
        self._step_index += 1
        return time.perf_counter() - began

    def save(self, way: str) -> dict[str, float]:
        out = self._out / way
        began = time.perf_counter()
        if way != WAYS[2]:
            self._student.config.checkpoint_format = way
            self._student.save(out)
            self._student.config.checkpoint_format = "megatron"
            return {"blocked_s": time.perf_counter() - began}
        self._student.begin_save(out)
        copied_s = time.perf_counter() - began
        steps = []
        while not all(_everywhere(self._student.save_written())):
            steps.append(self.step())
        finishing = time.perf_counter()
        write_s = self._student.finish_save()
        finish_s = time.perf_counter() - finishing
        return {
            "blocked_s": copied_s + finish_s,
            "copy_s": copied_s,
            "finish_s": finish_s,
            "write_s": write_s,
            "step_s": statistics.median(steps),
            "steps": float(len(steps)),
        }


def _everywhere(value: Any) -> list[Any]:
    import torch.distributed as dist

    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def rank_main(folder: Path, rank: int, port: int, rounds: int) -> None:
    bench = Bench(folder, rank, port)
    for _ in range(2):
        bench.step()
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    quiet = []
    for _ in range(rounds):
        quiet.append(bench.step())
        for way in WAYS:
            seen[way].append(bench.save(way))
            bench.step()
    if rank:
        return
    result: dict[str, Any] = {
        way: {key: round(statistics.median(m[key] for m in of), 3) for key in of[0]}
        for way, of in seen.items()
    }
    result["quiet_step_s"] = round(statistics.median(quiet), 3)
    result["megatron_mib"] = round(
        sum(p.stat().st_size for p in (folder / "checkpoints/megatron").rglob("*") if p.is_file())
        / 2**20
    )
    (folder / "result.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write, on the disk to be measured")
    arguments = parser.parse_args()
    from mopd.runtime.ports import free_port

    folder = Path(tempfile.mkdtemp(prefix="mopd-checkpoints-", dir=arguments.folder))
    try:
        make_model(folder / "model")
        port, spawn = free_port("127.0.0.1"), multiprocessing.get_context("spawn")
        processes = [
            spawn.Process(target=rank_main, args=(folder, rank, port, arguments.rounds))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit("a rank failed; see above")
        result = json.loads((folder / "result.json").read_text())
    finally:
        shutil.rmtree(folder)
    for way in WAYS:
        print(way, ", ".join(f"{key} {value}" for key, value in result[way].items()))
    print(f"a step without any: {result['quiet_step_s']} s; {result['megatron_mib']} MiB")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
