"""Everything Megatron-Core 0.16.1 needs changed to run where there is no accelerator.

Megatron assumes CUDA in three ways: it asks ``torch.cuda`` for devices and streams, it writes
``device="cuda"`` into factory calls, and it compares ``Tensor.type()`` with CUDA type names.
`install` mends the first for the life of the process; `pretend_cuda` mends the other two, and only
around the calls that need it (building the optimizer, gradient norms), because a function mode
costs Python time on every torch call inside it. On a machine with CUDA nothing here does anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mopd.student.local_ops import rotate

_installed = False


def on_cpu() -> bool:
    """True where the student runs without an accelerator."""
    return not torch.cuda.is_available()


class _Stream:
    """A stream that has always finished. A class, not a function: transformers annotates
    ``torch.cuda.Stream | None``, which only works on types."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        # Megatron skips its side-stream bookkeeping when two streams are the same one.
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...


class _Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...


def _cpu_instead_of_cuda(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with a CUDA `device` replaced by the CPU."""
    device = kwargs.get("device")
    if device is not None and str(device).startswith("cuda"):
        return {**kwargs, "device": "cpu"}
    return kwargs


class _PretendCuda(TorchFunctionMode):
    """CUDA factory calls make CPU tensors; ``Tensor.type()`` answers with the CUDA name."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers sort and assert parameters by 'torch.cuda.FloatTensor' etc.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **_cpu_instead_of_cuda(kwargs or {}))


def pretend_cuda() -> contextlib.AbstractContextManager[Any]:
    """Context in which ``device="cuda"`` means the CPU; does nothing where CUDA exists."""
    return _PretendCuda() if on_cpu() else contextlib.nullcontext()


class _TorchForSchedules(ModuleType):
    """`torch` as the pipeline schedules see it: one ``torch.zeros(..., device="cuda")`` per step
    is all that stands in their way, and a function mode around the whole forward and backward
    would slow every operation for it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **_cpu_instead_of_cuda(kwargs))


def _split_sizes_for_gloo(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stand-in for Megatron's ``maybe_move_tensor_to_cpu``, which converts split sizes only when
    they come from a GPU, while ``all_to_all_single`` takes numbers and never a tensor."""
    return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather_for_gloo(
    input_: torch.Tensor,
    group: Any,
    output_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Stand-in for Megatron's gather along the first dimension: gloo wants equal sizes, and with
    expert tensor parallelism every rank has as many tokens as were routed to it."""
    size = group.size()
    if size == 1:
        return input_
    equal = [input_.shape[0]] * size
    sizes = [int(n) for n in (equal if output_split_sizes is None else output_split_sizes)]
    longest = max(sizes)
    padded = input_.new_zeros(longest, *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in range(size)]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])


def _reduce_scatter_for_gloo(
    input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
) -> torch.Tensor:
    """Its counterpart: the sum over the ranks, of which each keeps its own rows."""
    size, rank = group.size(), group.rank()
    if size == 1:
        return input_
    equal = [input_.shape[0] // size] * size
    sizes = [int(n) for n in (equal if input_split_sizes is None else input_split_sizes)]
    total = input_.contiguous().clone()
    torch.distributed.all_reduce(total, group=group)
    return total[sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def _rotate(
    t: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> torch.Tensor:
    """Stand-in for Megatron's unfused rotary embedding, with a quarter of its passes over memory.

    `t`: [S, ..., D], pairs (i, i + D/2), or (2i, 2i + 1) in latent attention; `freqs`: [S, ..., D],
    the angles, the same in both halves. The products and sums are Megatron's.
    """
    assert not rotary_interleaved
    cos, sin = _cos_sin(freqs, None, mscale, t.dtype)
    return rotate(t, cos, sin, interleaved=multi_latent_attention)


def _rotate_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> torch.Tensor:
    """The same for sequences that lie end to end: `t` [T, H, D], `cu_seqlens` where each starts."""
    assert not rotary_interleaved
    cos, sin = _cos_sin(freqs, cu_seqlens, mscale, t.dtype)
    turned = rotate(t.unsqueeze(1), cos, sin, interleaved=multi_latent_attention)
    return turned.squeeze(1)


def _cos_sin(
    freqs: torch.Tensor, cu_seqlens: torch.Tensor | None, mscale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, ..., D/2] each, kept with `freqs`: every layer of a forward asks for the same, twice."""
    kept = getattr(freqs, "_mopd_cos_sin", None)
    if kept is not None and kept[0] is cu_seqlens and kept[1] == (mscale, dtype):
        return kept[2]  # type: ignore[no-any-return]
    angle = freqs[..., : freqs.shape[-1] // 2]
    cos, sin = (angle.cos() * mscale).to(dtype), (angle.sin() * mscale).to(dtype)
    if cu_seqlens is not None:
        starts = cu_seqlens[:-1].long()
        place = torch.arange(int(cu_seqlens[-1]))
        place -= starts.repeat_interleave(cu_seqlens.diff().long())
        cos, sin = cos.index_select(0, place), sin.index_select(0, place)
    freqs._mopd_cos_sin = (cu_seqlens, (mscale, dtype), (cos, sin))  # type: ignore[attr-defined]
    return cos, sin


def _sort_chunks(
    input: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_idxs: torch.Tensor,
    probs: torch.Tensor | None = None,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stand-in for Megatron's sorting of chunks, which copies everything even where they are in
    order, as they are without expert parallelism."""
    order = sorted_idxs.tolist()
    if order == list(range(len(order))):
        return input, probs
    sizes = split_sizes.tolist()

    def sort(x: torch.Tensor) -> torch.Tensor:
        chunks = x.split(sizes)
        return torch.cat([chunks[i] for i in order])

    return sort(input), None if probs is None else sort(probs)


def install() -> bool:
    """Mend this process if it has no accelerator; returns whether it is (now) mended.

    Call before anything of Megatron is built. Calling again does nothing.
    """
    global _installed
    _mend_missing_transformer_engine()
    if not on_cpu():
        return False
    if _installed:
        return True
    cpu, stream = torch.device("cpu"), _Stream()
    cuda: Any = torch.cuda
    # Used as `device=torch.cuda.current_device()` all over Megatron.
    cuda.current_device = lambda: cpu
    # Streams and events order GPU work against the host; there is nothing to order here.
    cuda.synchronize = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: stream
    cuda.default_stream = lambda *_, **__: stream
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.Stream = _Stream
    cuda.Event = _Event
    # Tied embeddings are moved with `.cuda()` before they are summed over pipeline stages.
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self

    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

    # Recomputed layers put the generators back; torch's own is handled beside this one.
    random._get_cuda_rng_state = lambda *_, **__: None
    random._set_cuda_rng_state = lambda *_, **__: None
    mappings._gather_along_first_dim = _gather_for_gloo
    mappings._reduce_scatter_along_first_dim = _reduce_scatter_for_gloo
    rope_utils._apply_rotary_pos_emb_bshd = _rotate
    rope_utils._apply_rotary_pos_emb_thd = _rotate_packed
    schedules.torch = _TorchForSchedules("torch")
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_for_gloo
    token_dispatcher.sort_chunks_by_idxs = _sort_chunks
    _installed = True
    return True


def _mend_missing_transformer_engine() -> None:
    """What megatron-core 0.16.1 gets wrong on any platform that lacks Transformer Engine.

    It reads ``te_general_gemm`` even when importing it failed (its own code takes None for 'not
    there'), and latent attention believes the engine is there and asks for instances of None.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


@contextlib.contextmanager
def quiet_build() -> Iterator[None]:
    """Silence what Megatron warns about on every build without Transformer Engine or Apex."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
