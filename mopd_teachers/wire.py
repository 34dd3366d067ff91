"""What travels over `/mopd/score`: msgpack, with arrays as little-endian bytes. Never pickle.

Legend: P prompt ids, R response ids, K candidates a position. Client and server share this file
and nothing else, so it imports neither vLLM nor torch.

    GET  /mopd/score -> JSON {"protocol", "model", "instance", "capabilities", "vocab_size",
                                "max_top_k", "prefix_block", "prefix_tokens"}
    POST /mopd/score    ScoreRequest -> ScoreReply (both msgpack)
    GET  /mopd/score/metrics -> counters in Prometheus' text format

A result belongs to the sequence whose id it carries, whatever its place in the reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

PROTOCOL = 2  # raised by every change that an older client or server would misread
PATH = "/mopd/score"
CONTENT_TYPE = "application/msgpack"
MAX_TOP_K = 1024
"""Of a server of ours, further limited by its vocabulary."""

SAMPLED, TOP_K, CANDIDATES = "sampled", "top_k", "candidates"
"""What a server can score: the tokens that are there; its own likeliest; ids that it is given."""


class SequenceMsg(msgspec.Struct):
    """One sequence to score."""

    id: str
    prompt_ids: bytes
    """[P] int32."""
    response_ids: bytes
    """[R] int32."""
    candidate_ids: bytes = b""
    """[R, K] int32, or empty."""


class ScoreRequest(msgspec.Struct):
    """`top_k` > 0 asks for the server's own likeliest ids at every response position, too."""

    protocol: int
    model: str
    sequences: list[SequenceMsg]
    top_k: int = 0


class Result(msgspec.Struct):
    """One sequence's scores, or `error` (then everything else is empty)."""

    id: str
    token_ids: bytes = b""
    """[R] int32: the ids that the engine scored, for the client to compare."""
    logprobs: bytes = b""
    """[R] float32: log p(response[t] | prompt, response[:t])."""
    topk_ids: bytes = b""
    """[R, K] int32: the likeliest first, or the candidates as they were given."""
    topk_logprobs: bytes = b""
    """[R, K] float32."""
    error: str = ""
    cached: int = 0
    """Prompt tokens that the server had in its prefix cache."""


class ScoreReply(msgspec.Struct):
    protocol: int
    model: str
    results: list[Result]
    instance: str = ""
    """Of the process that answers: another one after every start."""


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ScoreRequest).decode
decode_reply = msgspec.msgpack.Decoder(ScoreReply).decode
WireError = msgspec.MsgspecError  # raised by both decoders


def ids_to_bytes(ids: Sequence[int] | np.ndarray) -> bytes:
    """Little-endian int32, in C order. OverflowError for an id that int32 does not hold."""
    return np.asarray(ids, dtype="<i4").tobytes()


def floats_to_bytes(values: Any) -> bytes:
    """Little-endian float32, in C order."""
    return np.asarray(values, dtype="<f4").tobytes()


def bytes_to_ids(data: bytes, *shape: int) -> np.ndarray:
    """int32 of `shape` (one -1 is worked out). ValueError when the bytes do not fit it."""
    return np.frombuffer(data, dtype="<i4").reshape(shape).astype(np.int32, copy=False)


def bytes_to_floats(data: bytes, *shape: int) -> np.ndarray:
    """float32 of `shape`. ValueError when the bytes do not fit it."""
    return np.frombuffer(data, dtype="<f4").reshape(shape).astype(np.float32, copy=False)
