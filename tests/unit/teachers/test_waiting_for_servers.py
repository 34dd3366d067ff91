"""A server that is still loading when it is first asked is waited for; a wrong one is not."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from fake_teacher import FakeServer

from mopd.cli import main
from mopd.config.schema import Config, DomainConfig, TeacherConfig
from mopd.errors import TeacherError as RunError
from mopd.runtime.startup import Startup
from mopd.runtime.teacher_fleet import TeacherFleet
from mopd_teachers import waiting
from mopd_teachers.client import Endpoint, TeacherClient
from mopd_teachers.errors import TeacherError

BASE = Path(__file__).parents[3] / "demo/models/base"
Answer = Callable[[], web.Response]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Loading(FakeServer):
    """Its list of models is `before`, one answer after the other, until it has loaded; the last of
    `before` for good where `for_good`."""

    def __init__(self, *before: Answer, for_good: bool = False) -> None:
        super().__init__("m")
        self.before, self.for_good, self.lists = list(before), for_good, 0

    async def models(self, request: web.Request) -> web.Response:
        self.lists += 1
        if self.for_good:
            return self.before[-1]()
        return self.before.pop(0)() if self.before else await super().models(request)


def status(code: int) -> Answer:
    return lambda: web.Response(status=code, text="not now")


def no_model() -> web.Response:
    return web.json_response({"object": "list", "data": []})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "POLL_S", 0.02)


def fleet_of(tmp_path: Path, *urls: str, start_timeout_s: float = 20.0) -> TeacherFleet:
    teacher = TeacherConfig(endpoints=list(urls), model="m", start_timeout_s=start_timeout_s)
    config = Config(teachers={"t": teacher}, domains={"d": DomainConfig(teacher="t")})
    return TeacherFleet(config, tmp_path / "logs", host="", needed_tokens={"t": 5}, tokenized=[])


async def started(fleet: TeacherFleet, notes: list[str]) -> None:
    try:
        await fleet.start(Startup(lambda waiting: None, notes.append, notes.append))
    finally:
        await fleet.close()


def test_a_run_waits_for_a_server_that_is_still_loading(tmp_path: Path) -> None:
    """Nobody listens; then its gateway has nobody; then it lists nothing; then it is there."""
    server = Loading(status(503), status(502), no_model)
    server.port = free_port()
    url, notes = f"http://127.0.0.1:{server.port}", []

    async def scenario() -> None:
        starting = asyncio.ensure_future(started(fleet_of(tmp_path, url), notes))
        while not notes:
            await asyncio.sleep(0.01)
        assert not starting.done() and "Connect call failed" in notes[0]
        async with server:
            await asyncio.wait_for(starting, 10)

    asyncio.run(scenario())
    told = [
        n for n in notes if n.startswith(f"teacher t: waiting for its server {url} (0 of 20 s)")
    ]
    for text, why in zip(told, ("Connect", "503", "502", "it lists no model yet"), strict=True):
        assert why in text


def test_one_that_never_comes_is_named_after_its_time(tmp_path: Path) -> None:
    url, notes = f"http://127.0.0.1:{free_port()}", []
    with pytest.raises(RunError, match=rf"teacher 't': {url} was waited for 0.3 s \(start_timeout"):
        asyncio.run(started(fleet_of(tmp_path, url, start_timeout_s=0.3), notes))
    assert len([note for note in notes if "waiting for" in note]) == 1, "the same is not said again"


def another() -> web.Response:
    return web.json_response({"data": [{"id": "other", "max_model_len": 64}]})


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (another, r"serves \['other'\], expected 'm'"),
        (status(401), "answered 401: not now. It does not accept the token .* api_key_env"),
        (status(403), "answered 403: not now. It does not accept the token"),
        (status(404), "answered 404: not now. Is the server running, and is it vLLM"),
    ],
)
def test_a_wrong_answer_ends_it_at_once(tmp_path: Path, answer: Answer, says: str) -> None:
    """Also beside another server that is waited for."""
    wrong = Loading(answer, for_good=True)

    async def scenario() -> None:
        async with wrong:
            nobody = f"http://127.0.0.1:{free_port()}"
            await started(fleet_of(tmp_path, nobody, wrong.url), [])

    begin = time.monotonic()
    with pytest.raises(RunError, match=says):
        asyncio.run(scenario())
    assert time.monotonic() - begin < 5.0 and wrong.lists <= 2


def test_who_does_not_ask_for_waiting_has_an_answer_after_the_tries() -> None:
    async def scenario() -> None:
        async with Loading(status(503), for_good=True) as server:
            async with TeacherClient("t", [Endpoint(server.url, "m")], retries=1) as teacher:
                await teacher.probe()

    with pytest.raises(TeacherError, match="answered 503: not now, tried 2 times"):
        asyncio.run(scenario())


def test_the_probe_command_waits_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "run.yaml").write_text(
        f"name: x\nstudent: {{model: {BASE}}}\nrollout: {{max_response_tokens: 16}}\n"
        f"teachers: {{away: {{endpoints: ['{url}'], start_timeout_s: 0.3}}}}\n"
        "domains: {d: {teacher: away, prompts: {task: spell_backward}}}\n"
        "train: {steps: 1, prompts_per_step: 1}\n"
    )
    assert main(["teachers", "probe", str(tmp_path / "run.yaml")]) == 1
    said = capsys.readouterr()
    assert f"teacher away: waiting for its server {url} (0 of 0.3 s)" in said.err
    assert f"FAILED answers: teacher 'away': {url} was waited for 0.3 s" in said.out


def test_a_live_check_says_for_whom_it_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with FakeServer("m") as server:
            config = tmp_path / "run.yaml"
            config.write_text(
                f"name: x\nrun_dir: {tmp_path}\nstudent: {{model: {BASE}}}\n"
                "rollout: {max_response_tokens: 16}\n"
                f"teachers: {{t: {{endpoints: ['{server.url}']}}}}\n"
                "domains: {d: {teacher: t, prompts: {task: spell_backward}}}\n"
                "train: {steps: 10, prompts_per_step: 1}\n"
            )
            await asyncio.to_thread(main, ["check", str(config), "--live"])

    asyncio.run(scenario())
    said = capsys.readouterr()
    waiting = [line for line in (said.out + said.err).splitlines() if line.startswith("waiting")]
    assert waiting == ["waiting for teacher t"], said
