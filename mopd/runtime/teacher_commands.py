"""`mopd teachers ...`: the registry, health, and servers that stand alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mopd.config.checks import check_config
from mopd.config.load import load_config, load_teacher_settings
from mopd.config.schema import Config, TeacherConfig
from mopd.config.teacher_checks import api_key_problem
from mopd.config.wording import nearest
from mopd.errors import ConfigError
from mopd.model_folders import teacher_folders
from mopd.runtime.teacher_actor import api_key_of, client_of, server_spec
from mopd.runtime.teacher_examining import examined
from mopd.runtime.teacher_registry import goes_on, read_registry, request_change, require_running
from mopd_teachers.errors import TeacherError as ServerError
from mopd_teachers.examination import Finding
from mopd_teachers.replica import Endpoint, bare_url, url_problem
from mopd_teachers.server import ServerProcess, served_model

DRAIN_S = 60


def run(arguments: argparse.Namespace) -> int:
    """Do what `teacher_arguments` has parsed; the exit code."""
    actions = {"list": _list, "probe": _probe, "serve": _serve, "add": _change, "remove": _change}
    return actions[arguments.action](arguments)


def _list(arguments: argparse.Namespace) -> int:
    place = Path(arguments.place)
    running = None
    if place.is_dir():
        rows, running = read_registry(place), goes_on(place)
    else:
        rows = _configured(_config(place, arguments.more))
    if arguments.json:
        print(json.dumps({"teachers": rows, "running": running}))
        return 0
    if running is False:
        print("this run does not go on: how its teachers were when it ended")
    for row in rows:
        print(f"{row['name']}: {row['what']}; domains: {', '.join(row['domains']) or 'none'}")
        for server in row["servers"]:
            facts = [server["state"]]
            if server.get("tokens_per_s"):
                facts.append(f"{server['tokens_per_s']:,.0f} tokens/s")
            if server.get("last_error"):
                facts.append(server["last_error"])
            print(f"  {server['url']}: {'; '.join(facts)}")
    return 0


def _config(place: Path, more: Sequence[str] = ()) -> Config:
    files: list[str | Path] = [place, *(item for item in more if "=" not in item)]
    return load_config(files, [item for item in more if "=" in item])


def _configured(config: Config) -> list[dict[str, Any]]:
    """What the configuration says; servers given by URL are asked whether they are there."""
    rows = []
    for name, teacher in config.teachers.items():
        servers = []
        for url in teacher.endpoints:
            try:
                if problem := url_problem(url):
                    raise ConfigError(problem)
                card = served_model(bare_url(url), api_key=_key(teacher))
                state, error = f"up, serves {card['id']}", ""
            except ConfigError as caught:
                state, error = "not asked", str(caught)
            except (OSError, ServerError) as caught:
                state, error = "down", str(caught)
            shown = url.rpartition("@")[2]  # what stands before may be a password
            servers.append({"url": shown, "state": state, "last_error": error})
        what = f"{teacher.model or 'whatever its servers serve'}"
        if teacher.mixture:
            what = "geometric mean of " + ", ".join(
                f"{weight:g} {member}" for member, weight in teacher.mixture.items()
            )
        if teacher.revision:
            what += f" at {teacher.revision}"
        if not teacher.endpoints and not teacher.mixture:
            what += f", {teacher.replicas} server(s) started by the run"
        domains = [d for d, domain in config.domains.items() if domain.teacher == name]
        rows.append({"name": name, "what": what, "domains": domains, "servers": servers})
    return rows


def _key(teacher: TeacherConfig) -> str | None:
    if problem := api_key_problem(teacher.api_key_env):
        raise ConfigError(f"api_key_env: {problem}")
    return api_key_of(teacher)


def _named(config: Config, name: str) -> TeacherConfig:
    """This teacher, of whose configuration nothing is wrong; that of others does not matter."""
    if name not in config.teachers:
        raise ConfigError(
            f"there is no teacher {name!r}"
            + (nearest(name, config.teachers) or f"; there are {sorted(config.teachers)}")
        )
    key = f"teachers.{name}"
    problems = [p for p in check_config(config) if p.startswith((f"{key}.", f"{key} "))]
    if problems:
        raise ConfigError.listing(f"teacher {name} cannot be served or asked", problems)
    return config.teachers[name]


def _probe(arguments: argparse.Namespace) -> int:
    config = _config(Path(arguments.place))
    names = arguments.names or [n for n, t in config.teachers.items() if not t.mixture]
    found: dict[str, list[Finding]] = {}
    good = True
    for name in names:
        teacher = _named(config, name)
        folder = teacher_folders(replace(config, teachers={name: teacher})).get(name)
        try:
            found[name] = _examined(config, name, teacher, folder)
        except ServerError as error:
            found[name] = [Finding("answers", False, str(error))]
        good &= all(finding.good for finding in found[name])
        if not arguments.json:
            print(f"{name}:")
            for finding in found[name]:
                mark = "ok    " if finding.good else "FAILED"
                print(f"  {mark} {finding.what}: {finding.detail}")
    if arguments.json:
        rows = {
            name: [{"what": f.what, "good": f.good, "detail": f.detail} for f in findings]
            for name, findings in found.items()
        }
        print(json.dumps({"good": good, "teachers": rows}))
    return 0 if good else 1


def _examined(
    config: Config, name: str, teacher: TeacherConfig, folder: Path | None
) -> list[Finding]:
    """Ask the servers of an external teacher; start one of ours for the time of the probe."""
    key = _key(teacher)

    async def ask(endpoints: Sequence[Endpoint]) -> list[Finding]:
        async with client_of(name, teacher, endpoints) as client:
            return await examined(
                client,
                teacher,
                folder,
                Path(config.student.model),
                lambda t: print(t, file=sys.stderr),
            )

    if teacher.endpoints:
        return asyncio.run(ask([Endpoint(url, teacher.model, key) for url in teacher.endpoints]))
    with tempfile.TemporaryDirectory() as logs:
        spec = server_spec(name, teacher, host="127.0.0.1", api_key=key)
        with ServerProcess(spec, Path(logs) / "server.log") as server:
            server.start()
            server.wait_healthy(teacher.start_timeout_s, lambda t: print(t, file=sys.stderr))
            return asyncio.run(ask([Endpoint(server.url, server.served_name, key)]))


def _serve(arguments: argparse.Namespace) -> int:
    config = _config(Path(arguments.place))
    teacher = _named(config, arguments.name)
    if teacher.endpoints or teacher.mixture:
        kind = "given by endpoints" if teacher.endpoints else "a mixture"
        raise ConfigError(f"teachers.{arguments.name} is {kind}: there is no checkpoint to serve")
    key = _key(teacher)
    if key is None and arguments.host not in ("127.0.0.1", "localhost", "::1"):
        print(
            f"warning: whoever reaches {arguments.host} may use this server; set "
            f"teachers.{arguments.name}.api_key_env to ask for a token",
            file=sys.stderr,
        )
    spec = server_spec(arguments.name, teacher, host=arguments.host, api_key=key)
    spec = replace(spec, port=arguments.port, drain_s=DRAIN_S)
    log = Path(f"teacher-{arguments.name}.log").resolve()
    stopped = threading.Event()
    loading = True

    def stop(*_: object) -> None:
        stopped.set()
        if loading:  # nothing is in flight yet
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with ServerProcess(spec, log, served_name=arguments.name) as server:
        server.start()
        server.wait_healthy(teacher.start_timeout_s, lambda text: print(text, flush=True))
        loading = False
        url = server.url
        if arguments.host in ("0.0.0.0", "::"):  # no address that another machine could ask
            url = f"http://{socket.gethostname()}:{server.port}"
        print(
            f"{arguments.name} is served at {url} (log: {log}). In a run's configuration:\n"
            f"  {arguments.name}: {{endpoints: [{url}], model: {arguments.name}}}",
            flush=True,
        )
        while not stopped.wait(0.5):
            if not server.alive():
                raise ServerError(f"the server has ended by itself.\n{server.log_tail()}")
        print("finishing what is in flight ...", flush=True)
        server.stop(grace_s=DRAIN_S + 10)
    return 0


def _change(arguments: argparse.Namespace) -> int:
    request = {"op": arguments.action, "teacher": arguments.name, "endpoint": arguments.endpoint}
    if arguments.action == "add":
        settings = load_teacher_settings(arguments.more)
        request |= {"model": arguments.model, "domain": arguments.domain, "settings": settings}
        if settings and not arguments.domain:
            raise ConfigError(
                f"{', '.join(settings)}: one more server of a teacher has its teacher's settings; "
                "they go with a new teacher (--domain)"
            )
        if arguments.domain and not (arguments.model or arguments.endpoint):
            raise ConfigError("a new teacher needs --model (a checkpoint to serve) or --endpoint")
        if arguments.model and not (arguments.domain or arguments.endpoint):
            raise ConfigError(
                "--model is the name that the server at --endpoint must serve, or with --domain a "
                "new teacher's checkpoint; a server that the run starts has its teacher's own"
            )
    run_dir = Path(arguments.place)
    if run_dir.is_dir():
        require_running(run_dir)
    request_change(run_dir, request)
    print("the run takes it up at its next step; `mopd teachers list` shows it then")
    return 0
