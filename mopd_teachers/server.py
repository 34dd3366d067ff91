"""One teacher server as a child process: start, wait until it is really ours and healthy, stop."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mopd_teachers.errors import TeacherError
from mopd_teachers.replica import key_problem

_POLL_S = 0.2
_WAIT_NOTE_S = 5.0
_STOP_GRACE_S = 10.0
_LOG_TAIL_LINES = 15
_ERRORS_SHOWN = 4
_ERROR_LINE = re.compile(r"(?:^|[\s\]])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .+)")
_RESERVED = {
    "model", "host", "port", "served_model_name", "dtype", "max_model_len",
    "kv_cache_memory_bytes", "tensor_parallel_size", "uds", "worker_extension_cls", "api_key",
}  # fmt: skip


@dataclass(frozen=True)
class ServerSpec:
    """What to serve and how. `engine_args` are further vLLM server arguments, by their long name
    with underscores or dashes (``{"max_num_seqs": 64, "enable_prefix_caching": False}``)."""

    name: str
    model_path: str
    dtype: str = "float32"
    max_model_len: int | None = None
    kv_cache_gib: float | None = 0.125
    """KV cache; None leaves vLLM to take its share of the memory."""
    threads: int = 1
    tensor_parallel_size: int = 1
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes any free port."""
    revision: str | None = None
    api_key: str | None = field(default=None, repr=False)
    """Bearer token that every request must carry; handed over in the environment, never in the
    command line or a log."""

    drain_s: float = 0.0
    """How long it may finish what is in flight when it is told to end."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise TeacherError(f"teacher {self.name!r}: port {self.port} is not within 0..65535")
        if self.api_key is not None and (not self.api_key or key_problem(self.api_key)):
            problem = key_problem(self.api_key) or "the bearer token is empty"
            raise TeacherError(f"teacher {self.name!r}: {problem}")
        clash = sorted(k for k in self.engine_args if k.replace("-", "_") in _RESERVED)
        if clash:
            raise TeacherError(
                f"teacher {self.name!r}: engine_args has {clash}, which have keys of their own in "
                "the teacher's configuration; set them there"
            )

    def vllm_arguments(self, served_name: str, port: int) -> list[str]:
        """The vLLM command line."""
        args: dict[str, Any] = {
            "model": self.model_path,
            "served_model_name": served_name,
            "host": self.host,
            "port": port,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "revision": self.revision,
            "tensor_parallel_size": self.tensor_parallel_size,
            "kv_cache_memory_bytes": (
                None if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30)
            ),
            # A model's own generation_config would change sampling behind the caller's back.
            "generation_config": "vllm",
            "disable_uvicorn_access_log": True,
            "disable_log_stats": True,
        }
        args |= {key.replace("-", "_"): value for key, value in self.engine_args.items()}
        return [text for key, value in args.items() for text in _argument(key, value)]


def _argument(key: str, value: Any) -> list[str]:
    flag = "--" + key.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, Mapping):
        return [flag, json.dumps(dict(value))]
    if isinstance(value, list | tuple):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]


def served_model(url: str, timeout_s: float = 2.0, api_key: str | None = None) -> dict[str, Any]:
    """The first entry of `url`/v1/models (its ``id`` is the served name).

    Raises OSError when nobody answers, TeacherError when the answer is not a model list.
    """
    # No proxy, whatever the environment says: the servers are on this machine or its network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    body = b""
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with opener.open(request, timeout=timeout_s) as reply:
            body = reply.read()
        card = json.loads(body)["data"][0]
        if not isinstance(card["id"], str):
            raise TypeError
    except (ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        raise TeacherError(
            f"{url}/v1/models answered {body[:200]!r}, which is not a vLLM model list"
        ) from error
    return dict(card)


class ServerProcess:
    """A vLLM server in a session of its own, which ends with this process.

    `served_name` is unique to this start (``NAME@nonce``): a server that answers with another
    name is not the one that was started, whatever port it sits on.
    """

    def __init__(self, spec: ServerSpec, log_path: Path, served_name: str | None = None) -> None:
        """`served_name`: for a server that others are to know by a name that stays."""
        self.spec = spec
        self.log_path = Path(log_path)
        self.served_name = served_name or f"{spec.name}@{secrets.token_hex(4)}"
        self.port = 0
        self._log_start = 0  # where this server's part of the log begins
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server; returns at once. Raises TeacherError if the port is taken.

        The port is bound here and the socket handed over, so nobody can come in between.
        """
        if self._process is not None:
            raise TeacherError(f"teacher {self.spec.name!r}: the server was started already")
        local = Path(self.spec.model_path)
        if local.is_absolute() or self.spec.model_path.startswith("."):
            if not (local / "config.json").is_file():
                raise TeacherError(
                    f"teacher {self.spec.name!r}: no checkpoint at {local} (config.json is "
                    "missing); give a Hugging Face model folder"
                )
        family = socket.AF_INET6 if ":" in self.spec.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            if self.spec.port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((self.spec.host, self.spec.port))
            except OSError as error:
                raise TeacherError(
                    f"teacher {self.spec.name!r}: cannot listen on "
                    f"{self.spec.host}:{self.spec.port} ({error.strerror}). If another program "
                    "holds the port, stop that or take another (0: any free one); the host must be "
                    "an address of this machine"
                ) from error
            self.port = sock.getsockname()[1]
            self._process = self._spawn(sock.fileno())

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "mopd_teachers.serve",
            "--mopd-fd", str(fd),
            "--mopd-parent-pid", str(os.getpid()),
            "--mopd-threads", str(self.spec.threads),
            "--mopd-drain-s", str(self.spec.drain_s),
        ]  # fmt: skip
        if Path(self.spec.model_path).is_dir():
            command.append("--mopd-local-model")
        command += self.spec.vllm_arguments(self.served_name, self.port)
        # The package must be found from any working directory (a Ray worker's, for one), and the
        # child must not take this process for its Ray driver or inherit a torchrun rank.
        package_root = str(Path(__file__).resolve().parent.parent)
        env = {k: v for k, v in os.environ.items() if k not in _FOREIGN_ENV}
        env["PYTHONPATH"] = os.pathsep.join([package_root, *filter(None, [env.get("PYTHONPATH")])])
        for key, value in MALLOC_ENV.items():
            env.setdefault(key, value)
        env.pop("VLLM_API_KEY", None)
        if self.spec.api_key:
            env["VLLM_API_KEY"] = self.spec.api_key
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=(fd,),
                start_new_session=True,
            )

    def wait_healthy(
        self, timeout_s: float, on_wait: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Block until the server answers under its own unique name; returns its model card.

        `on_wait` is told every few seconds what is being waited for. Raises TeacherError when
        the process dies (with the end of its log), when another server answers, or in time.
        """
        begin = time.monotonic()
        next_note = begin + _WAIT_NOTE_S
        while True:
            if self._process is None or self._process.poll() is not None:
                code = None if self._process is None else self._process.returncode
                self.stop()
                raise TeacherError(
                    f"teacher {self.spec.name!r}: the server for {self.spec.model_path} ended "
                    f"with exit code {code} before it was ready.\n{self.log_tail()}"
                )
            try:
                card = served_model(self.url, api_key=self.spec.api_key)
                break
            except OSError:
                pass  # not listening yet
            except TeacherError:
                self.stop()
                raise
            now = time.monotonic()
            if now - begin > timeout_s:
                self.stop()
                raise TeacherError(
                    f"teacher {self.spec.name!r}: the server for {self.spec.model_path} was not "
                    f"ready within {timeout_s:g} s; raise start_timeout_s if the model is large."
                    f"\n{self.log_tail()}"
                )
            if on_wait is not None and now >= next_note:
                next_note = now + _WAIT_NOTE_S
                on_wait(f"teacher {self.spec.name}: loading, {now - begin:.0f} s")
            time.sleep(_POLL_S)
        if card["id"] != self.served_name:
            self.stop()
            raise TeacherError(
                f"teacher {self.spec.name!r}: {self.url} serves {card['id']!r} instead of "
                f"{self.served_name!r}: another server holds the port; stop it or choose another"
            )
        return card

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """The errors that the server's log names and its end, with its path."""
        try:
            text = self.log_path.read_bytes()[self._log_start :].decode(errors="replace")
        except OSError:
            return f"(no log at {self.log_path})"
        rows = text.splitlines()
        # vLLM's last error is often "see root cause above"; the root may be hundreds of lines up.
        named = [match[1] for row in rows if (match := _ERROR_LINE.search(row))]
        errors = list(dict.fromkeys(named))[:_ERRORS_SHOWN]
        return "\n".join(
            [
                *(f"  {error}" for error in errors),
                f"The end of {self.log_path}:",
                *(f"  {row}" for row in rows[-lines:]),
            ]
        )

    def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """End the server and every process of its group; returns when none is left. It has
        `grace_s` to end by itself."""
        if self._process is None:
            return
        pid = self._process.pid
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass
        # The group outlives its leader: an engine process may still be there.
        deadline = time.monotonic() + _STOP_GRACE_S
        while _group_alive(pid):
            _kill_group(pid)
            self._process.poll()
            if time.monotonic() > deadline:
                raise TeacherError(
                    f"teacher {self.spec.name!r}: processes of group {pid} do not end; look for "
                    "them with `ps -o pid,pgid,stat,cmd` and end them by hand"
                )
            time.sleep(0.05)
        self._process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_FOREIGN_ENV = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "RAY_ADDRESS", "RAY_JOB_ID", "RAY_RAYLET_PID", "TRITON_INTERPRET",
    # Routes that call anything in the worker, and pickle between vLLM's processes.
    "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION",
}  # fmt: skip

# glibc would hand every activation of a few MB back to the kernel and fault it in again; keeping
# the pages takes 10 to 15 % off a scoring batch on CPU.
MALLOC_ENV = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(4 << 30)}


def _kill_group(pgid: int) -> None:
    try:
        os.killpg(pgid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _group_alive(pgid: int) -> bool:
    """Is any process of the group still running (zombies are not)?"""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        state, _ppid, pgrp = stat.rsplit(")", 1)[1].split()[:3]
        if int(pgrp) == pgid and state not in "ZX":
            return True
    return False
