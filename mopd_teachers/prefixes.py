"""How many tokens a server really has to read for a request, given what its prefix cache holds.

vLLM keeps the keys and values of whole blocks of tokens, each known by itself and all before it.
This is the client's picture of one server's cache, made of what was sent there: it decides where
a request goes and how soon, and nothing about any score, so that it may be wrong.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from mopd_teachers.scores import ScoreItem, size_of


class Reading:
    """The sequences of one request, in the order in which the server gets them."""

    def __init__(self, items: Sequence[ScoreItem] = ()) -> None:
        self._items = items
        self._chains: dict[int, list[array[int]]] = {}

    @property
    def tokens(self) -> int:
        """Of all sequences, prompts and responses."""
        return sum(map(size_of, self._items))

    def chains(self, block: int) -> list[array[int]]:
        """For each sequence one number for each of its whole blocks: equal numbers stand for equal
        tokens up to the block's end (but for collisions of Python's hash)."""
        if block not in self._chains:
            self._chains[block] = [_chain(item, block) for item in self._items]
        return self._chains[block]

    def readable(self, block: int) -> Iterable[tuple[int, int]]:
        """(Tokens, blocks that may come from the cache) of each sequence. The row of the prompt's
        last token predicts the first response token, so that it is always computed."""
        for item in self._items:
            yield size_of(item), (len(item.prompt_ids) - 1) // block


class PrefixMemory:
    """What one server's prefix cache holds, as far as its client knows.

    `block`: tokens of one block. `tokens`: how many the cache holds; the least recently used go
    first, as they do there.
    """

    def __init__(self, block: int, tokens: int) -> None:
        self.block = block
        self._most = tokens // block
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def forget(self) -> None:
        """The server may have been restarted."""
        self._blocks.clear()

    def to_read(self, reading: Reading) -> int:
        """Tokens of `reading` that the server must compute: of each sequence what does not come
        from the cache, nor from an earlier sequence of the same request."""
        earlier: set[int] = set()
        tokens = 0
        chains = reading.chains(self.block)
        for (size, most), chain in zip(reading.readable(self.block), chains, strict=True):
            known = 0
            while known < most and (chain[known] in self._blocks or chain[known] in earlier):
                known += 1
            tokens += size - known * self.block
            earlier.update(chain)
        return tokens

    def sent(self, reading: Reading) -> None:
        """The server gets `reading`, and will have it in its cache."""
        for chain in reading.chains(self.block):
            for key in reversed(chain):  # of one sequence the last blocks go first
                self._blocks[key] = None
                self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


def _chain(item: ScoreItem, block: int) -> array[int]:
    ids = (*item.prompt_ids, *item.response_ids)
    key = 0
    chain = array("q")  # a fifth of a list's memory: thousands of requests may wait
    for start in range(0, len(ids) - block + 1, block):
        key = hash((key, ids[start : start + block]))
        chain.append(key)
    return chain


def prompts_together(items: Sequence[ScoreItem], block: int) -> list[list[ScoreItem]]:
    """The samples in groups that should not be parted between servers, those of one prompt side by
    side. Parting one in two would have its prompt read twice, which pays only where the responses
    are the greater part: then each sample is a group of its own."""
    by_prompt: dict[tuple[int, ...], list[ScoreItem]] = {}
    for item in items:
        by_prompt.setdefault(tuple(item.prompt_ids), []).append(item)
    groups: list[list[ScoreItem]] = []
    for prompt, samples in by_prompt.items():
        reused = (len(prompt) - 1) // block * block
        if 2 * reused >= sum(len(item.response_ids) for item in samples):
            groups.append(samples)
        else:
            groups += [[item] for item in samples]
    return groups
