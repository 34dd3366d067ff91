"""Scores that are known already, by content: the same tokens with the same question.

Where a policy has become sure of itself, most of a group's answers are the same tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np

from mopd_teachers.scores import ScoreItem, TeacherScore

_ENTRY_BYTES = 512
"""Of an entry beside its arrays: key, score and array objects, place in the table."""


class ScoreCache:
    """Least recently used scores go first when all together would exceed `max_bytes`.

    It holds scores of one model. `forget` begins a new epoch, and what was asked in an earlier
    one is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._scores: OrderedDict[bytes, TeacherScore] = OrderedDict()
        self.bytes = 0
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._scores)

    def get(self, key: bytes) -> TeacherScore | None:
        score = self._scores.get(key)
        if score is not None:
            self._scores.move_to_end(key)
        return score

    def put(self, key: bytes, score: TeacherScore, epoch: int) -> None:
        """Keep a score that was asked for in `epoch`."""
        size = _size(score)
        if epoch != self.epoch or size > self._max_bytes or key in self._scores:
            return
        self._scores[key] = score
        self.bytes += size
        while self.bytes > self._max_bytes:
            _, oldest = self._scores.popitem(last=False)
            self.bytes -= _size(oldest)

    def forget(self) -> None:
        """The model may be another one now."""
        self._scores.clear()
        self.bytes = 0
        self.epoch += 1


def content_key(item: ScoreItem, top_k: int) -> bytes:
    """Equal for equal questions alone: ids, where the response begins, and what is asked of it."""
    arrays = [np.asarray(ids, "<i4") for ids in (item.prompt_ids, item.response_ids)]
    if item.candidate_ids is not None:
        arrays.append(np.asarray(item.candidate_ids, "<i4"))
    sizes = np.array([top_k, *(length for each in arrays for length in each.shape)], "<i4")
    digest = hashlib.blake2b(sizes.tobytes(), digest_size=16)
    for each in arrays:
        digest.update(each.tobytes())
    return digest.digest()


def _size(score: TeacherScore) -> int:
    arrays = (score.logprobs, score.topk_ids, score.topk_logprobs)
    return _ENTRY_BYTES + sum(each.nbytes for each in arrays if each is not None)
