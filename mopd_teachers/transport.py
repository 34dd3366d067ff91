"""One try of one HTTP request; every way to fail becomes a `RequestError`."""

from __future__ import annotations

import json
from typing import Any, Protocol

import aiohttp

from mopd_teachers.replica import Replica


class RequestError(Exception):
    """One request failed: `cause` for counting, and whether another try may help."""

    def __init__(self, cause: str, detail: str, retry: bool) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail, self.retry = cause, detail, retry


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
                text = content.decode(errors="replace")[:300]
                raise RequestError(
                    f"http {reply.status}",
                    f"{where} answered {reply.status}: {text}",
                    retry=reply.status >= 500 or reply.status in (408, 429),
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
