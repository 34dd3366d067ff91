"""What every request to a server of ours passes first, whichever route it is for.

vLLM asks for the token on some of its routes only: ``/invocations`` gives completions, with
logprobs, to whoever asks. Here every route wants it but those that say nothing of the model.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

OPEN = frozenset(("/health", "/ping", "/metrics", "/mopd/score/metrics"))
"""For probes of an orchestrator and for Prometheus, which have no token."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Door:
    """Who may come in, and who is inside. With no keys everybody may."""

    def __init__(self, api_keys: Sequence[str] = ()) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self.in_flight = 0
        """Requests that are being answered."""
        self.closing = False
        """Set once: whoever comes now is told to go elsewhere (status 503)."""

    def lets_in(self, authorization: str) -> bool:
        """Whether a request with this header may come in. Takes the same time for every key."""
        scheme, _, token = authorization.partition(" ")
        digest = hashlib.sha256(token.encode()).digest()
        known = [hmac.compare_digest(digest, each) for each in self._digests]
        return not known or (scheme.lower() == "bearer" and any(known))


class Guard:
    """ASGI middleware: the door in front of an application."""

    def __init__(self, app: App, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        door = self._door
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])  # names come in lower case
        if not door.lets_in(headers.get(b"authorization", b"").decode("latin-1")):
            await _refuse(scope, send, 401, b"Unauthorized")
        elif door.closing:
            await _refuse(scope, send, 503, b"this server is ending")
        else:
            door.in_flight += 1
            try:
                await self._app(scope, receive, send)
            finally:
                door.in_flight -= 1


async def _refuse(scope: Scope, send: Send, status: int, text: bytes) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": text.decode()})
        return
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
