"""New weights for a small model on the CPU, without walking vLLM's loaders at every update.

vLLM's in-place reload rebuilds every layer from meta tensors and sends every tensor through Python
loaders, a cost by the number of tensors: a good part of a small model's whole training step. Where
each number of a checkpoint ends up does not change between updates, so it is learned once, from
vLLM itself: weights that count 1, 2, 3, ... are loaded its way, and every tensor of the model is
read for the places they came to. Layers that vLLM packs for its kernels (linear, experts) are read
just before they are packed, and packed by vLLM's own functions.

`learn` leaves the model full of those counters; whoever calls it loads real weights both ways and
compares what the model says (`mopd.rollout.engine`), so that anything this does not know of (a
tensor that vLLM derives from others) shows as garbage and vLLM's way stays in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mopd.kernels.word_sums import word_sum
from mopd.rollout.weight_file import WeightFile

LIMIT = 2**24
"""Weights: larger counters are no float32. Above, bytes and not names are what an update costs."""
_MOST_PIECES = 64
"""Per tensor; a mapping in more pieces is no layout worth copying piece by piece."""


@dataclass
class _Site:
    """A plain tensor that weights are copied into, and what is made of it then."""

    plain: Tensor
    pack: Callable[[], None] | None = None


@dataclass
class _Sites:
    """What one reload passed to vLLM's packing functions, by layer."""

    of_layer: dict[Any, list[_Site]] = field(default_factory=dict)
    experts: list[Any] = field(default_factory=list)
    """Layers whose parameters are packed ones."""


class DirectLoad:
    """The places of a model that has been learned."""

    def __init__(self, file: WeightFile, sites: list[_Site], pieces: list[list[_Piece]]) -> None:
        self._header = file.header
        self._file: WeightFile | None = None
        self._sites, self._pieces = sites, pieces
        self._targets = [
            site.plain.view(-1)[piece.place : piece.place + piece.count]
            for site, own in zip(sites, pieces, strict=True)
            for piece in own
        ]
        self._sources: list[Tensor] = []
        names = list(file.tensors)
        self._names = [names[piece.tensor] for own in pieces for piece in own]

    def knows(self, file: WeightFile) -> bool:
        """Whether `file` has the tensors, in the order, that were learned."""
        return torch.equal(file.header, self._header)

    @torch.no_grad()
    def load(self, file: WeightFile) -> dict[str, int]:
        """Bring the file's weights into the model; tensor name -> `word_sum` of what the model, or
        what vLLM packed for it, now holds of it."""
        if self._file is not file:
            flat = file.body.view(torch.float32)
            pieces = [piece for own in self._pieces for piece in own]
            self._sources = [flat[piece.start : piece.start + piece.count] for piece in pieces]
            self._file = file
        torch._foreach_copy_(self._targets, self._sources)
        sums = torch.stack([word_sum(target) for target in self._targets]).tolist()
        for site in self._sites:
            if site.pack is not None:
                site.pack()
        out: dict[str, int] = {}
        for name, value in zip(self._names, sums, strict=True):
            out[name] = out.get(name, 0) + value
        return out


@dataclass(frozen=True)
class _Piece:
    """A run of one tensor's numbers that lie in a row in the model, too."""

    tensor: int
    start: int
    """In the file's body, in numbers; as `place` and `count` are."""
    place: int
    count: int


@torch.no_grad()
def learn(
    model: Any,
    file: WeightFile,
    reload: Callable[[Iterable[tuple[str, Tensor]]], None],
    record: Callable[[], AbstractContextManager[_Sites]] | None = None,
) -> DirectLoad | None:
    """The places of `file`'s weights in vLLM's `model`; None where they cannot be told.

    `reload` gives the model weights in vLLM's own way. The model holds nothing sensible afterwards,
    unless it is None because of what the file is. `record`: who watches what vLLM packs, vLLM's own
    functions if None.
    """
    if any(t.dtype != torch.float32 for t in file.tensors.values()):
        return None
    total = file.body.numel() // 4
    if not 0 < total < LIMIT:
        return None
    starts = [0]
    for tensor in file.tensors.values():
        starts.append(starts[-1] + tensor.numel())
    assert starts[-1] == total, (starts[-1], total)

    def counters() -> Iterator[tuple[str, Tensor]]:
        for (name, tensor), start in zip(file.tensors.items(), starts, strict=False):
            count = torch.arange(start + 1, start + 1 + tensor.numel(), dtype=torch.float32)
            yield name, count.view(tensor.shape)

    with (record or _recording)() as sites:
        reload(counters())
    packed = [site for own in sites.of_layer.values() for site in own]
    unread = {id(p) for layer in sites.experts for p in (layer.w13_weight, layer.w2_weight)}
    plain = [_Site(p.data) for p in model.parameters() if p.numel() and id(p) not in unread]
    found = packed + plain
    pieces = [_pieces(site.plain, starts) for site in found]
    if any(own is None for own in pieces):
        return None
    whole = [own for own in pieces if own is not None]
    covered = sorted((piece.start, piece.count) for own in whole for piece in own)
    if len(covered) > _MOST_PIECES * len(file.tensors):
        return None
    end = 0
    for start, count in covered:  # every weight is somewhere, and nowhere twice
        if start != end:
            return None
        end = start + count
    return DirectLoad(file, found, whole) if end == total else None


def _pieces(plain: Tensor, starts: list[int]) -> list[_Piece] | None:
    """The runs of counters in a tensor; zeros are nobody's (rows that pad a vocabulary)."""
    if not plain.numel():
        return []
    if plain.dtype != torch.float32 or not plain.is_contiguous():
        return None
    values = plain.view(-1)
    if not bool(((values >= 0) & (values <= starts[-1]) & (values == values.round())).all()):
        return None
    index = values.long() - 1
    bounds = torch.tensor(starts)
    owner = torch.bucketize(index, bounds, right=True) - 1
    new = torch.ones(len(index), dtype=torch.bool)
    new[1:] = (index[1:] != index[:-1] + 1) | (owner[1:] != owner[:-1])
    places = torch.nonzero(new).view(-1).tolist()
    out = []
    for place, stop in zip(places, [*places[1:], len(index)], strict=True):
        start = int(index[place])
        if start >= 0:
            out.append(_Piece(int(owner[place]), start, place, stop - place))
    return out


@contextmanager
def _recording() -> Iterator[_Sites]:
    """Remember what vLLM packs, as it was before."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    sites = _Sites()
    dispatch, setup = utils.dispatch_cpu_unquantized_gemm, UnquantizedFusedMoEMethod._setup_kernel

    def recorded_dispatch(layer: Any, remove_weight: bool) -> None:
        plain = layer.weight.detach().clone()
        dispatch(layer, remove_weight)
        if layer.weight.numel():
            # The layer's own tensor stays in use beside the packed one: it is found there.
            sites.of_layer[layer] = [_Site(torch.empty(0), lambda: dispatch(layer, False))]
            return

        def pack() -> None:
            kept, layer.weight = layer.weight, torch.nn.Parameter(plain, requires_grad=False)
            dispatch(layer, False)
            layer.weight = kept

        sites.of_layer[layer] = [_Site(plain, pack)]

    def recorded_setup(self: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        plain = [w13.detach().clone(), w2.detach().clone()]
        setup(self, layer, w13, w2)

        def pack() -> None:
            kept = [layer.w13_weight, layer.w2_weight]
            layer.w13_weight, layer.w2_weight = (
                torch.nn.Parameter(tensor, requires_grad=False) for tensor in plain
            )
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)
            for place, new in zip(kept, (layer.w13_weight, layer.w2_weight), strict=True):
                place.data.copy_(new.data)
            layer.w13_weight, layer.w2_weight = kept

        sites.of_layer[layer] = [_Site(plain[0], pack), _Site(plain[1])]
        sites.experts.append(layer)

    utils.dispatch_cpu_unquantized_gemm = recorded_dispatch
    UnquantizedFusedMoEMethod._setup_kernel = recorded_setup
    try:
        yield sites
    finally:
        utils.dispatch_cpu_unquantized_gemm = dispatch
        UnquantizedFusedMoEMethod._setup_kernel = setup
