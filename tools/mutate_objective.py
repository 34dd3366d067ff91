"""Plant faults in the objective, one at a time, and see whether its unit tests notice.

    python tools/mutate_objective.py [--jobs 2] [--only TEXT]... [--list]

`tools/objective_mutants.txt` lists the faults:

    @ FILE FUNCTION      a file of mopd (`objective/loss.py`) and a function or class in it
    - TEXT               stands exactly once in that function's source
    + TEXT               what it becomes

Each is applied to a copy of the package in a temporary folder, where tests/unit/objective runs
until its first failure. A fault that no test notices has lived. The untouched copy runs first and
has to pass; one that the interpreter itself refuses counts as an error of the list.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = Path(__file__).with_name("objective_mutants.txt")
TESTS = "tests/unit/objective"
TIMEOUT_S = 300.0
FIRST = {
    "objective_names.py": "names",
    "advantage.py": "sequence_gradients",
    "aggregation.py": "aggregation",
    "balance.py": "domain_balance",
    "divergence.py": "divergence",
    "gae.py": "gae",
    "inputs.py": "objective_loss",
    "orm.py": "orm",
    "reference_kl.py": "reference_kl",
    "schedules.py": "schedules_and_shaping",
    "shaping.py": "schedules_and_shaping",
    "stats.py": "stats",
    "truncation.py": "truncation",
}
"""Which tests know a file best: they run first, which only saves time."""


@dataclass(frozen=True)
class Mutant:
    file: str
    function: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.before!r} -> {self.after!r}"


def read_mutants(text: str) -> list[Mutant]:
    """The faults of a list; ValueError naming the line that is none."""
    mutants, place, before = [], None, None
    for number, line in enumerate(text.splitlines(), 1):
        kind, _, rest = line.partition(" ")
        if not line.strip() or kind == "#":
            continue
        if kind == "@" and len(rest.split()) == 2:
            place = rest.split()
        elif kind == "-" and place and before is None:
            before = rest
        elif kind == "+" and place and before is not None:
            mutants.append(Mutant(place[0], place[1], before, rest))
            before = None
        else:
            raise ValueError(f"line {number} is {line!r}; expected '@ FILE FUNCTION', '-' then '+'")
    return mutants


def mutated(source: str, mutant: Mutant) -> str:
    """The file's text with the fault in it; ValueError unless it stands there exactly once."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == mutant.function:
            lines = source.splitlines(keepends=True)
            assert node.end_lineno is not None
            head, body, tail = (
                "".join(part)
                for part in (
                    lines[: node.lineno - 1],
                    lines[node.lineno - 1 : node.end_lineno],
                    lines[node.end_lineno :],
                )
            )
            if body.count(mutant.before) != 1:
                raise ValueError(f"{mutant}: stands there {body.count(mutant.before)} times, not 1")
            return head + body.replace(mutant.before, mutant.after) + tail
    raise ValueError(f"{mutant}: no such function")


def tests_fail(mutant: Mutant | None) -> tuple[bool, str]:
    """(whether the tests notice, the first failure's name) on a copy with the fault in it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "mopd", copy / "mopd", ignore=ignore)
        shutil.copytree(ROOT / TESTS, copy / TESTS, ignore=ignore)
        best = "objective_reference"
        if mutant is not None:
            path = copy / "mopd" / mutant.file
            path.write_text(mutated(path.read_text(), mutant))
            best = FIRST.get(path.name, best)
        # A fork of this process has the large packages loaded, and nothing of mopd.
        child = multiprocessing.get_context("fork").Process(target=_test, args=(copy, best))
        child.start()
        child.join(TIMEOUT_S)
        if child.is_alive():
            child.kill()
            child.join()
            return True, f"still running after {TIMEOUT_S:.0f} s"
        output = (copy / "output").read_text()
    # 0 all passed, 1 a test failed, 2 not even imported
    if child.exitcode not in (0, 1):
        raise RuntimeError(f"{mutant}: pytest ended with {child.exitcode}:\n{output[-2000:]}")
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    return child.exitcode == 1, failed[0].split(" - ")[0].split("/")[-1] if failed else ""


def _test(copy: Path, best: str) -> None:
    """In a process of its own: the copy's tests until the first failure, `best` ahead."""
    output = os.open(copy / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    import pytest

    import mopd  # the package itself holds nothing; its path shows whose it is

    assert mopd.__file__ is not None and mopd.__file__.startswith(str(copy)), mopd.__file__
    files = sorted(Path(TESTS).glob("test_*.py"), key=lambda path: path.stem != f"test_{best}")
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rf", f"--rootdir={copy}"]
    code = pytest.main([*map(str, files), *options])
    sys.stdout.flush()
    os._exit(code)


def load_large_packages() -> None:
    """What the tests import besides mopd, once for all forks; no thread may be started."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import hypothesis
    import numpy  # noqa: F401
    import omegaconf  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401

    torch.set_num_threads(1)
    # Whether a fault is found is asked, not its smallest example.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("unshrunk", phases=phases)
    hypothesis.settings.load_profile("unshrunk")
    assert not any(name.split(".")[0] == "mopd" for name in sys.modules)


def run(mutants: Sequence[Mutant], jobs: int) -> list[Mutant]:
    """Those that lived."""
    for mutant in mutants:  # the list itself is checked before an hour is spent
        mutated((ROOT / "mopd" / mutant.file).read_text(), mutant)
    load_large_packages()
    failed, first = tests_fail(None)
    if failed:
        raise RuntimeError(f"the tests fail without a fault: {first}")
    start, lived = time.monotonic(), []
    with ThreadPoolExecutor(jobs) as pool:
        for mutant, (noticed, first) in zip(mutants, pool.map(tests_fail, mutants), strict=True):
            print(f"{'killed' if noticed else 'LIVED '}  {mutant}  {first}", flush=True)
            if not noticed:
                lived.append(mutant)
    killers = Counter(mutant.file for mutant in mutants)
    by_file = ", ".join(f"{name} {count}" for name, count in sorted(killers.items()))
    print(
        f"{len(mutants) - len(lived)} of {len(mutants)} faults were noticed, {len(lived)} lived, "
        f"in {time.monotonic() - start:.0f} s ({by_file})"
    )
    return lived


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="copies tested at the same time")
    parser.add_argument(
        "--only", action="append", help="faults whose description contains this text (repeatable)"
    )
    parser.add_argument("--list", action="store_true", help="name them and count them by function")
    args = parser.parse_args()
    mutants = [
        mutant
        for mutant in read_mutants(MUTANTS.read_text())
        if any(text in str(mutant) for text in args.only or [""])
    ]
    if args.list:
        for (file, function), count in Counter((m.file, m.function) for m in mutants).items():
            print(f"{count:3d}  {file} {function}")
        print(f"{len(mutants):3d}  in all")
        return 0
    return 1 if run(mutants, args.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
