"""Code of a user in its process: no network, bounded memory, a deadline, and nothing but JSON."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mopd.config.schema import DomainConfig, VerifierConfig
from mopd.data.verifier_process import LastingVerifier, NoVerdict, VerifierProcess
from mopd.data.verifiers import VerifierError
from mopd.errors import ConfigError
from mopd.types import Prompt

MODULE = """
import ctypes, os, pickle, platform, socket, subprocess, sys, time
from multiprocessing.connection import Connection

class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)

def judge(prompt, answer):
    if answer == "tcp":
        socket.create_connection(("127.0.0.1", int(prompt.answer)), timeout=2)
    if answer == "udp6":
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    if answer == "raw call":
        number = {"x86_64": 41, "aarch64": 198}[platform.machine()]
        assert ctypes.CDLL(None, use_errno=True).syscall(number, 2, 1, 0) == -1
        raise OSError(ctypes.get_errno(), "refused")
    if answer == "by a child":
        code = [sys.executable, "-c", "import socket; socket.socket()"]
        return subprocess.run(code, stderr=subprocess.DEVNULL).returncode == 0
    if answer == "unix":
        a, b = socket.socketpair()
        a.send(b"x")
        return b.recv(1) == b"x"
    if answer == "memory":
        return len(bytearray(3 << 30)) > 0
    if answer == "hang":
        subprocess.Popen(["sleep", "613.7"])
        time.sleep(600)
    if answer == "forge":
        Connection(int(sys.argv[1])).send(Bomb())
    if answer == "ahead":
        Connection(int(sys.argv[1])).send_bytes(b'{"number": 99, "correct": true, "score": 1}')
    if answer.startswith("env "):
        return os.environ.get(answer[4:]) == prompt.answer
    return answer == "right"
"""


@pytest.fixture
def domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DomainConfig:
    name = f"user_process_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    verifier = VerifierConfig(target=f"{name}:judge", timeout_s=20.0, memory_gib=2.0)
    return DomainConfig(teacher="t", verifier=verifier)


@pytest.fixture
def listening() -> Iterator[Prompt]:
    """A prompt whose answer is a port at which somebody listens."""
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield Prompt("d/0", "d", "?", (1,), answer=str(server.getsockname()[1]))


def test_it_has_no_network_unless_told_otherwise(domain: DomainConfig, listening: Prompt) -> None:
    with VerifierProcess("d", domain) as judge:
        for answer in ("tcp", "udp6", "raw call"):
            with pytest.raises(VerifierError, match=r"PermissionError.*13"):
                judge(listening, answer)
        assert not judge(listening, "by a child").correct
        assert judge(listening, "unix").correct and judge(listening, "right").correct
    assert domain.verifier is not None
    domain.verifier.network = True
    with VerifierProcess("d", domain) as judge:
        assert not judge(listening, "tcp").correct  # it came through
        assert judge(listening, "by a child").correct


def test_it_sees_no_secrets_but_what_it_is_given(
    domain: DomainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MATH_TEACHER", "JUDGE_DATA"):
        monkeypatch.setenv(name, "s3cret")
    prompt = Prompt("d/0", "d", "?", (1,), answer="s3cret")
    assert domain.verifier is not None
    domain.verifier.env = ["JUDGE_DATA"]
    with VerifierProcess("d", domain) as judge:
        assert not judge(prompt, "env MATH_TEACHER").correct
        assert judge(prompt, "env JUDGE_DATA").correct
    domain.verifier.env = ["JUDGE_DATA", "NOT_SET_HERE"]
    with pytest.raises(ConfigError, match=r"domains.d.verifier.env: NOT_SET_HERE is not set"):
        VerifierProcess("d", domain)


def test_its_memory_is_bounded(domain: DomainConfig, listening: Prompt) -> None:
    with VerifierProcess("d", domain) as judge:
        with pytest.raises(VerifierError, match="MemoryError"):
            judge(listening, "memory")
        assert judge(listening, "right").correct


def test_it_is_ended_with_what_it_started_and_the_next_answer_has_another(
    domain: DomainConfig, listening: Prompt
) -> None:
    assert domain.verifier is not None
    domain.verifier.timeout_s = 1.0
    judge = LastingVerifier("d", domain)
    before = {p.pid for p in psutil.process_iter()}
    with pytest.raises(NoVerdict, match=r"no answer for d/0.*within 1 s") as missed:
        judge(listening, "hang")
    assert missed.value.cause == "no verdict after 1 s"

    def sleeping() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                new = process.pid not in before and process.status() != psutil.STATUS_ZOMBIE
                if new and process.cmdline()[-2:] == ["sleep", "613.7"]:
                    found.append(process)
        return found

    # It has been killed; on a loaded machine it is there for a moment more.
    deadline = time.monotonic() + 30
    while sleeping() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleeping()
    assert judge(listening, "right").correct and not judge(listening, "wrong").correct
    assert judge._process is not None
    judge._process.close()


@pytest.mark.parametrize("answer", ["forge", "ahead"])
def test_what_is_no_verdict_is_not_taken_for_one(
    domain: DomainConfig, listening: Prompt, answer: str, tmp_path: Path
) -> None:
    """A pickle is not unpacked; an answer to another question is none to this one."""
    with VerifierProcess("d", domain) as judge, pytest.raises(NoVerdict, match="no verdict"):
        judge(listening, answer)
    assert not (tmp_path / "exploded").exists()


PARENT = """
import sys, time
from mopd.config.schema import DomainConfig, VerifierConfig
from mopd.data.verifier_process import VerifierProcess
from mopd.types import Prompt
config = VerifierConfig(target=sys.argv[1], timeout_s=60.0)
process = VerifierProcess("d", DomainConfig(teacher="t", verifier=config))
print(process._process.pid, flush=True)
process(Prompt("d/0", "d", "?", (1,)), "hang")
"""


def test_it_ends_with_the_process_that_asked(domain: DomainConfig) -> None:
    assert domain.verifier is not None and domain.verifier.target is not None
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, domain.verifier.target], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.5)  # it is in the middle of an answer
    parent.kill()
    parent.wait()
    child.wait(10)
    assert not child.is_running()


def test_a_system_that_cannot_refuse_sockets_says_so(
    domain: DomainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mopd.data import confinement

    monkeypatch.setattr(confinement.platform, "machine", lambda: "riscv64")
    assert "riscv64" in (confinement._refuse_sockets() or "")
    monkeypatch.setattr(confinement, "_refuse_sockets", lambda: "no such call")
    monkeypatch.setattr(confinement.resource, "setrlimit", lambda *_: None)
    with pytest.raises(ConfigError, match=r"domains\.d\.verifier: .*\.network to true"):
        confinement.confine("domains.d.verifier", 1.0, network=False)
    confinement.confine("domains.d.verifier", 1.0, network=True)
