"""What a running run says of its teachers, and what it can be asked to change, as files.

RUN_DIR/logs/teachers.json            who they are and how they do; written at every step
RUN_DIR/logs/teacher-requests/*.json  changes asked for by `mopd teachers add|remove`
RUN_DIR/logs/teacher-changes.jsonl    what became of each
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mopd.config.wording import nearest
from mopd.errors import ConfigError
from mopd.run_dir import LOCK
from mopd_teachers.replica import bare_url, url_problem

ENDED = "ended"
"""Recorded of a teacher that came while a run went on, when the next run begins without it."""


def write_registry(logs: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file in one go: a reader never sees half of it."""
    logs.mkdir(parents=True, exist_ok=True)
    _replace(logs / "teachers.json", {"time": time.time(), "teachers": list(rows)})


def read_registry(run_dir: Path) -> list[dict[str, Any]]:
    """The teachers of a run. Raises ConfigError when the folder is none of a run with them."""
    path = run_dir / "logs" / "teachers.json"
    try:
        return list(json.loads(path.read_text())["teachers"])
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); expected the folder of a run that has begun its "
            "first step, or a configuration file"
        ) from error


def goes_on(run_dir: Path) -> bool | None:
    """Whether a process runs this run now; None where the file system cannot tell."""
    try:
        with (run_dir / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None


def require_running(run_dir: Path) -> None:
    """Raises ConfigError unless there is a run that could carry a request out."""
    if goes_on(run_dir) is False:
        raise ConfigError(
            f"no run goes on in {run_dir} (it has ended, or is not this machine's to see), so that "
            "nobody would carry this out; for the next run, change the configuration"
        )


def request_change(run_dir: Path, request: Mapping[str, Any]) -> None:
    """Leave a request for the run. Raises ConfigError when it could not be meant for this run."""
    rows = {row["name"]: row for row in read_registry(run_dir)}
    name, domain = str(request["teacher"]), request.get("domain")
    row = rows.get(name)
    if domain is not None:
        domains = sorted({d for each in rows.values() for d in each["domains"]})
        if row is not None:
            raise ConfigError(
                f"{run_dir} has a teacher {name!r} already: take another name, or leave --domain "
                "out to give it one more server"
            )
        if domain not in domains:
            raise ConfigError(f"{run_dir} has no domain {domain!r}{nearest(domain, domains)}")
    elif row is None:
        raise ConfigError(
            f"{run_dir} has no teacher {name!r}; it has {sorted(rows)}"
            + ("; a new one needs --domain" if request["op"] == "add" else "")
        )
    else:
        urls = [server["url"] for server in row["servers"]]
        wanted = request.get("endpoint")
        if request["op"] == "remove" and wanted is not None:
            if bare_url(wanted) not in urls:
                raise ConfigError(f"teacher {name} has no server {wanted!r}; it has {urls}")
            request = {**request, "endpoint": bare_url(wanted)}
    if request["op"] == "add" and request.get("endpoint") is not None:
        if problem := url_problem(str(request["endpoint"])):
            raise ConfigError(problem)
    folder = run_dir / "logs" / "teacher-requests"
    try:
        folder.mkdir(exist_ok=True)
        _replace(folder / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}.json", dict(request))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error}); is it your run?") from error


def take_requests(logs: Path) -> Iterator[dict[str, Any]]:
    """Each request once, oldest first; the file is gone before it is acted upon."""
    for path in sorted((logs / "teacher-requests").glob("*.json")):
        try:
            request = json.loads(path.read_text())
        except (OSError, ValueError):
            request = {"op": "unreadable", "file": path.name}
        path.unlink(missing_ok=True)
        yield request


def teachers_until_the_end(logs: Path) -> dict[str, str]:
    """Domain -> the teacher that was added for it and scored it until an earlier run here ended."""
    path = logs / "teacher-changes.jsonl"
    found: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            change = json.loads(line)
            op, name, outcome = change["op"], change["teacher"], str(change["outcome"])
        except (ValueError, TypeError, KeyError):
            continue  # torn by a kill
        if outcome.startswith("refused"):
            continue
        if op == "add" and change.get("domain") is not None:
            found[change["domain"]] = name
        elif op in ("remove", ENDED) and change.get("endpoint") is None:
            found = {domain: each for domain, each in found.items() if each != name}
    return found


def record_change(logs: Path, request: Mapping[str, Any], outcome: str) -> None:
    """One line for each request and what became of it."""
    line = json.dumps({"time": time.time(), **request, "outcome": outcome})
    with (logs / "teacher-changes.jsonl").open("a") as file:
        file.write(line + "\n")


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)
