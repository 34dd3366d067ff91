"""What a run will need of its machines: about how much memory and disk, how many processes.

Exact where checkpoints say it (weights, gradients, Adam's moments, what is saved), rough for the
rest: activations after Korthikanti et al. 2022 (arXiv 2205.05198, section 4: 34 bytes a token, a
hidden unit and a layer in half precision, attention scores left out), and for each kind of process
what it takes by itself, measured on the CPU with the demo's models. Units: bytes inside, GiB in
words.

Legend: N parameters, T tokens of one forward, V vocabulary, H hidden size, L layers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mopd.checking.rows import FAILED, OK, WARNING, Row
from mopd.config.model_files import read_model_limits
from mopd.config.placement import Role, placement_text, roles, total_reserved
from mopd.config.schema import Config
from mopd.errors import ConfigError

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BY_ITSELF_GIB = {
    "student rank": 0.8,
    "rollout engine": 1.0,
    "teacher": 0.85,
    "verifier worker": 0.15,
}
"""Of a process (a teacher's server: of all of its) beside its model: proportional memory of a run
of the quickstart after some hundred steps, less what its model of 4 MB takes by this reckoning."""
OTHERS_GIB = 1.2
"""The driver and Ray's own processes."""
LOGITS_BLOCKS = 4 * 64 * 2**20
"""Of a teacher's server: blocks of logits that exist at a time."""
ACTIVATIONS = 34 / 2
"""Bytes a byte of precision, a token, a hidden unit and a layer."""
ROOM = 0.8
"""Share of the disk's free space that a run may take without a warning."""


@dataclass(frozen=True)
class Size:
    """Parameters of a checkpoint, from the headers of its files."""

    total: int
    expert: int

    def of_rank(self, config: Config) -> float:
        """Parameters that one student rank holds, about: layers and heads are not even parts."""
        layout = config.student.parallel
        dense = (self.total - self.expert) / (layout.tp * layout.pp)
        return dense + self.expert / (layout.ep * layout.etp * layout.pp)


def size_of(folder: Path) -> Size:
    """Reads headers alone; the files were found whole before (`folder_problem`)."""
    total = expert = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            count = 1
            for length in entry["shape"]:
                count *= length
            total += count
            expert += count if ".experts." in name else 0
    return Size(total, expert)


def student_bytes(config: Config, size: Size, longest: int) -> tuple[float, float]:
    """(weights, gradients and optimizer; everything that grows with a forward) of one rank.

    longest: tokens of the longest sample.
    """
    student = config.student
    width = BYTES[student.dtype]
    copies = 0 if width == 4 else 4  # Adam updates float32 copies of half-precision weights
    spread = student.parallel.dp if student.optimizer.distributed else 1
    # Gradients are kept in float32 whatever the weights are.
    kept = size.of_rank(config) * (width + 4 + (copies + 8) / spread)
    if student.checkpoint_async:  # the copy that is written beside training
        kept += size.of_rank(config) * 12
    tokens = student.max_tokens_per_microbatch or student.micro_batch_size * longest
    shape = json.loads((Path(student.model) / "config.json").read_text())
    limits = read_model_limits(student.model)
    layers = 1 if student.recompute == "layers" else limits.num_layers / student.parallel.pp
    hidden = shape.get("hidden_size", shape.get("n_embd", 0))
    grows = tokens * hidden * layers * ACTIVATIONS * width / student.parallel.tp
    if student.loss_head == "logits":  # the logits, their softmax and its gradient
        grows += 3 * 4 * tokens * limits.vocab_size / student.parallel.tp
    return kept, grows


def role_bytes(config: Config, folders: Mapping[str, Path], longest: int) -> dict[str, float]:
    """Role -> bytes of one of its processes."""
    sizes = {name: size_of(folder) for name, folder in folders.items()}
    size = size_of(Path(config.student.model))
    found: dict[str, float] = {}
    for role in roles(config):
        base = BY_ITSELF_GIB.get(role.name, BY_ITSELF_GIB["teacher"]) * GIB
        if role.name == "student rank":
            base += sum(student_bytes(config, size, longest))
            if config.objective.teacher.signal == "full":  # the ranks hold every teacher, too
                domains = {domain.teacher for domain in config.domains.values()}
                width = BYTES[config.student.dtype]
                base += sum(sizes[n].of_rank(config) * width for n in domains if n in sizes)
        elif role.name == "rollout engine":
            base += size.total * BYTES[config.student.dtype] + config.rollout.kv_cache_gib * GIB
        elif role.name.startswith("teacher "):
            name = role.name.removeprefix("teacher ")
            teacher = config.teachers[name]
            if name in sizes:
                base += sizes[name].total * BYTES.get(teacher.dtype, 4)
            base += teacher.kv_cache_gib * GIB + LOGITS_BLOCKS
        found[role.name] = base
    return found


def memory_rows(
    config: Config, folders: Mapping[str, Path], longest: int, available: float | None = None
) -> list[Row]:
    """A row for each role, and whether all that share this machine's memory fit it.

    available: bytes; None asks the machine. A cluster's machines are not asked.
    """
    needed = role_bytes(config, folders, longest)
    rows, here = [], OTHERS_GIB * GIB
    for role in roles(config):
        each = needed[role.name]
        here += 0.0 if role.gpus else role.count * each
        where = "GPU memory " if role.gpus else ""
        times = f"{role.count} x " if role.count > 1 else ""
        rows.append(Row("memory", role.name, OK, f"about {times}{where}{each / GIB:.1f} GiB"))
        rows += _on_gpu(role, each)
    if config.ray.address is None:
        have = available_bytes() if available is None else available
        text = f"about {here / GIB:.1f} GiB, and {have / GIB:.1f} GiB are free here"
        if here > have:
            text += (
                "; what to lower: train on fewer tokens at a time "
                "(student.max_tokens_per_microbatch), kv_cache_gib, replicas, or use "
                "student.loss_head=fused"
            )
        rows.append(Row("memory", "of this machine", WARNING if here > have else OK, text))
    return rows


def _on_gpu(role: Role, each: float) -> list[Row]:
    """Whether one process fits the smallest GPU that is here; silent where there is none."""
    if not role.gpus:
        return []
    import torch

    cards = range(torch.cuda.device_count())
    smallest = min((torch.cuda.get_device_properties(i).total_memory for i in cards), default=0)
    have = smallest * role.gpus
    if not have or each <= have:
        return []
    text = f"about {each / GIB:.1f} GiB, and {role.gpus:g} GPU has {have / GIB:.1f} GiB"
    return [Row("memory", role.name, WARNING, text)]


def available_bytes() -> float:
    """Memory that new processes may take: what is free, or what is left of the container's."""
    entries = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = float(entries["MemAvailable"].split()[0]) * 1024
    try:
        most = float(Path("/sys/fs/cgroup/memory.max").read_text())
        used = float(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no such limit ("max")
        return free
    return min(free, most - used)


def disk_rows(config: Config, run_dir: Path, shared: Path) -> list[Row]:
    """Whether checkpoints and students fit where the run is kept, and one set of weights where
    ranks hand them to the engines (`shared`)."""
    size = size_of(Path(config.student.model)).total
    weights = size * BYTES[config.student.dtype]
    # Float32 weights and Adam's two moments; one more is written before the oldest goes.
    checkpoints = 12 * size * (config.train.keep_checkpoints + 1)
    students = weights * (1 if config.evaluation.keep_best == "off" else 2)
    return [
        _room(run_dir, checkpoints + students, "checkpoints and students"),
        _room(shared, 2 * weights, "weights on their way to the engines"),
    ]


def _room(folder: Path, needed: float, what: str) -> Row:
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    status = FAILED if needed > free else WARNING if needed > ROOM * free else OK
    text = f"{needed / GIB:.2f} GiB, and {free / GIB:.1f} GiB are free at {place}"
    if not os.access(place, os.W_OK):
        status, text = FAILED, f"{place} cannot be written"
    return Row("disk", what, status, text)


def placement_lines(config: Config) -> list[str]:
    """The processes a run would start and how they fit this machine, in words.

    Raises:
        ConfigError: they reserve more GPUs than this machine has, and no cluster is named.
    """
    lines = [f"processes: {placement_text(config)}"]
    cpus, gpus = total_reserved(config)
    if config.ray.address is not None:
        asked = f"{cpus:g} CPUs and {gpus:g} GPUs"
        return [*lines, f"the cluster at {config.ray.address!r} must have {asked}"]
    have = os.cpu_count() or 1
    turns = f": they take turns on {have} here" if cpus > have else f" of {have} here"
    lines.append(f"CPUs reserved: {cpus:g}{turns}")
    if gpus > 0:
        import torch

        found = torch.cuda.device_count()
        if gpus > found:
            raise ConfigError(
                f"the run's processes reserve {gpus:g} GPUs, this machine has {found}: "
                f"{placement_text(config)}; lower gpus_per_rank, gpus_per_engine or the teachers' "
                "gpus, or name a cluster (ray.address)"
            )
        lines.append(f"GPUs reserved: {gpus:g} of {found} here")
    return lines
