"""The door of a server of ours: every route asks for the token; who is inside is counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mopd_teachers.guard import OPEN, Door, Guard


async def asked(guard: Guard, path: str, kind: str = "http", **headers: str) -> Any:
    """The status that is answered (or the close code)."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await guard({"type": kind, "path": path, "headers": raw}, receive, send)
    return sent[0].get("status") or sent[0].get("code")


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize("path", ["/invocations", "/tokenize", "/v1/completions", "/mopd/score"])
def test_without_the_token_nothing_of_the_model_is_said(path: str) -> None:
    guard = Guard(app, Door(["s3cret", "another"]))
    for header in ("", "s3cret", "Basic s3cret", "Bearer s3cre", "Bearer s3cret "):
        assert asyncio.run(asked(guard, path, authorization=header)) == 401
    assert asyncio.run(asked(guard, path)) == 401
    assert asyncio.run(asked(guard, path, "websocket")) == 1008
    for header in ("Bearer s3cret", "bearer another"):
        assert asyncio.run(asked(guard, path, authorization=header)) == 200


def test_probes_and_metrics_need_none() -> None:
    guard = Guard(app, Door(["s3cret"]))
    assert {asyncio.run(asked(guard, path)) for path in OPEN} == {200}
    assert asyncio.run(asked(Guard(app, Door()), "/v1/completions")) == 200


def test_who_is_inside_is_counted_and_who_comes_late_is_sent_away() -> None:
    async def run() -> None:
        inside, leave = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            inside.set()
            await leave.wait()
            await app(scope, receive, send)

        door = Door()
        guard = Guard(slow, door)
        first = asyncio.ensure_future(asked(guard, "/v1/completions"))
        await inside.wait()
        door.closing = True
        assert door.in_flight == 1 and await asked(guard, "/v1/completions") == 503
        leave.set()
        assert await first == 200 and door.in_flight == 0
        assert await asked(guard, "/health") == 200

    asyncio.run(run())
