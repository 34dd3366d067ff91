"""One HTTP server of a teacher: where it is, what it can do, and one try of one request."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from mopd_teachers.errors import TeacherError


class RequestError(Exception):
    """One request failed: `cause` for counting, and whether another try may help."""

    def __init__(self, cause: str, detail: str, retry: bool) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail, self.retry = cause, detail, retry


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one server is, and the name it must serve (None: whatever it serves, found out once).

    Replicas that were started here have a name each (`ServerProcess.served_name`).
    """

    url: str
    model: str | None = None


class Server:
    """One endpoint in use: what it can do, and how much it has to do."""

    def __init__(self, teacher: str, endpoint: Endpoint) -> None:
        if not endpoint.url.startswith(("http://", "https://")):
            raise TeacherError(
                f"teacher {teacher!r}: endpoint {endpoint.url!r} is not a URL; write "
                "http://HOST:PORT"
            )
        self.url = endpoint.url.rstrip("/").removesuffix("/v1")
        self.model = endpoint.model
        self.fast: bool | None = None
        """Has our route; None: not asked yet."""
        self.capabilities: frozenset[str] = frozenset()
        self.max_model_len: int | None = None
        self.in_flight = 0
        self.slots = asyncio.Semaphore(1)  # replaced by the client, per event loop


async def request(
    session: aiohttp.ClientSession,
    server: Server,
    method: str,
    path: str,
    body: Any = None,
    *,
    binary: bool = False,
    content_type: str = "application/json",
    timeout_s: float,
) -> Any:
    """One try of one request; every way to fail becomes a `RequestError`.

    `body` is bytes (sent as they are, under `content_type`) or what JSON can say. Returns the
    answer's bytes if `binary`, else what its JSON says.
    """
    data = body if isinstance(body, bytes) else None
    try:
        async with session.request(
            method,
            server.url + path,
            data=data,
            json=body if data is None else None,
            headers={"Content-Type": content_type} if data is not None else None,
        ) as reply:
            content = await reply.read()
            if reply.status != 200:
                text = content.decode(errors="replace")[:300]
                raise RequestError(
                    f"http {reply.status}",
                    f"{server.url}{path} answered {reply.status}: {text}",
                    retry=reply.status >= 500 or reply.status in (408, 429),
                )
            return content if binary else json.loads(content)
    except TimeoutError:
        raise RequestError(
            "timeout",
            f"{server.url}{path} did not answer within {timeout_s:g} s",
            retry=True,
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        raise RequestError("connection", f"{server.url}: {error}", retry=True) from error
    except ValueError as error:
        raise RequestError(
            "bad answer", f"{server.url}{path} did not answer in JSON: {error}", retry=True
        ) from error
