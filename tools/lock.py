"""Remake the lock files from the ranges in pyproject.toml. Standard library only.

    python3.11 tools/lock.py                    # keep every pin that still fits, add, drop
    python3.11 tools/lock.py --upgrade          # newest of everything inside the ranges
    python3.11 tools/lock.py --upgrade-package ray
    python3.11 tools/lock.py --check            # only say whether the locks are what it would write

uv resolves (installed for the purpose into a folder of its own that is removed afterwards); it
reads UV_INDEX_URL, not pip's settings. What goes in and what comes out:

    requirements/cpu.lock   pyproject.toml with its extras cpu and dev, requirements/cpu.in
    requirements/trl.lock   requirements/trl.in: tools/bench_trl.py, an environment of its own
    requirements/overrides.txt   requirements of requirements that are left out, and why
    requirements/torch-cpu.txt   not resolved: torch's CPU build, pinned by its local version

A lock pins every package by version and by the hashes of all of its files, for CPython 3.11 on
Linux x86-64, and is installed with `pip install --no-deps --require-hashes` (tools/setup_env.py).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV_VERSION = "0.13.9"
PYTHON_VERSION = "3.11"
PLATFORM = "x86_64-manylinux_2_28"

LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
"""Never in a lock: see requirements/overrides.txt."""


@dataclass(frozen=True)
class Target:
    """One lock file: what uv resolves it from."""

    lock: str
    sources: tuple[str, ...]
    extras: tuple[str, ...] = ()


TARGETS = (
    Target(
        "requirements/cpu.lock",
        ("pyproject.toml", "requirements/cpu.in"),
        ("cpu", "dev"),
    ),
    Target("requirements/trl.lock", ("requirements/trl.in",)),
)


@dataclass(frozen=True)
class Pin:
    """One package of a lock."""

    name: str
    version: str
    hashes: tuple[str, ...]
    via: str = ""
    """Who asked for it, as uv says it."""


class LockError(Exception):
    """A lock cannot be read or made; the text says what is wrong."""


def normalise(name: str) -> str:
    """A package's name as registries compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)(\s*;[^\\]*)?\s*\\?$")
HASH = re.compile(r"^\s+--hash=(sha256:[0-9a-f]{64})\s*\\?$")
VIA = re.compile(r"^\s+#(?: via)?\s+(\S.*)$")


def parse_lock(text: str) -> dict[str, Pin]:
    """Read a lock, strictly: LockError names the first line that is none of its kinds."""
    pins: dict[str, Pin] = {}
    current: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if match := PIN.match(line):
            name, version, marker = match.groups()
            if marker:
                raise LockError(f"line {number}: a marker ({marker.strip()}); a lock has none")
            current = normalise(name)
            if current in pins:
                raise LockError(f"line {number}: {current} is pinned twice")
            pins[current] = Pin(current, version, ())
        elif (match := HASH.match(line)) and current is not None:
            old = pins[current]
            pins[current] = Pin(old.name, old.version, (*old.hashes, match.group(1)), old.via)
        elif (match := VIA.match(line)) and current is not None:
            old = pins[current]
            via = ", ".join(filter(None, (old.via, match.group(1).strip())))
            pins[current] = Pin(old.name, old.version, old.hashes, via.removeprefix("via, "))
        else:
            raise LockError(f"line {number}: neither a pin, a hash nor a comment: {line!r}")
    return pins


def render_lock(pins: dict[str, Pin], target: Target) -> str:
    """The lock file's text; `parse_lock` reads it back to the same pins."""
    extras = f" (extras {', '.join(target.extras)})" if target.extras else ""
    lines = [
        f"# Made by tools/lock.py from {', '.join(target.sources)}{extras}; do not edit.",
        f"# CPython {PYTHON_VERSION}, Linux x86-64. Install with --no-deps --require-hashes.",
    ]
    for name in sorted(pins):
        pin = pins[name]
        lines.append(f"{pin.name}=={pin.version} \\")
        lines += [f"    --hash={digest} \\" for digest in pin.hashes[:-1]]
        lines.append(f"    --hash={pin.hashes[-1]}")
        if pin.via:
            lines.append(f"    # via {pin.via}")
    return "\n".join(lines) + "\n"


def verify(pins: dict[str, Pin], target: Target) -> None:
    """Raise LockError where a lock breaks what `make setup` relies on."""
    if not pins:
        raise LockError(f"{target.lock} is empty")
    for pin in pins.values():
        if not pin.hashes:
            raise LockError(f"{target.lock}: {pin.name} has no hash")
        if pin.name in LEFT_OUT or pin.name.startswith("nvidia-"):
            raise LockError(
                f"{target.lock}: {pin.name} must not be in it (asked for by: {pin.via}); name it "
                "in requirements/overrides.txt"
            )


def resolve(uv: Path, target: Target, options: Sequence[str]) -> dict[str, Pin]:
    """Let uv resolve one lock, starting from the pins that are there."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lock.txt"
        old = ROOT / target.lock
        if old.exists():  # uv keeps the pins that it finds in its output file
            out.write_text(old.read_text())
        command = [str(uv), "pip", "compile", *target.sources]
        for extra in target.extras:
            command += ["--extra", extra]
        command += ["--override", "requirements/overrides.txt", "--generate-hashes"]
        command += ["--python-version", PYTHON_VERSION, "--python-platform", PLATFORM]
        command += ["--no-header", "--no-emit-index-url", "--no-emit-find-links", "--no-progress"]
        command += ["--annotation-style", "line", "--quiet", "-o", str(out), *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise LockError(f"uv could not resolve {target.lock}:\n{done.stderr.strip()}")
        pins = parse_lock(out.read_text())
    verify(pins, target)
    return pins


def changes(old: dict[str, Pin], new: dict[str, Pin]) -> list[str]:
    """What differs, one line a package."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before is None and after is not None:
            lines.append(f"+ {name} {after.version}")
        elif before is not None and after is None:
            lines.append(f"- {name} {before.version}")
        elif before is not None and after is not None and before.version != after.version:
            lines.append(f"~ {name} {before.version} -> {after.version}")
        elif before is not None and after is not None and set(before.hashes) != set(after.hashes):
            lines.append(f"~ {name} {after.version}: other files")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="newest inside the ranges")
    parser.add_argument("--upgrade-package", action="append", default=[], metavar="NAME")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 on a change")
    arguments = parser.parse_args(argv)
    options = ["--upgrade"] if arguments.upgrade else []
    for name in arguments.upgrade_package:
        options += ["--upgrade-package", name]
    stale = False
    try:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [str(Path(folder) / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            done = subprocess.run([*pip, f"uv=={UV_VERSION}"], capture_output=True, text=True)
            if done.returncode != 0:
                raise LockError(f"could not install uv {UV_VERSION}:\n{done.stderr.strip()}")
            for target in TARGETS:
                path = ROOT / target.lock
                old = parse_lock(path.read_text()) if path.exists() else {}
                new = resolve(Path(folder) / "bin" / "uv", target, options)
                lines = changes(old, new)
                stale = stale or bool(lines)
                print(f"{target.lock}: {len(new)} packages, {len(lines)} changed", flush=True)
                print("".join(f"  {line}\n" for line in lines), end="", flush=True)
                if not arguments.check:
                    path.write_text(render_lock(new, target))
    except LockError as error:
        print(f"No lock was made: {error}", file=sys.stderr)
        return 2
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
