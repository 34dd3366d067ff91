"""Who computes: the torch or the Triton module of a family of kernels, by device and configuration.

Imports triton only when the Triton backend is asked for.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any, Literal, cast

from mopd.errors import ConfigError
from mopd.kernels.autograd import Backend

logger = logging.getLogger(__name__)

BackendName = Literal["auto", "triton", "torch"]
Family = Literal["rows", "buckets", "pairs"]

_MODULES: dict[Family, tuple[str, str]] = {
    "rows": ("torch_rows", "gathered_logprob"),
    "buckets": ("torch_buckets", "triton_buckets"),
    "pairs": ("torch_pairs", "triton_pairs"),
}
"""Family -> its torch and its Triton module. rows: gathered logprobs and the tiles of a fused head;
buckets: top-k with a tail; pairs: two distributions, for divergences over the whole vocabulary."""


@functools.cache
def resolve(backend: str, device_type: str) -> Literal["torch", "triton"]:
    """The backend's name on `device_type`; logs the choice the first time it is made.

    Raises ConfigError for an unknown name, and for Triton where it cannot run: no fallback.
    """
    if backend not in ("auto", "triton", "torch"):
        raise ConfigError(f"student.kernel is {backend!r}; expected 'auto', 'triton' or 'torch'.")
    name = cast(Literal["torch", "triton"], backend)
    if backend == "auto":
        name = "triton" if device_type == "cuda" else "torch"
    if name == "triton":
        _check_triton(device_type)
    logger.info("logprob kernel: %s on %s (student.kernel: %s)", name, device_type, backend)
    return name


@functools.cache
def backend_module(family: Family, backend: str, device_type: str) -> Any:
    """The module that computes `family` on `device_type`; errors as `resolve`."""
    torch_module, triton_module = _MODULES[family]
    chosen = triton_module if resolve(backend, device_type) == "triton" else torch_module
    return importlib.import_module(f"mopd.kernels.{chosen}")


def choose_backend(backend: str, device_type: str) -> Backend:
    """`backend_module` of the row kernels."""
    return cast(Backend, backend_module("rows", backend, device_type))


def forget_choices() -> None:
    """For tests that change the environment the choice depends on."""
    resolve.cache_clear()
    backend_module.cache_clear()


def _check_triton(device_type: str) -> None:
    wants_interpreter = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y")
    if device_type != "cuda" and not wants_interpreter:
        raise ConfigError(
            f"student.kernel: triton was asked for on {device_type}; Triton compiles for CUDA "
            "only. Set student.kernel to torch (or auto), or TRITON_INTERPRET=1 before Python "
            "starts to run the kernel, very slowly, in Triton's interpreter."
        )
    try:
        from mopd.kernels import gathered_logprob, triton_common  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the Triton logprob kernel was asked for on {device_type}, and triton does not "
            f"import ({error}). Install triton, or set student.kernel: torch."
        ) from error
    if device_type != "cuda" and not triton_common.interpreted():
        raise ConfigError(
            "TRITON_INTERPRET=1 was set after triton had been imported, which is too late; set it "
            "in the environment before Python starts, or set student.kernel: torch."
        )
