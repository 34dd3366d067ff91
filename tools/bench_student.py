"""The Megatron student's step beside a plain transformers one, and where its time and memory go.

    .venv/bin/python tools/bench_student.py --json              one process (a minute or two)
    .venv/bin/python tools/bench_student.py --json --ranks 2    and two, data and expert parallel

Both train the same weights on the same samples: the quickstart's prompts with answers of the
lengths that its teachers give, the same loss (-w A log pi with fixed A and w = 1), AdamW, float32,
one thread a process, the same micro-batches. The transformers side is the plainest that is not
slow on purpose: logits of the response positions only, fused SDPA attention, its fastest experts
implementation on this machine. Steps of the two alternate, and medians are compared: of the time
that passed, and of processor time, which others on the machine disturb less.

With --json the last line of standard output is one JSON object: tokens/s of each variant, its
ratio to transformers, the share of the step spent outside forward and backward, the peak of
resident memory over what was there before the model, and the arithmetic floor of it (weights,
gradients, Adam's moments, and what the largest forward must keep for its backward), and how full
the forwards of the quickstart's lengths are with padding, with a token budget, and packed.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
VARIANTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True},
    "packed, fused head": {"packing": True, "loss_head": "fused"},
    "packed, token budget": {"packing": True, "max_tokens_per_microbatch": 2048},
    "distributed optimizer": {"optimizer": {"distributed": True}},
    "recompute layers": {"recompute": "layers"},
}


def quickstart_samples(count: int, seed: int = 0) -> tuple[Any, list[Any]]:
    """(prepared quickstart, samples): real prompts, each with its reference answer."""
    from mopd.build import prepare
    from mopd.config.load import load_config
    from mopd.types import TrainSample

    prepared = prepare(load_config([ROOT / "configs" / "quickstart.yaml"]))
    draw = random.Random(seed)
    prompts = [p for data in prepared.domains.values() for p in data.train if p.answer]
    samples = []
    for i in range(count):
        prompt = prompts[draw.randrange(len(prompts))]
        ids = prepared.tokenizer.encode(prompt.answer, add_special_tokens=False)
        response = (*ids[:15], prepared.eos_token_ids[0])
        zeros = (0.0,) * len(response)
        samples.append(
            TrainSample(f"0:{i}:x:0", prompt.domain, prompt.token_ids, response, zeros, zeros, 0.5)
        )
    return prepared, samples


class Ours:
    """One rank of the student; every rank makes the same calls."""

    def __init__(
        self, prepared: Any, options: dict[str, Any], rank: int, layout: dict[str, int], port: int
    ) -> None:
        from copy import deepcopy

        from mopd.student.forwards import Forwards
        from mopd.student.trainer import StudentRank

        config = deepcopy(prepared.config.student)
        for key, value in options.items():
            if key == "optimizer":
                for name, each in value.items():
                    setattr(config.optimizer, name, each)
            else:
                setattr(config, key, value)
        if not {"max_tokens_per_microbatch", "micro_batch_size"} & options.keys():
            config.micro_batch_size = 64
        for name in ("dp", "tp", "pp", "ep", "etp"):
            setattr(config.parallel, name, layout.get(name, 1))
        objective = deepcopy(prepared.config.objective)
        objective.truncation.kind = "none"  # w = 1: the samples have no sampler of their own
        self.before = resident()
        self.rank = StudentRank(
            config=config,
            objective=objective,
            domains=list(prepared.config.domains),
            total_steps=1000,
            temperature=1.0,
            valid_vocab=prepared.valid_vocab,
            pad_id=prepared.eos_token_ids[0],
            rank=rank,
            world_size=layout.get("dp", 1) * layout.get("tp", 1) * layout.get("pp", 1),
            master_port=port,
        )
        self.inside_s = 0.0
        run = Forwards.run

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = run(*arguments, **named)
            self.inside_s += time.perf_counter() - start
            return result

        Forwards.run = timed  # type: ignore[method-assign]

    def step(self, samples: Sequence[Any]) -> None:
        self.rank.step(samples, 500)

    def floor_bytes(self, samples: Sequence[Any]) -> int:
        """Weights, gradients and Adam's state of this rank, and the activations of the largest
        forward of these samples."""
        parameters = list(self.rank.model.parameters())
        weights = sum(p.nbytes for p in parameters)
        gradients = sum(p.numel() * 4 for p in parameters if p.requires_grad)
        state = self.rank._optimizer.state_bytes()
        return weights + gradients + state + self._activation_bytes(samples)

    def _activation_bytes(self, samples: Sequence[Any]) -> int:
        """What the backward pass of the largest micro-batch needs of its forward pass, float32.

        A token and layer: the inputs of two norms and of what follows them (4 H), queries and keys
        before their norms, then queries, keys, values and the result of attention and its sums,
        the result again as the projection's input; of each of its k experts input, gate, up and
        their weighted product (H + 3 F). At the end the head's input and a row of logits for each
        response token.
        """
        config, student = self.rank.model.config, self.rank.config
        h, heads = config.hidden_size, config.num_attention_heads
        q, kv = heads * config.kv_channels, config.num_query_groups * config.kv_channels
        experts = config.moe_router_topk * (h + 3 * (config.moe_ffn_hidden_size or 0))
        layer = 4 * h + (q + kv) + (q + 2 * kv) + (2 * q + heads) + experts
        largest = 0
        forwards = self.rank._parts.forwards
        for plan in forwards.plan([(s.prompt_ids, s.response_ids) for s in samples]):
            rows = plan.rows[forwards.dp_rank]
            own = [samples[i] for i in rows if i is not None]
            tokens = plan.lengths[forwards.dp_rank] * (1 if student.packing else len(rows))
            answers = sum(len(s.response_ids) for s in own)
            kept = config.num_layers * tokens * (h if student.recompute == "layers" else layer)
            if student.recompute == "layers":  # one layer at a time is there whole
                kept += tokens * layer
            head = 0 if student.loss_head == "fused" else self.rank.family.vocabulary
            largest = max(largest, kept + answers * (h + head))
        return 4 * largest


class Transformers:
    """The same step with transformers and torch alone."""

    def __init__(self, prepared: Any, experts: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.before = resident()
        self.model = AutoModelForCausalLM.from_pretrained(
            prepared.config.student.model, dtype=torch.float32, experts_implementation=experts
        )
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not name.endswith("mlp.gate.weight"))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6)
        self.valid = prepared.valid_vocab

    def step(self, samples: Sequence[Any]) -> None:
        import torch

        order = sorted(samples, key=lambda s: -(len(s.prompt_ids) + len(s.response_ids)))
        self.optimizer.zero_grad()
        for start in range(0, len(order), 64):
            batch = order[start : start + 64]
            inputs = [[*s.prompt_ids, *s.response_ids][:-1] for s in batch]
            longest = max(map(len, inputs))
            ids = torch.tensor([i + [0] * (longest - len(i)) for i in inputs])
            mask = torch.tensor([[1] * len(i) + [0] * (longest - len(i)) for i in inputs])
            hidden = self.model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
            row, column, target, weight = [], [], [], []
            for i, s in enumerate(batch):
                n = len(s.response_ids)
                row += [i] * n
                column += range(len(s.prompt_ids) - 1, len(s.prompt_ids) - 1 + n)
                target += s.response_ids
                weight += [s.orm_advantage / n / len(samples)] * n
            logits = self.model.lm_head(hidden[row, column])[:, : self.valid]
            logprobs = torch.log_softmax(logits, -1)
            chosen = logprobs.gather(1, torch.tensor(target)[:, None]).squeeze(1)
            (-(chosen * torch.tensor(weight)).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def resident() -> int:
    """Bytes of this process in memory; starts a new high-water mark."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # the mark then is the process's whole life's
    return _status("VmRSS")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def timed(step: Callable[[Sequence[Any]], None], samples: Sequence[Any]) -> tuple[float, float]:
    """Seconds that passed, and seconds of this process's processor time."""
    start, used = time.perf_counter(), time.process_time()
    step(samples)
    return time.perf_counter() - start, time.process_time() - used


def bench_one_process(samples_a_step: int, steps: int) -> dict[str, Any]:
    """Every variant in turn with transformers beside it."""
    from mopd.runtime.ports import free_port

    prepared, samples = quickstart_samples(samples_a_step)
    memory = peaks_and_floors(samples_a_step)
    tokens = sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in samples)
    best: tuple[float, str] = (float("inf"), "")
    for experts in ("eager", "batched_mm", "grouped_mm"):
        reference = Transformers(prepared, experts)
        reference.step(samples)
        best = min(best, (min(timed(reference.step, samples)[1] for _ in range(2)), experts))
    reference = Transformers(prepared, best[1])
    reference.step(samples)
    out: dict[str, Any] = {"samples": samples_a_step, "tokens": tokens, "experts": best[1]}
    for name, options in VARIANTS.items():
        ours = Ours(prepared, options, 0, {}, free_port("127.0.0.1"))
        ours.step(samples)
        ours.inside_s = 0.0
        pairs = [(timed(ours.step, samples), timed(reference.step, samples)) for _ in range(steps)]
        mine, theirs = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
        my_cpu, their_cpu = (statistics.median(pair[i][1] for pair in pairs) for i in (0, 1))
        out[name] = {
            "tokens_per_s": tokens / mine,
            "transformers_tokens_per_s": tokens / theirs,
            "ratio": theirs / mine,
            "ratio_of_processor_time": their_cpu / my_cpu,
            "outside_forward_backward": 1 - ours.inside_s / sum(a[0] for a, _ in pairs),
            **memory[name],
        }
        print(f"{name}: {out[name]}", flush=True)
        ours.rank.close()
    return out


def peaks_and_floors(samples_a_step: int) -> dict[str, dict[str, float]]:
    """Of each variant's first two steps, in a process of its own that has loaded all libraries."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    # What is freed goes back at once: else a variant would live in what the last one left.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 1024)
    process = spawn.Process(target=_peaks, args=(samples_a_step, there))
    process.start()
    del os.environ["MALLOC_MMAP_THRESHOLD_"]
    there.close()
    found: dict[str, dict[str, float]] = here.recv()
    process.join()
    return found


def _peaks(count: int, pipe: Any) -> None:
    import torch

    from mopd.runtime.ports import free_port

    torch.set_num_threads(1)
    prepared, samples = quickstart_samples(count)
    found = {}
    for name, options in [("libraries", {}), *VARIANTS.items()]:
        gc.collect()
        ours = Ours(prepared, options, 0, {}, free_port("127.0.0.1"))
        for _ in range(2):
            ours.step(samples)
        found[name] = {
            "peak_over_start_mib": (_status("VmHWM") - ours.before) / 2**20,
            "floor_mib": ours.floor_bytes(samples) / 2**20,
        }
        ours.rank.close()
        del ours
    pipe.send(found)


def fill(samples_a_step: int) -> dict[str, float]:
    """Real tokens / computed positions of the quickstart's lengths, two data-parallel ranks."""
    from mopd.config.schema import StudentConfig
    from mopd.student.planning import plan

    _, samples = quickstart_samples(samples_a_step)
    lengths = [len(s.prompt_ids) + len(s.response_ids) - 1 for s in samples]
    out = {}
    for name, options in (
        ("padded, 64 a forward", {"micro_batch_size": 64}),
        ("padded, one forward", {"micro_batch_size": samples_a_step}),
        ("padded, budget 2048", {"max_tokens_per_microbatch": 2048}),
        ("packed", {"packing": True}),
    ):
        computed = 0
        for p in plan(lengths, 2, StudentConfig(model="", **options)):  # type: ignore[arg-type]
            for rows, length in zip(p.rows, p.lengths, strict=True):
                computed += length * (1 if options.get("packing") else len(rows))
        out[name] = sum(lengths) / computed
    return out


def _rank(
    rank: int,
    options: dict[str, Any],
    layout: dict[str, int],
    port: int,
    count: int,
    steps: int,
    pipe: Any,
) -> None:
    import torch

    torch.set_num_threads(1)
    prepared, samples = quickstart_samples(count)
    ours = Ours(prepared, options, rank, layout, port)
    ours.step(samples)
    times = [timed(ours.step, samples)[0] for _ in range(steps)]
    pipe.send(
        {
            "seconds": statistics.median(times),
            "floor_mib": ours.floor_bytes(samples) / 2**20,
        }
    )


def bench_ranks(ranks: int, count: int, steps: int) -> dict[str, Any]:
    """`ranks` processes, data parallel with the experts spread over them."""
    from mopd.runtime.ports import free_port

    spawn = multiprocessing.get_context("spawn")
    port, pipes, processes = free_port("127.0.0.1"), [], []
    for rank in range(ranks):
        here, there = spawn.Pipe()
        layout = {"dp": ranks, "ep": ranks}
        processes.append(
            spawn.Process(
                target=_rank, args=(rank, {"packing": True}, layout, port, count, steps, there)
            )
        )
        processes[-1].start()
        pipes.append(here)
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    _, samples = quickstart_samples(count)
    tokens = sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in samples)
    return {
        "ranks": ranks,
        "tokens_per_s": tokens / max(f["seconds"] for f in found),
        "floor_mib": [f["floor_mib"] for f in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    os.chdir(ROOT)
    result: dict[str, Any] = {"fill": fill(arguments.samples)}
    result["one_process"] = bench_one_process(arguments.samples, arguments.steps)
    if arguments.ranks > 1:
        several = bench_ranks(arguments.ranks, arguments.samples, arguments.steps)
        plain = [
            v["transformers_tokens_per_s"]
            for v in result["one_process"].values()
            if isinstance(v, dict)
        ]
        # Not in turns with them, but in the same run.
        several["ratio"] = several["tokens_per_s"] / statistics.median(plain)
        result["several"] = several
    result |= result.pop("one_process")
    for name in ("samples", "tokens", "experts", "fill", "several"):
        if name in result:
            print(f"{name}: {result[name]}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
