"""Who may import whom, read from the source with ast.

    types, errors, config  <-  objective, kernels, protocols
                           <-  data, rollout, student, weight_sync, evaluation, observe, ...
                           <-  collecting  <-  loop
                           <-  build, runtime, run, cli

Parts of the third row meet in the last, through protocols, and never import each other.
Imports inside functions and under TYPE_CHECKING count: the direction is of the design, not of
the moment of loading.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

RANKS: dict[str, int] = {
    **dict.fromkeys(("types", "errors", "config", "objective_names"), 0),
    **dict.fromkeys(("objective", "kernels", "protocols"), 1),
    **dict.fromkeys(
        ("data", "rollout", "student", "weight_sync", "evaluation", "observe", "checkpoints"), 2
    ),
    **dict.fromkeys(("credit", "step_metrics"), 2),
    "collecting": 3,
    "loop": 4,
    **dict.fromkeys(
        (
            "build",
            "inputs",
            "model_folders",
            "runtime",
            "run",
            "run_dir",
            "run_observer",
            "starting",
            "system",
            "checking",
            "evaluating",
            "stopping",
            "cli",
            "__main__",
        ),
        5,
    ),
}
"""Every component of mopd (a folder or a module directly under it) and its row, from 0."""

SAME_RANK = {0, 5}
"""Rows whose components may import each other: the vocabulary, and the composition root."""

LOOP = frozenset({"loop", "collecting", "step_metrics"})
LOOP_MAY = LOOP | {"objective", "credit", "protocols", "types", "errors", "config"}
"""The algorithm on one page reads of nothing else, and of no third-party package."""

TEACHERS_IMPORTED_BY = frozenset(
    {"model_folders", "runtime", "run", "checking", "evaluating", "cli"}
)

ONLY_IN: dict[str, tuple[str, ...]] = {
    "vllm": ("mopd/rollout/", "mopd_teachers/"),
    "megatron": ("mopd/student/",),
    "ray": ("mopd/runtime/",),
    "triton": ("mopd/kernels/",),
}
"""Third-party package -> the folders in which alone it is imported."""

CONFIG_NEVER = frozenset({"torch", "vllm", "ray", "megatron", "transformers", "triton"})


@dataclass(frozen=True)
class Import:
    """One imported module, with where it is written."""

    path: str
    line: int
    module: str
    """Absolute dotted name, e.g. ``mopd.data.tasks`` (``from mopd import data`` gives both)."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.module}"


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import of one file: statements anywhere in it, and import_module of a literal."""
    relative = path.relative_to(root)
    package = list(relative.parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and node.args:
            function = ast.unparse(node.func)
            first = node.args[0]
            if function.split(".")[-1] in ("import_module", "__import__") and isinstance(
                first, ast.Constant
            ):
                names = [str(first.value)]
        for name in names:
            yield Import(str(relative), getattr(node, "lineno", 0), name)


def component(path: str) -> str:
    """``mopd/data/tasks.py`` -> ``data``; ``mopd/loop.py`` -> ``loop``."""
    return path.split("/")[1].removesuffix(".py")


def violations(root: Path) -> list[str]:
    """Every import under `root` that breaks the direction, as one line of text each."""
    found: dict[str, None] = {}  # keeps order, drops doubles

    def report(item: Import, why: str) -> None:
        found[f"{item}: {why}"] = None

    sources = [
        path
        for package in ("mopd", "mopd_teachers")
        for path in sorted((root / package).rglob("*.py"))
    ]
    for path in sources:
        for item in imports_of(path, root):
            top = item.module.split(".")[0]
            if top in ONLY_IN and not item.path.startswith(ONLY_IN[top]):
                report(item, f"{top} is imported in {' and '.join(ONLY_IN[top])} only")
            if item.path.startswith("mopd_teachers/"):
                if top == "mopd":
                    report(item, "mopd_teachers never imports mopd")
                continue
            if item.path == "mopd/__init__.py":
                if top not in sys.stdlib_module_names:
                    report(item, "mopd/__init__.py imports nothing of ours or of others")
                continue
            source = component(item.path)
            if source not in RANKS:
                report(item, f"the component {source} has no row: give it one in RANKS")
                continue
            if top == "mopd_teachers" and source not in TEACHERS_IMPORTED_BY:
                report(item, "teachers are met in build, runtime, run and cli only")
            if source == "config" and top in CONFIG_NEVER:
                report(item, f"configuration is read without {top}")
            if source in LOOP and not (top in sys.stdlib_module_names or top == "mopd"):
                report(item, "the loop imports no third-party package")
            if top != "mopd" or item.module == "mopd":
                continue
            target = item.module.split(".")[1]
            if target == source or target not in RANKS:
                if target not in RANKS and not item.module.startswith("mopd.__"):
                    report(item, f"mopd has no component {target} in RANKS")
                continue
            if source in LOOP and target not in LOOP_MAY:
                report(item, f"the loop imports {', '.join(sorted(LOOP_MAY - {'loop'}))} only")
            elif RANKS[target] > RANKS[source]:
                report(item, f"{source} is below {target}")
            elif RANKS[target] == RANKS[source] and RANKS[source] not in SAME_RANK:
                if RANKS[source] == 1 and target == "protocols":
                    continue
                report(item, f"{source} and {target} meet in mopd.build, through protocols")
    return list(found)


def test_the_tree_keeps_the_direction() -> None:
    found = violations(ROOT)
    assert not found, "\n".join(found)


def test_every_component_has_a_row_and_every_row_is_checked() -> None:
    """The walk really sees the package: without this an empty walk would pass."""
    seen = {
        component(str(path.relative_to(ROOT)))
        for path in (ROOT / "mopd").rglob("*.py")
        if path != ROOT / "mopd" / "__init__.py"
    }
    assert seen <= RANKS.keys(), f"without a row: {sorted(seen - RANKS.keys())}"
    assert {"types", "config", "objective", "data", "student", "rollout", "build"} <= seen


@pytest.mark.parametrize(
    ("path", "source", "why"),
    [
        ("mopd/data/a.py", "from mopd.student import model", "data and student meet in"),
        ("mopd/data/a.py", "from ..student import model", "data and student meet in"),
        ("mopd/data/a.py", "import mopd.build", "data is below build"),
        ("mopd/objective/a.py", "def f():\n    import mopd.data.tasks", "objective is below data"),
        ("mopd/objective/a.py", "from mopd.kernels import select", "objective and kernels meet"),
        ("mopd/types.py", "from mopd.protocols import Student", "types is below protocols"),
        ("mopd/loop.py", "import torch", "no third-party package"),
        ("mopd/loop.py", "from mopd.observe import metrics", "the loop imports"),
        ("mopd/collecting.py", "import numpy", "no third-party package"),
        ("mopd/collecting.py", "import mopd.loop", "collecting is below loop"),
        ("mopd/config/a.py", "import torch.nn as nn", "configuration is read without torch"),
        ("mopd/student/a.py", "import vllm", "vllm is imported in mopd/rollout/"),
        ("mopd/rollout/a.py", "import ray", "ray is imported in mopd/runtime/ only"),
        ("mopd/data/a.py", "from megatron.core import x", "megatron is imported in"),
        ("mopd/student/a.py", "import triton.language as tl", "triton is imported in"),
        ("mopd/data/a.py", "import importlib as i\ni.import_module('ray')", "ray is imported in"),
        ("mopd/data/a.py", "import mopd_teachers.client", "teachers are met in build"),
        ("mopd_teachers/a.py", "from mopd.errors import TeacherError", "never imports mopd"),
        ("mopd/novelty/a.py", "import os", "has no row"),
        ("mopd/__init__.py", "import torch", "imports nothing of ours or of others"),
    ],
)
def test_a_planted_breach_is_found(tmp_path: Path, path: str, source: str, why: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source + "\n")
    found = violations(tmp_path)
    assert found and all(why in line for line in found), found
    assert found[0].startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("mopd/data/a.py", "from mopd.types import Prompt\nfrom mopd.config.schema import Config"),
        ("mopd/data/a.py", "from . import b\nfrom mopd.data.c import d"),
        ("mopd/objective/a.py", "from mopd.protocols import Student\nimport torch"),
        ("mopd/loop.py", "import asyncio\nfrom mopd.protocols import Student"),
        ("mopd/runtime/a.py", "import ray\nimport mopd_teachers.client\nimport mopd.rollout.b"),
        ("mopd_teachers/a.py", "import vllm\nfrom mopd_teachers.errors import E"),
    ],
)
def test_what_the_design_allows_is_not_reported(tmp_path: Path, path: str, source: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source + "\n")
    assert violations(tmp_path) == []


BLOCKED_IMPORT = """
import importlib, sys
blocked = set(sys.argv[1].split(","))

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked by this test")

sys.meta_path.insert(0, Block())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def import_without(blocked: set[str], modules: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT, ",".join(sorted(blocked)), *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def modules_under(*folders: str) -> list[str]:
    """Dotted names of every module of these folders."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert paths, folders
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith(".__main__")]


SERVER_SIDE = {
    "mopd_teachers.serve", "mopd_teachers.score_route", "mopd_teachers.scoring_worker",
    "mopd_teachers.gather", "mopd_teachers.prefix_scheduler",
}  # fmt: skip
"""What runs inside a teacher's own vLLM process."""


@pytest.mark.parametrize(
    ("modules", "blocked"),
    [
        # Configuration and `mopd --help` answer without loading anything heavy.
        ([*modules_under("mopd/config"), "mopd.cli"], CONFIG_NEVER | {"mopd_teachers"}),
        # Checked and timed on a GPU machine that has torch and triton alone.
        (
            modules_under("mopd/objective", "mopd/kernels"),
            {"vllm", "ray", "megatron", "omegaconf", "mopd_teachers"},
        ),
        # A client of teachers needs neither us nor vLLM.
        (
            [name for name in modules_under("mopd_teachers") if name not in SERVER_SIDE],
            {"mopd", "vllm", "ray", "megatron", "torch"},
        ),
    ],
    ids=["config", "objective-kernels", "teachers"],
)
def test_light_parts_import_without_heavy_packages(modules: list[str], blocked: set[str]) -> None:
    done = import_without(blocked, modules)
    assert done.returncode == 0, done.stderr


def test_a_blocked_import_does_fail() -> None:
    done = import_without({"torch"}, ["mopd.objective.loss"])
    assert done.returncode != 0 and "torch is blocked" in done.stderr
