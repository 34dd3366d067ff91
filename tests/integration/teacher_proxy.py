"""A proxy that stands in front of a real teacher server and fails on purpose, by a seeded draw."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from mopd_teachers import wire

STALL_S = 30.0  # past every deadline of the tests


class FaultProxy:
    """Forwards to `upstream`; each scoring request meets, with probability `rate`, one of
    `faults`. `other` is the server that answers when the fault is ``stranger``."""

    def __init__(
        self, upstream: str, faults: Sequence[str], rate: float, seed: int, other: str = ""
    ) -> None:
        self._upstream, self._other = upstream, other
        self._faults, self.rate, self._rng = list(faults), rate, random.Random(seed)
        self.drawn: Counter[str] = Counter()

    async def __aenter__(self) -> FaultProxy:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _forward(self, request: web.Request, to: str) -> tuple[int, bytes, str]:
        body = await request.read()
        headers = {"Content-Type": request.content_type} if body else {}
        url = to + request.path_qs
        async with self._session.request(request.method, url, data=body, headers=headers) as reply:
            return reply.status, await reply.read(), reply.content_type

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = ""
        if request.method == "POST" and self._rng.random() < self.rate:
            fault = self._rng.choice(self._faults)
            self.drawn[fault] += 1
        if fault == "500":
            return web.Response(status=500, text="out of memory")
        if fault == "stall":
            await asyncio.sleep(STALL_S)
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        to = self._other if fault == "stranger" else self._upstream
        status, body, kind = await self._forward(request, to)
        if fault in ("drip", "truncated"):
            return await self._slowly(request, body, cut=fault == "truncated")
        if fault and status == 200:
            body = spoiled(body, fault, kind)
        return web.Response(status=status, body=body, content_type=kind)

    async def _slowly(self, request: web.Request, body: bytes, cut: bool) -> web.StreamResponse:
        """Half of the body, then nothing more (`cut`) or a byte now and then."""
        reply = web.StreamResponse(headers={"Content-Length": str(len(body))})
        await reply.prepare(request)
        await reply.write(body[: len(body) // 2])
        if cut:
            assert request.transport is not None
            request.transport.close()
        else:
            for byte in body[len(body) // 2 :]:
                await asyncio.sleep(0.2)
                await reply.write(bytes([byte]))
        return reply


def spoiled(body: bytes, fault: str, kind: str) -> bytes:
    """A good answer turned into one that looks almost as good."""
    if kind == wire.CONTENT_TYPE:
        reply = wire.decode_reply(body)
        reply.results = _spoiled_results(reply.results, fault)
        return wire.encode(reply)
    answer = json.loads(body)
    rows: list[Any] = answer["choices"][0]["prompt_logprobs"]
    row = next(r for r in reversed(rows) if r)
    if fault == "reordered":
        rows[1:] = rows[:0:-1]
    elif fault == "duplicated":
        rows.append(rows[-1])
    elif fault == "wrong ids":
        for i, r in enumerate(rows):
            rows[i] = r and {str(int(t) + 1): v for t, v in r.items()}
    elif fault == "nan":
        row[next(iter(row))]["logprob"] = None
    return json.dumps(answer).encode()


def _spoiled_results(results: list[wire.Result], fault: str) -> list[wire.Result]:
    first, rest = results[0], results[1:]
    if fault == "reordered":
        return results[::-1]
    if fault == "duplicated":
        return [*results, first]
    if fault == "wrong ids":
        ids = wire.bytes_to_ids(first.token_ids, -1) + 1
        return [msgspec.structs.replace(first, token_ids=wire.ids_to_bytes(ids)), *rest]
    if fault == "nan":
        values = wire.bytes_to_floats(first.logprobs, -1).copy()
        values[-1] = float("nan")
        return [msgspec.structs.replace(first, logprobs=wire.floats_to_bytes(values)), *rest]
    return results
