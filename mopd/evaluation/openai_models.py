"""Any OpenAI-compatible server as a model under evaluation: text in, text out.

Plain prompts go to ``/v1/completions``, chats to ``/v1/chat/completions``. Such a server shows
neither its weights nor (in general) token ids, so there is no per-token comparison with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from mopd.errors import ModelError
from mopd.evaluation.answering import RawAnswer

KEY_VARIABLE = "MOPD_API_KEY"
"""Environment variable whose value, if set, is sent as the bearer token."""

Asked = str | Sequence[Mapping[str, Any]]
"""A prompt's text, or a chat's messages."""


class OpenAIModel:
    """One server and one model that it serves.

    Args:
        label: for messages.
        url: ``http://HOST:PORT``, with or without ``/v1``.
        model: the served name; None takes the only one there is.
        max_tokens: longest answer.
    """

    def __init__(
        self,
        label: str,
        url: str,
        model: str | None,
        *,
        max_tokens: int,
        concurrency: int = 16,
        timeout_s: float = 600.0,
        retries: int = 3,
    ) -> None:
        self.label, self.model = label, model
        self.url = url.rstrip("/").removesuffix("/v1")
        self._max_tokens, self._retries = max_tokens, retries
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Find out what is served.

        Raises:
            ModelError: no answer, or not the model that was asked for.
        """
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(timeout=self._timeout, headers=headers)
        answer = await self._request("GET", "/v1/models", None)
        served = [str(card.get("id")) for card in answer.get("data", [])]
        if self.model is None and len(served) == 1:
            self.model = served[0]
        if self.model not in served:
            wanted = "exactly one" if self.model is None else repr(self.model)
            raise ModelError(
                f"{self.label}: {self.url} serves {served}, expected {wanted}; name one as "
                "NAME=URL#MODEL"
            )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(
        self, requests: Sequence[tuple[str, Asked]], *, temperature: float, seed: int
    ) -> AsyncIterator[Sequence[RawAnswer]]:
        """Answers to (key, prompt) pairs, one by one as they come.

        Raises:
            ModelError: a request failed for good; what came before was yielded.
        """
        tasks = [
            asyncio.ensure_future(self._answer(key, asked, temperature, seed + k))
            for k, (key, asked) in enumerate(requests)
        ]
        try:
            for next_done in asyncio.as_completed(tasks):
                yield [await next_done]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, key: str, asked: Asked, temperature: float, seed: int) -> RawAnswer:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self._max_tokens,
            "temperature": temperature,
        }
        if temperature > 0:
            body["seed"] = seed
        chat = not isinstance(asked, str)
        body |= {"messages": list(asked)} if chat else {"prompt": asked}
        async with self._slots:
            answer = await self._request(
                "POST", "/v1/chat/completions" if chat else "/v1/completions", body
            )
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if chat else choice["text"]
            tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
            return RawAnswer(key, text or "", None, tokens, choice.get("finish_reason") or "abort")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self.label}: {self.url} answered {str(answer)[:200]!r}; expected an "
                "OpenAI-compatible completion"
            ) from error

    async def _request(self, method: str, path: str, body: Any) -> Any:
        assert self._session is not None
        trouble = ""
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(0.5 * 2**attempt)
            try:
                async with self._session.request(method, self.url + path, json=body) as reply:
                    if reply.status == 200:
                        return await reply.json(content_type=None)
                    trouble = f"{reply.status}: {(await reply.text())[:300]}"
                    if reply.status < 500 and reply.status not in (408, 429):
                        break
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                trouble = f"{type(error).__name__} {error}"
        raise ModelError(f"{self.label}: {self.url}{path}: {trouble}")
