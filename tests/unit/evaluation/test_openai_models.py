"""The client of OpenAI-compatible servers, against a small real server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from mopd.errors import ModelError
from mopd.evaluation.openai_models import KEY_VARIABLE, OpenAIModel


class Server:
    """Echoes prompts; fails the first `failures` posts with 500."""

    def __init__(self, failures: int = 0, models: tuple[str, ...] = ("one",)) -> None:
        self.failures, self.models = failures, models
        self.bodies: list[dict] = []
        self.headers: list[str | None] = []

    async def list_models(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": m} for m in self.models]})

    async def post(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.failures:
            self.failures -= 1
            return web.Response(status=500, text="busy")
        self.bodies.append(body)
        said = {"text": body["prompt"].upper()} if "prompt" in body else {
            "message": {"content": body["messages"][-1]["content"].upper()}
        }  # fmt: skip
        choice = {**said, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 3}})


def with_server(server: Server, use: Callable[[str], Awaitable[object]]) -> object:
    async def run() -> object:
        app = web.Application()
        app.router.add_get("/v1/models", server.list_models)
        for path in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(path, server.post)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            return await use(f"http://127.0.0.1:{port}/v1")
        finally:
            await runner.cleanup()

    return asyncio.run(run())


async def answers(url: str, requests: list, model: str | None = None, **kw) -> dict:
    client = OpenAIModel("other", url, model, max_tokens=8, retries=1)
    await client.start()
    try:
        found = {}
        async for group in client.generate(requests, **{"temperature": 0.0, "seed": 5, **kw}):
            found |= {answer.key: answer for answer in group}
        return found
    finally:
        await client.close()


def test_texts_and_chats(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "word")
    server = Server(failures=1)
    chat = [{"role": "user", "content": "hi"}]
    found = with_server(server, lambda url: answers(url, [("a", "abc"), ("b", chat)]))
    assert (found["a"].text, found["a"].tokens, found["a"].ids) == ("ABC", 3, None)
    assert found["b"].text == "HI" and found["b"].finish_reason == "stop"
    assert server.headers == ["Bearer word"]
    assert all(b["model"] == "one" and b["max_tokens"] == 8 and "seed" not in b
               for b in server.bodies)  # fmt: skip


def test_sampled_answers_have_seeds_of_their_own():
    server = Server()
    with_server(server, lambda url: answers(url, [("a", "x"), ("b", "x")], temperature=1.0))
    assert sorted(b["seed"] for b in server.bodies) == [5, 6]


@pytest.mark.parametrize(
    ("models", "wanted", "said"),
    [
        (("one",), "two", r"serves \['one'\], expected 'two'"),
        (("one", "two"), None, "expected exactly one; name one as NAME=URL#MODEL"),
    ],
)
def test_another_model_is_refused(models, wanted, said):
    with pytest.raises(ModelError, match=said):
        with_server(Server(models=models), lambda url: answers(url, [], wanted))


def test_a_server_that_fails_is_named_with_its_words():
    with pytest.raises(ModelError, match="other: .*/v1/completions: 500: busy"):
        with_server(Server(failures=9), lambda url: answers(url, [("a", "x")]))
