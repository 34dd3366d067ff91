"""The student's weights by vLLM's own weight-transfer API: NCCL, or CUDA IPC on a shared GPU.

vLLM drives it from the trainer: its trainer engines read a `WeightSource` and talk to the engines
through a client. Here are the source, and which trainer engine belongs to which transport. Tensors
go in packed buckets, so that no rank holds the model a second time. What arrived is proven as with
every other transport (`RolloutEngine.update_weights`).

Not run on a GPU yet: the tests hold the source and the receiving side, on a CPU, with the wire
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

BUCKET_BYTES = 256 * 2**20


class WholeWeights(Protocol):
    """`mopd.student.publishing.Publisher`."""

    manifest: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

    def stream(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]: ...

    def everywhere(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]: ...


class StudentSource(WeightSource):
    """Whole tensors, put together from the ranks' parts as vLLM asks for them.

    Every rank iterates: that is a collective. With NCCL rank 0 alone sends and gets the tensors;
    with IPC each engine reads from the rank on its own GPU, so that every rank gets them.
    """

    def __init__(self, weights: WholeWeights, *, everywhere: bool) -> None:
        self._weights, self._everywhere = weights, everywhere

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, *what) for name, what in self._weights.manifest.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._everywhere:
            return self._weights.everywhere(BUCKET_BYTES)
        return self._weights.stream(BUCKET_BYTES)


def open_sender(
    transport: str,
    weights: WholeWeights,
    client: VLLMWeightSyncClient,
    *,
    rank: int,
    host: str,
    port: int,
    engines: int,
) -> TrainerWeightTransferEngine[Any]:
    """vLLM's trainer side of `transport` (`nccl` or `ipc`), connected. Every rank must call.

    Its `send_weights()`, called on every rank, makes one whole update in all engines. `host` and
    `port`: where rank 0 meets them; `engines`: how many, one GPU each.
    """
    if transport == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        return NCCLTrainerWeightTransferEngine.trainer_init(
            NCCLTrainerInitInfo(
                master_address=host,
                master_port=port,
                world_size=1 + engines,
                packed=True,
                packed_buffer_size_bytes=BUCKET_BYTES,
                rank=rank,
            ),
            client=client,
            source=StudentSource(weights, everywhere=False),
        )
    assert transport == "ipc", transport
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCTrainerInitInfo,
        IPCTrainerWeightTransferEngine,
    )

    return IPCTrainerWeightTransferEngine.trainer_init(
        IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=BUCKET_BYTES, rank=rank),
        client=client,
        source=StudentSource(weights, everywhere=True),
    )
