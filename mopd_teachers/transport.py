"""One try of one HTTP request; every way to fail becomes a `RequestError`."""

from __future__ import annotations

import json
from typing import Any, Protocol

import aiohttp

from mopd_teachers.replica import Replica

BUSY = "http 429"
"""Cause of a request that a server refused because it has too much to do already."""
REFUSED = ("http 401", "http 403")
"""Causes of requests whose token a server does not accept; another server may."""


class RequestError(Exception):
    """One request failed: `cause` for counting, and whether another try may help.

    `blames`: whether it says that the server is not well (one that is busy is).
    `wait_s`: how long the server asks to be left alone, where it says so.
    """

    def __init__(
        self,
        cause: str,
        detail: str,
        retry: bool,
        *,
        blames: bool = True,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail, self.retry = cause, detail, retry
        self.blames, self.wait_s = blames, wait_s
        self.at: Replica | None = None
        """The server that was asked last."""

    @property
    def refused(self) -> bool:
        """Whether the server does not accept the token: to ask it again is of no use."""
        return self.cause in REFUSED


class Ask(Protocol):
    """`request` with a session and a deadline already given."""

    async def __call__(
        self, server: Replica, method: str, path: str, body: Any = None, **how: Any
    ) -> Any: ...


async def request(
    session: aiohttp.ClientSession,
    server: Replica,
    method: str,
    path: str,
    body: Any = None,
    *,
    binary: bool = False,
    content_type: str = "application/json",
    timeout_s: float,
) -> Any:
    """One try of one request.

    `body` is bytes (sent as they are, under `content_type`) or what JSON can say. Returns the
    answer's bytes if `binary`, else what its JSON says.
    """
    where = f"{server.url}{path}"
    data = body if isinstance(body, bytes) else None
    headers = dict(server.headers)
    if data is not None:
        headers["Content-Type"] = content_type
    try:
        async with session.request(
            method,
            where,
            data=data,
            json=body if data is None else None,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,  # a token must not follow one to another host
        ) as reply:
            content = await reply.read()
            if reply.status != 200:
                text = server.without_key(content.decode(errors="replace"))[:300]
                asked = reply.headers.get("Retry-After", "")
                raise RequestError(
                    f"http {reply.status}",
                    f"{where} answered {reply.status}: {text}",
                    retry=reply.status >= 500 or reply.status in (408, 429),
                    blames=reply.status != 429,
                    wait_s=float(asked) if asked.isdecimal() else None,
                )
            return content if binary else json.loads(content)
    except TimeoutError:
        raise RequestError(
            "timeout", f"{where} did not answer within {timeout_s:g} s", retry=True
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise RequestError("connection", f"{server.url}: {error}", retry=True) from error
    except ValueError as error:
        raise RequestError(
            "bad answer", f"{where} did not answer in JSON: {error}", retry=True
        ) from error
