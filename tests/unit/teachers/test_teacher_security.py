"""Loopback unless told otherwise, no pickle over the wire, keys that nobody can read."""

from __future__ import annotations

import ast
import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from fake_teacher import FakeServer

import mopd_teachers
from mopd.cli import _parse
from mopd.config.load import save_config
from mopd.config.schema import Config, DomainConfig, TeacherConfig
from mopd.runtime import teacher_actor
from mopd.runtime.startup import Startup
from mopd.runtime.teacher_actor import server_spec
from mopd.runtime.teacher_fleet import TeacherFleet
from mopd_teachers.client import Endpoint
from mopd_teachers.errors import TeacherError
from mopd_teachers.server import ServerProcess, ServerSpec

FORBIDDEN = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
KEY = "s3cret-of-the-platform"


def test_nothing_of_the_teachers_package_can_unpack_a_pickle() -> None:
    files = sorted(Path(mopd_teachers.__file__).parent.rglob("*.py"))
    assert len(files) > 15
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.partition(".")[0] for name in names} & FORBIDDEN, file
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "eval", "exec", "np.load", "yaml.load"), file


def test_a_server_listens_on_loopback_unless_told_otherwise() -> None:
    assert ServerSpec("t", "m").host == "127.0.0.1"
    assert _parse(["teachers", "serve", "c.yaml", "t"]).host == "127.0.0.1"
    assert _parse(["teachers", "serve", "c.yaml", "t", "--host", "0.0.0.0"]).host == "0.0.0.0"


def spawned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[str], dict[str, str], str]:
    """Command line, environment and address of a server that would be started."""
    (tmp_path / "config.json").write_text("{}")
    seen: dict[str, Any] = {}

    class Popen:
        pid = 1

        def __init__(self, command: list[str], **how: Any) -> None:
            with socket.socket(fileno=socket.dup(how["pass_fds"][0])) as given:
                seen.update(command=command, address=given.getsockname()[0], **how)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr("mopd_teachers.server.subprocess.Popen", Popen)
    ServerProcess(ServerSpec("t", str(tmp_path), **options), tmp_path / "log").start()
    return seen["command"], seen["env"], seen["address"]


def test_the_key_travels_in_the_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv("VLLM_API_KEY", "somebody else's")
    command, env, address = spawned(tmp_path, monkeypatch, api_key=KEY)
    assert address == "127.0.0.1"
    assert KEY not in " ".join(command) and env["VLLM_API_KEY"] == KEY
    assert not {"VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"} & env.keys()
    assert "VLLM_API_KEY" not in spawned(tmp_path, monkeypatch)[1]
    with pytest.raises(TeacherError, match="api-key"):
        ServerSpec("t", "m", engine_args={"api-key": KEY})


def test_no_file_of_a_run_and_no_message_has_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    notes: list[str] = []

    async def scenario() -> Config:
        async with FakeServer("m") as server:
            teacher = TeacherConfig(endpoints=[server.url], model="m", api_key_env="TEACHER_KEY")
            config = Config(teachers={"t": teacher}, domains={"d": DomainConfig(teacher="t")})
            fleet = TeacherFleet(
                config, tmp_path / "logs", host="", needed_tokens={"t": 5}, tokenized=[]
            )
            await fleet.start(Startup(lambda waiting: None, notes.append, notes.append))
            assert fleet.client("t").servers[0].headers == {"Authorization": f"Bearer {KEY}"}
            notes.append(json.dumps(fleet.metrics()))
            teacher.model = "another"
            wrong = TeacherFleet(config, tmp_path, host="", needed_tokens={"t": 5}, tokenized=[])
            outcome = await wrong.start_each(
                Startup(lambda waiting: None, notes.append, notes.append)
            )
            assert outcome["t"] is not None
            notes.append(str(outcome["t"]))
            await fleet.close()
            await wrong.close()
            return config

    config = asyncio.run(scenario())
    spec = server_spec("t", TeacherConfig(model="m"), host="127.0.0.1", api_key=KEY)
    notes += [repr(Endpoint("http://a", None, KEY)), repr(spec)]
    config.name, config.student.model = "n", "s"
    config.rollout.max_response_tokens = config.train.steps = config.train.prompts_per_step = 1
    save_config(config, tmp_path / "config.yaml")
    for file in tmp_path.rglob("*"):
        if file.is_file():
            notes.append(file.read_text())
    assert len(notes) >= 5 and not [text for text in notes if KEY in text]


def test_a_hub_model_is_pinned_to_the_commit_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = tmp_path / "hub/models--org--name/snapshots/0123abc"
    snapshots.mkdir(parents=True)
    (snapshots / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    hub = TeacherConfig(model="org/name")
    assert server_spec("t", hub, host="", api_key=None).revision == "0123abc"
    keeper = teacher_keeper_row(hub)
    assert keeper["revision"] == "0123abc" and keeper["what"] == "org/name at 0123abc"
    assert teacher_actor.pinned_revision(TeacherConfig(model=str(tmp_path))) is None
    away = TeacherConfig(model="org/name", endpoints=["http://a:1"])
    assert teacher_actor.pinned_revision(away) is None


def teacher_keeper_row(config: TeacherConfig) -> dict[str, Any]:
    from mopd.runtime.teacher_keeper import TeacherKeeper

    client = teacher_actor.client_of("t", config, [Endpoint("http://127.0.0.1:1")])
    return TeacherKeeper("t", config, client, [], lambda text: None).row()
