"""A plain single-process trainer to measure ours against: TRL's DistillationTrainer, on the CPU.

    make bench-env
    .venv-trl/bin/python tools/bench_trl.py --student demo/models/base --teacher demo/models/t \\
        --prompts prompts.json --samples 192 --response-tokens 16

Runs in .venv-trl and imports nothing of mopd; tools/bench_step.py starts it on the same models
and prompts as ours. One student, one teacher, one process: sample with transformers' generate,
full-vocabulary reverse KL (beta 1), AdamW. No servers, no verified sync, no parallel layout, no
verifier. What could make it slower than it need be is turned off: gradient checkpointing, bf16,
logging to trackers, saving; matrices go over as many threads as --threads says.

A step's time is from the end of one optimizer step to the end of the next: batch, sampling, both
models' forward, backward, clipping, update. The last line of standard output is one JSON object:
    {"trainer": "trl", "seconds_per_step": median, "samples_per_s": .., "tokens_per_s": ..,
     "samples_per_step": .., "response_tokens": .., "steps": .., "threads": ..,
     "all_seconds": [..], "first_loss": .., "last_loss": .., "versions": {..}}
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MEASURED_PACKAGES = ("trl", "transformers", "torch", "accelerate", "tokenizers", "numpy")


class BenchError(Exception):
    """The measurement cannot be made, or would not mean what it says."""


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected at least 1")
    return value


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--student", type=Path, required=True, help="Hugging Face checkpoint")
    parser.add_argument("--teacher", type=Path, required=True, help="the same vocabulary")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON file: a list of strings")
    parser.add_argument("--samples", type=positive, default=192, help="samples per step")
    parser.add_argument("--response-tokens", type=positive, default=16, help="of every sample")
    parser.add_argument("--steps", type=positive, default=10, help="measured")
    parser.add_argument("--warmup", type=positive, default=2, help="steps before, not measured")
    parser.add_argument("--micro-batch", type=positive, help="samples per backward; default: all")
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a JSON file, checked."""
    try:
        prompts = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(prompts, list) or not prompts:
        raise BenchError(f"{path}: expected a list of strings, not empty")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt:
            raise BenchError(f"{path}: item {number} is {prompt!r}, expected a string, not empty")
    return prompts


def require_folder(path: Path, what: str) -> str:
    """A checkpoint folder's path; anything else would be looked for on a hub."""
    if not (path / "config.json").is_file():
        raise BenchError(f"--{what} {path}: no checkpoint folder (no config.json in it)")
    return str(path)


def freeze_routers(model: Any) -> int:
    """Freeze every MoE router, as our student does; returns how many there were."""
    routers = [p for name, p in model.named_parameters() if name.endswith(".mlp.gate.weight")]
    for parameter in routers:
        parameter.requires_grad_(False)
    return len(routers)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train for warmup + steps steps and return what the module's docstring lists."""
    # Read by torch's threads when it is first imported.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    torch.set_num_threads(arguments.threads)
    micro_batch = arguments.micro_batch or arguments.samples
    if arguments.samples % micro_batch:
        raise BenchError(
            f"--micro-batch {micro_batch} does not divide --samples {arguments.samples}"
        )
    prompts = read_prompts(arguments.prompts)
    student_path = require_folder(arguments.student, "student")
    teacher_path = require_folder(arguments.teacher, "teacher")
    total = arguments.warmup + arguments.steps
    rows = [prompts[i % len(prompts)] for i in range(total * arguments.samples)]

    tokenizer = AutoTokenizer.from_pretrained(student_path, padding_side="left")
    student = AutoModelForCausalLM.from_pretrained(student_path, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.float32)
    routers = freeze_routers(student)

    class Clock(TrainerCallback):  # type: ignore[misc]
        """When each optimizer step ended, and what the trainer logged of it."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.logs: list[dict[str, float]] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.ends.append(time.perf_counter())

        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" in logs:
                self.logs.append(logs)

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = DistillationConfig(
            output_dir=folder,
            max_steps=total,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=arguments.samples // micro_batch,
            max_completion_length=arguments.response_tokens,
            generation_kwargs={"min_new_tokens": arguments.response_tokens},
            temperature=1.0,
            top_k=0,
            beta=1.0,  # reverse KL; sampling is always from the student itself
            learning_rate=arguments.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            shuffle_dataset=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=arguments.seed,
        )
        trainer = DistillationTrainer(
            model=student,
            teacher_model=teacher,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": rows}),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()

    lengths = {log["completions/mean_length"] for log in clock.logs}
    if lengths != {float(arguments.response_tokens)}:
        raise BenchError(
            f"samples of {sorted(lengths)} tokens, expected {arguments.response_tokens}: this "
            "would measure another shape"
        )
    if len(clock.ends) != total:
        raise BenchError(f"{len(clock.ends)} optimizer steps, expected {total}")
    ends = clock.ends[arguments.warmup - 1 :]  # the last warm-up step's end starts the first
    seconds = [after - before for before, after in zip(ends[:-1], ends[1:], strict=True)]
    median = statistics.median(seconds)
    return {
        "trainer": "trl",
        "seconds_per_step": median,
        "samples_per_s": arguments.samples / median,
        "tokens_per_s": arguments.samples * arguments.response_tokens / median,
        "samples_per_step": arguments.samples,
        "response_tokens": arguments.response_tokens,
        "micro_batch": micro_batch,
        "steps": arguments.steps,
        "warmup": arguments.warmup,
        "threads": arguments.threads,
        "all_seconds": [round(value, 4) for value in seconds],
        "first_loss": clock.logs[0]["loss"],
        "last_loss": clock.logs[-1]["loss"],
        "student_parameters": sum(p.numel() for p in student.parameters()),
        "teacher_parameters": sum(p.numel() for p in teacher.parameters()),
        "frozen_routers": routers,
        "versions": {name: importlib.metadata.version(name) for name in MEASURED_PACKAGES},
    }


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        result = measure(arguments)
    except BenchError as error:
        print(f"No measurement: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"No measurement: {error}. Run `make bench-env`, then this with .venv-trl/bin/python.",
            file=sys.stderr,
        )
        return 1
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
