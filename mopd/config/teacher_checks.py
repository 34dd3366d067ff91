"""What of `teachers` cannot be meant. Reads at most the `config.json` of model folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from mopd.config.model_files import folder_problem, hub_cache_folder, is_hub_name, read_model_limits
from mopd.config.names import check_names
from mopd.config.schema import Config, TeacherConfig
from mopd.config.teachers import mixture_problems
from mopd.errors import ModelError

_STARTED_ONLY = (
    "revision dtype replicas tensor_parallel_size kv_cache_gib threads gpus max_restarts "
    "engine_args"
).split()

_OWN_ENGINE_ARGS = {
    "model": "model",
    "revision": "revision",
    "dtype": "dtype",
    "tensor_parallel_size": "tensor_parallel_size",
    "max_model_len": "max_model_len",
    "kv_cache_memory_bytes": "kv_cache_gib",
    "api_key": "api_key_env",
}

_SERVER_ARGS = ("host", "port", "served_model_name", "uds")


def check_teachers(config: Config) -> Iterator[str]:
    yield from check_names(config.teachers, "teachers", "teacher")
    defaults = TeacherConfig()
    for name, teacher in config.teachers.items():
        key = f"teachers.{name}"
        if teacher.mixture:
            yield from mixture_problems(config, name)
            continue
        if name == "self" and (teacher.endpoints or teacher.model != config.student.model):
            got = teacher.endpoints or teacher.model
            yield (
                f"{key} is the frozen student: its model is student.model "
                f"({config.student.model}), got {got}; leave model out, or take another name"
            )
        if not teacher.endpoints:
            if not teacher.model:
                yield (
                    f"{key} has neither model (a checkpoint to serve) nor endpoints "
                    "(URLs of vLLM servers already running)"
                )
            elif problem := _model_problem(teacher.model, teacher.revision):
                yield f"{key}.model: {problem}"
            else:
                yield from _server_size(teacher, key)
        else:
            for field in _STARTED_ONLY:
                if getattr(teacher, field) != getattr(defaults, field):
                    yield (
                        f"{key}.{field} would have no effect: its servers (endpoints) already "
                        "run; leave one of the two out"
                    )
            for url in teacher.endpoints:
                if problem := _url_problem(url):
                    yield f"{key}.endpoints: {_shown(url)!r} {problem}"
            bare = [url.rstrip("/") for url in teacher.endpoints]
            for url in sorted({url for url in bare if bare.count(url) > 1}):
                yield f"{key}.endpoints: {url} is listed twice"
        if teacher.hedge_after_s is not None and teacher.hedge_after_s >= teacher.timeout_s:
            yield (
                f"{key}.hedge_after_s ({teacher.hedge_after_s:g}) is not below timeout_s "
                f"({teacher.timeout_s:g}): the request would have ended before a second server "
                "is asked"
            )
        if teacher.hedge_quantile is not None and teacher.hedge_after_s is None:
            yield (
                f"{key}.hedge_quantile goes with hedge_after_s, the least that it waits; give both"
            )
        if problem := api_key_problem(teacher.api_key_env):
            yield f"{key}.api_key_env: {problem}"
        for arg in teacher.engine_args:
            plain = arg.lstrip("-").replace("-", "_")
            if plain in _OWN_ENGINE_ARGS:
                yield f"{key}.engine_args.{arg}: use {key}.{_OWN_ENGINE_ARGS[plain]} for that"
            elif plain in _SERVER_ARGS:
                yield f"{key}.engine_args.{arg}: chosen by mopd for each server; leave it out"


def _server_size(teacher: TeacherConfig, key: str) -> Iterator[str]:
    """What a server started for this teacher could not be."""
    assert teacher.model is not None
    folder = Path(teacher.model)
    if not folder.is_dir():
        cached = hub_cache_folder(teacher.model, teacher.revision)
        assert cached is not None  # `_model_problem` has said so
        folder = cached
    size, length = teacher.tensor_parallel_size, teacher.max_model_len
    if 0 < teacher.gpus < size:
        yield (
            f"{key}.tensor_parallel_size is {size}, more than {key}.gpus ({teacher.gpus:g}): a "
            "server spreads over that many GPUs; set gpus to the same number"
        )
    try:
        limits = read_model_limits(folder)
    except ModelError as error:
        yield f"{key}.model: {error}"
        return
    if length is not None and length > limits.max_position_embeddings and not limits.stretched:
        yield (
            f"{key}.max_model_len is {length}, more than {teacher.model} can read "
            f"({limits.max_position_embeddings} tokens, max_position_embeddings)"
        )
    if size > 0 and limits.num_heads % size:
        yield (
            f"{key}.tensor_parallel_size {size} does not divide the {limits.num_heads} heads of "
            f"{teacher.model}"
        )


def _model_problem(model: str, revision: str | None) -> str | None:
    if not is_hub_name(model):
        problem = folder_problem(model)
        if problem is None and revision is not None:
            return f"{model} is a folder, which has no revision ({revision!r}); leave it out"
        return problem
    cached = hub_cache_folder(model, revision)
    if cached is not None:
        return folder_problem(cached)
    at = "" if revision is None else f" --revision {revision}"
    return (
        f"{model!r} is no folder here (working directory {Path.cwd()}) and not in the Hugging Face "
        f"cache{' in that revision' if at else ''}, and a run fetches nothing by itself; fetch it "
        f"first: hf download {model}{at}"
    )


def _shown(url: str) -> str:
    """Without what stands before an @, which may be a password."""
    scheme, slashes, rest = url.partition("://")
    return f"{scheme}{slashes}...@{rest.rpartition('@')[2]}" if "@" in rest else url


def api_key_problem(variable: str | None) -> str | None:
    """What is wrong with the bearer token in this environment variable. Never shows the token."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        return (
            f"the environment variable {variable!r} is {'not set' if key is None else 'empty'}; "
            "expected the bearer token of the teacher's servers in it"
        )
    if not all("!" <= letter <= "~" for letter in key):  # as the client sees it, too
        return (
            f"the token in {variable!r} has a blank, a line break or a letter outside ASCII in it, "
            "which does not travel in an HTTP header; is there a line break at its end?"
        )
    return None


def _url_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port_ok = parts.port is None or parts.port > 0
    except ValueError as error:
        return f"is not a URL ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok:
        return "is not a URL such as http://10.0.0.7:8000"
    if "@" in parts.netloc:
        return "has a user or a password in it, which messages would show; use api_key_env"
    if url != url.strip() or parts.query or parts.fragment:
        return "should end after host, port and path"
    return None
