"""What a process gives up before it runs code that nobody has read: memory past a bound, network.

Linux, x86-64 and arm64. Sockets other than Unix ones cannot be made afterwards, by this process or
any that it starts: a seccomp filter (see seccomp(2)) refuses them, which needs no privileges and
cannot be taken back. Memory is bounded for each process by RLIMIT_AS. Files are not confined.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Mapping

from mopd.errors import ConfigError

HARMLESS = frozenset(
    """
    PATH PYTHONPATH PYTHONHASHSEED PYTHONDONTWRITEBYTECODE LD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX
    HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP
    OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS CUDA_VISIBLE_DEVICES
    HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE
    """.split()
)
"""Variables that every program needs, or none is harmed by; so is what begins with LC_."""

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 13  # EACCES
_IO_URING_SETUP = 425
"""Its rings can make sockets without the system call that does; of both architectures."""
_ARCHITECTURES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""Machine -> (AUDIT_ARCH, number of socket(2))."""
_X32 = 0x40000000
"""System calls of x86-64's other interface begin here."""
_AF_UNIX = 1
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06


def allowed_environment(where: str, more: Iterable[str]) -> dict[str, str]:
    """This process's variables that are harmless, or named in `more`: teachers' tokens, and
    whatever else is secret, are not for code that nobody has read.

    ConfigError (starting with `where`) for a name in `more` that is not set.
    """
    have: Mapping[str, str] = os.environ
    if unset := [name for name in more if name not in have]:
        raise ConfigError(f"{where}.env: {', '.join(unset)} is not set; set it, or leave it out")
    passed = HARMLESS.union(more)
    return {n: value for n, value in have.items() if n in passed or n.startswith("LC_")}


def confine(where: str, memory_gib: float, network: bool) -> None:
    """Bound this process. ConfigError (starting with `where`) where the system cannot."""
    size = int(memory_gib * 2**30)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}.memory_gib: this system does not bound a process to {memory_gib:g} GiB "
            f"({error})"
        ) from error
    if not network and (problem := _refuse_sockets()):
        raise ConfigError(
            f"{where}: this system cannot keep a verifier from the network ({problem}); set "
            f"{where}.network to true if it may use it"
        )


def end_with_parent() -> None:
    """SIGKILL for this process when the one that started it is gone, whatever it runs then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _refuse_sockets() -> str | None:
    """Install the filter; what keeps it from being installed, or None."""
    if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES:
        return f"{sys.platform} on {platform.machine()}, expected Linux on x86-64 or arm64"
    architecture, socket_call = _ARCHITECTURES[platform.machine()]
    program = [
        _step(_LOAD, 4),  # the architecture of the call
        _step(_EQUAL, architecture, otherwise=6),  # 32-bit calls have other numbers: refused
        _step(_LOAD, 0),  # its number
        _step(_AT_LEAST, _X32, then=4),
        _step(_EQUAL, _IO_URING_SETUP, then=3),
        _step(_EQUAL, socket_call, otherwise=3),
        _step(_LOAD, 16),  # its first argument: the family
        _step(_EQUAL, _AF_UNIX, then=1),
        _step(_RETURN, _REFUSE),
        _step(_RETURN, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(program))

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    filled = Program(len(program), ctypes.cast(code, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filled), 0, 0
    ):
        return f"prctl: error {ctypes.get_errno()}"
    return None


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction of classic BPF; the jumps are over that many of the next ones."""
    return struct.pack("HBBI", code, then, otherwise, value)
