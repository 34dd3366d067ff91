"""vLLM's OpenAI-compatible server with one more route, started quickly: `python -m
mopd_teachers.serve VLLM-ARGUMENTS`.

It is vLLM's own application (all its routes), put together from vLLM's public parts, plus
`/mopd/score` (see `score_route`). Three things differ from `python -m vllm.entrypoints...`:

- On CPU with one rank the engine core is *forked* from this process, which has vLLM imported
  already, and holds the only worker itself. The stock layout starts two further interpreters
  that import vLLM again (measured here: 23 s, 27 s of CPU and 1.6 GB against 10 s, 10 s and
  0.9 GB). On an accelerator the layout is vLLM's own.
- It can take over a listening socket that its parent has bound (`--mopd-fd`), so that two
  servers can never race for a port.
- It ends when its parent does (`--mopd-parent-pid`), even if the parent is SIGKILLed.

Set before vLLM or torch is imported: OMP_NUM_THREADS (`--mopd-threads`), VLLM_NO_USAGE_STATS,
HF_HUB_OFFLINE when `--model` is a folder.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

_PARENT_POLL_S = 0.5
_GRACE_S = 5.0
_BATCHED_TOKENS = 4096
_CPU_BLOCK_TOKENS = 128
_LAST_ANSWER_S = 0.5  # for the last bytes to leave
_PR_SET_PDEATHSIG = 1
_SCHEDULER = "mopd_teachers.prefix_scheduler.scheduler"
_COMPILE_OPTIONS = {"--enforce-eager", "--no-enforce-eager", "--compilation-config", "-O", "-cc"}


def _parse_own(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take our own arguments out of `argv`; the rest is vLLM's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--mopd-fd", type=int, default=None)
    parser.add_argument("--mopd-parent-pid", type=int, default=None)
    parser.add_argument("--mopd-threads", type=int, default=None)
    parser.add_argument("--mopd-drain-s", type=float, default=0.0)
    parser.add_argument("--mopd-local-model", action="store_true")
    return parser.parse_known_args(list(argv))


def watch_parent(parent_pid: int) -> None:
    """End this process group within about a second of the parent's death.

    Polling the parent's pid is per process; PR_SET_PDEATHSIG is per *thread*, and would end the
    server as soon as the thread that started it (of a pool, or of a Ray worker) ends.
    """

    def loop() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        if os.getpgrp() == os.getpid():  # our own group: take the engine processes along
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=loop, name="mopd-parent-watch", daemon=True).start()


def _die_with_parent() -> None:
    """In a forked child: SIGKILL when the process that forked it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _use_one_engine_process(vllm_args: list[str]) -> None:
    """CPU, one rank: one engine process, forked, with the worker inside (see the module text)."""
    import multiprocessing

    import vllm.v1.engine.utils as engine_utils

    # On CPU vLLM turns 'uni' into 'mp' unless this says that nobody forks OpenMP threads; with
    # AsyncLLM it changes nothing else. No OpenMP pool exists yet when the fork happens.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    vllm_args += ["--distributed-executor-backend", "uni"]
    # vLLM forces 'spawn' on CPU through an environment variable; only this caller is to fork.
    engine_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    os.register_at_fork(after_in_child=_die_with_parent)


def _run_eagerly(vllm_args: list[str]) -> None:
    """CPU, unless the caller says otherwise: no compilation, which takes longer than it saves.

    Dynamo goes too: one helper of vLLM's (the rank of a token in the vocabulary) is compiled
    whatever `--enforce-eager` says, which costs the first scoring request 4 s.
    """
    if not any(a.split("=")[0] in _COMPILE_OPTIONS for a in vllm_args):
        vllm_args.append("--enforce-eager")
    if "--enforce-eager" in vllm_args:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _share_prefixes(vllm_args: list[str], cpu: bool) -> None:
    """Let scores begin after what the prefix cache holds (see `prefix_scheduler`), unless the
    caller schedules otherwise. Where no context fills a block of the cache there is nothing to
    find, and keeping its books costs some per cent."""
    context = _option(vllm_args, "--max-model-len", "")
    block = _option(vllm_args, "--block-size", str(_CPU_BLOCK_TOKENS))
    if cpu and context.isdigit() and block.isdigit() and int(context) <= int(block):
        if not {"--enable-prefix-caching", "--no-enable-prefix-caching"} & set(vllm_args):
            vllm_args.append("--no-enable-prefix-caching")
    if not _option(vllm_args, "--scheduler-cls", ""):
        vllm_args += ["--scheduler-cls", _SCHEDULER]


def _prefix_cache(config: Any) -> tuple[int, int]:
    """Tokens of a block of the prefix cache and of all of it, as far as scores may come from there;
    zeros where they may not. What another machine's cache gives is not bounded by our scheduler."""
    cache = config.cache_config
    ours = config.scheduler_config.scheduler_cls == _SCHEDULER
    if not ours or not cache.enable_prefix_caching or config.kv_transfer_config is not None:
        return 0, 0
    return cache.block_size, cache.block_size * (cache.num_gpu_blocks or 0)


def _option(args: Sequence[str], name: str, default: str) -> str:
    """The value of `name`, which vLLM also takes with underscores."""
    for i, arg in enumerate(args):
        given, equals, value = arg.partition("=")
        if given.replace("_", "-") == name and (equals or i + 1 < len(args)):
            return value if equals else args[i + 1]
    return default


async def _drain_on_sigterm(door: Any, app: Any, drain_s: float) -> None:
    """SIGTERM: take no more, finish what is in flight on any route for up to `drain_s`, then end as
    vLLM does.

    vLLM installs handlers of its own when its HTTP server starts; SIGINT stays with it.
    """
    while not getattr(getattr(app.state, "server", None), "started", False):
        await asyncio.sleep(0.05)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    await asked.wait()
    door.closing = True
    deadline = time.monotonic() + drain_s
    while door.in_flight and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    if drain_s:
        await asyncio.sleep(_LAST_ANSWER_S)
    os.kill(os.getpid(), signal.SIGINT)


async def _run(args: Any, sock: socket.socket | None, drain_s: float) -> None:
    """vLLM's `run_server`, with our route added to the app and, if given, our socket."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server

    from mopd_teachers.guard import Door, Guard
    from mopd_teachers.score_route import (
        Scorer,
        add_score_route,
        install_array_logprobs,
        require_scoring_workers,
    )

    install_array_logprobs()
    if sock is None:
        _, sock = setup_server(args, reuse_port=False)
    try:
        async with build_async_engine_client(args) as engine:
            tasks = await engine.get_supported_tasks()
            app = build_app(args, tasks, engine.model_config)
            await init_app_state(engine, app.state, args, tasks)
            await require_scoring_workers(engine)
            served = args.served_model_name
            keys = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
            block, tokens = _prefix_cache(engine.vllm_config)
            scorer = Scorer(
                engine,
                served[0] if served else args.model,
                prefix_block=block,
                prefix_tokens=tokens,
            )
            add_score_route(app, scorer)
            door = Door(keys)
            # vLLM has put its own middleware together already; ours comes before all of it.
            app.middleware_stack = Guard(app.middleware_stack or app.build_middleware_stack(), door)
            draining = asyncio.create_task(_drain_on_sigterm(door, app, drain_s))
            shutdown = await serve_http(
                app,
                sock=sock,
                host=args.host,
                port=args.port,
                log_level=args.uvicorn_log_level,
                access_log=not args.disable_uvicorn_access_log,
                timeout_keep_alive=60,
            )
            draining.cancel()
        await shutdown
    finally:
        sock.close()


def main(argv: Sequence[str] | None = None) -> None:
    own, vllm_args = _parse_own(sys.argv[1:] if argv is None else argv)
    if own.mopd_parent_pid is not None:
        watch_parent(own.mopd_parent_pid)
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if own.mopd_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(own.mopd_threads)
    if own.mopd_local_model:
        os.environ["HF_HUB_OFFLINE"] = "1"

    # Until uvicorn installs its own handlers SIGTERM must still end the start-up.
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)

    import uvloop
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    backend = _option(vllm_args, "--distributed-executor-backend", "")
    ranks = int(_option(vllm_args, "--tensor-parallel-size", "1"))
    ranks *= int(_option(vllm_args, "--pipeline-parallel-size", "1"))
    _share_prefixes(vllm_args, current_platform.is_cpu())
    if current_platform.is_cpu():
        _run_eagerly(vllm_args)
        if not _option(vllm_args, "--max-num-batched-tokens", ""):
            # What vLLM takes offline: half of it, its default for servers, suits short latencies.
            vllm_args += ["--max-num-batched-tokens", str(_BATCHED_TOKENS)]
        if ranks == 1 and not backend:
            _use_one_engine_process(vllm_args)

    # Scores are gathered in the worker, by a hook in this model runner (the one of CPUs).
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    vllm_args += ["--worker-extension-cls", "mopd_teachers.scoring_worker.ScoringWorker"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(vllm_args)
    validate_parsed_serve_args(args)
    sock = None if own.mopd_fd is None else socket.socket(fileno=own.mopd_fd)
    try:
        uvloop.run(_run(args, sock, own.mopd_drain_s))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
