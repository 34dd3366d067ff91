"""The student's weights on their way to the rollout engines, again and again.

Three ways: into a file in memory that every rank writes its own part of (`share`), streamed through
rank 0 into a file (`write`), or handed out whole one by one (`stream`). With any of them goes a
fingerprint that the ranks make of the weights they train, not of what was written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mopd.errors import ModelError
from mopd.kernels.word_sums import word_sum
from mopd.student.files import Manifest, safetensors_header
from mopd.student.weights import BUCKET_BYTES, ShardedWeights


class Publisher:
    """Whole tensors of the ranks' parameters. Every method is collective."""

    def __init__(self, weights: ShardedWeights, tensors: Mapping[str, Tensor]) -> None:
        """`tensors`: this rank's, by Megatron name. They must stay where they are in memory:
        later calls read the same storage."""
        self._weights, self._tensors = weights, dict(tensors)
        self._plan = weights.plan(tensors)
        self.manifest: Manifest = self._plan.manifest()
        """Hugging Face name -> (dtype, shape), in the order of `stream`."""
        meta = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (dtype, shape) in self.manifest.items()
        }
        self._own = [(name, own) for name, own, _ in self._views(meta.__getitem__)]
        self._shared: _SharedFile | None = None

    def word_sums(self) -> dict[str, int]:
        """Hugging Face name -> `word_sum` of its weights, on every rank."""
        place = {name: i for i, name in enumerate(self.manifest)}
        device = next(iter(self._tensors.values())).device
        sums = torch.zeros(len(place), dtype=torch.int64, device=device)
        if self._own:
            own = torch.stack([word_sum(tensor) for _, tensor in self._own])
            places = torch.tensor([place[name] for name, _ in self._own], device=device)
            sums.index_add_(0, places, own)
        dist.all_reduce(sums)  # modulo 2^64, as the sums are
        return dict(zip(self.manifest, sums.tolist(), strict=True))

    def share(self, path: Path) -> dict[str, int]:
        """Write all weights into the file `path`, which lies in memory that every rank (and every
        engine) sees; returns `word_sums`, which no rank gets before all have written.

        The file is made at the first call and written in place at later ones: it is for readers
        that are told when. Raises ModelError, on every rank, where one of them cannot use it.
        """
        if self._shared is None or self._shared.path != path:
            self._shared = _SharedFile(path, self.manifest, self._views)
        self._shared.write()
        return self.word_sums()

    def write(self, path: Path) -> dict[str, int]:
        """Write all weights into a new file, bucket by bucket through rank 0; it appears whole or
        not at all. Returns `word_sums`. Raises ModelError where it cannot be written."""
        # Not durable: it is read once and removed.
        self._weights.write(self._tensors, path, durable=False)
        return self.word_sums()

    def stream(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor on the ranks' device) on rank 0, nothing elsewhere; in
        `manifest`'s order.

        Every rank must exhaust it. Rank 0 holds a bucket of whole tensors at a time.
        """
        return self._weights.stream(self._tensors, bucket_bytes, to_cpu=False)

    def everywhere(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """The same on every rank: for engines that share each rank's device."""
        device = next(iter(self._tensors.values())).device
        for names, found in self._weights.buckets(self._tensors, bucket_bytes, to_cpu=False):
            for name in names:
                dtype, shape = self.manifest[name]
                tensor = next(found, None)  # on rank 0
                if tensor is None:
                    tensor = torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(tensor, src=0)
                yield name, tensor

    def _views(self, full: Callable[[str], Tensor]) -> list[tuple[str, Tensor, Tensor]]:
        """(name, view of this rank's parameter, view of the whole tensor) of everything that this
        rank speaks for."""
        speaks = {part.key for part in self._plan.owned[dist.get_rank()]}
        views = []
        for name, part in self._plan.mine.items():
            if part.key not in speaks:
                continue
            whole = [full(hf) for hf in part.hf]
            pairs = part.packing.pairs(self._tensors[name].detach(), whole, *part.shard)
            views += [(hf, own, place) for hf, (own, place) in zip(part.hf, pairs, strict=True)]
        return views


class _SharedFile:
    """A safetensors file that all ranks have mapped into their memory."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        views: Callable[[Callable[[str], Tensor]], list[tuple[str, Tensor, Tensor]]],
    ) -> None:
        # Wide elements first, or one could start where its type cannot be read in place.
        ordered = dict(sorted(manifest.items(), key=lambda item: -item[1][0].itemsize))
        header, starts = safetensors_header(ordered)
        self.path = path
        failure: str | None = None
        if dist.get_rank() == 0:
            try:
                _create(path, header, starts[-1])
            except OSError as error:
                failure = str(error)
        self._agree(failure)
        memory = torch.empty(0)
        try:
            memory = torch.from_file(str(path), shared=True, size=starts[-1], dtype=torch.uint8)
        except RuntimeError as error:
            failure = f"rank {dist.get_rank()}: {error}"
        self._agree(failure)
        whole = {
            name: memory[start:stop].view(dtype).view(shape)
            for (name, (dtype, shape)), start, stop in zip(
                ordered.items(), starts, starts[1:], strict=False
            )
        }
        found = views(whole.__getitem__)
        self._own, self._places = [own for _, own, _ in found], [place for _, _, place in found]

    def write(self) -> None:
        if self._own:
            torch._foreach_copy_(self._places, self._own)

    def _agree(self, failure: str | None) -> None:
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, failure)
        found = [text for text in said if text is not None]
        if found:
            raise ModelError(
                f"could not share the weights through {self.path}: {'; '.join(found)}. "
                "weight_sync.transport=shared_memory wants one machine, with room for the weights "
                "there; weight_sync.transport=file takes a folder that all machines see."
            )


def _create(path: Path, header: bytes, size: int) -> None:
    """Raises OSError where there is no room: found later, it would kill the process."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        file.write(header)
