"""Real vLLM teacher servers over tiny random checkpoints: C01, C02, C05, C06, C11, C13, C37, C38.

One start of three servers at once is shared by the module: two of ours (a dense and a MoE model)
and one plain `vllm.entrypoints` server, as somebody else would run it. The reference is
transformers in this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
from teacher_proxy import FaultProxy

from mopd_teachers import wire
from mopd_teachers.client import Endpoint, TeacherClient, sample_seed
from mopd_teachers.errors import TeacherError
from mopd_teachers.router import TeacherRouter
from mopd_teachers.scores import Outcome, ScoreItem, TeacherFailure, TeacherScore
from mopd_teachers.server import ServerProcess, ServerSpec, served_model
from mopd_teachers.transport import RequestError

BOS, EOS, AB = 1, 2, 259
CONTEXT = 64
BLOCK = 32
START_S = 240.0
T = TypeVar("T")


def save_tokenizer(folder: Path) -> None:
    """Byte-level, adds BOS when it encodes text, and merges "a" + "b" into id 259 (C05)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)


def save_model(folder: Path, kind: str, seed: int) -> Any:
    """A random model with its tokenizer; returns the model, for reference."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {
        "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
        "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": BOS,
        "eos_token_id": EOS, "pad_token_id": 0, "initializer_range": 0.12,
    }  # fmt: skip
    torch.manual_seed(seed)
    if kind == "moe":
        config = Qwen3MoeConfig(
            **shape, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
            norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        )  # fmt: skip
        model: Any = Qwen3MoeForCausalLM(config).float().eval()
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).float().eval()
    with torch.no_grad():
        model.lm_head.weight[EOS] *= 3.0  # so that some greedy answers end
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


@dataclass
class Rig:
    """The servers, and the models that they serve."""

    a: ServerProcess  # dense, ours
    b: ServerProcess  # MoE, ours
    plain_url: str  # dense, as vLLM ships it
    dense: Any
    moe: Any
    dense_path: Path

    def client(self, server: ServerProcess, **options: Any) -> TeacherClient:
        return TeacherClient(
            server.spec.name, [Endpoint(server.url, server.served_name)], **options
        )

    def plain(self) -> TeacherClient:
        return TeacherClient("plain", [Endpoint(self.plain_url)])


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    root = tmp_path_factory.mktemp("teachers")
    dense, moe = save_model(root / "dense", "dense", 0), save_model(root / "moe", "moe", 1)
    a = ServerProcess(
        ServerSpec("dense", str(root / "dense"), max_model_len=CONTEXT), root / "a.log"
    )
    # Pieces of 40 tokens at most: sequences of up to 63 are scored over several engine steps. Of
    # blocks of 32 (the least on a CPU) its prefix cache can give one.
    pieces = {"max_num_batched_tokens": 40, "max_num_seqs": 8, "enable_chunked_prefill": True}
    pieces |= {"block_size": BLOCK}
    b = ServerProcess(
        ServerSpec("moe", str(root / "moe"), max_model_len=CONTEXT, engine_args=pieces),
        root / "b.log",
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = start_plain(root / "dense", port, root / "plain.log")
    try:
        a.start()
        b.start()
        a.wait_healthy(START_S)
        b.wait_healthy(START_S)
        deadline = time.monotonic() + START_S
        while True:
            try:
                served_model(f"http://127.0.0.1:{port}")
                break
            except OSError:
                assert plain.poll() is None and time.monotonic() < deadline, "plain server died"
                time.sleep(0.3)
        yield Rig(a, b, f"http://127.0.0.1:{port}", dense, moe, root / "dense")
    finally:
        family = [psutil.Process(plain.pid), *psutil.Process(plain.pid).children(recursive=True)]
        plain.terminate()
        plain.wait(30)
        for server in (a, b):
            group = [p for p in psutil.process_iter() if _group(p) == server.pid]
            server.stop()
            assert _gone(group, 0.0), f"left behind: {group}"
        assert _gone(family, 15.0)


def start_plain(model: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """vLLM's own server with the least start-up cost that its options allow."""
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    return subprocess.Popen(
        [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--dtype", "float32", "--max-model-len", str(CONTEXT), "--enforce-eager",
            "--kv-cache-memory-bytes", str(2**27), "--host", "127.0.0.1", "--port", str(port),
            "--distributed-executor-backend", "uni",
        ],
        env=env, stdout=log.open("wb"), stderr=subprocess.STDOUT,
    )  # fmt: skip


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None


def _gone(processes: list[psutil.Process], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while True:
        alive = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if not alive or time.monotonic() > deadline:
            return not alive
        time.sleep(0.1)


def reference_rows(model: Any, item: ScoreItem) -> Any:
    """[R, V] float64 logprobs of transformers at the response positions."""
    import torch

    ids = torch.tensor([[*item.prompt_ids, *item.response_ids]])
    with torch.no_grad():
        return model(ids).logits[0, len(item.prompt_ids) - 1 : -1].double().log_softmax(-1)


def reference(model: Any, item: ScoreItem) -> list[float]:
    """transformers' logprobs of the response ids."""
    import torch

    rows = reference_rows(model, item)
    return rows.gather(1, torch.tensor(item.response_ids)[:, None])[:, 0].tolist()


def items(count: int, seed: int = 0) -> list[ScoreItem]:
    """Prompts and responses of 1 to 30 tokens, one-token ones among them (C01)."""
    rng = random.Random(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 260) for _ in range(n))

    lengths = [
        (1, 1),
        (1, 2),
        (7, 1),
        *((rng.randint(1, 30), rng.randint(1, 30)) for _ in range(count - 3)),
    ]  # noqa: E501
    return [ScoreItem(f"0:p{i}:0", ids(p), ids(r)) for i, (p, r) in enumerate(lengths)]


def run(client: TeacherClient, use: Callable[[TeacherClient], Awaitable[T]]) -> T:
    async def whole() -> T:
        async with client:
            await client.probe()
            return await use(client)

    return asyncio.run(whole())


def good(result: dict[str, Outcome]) -> dict[str, TeacherScore]:
    bad = [s for s in result.values() if isinstance(s, TeacherFailure)]
    assert not bad, bad[0]
    return {key: score for key, score in result.items() if isinstance(score, TeacherScore)}


def scores_of(client: TeacherClient, batch: list[ScoreItem]) -> dict[str, list[float]]:
    return lists(run(client, lambda c: c.score_batch(batch)))


def lists(result: dict[str, Outcome]) -> dict[str, list[float]]:
    return {key: score.logprobs.tolist() for key, score in good(result).items()}


def worst(a: dict[str, list[float]], b: dict[str, list[float]]) -> float:
    assert a.keys() == b.keys()
    return max(abs(x - y) for k in a for x, y in zip(a[k], b[k], strict=True))


def test_two_servers_at_once_have_ports_and_names_of_their_own(rig: Rig) -> None:
    """C37."""
    assert rig.a.url != rig.b.url and rig.a.served_name != rig.b.served_name
    for server in (rig.a, rig.b):
        report = run(rig.client(server), lambda c: c.probe())
        assert report.models == (server.served_name,)
        assert report.max_model_len == CONTEXT and report.fast_route


def test_nobody_else_reaches_a_server_or_its_engine(rig: Rig) -> None:
    """Every port of theirs listens on loopback."""
    leader = psutil.Process(rig.a.pid)
    family = [leader, *leader.children(recursive=True)]
    listening = [
        c.laddr for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN
    ]
    assert rig.a.port in {address.port for address in listening} and len(family) >= 2
    assert {address.ip for address in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("which", ["a", "b"])
def test_c01_c06_scores_agree_with_transformers(rig: Rig, which: str) -> None:
    server, model = (rig.a, rig.dense) if which == "a" else (rig.b, rig.moe)
    batch = items(60)
    scores = scores_of(rig.client(server), batch)
    assert worst(scores, {i.sample_id: reference(model, i) for i in batch}) < 1e-4


def test_a_plain_vllm_server_gives_the_same_numbers_by_its_own_route(rig: Rig) -> None:
    batch = items(40, seed=1)

    async def use(client: TeacherClient) -> Any:
        assert not (await client.probe()).fast_route
        return lists(await client.score_batch(batch))

    plain = run(rig.plain(), use)
    assert worst(plain, scores_of(rig.client(rig.a), batch)) < 1e-5


@pytest.mark.parametrize("which", ["ours", "in pieces", "plain"])
def test_the_teacher_s_top_k_is_that_of_transformers(rig: Rig, which: str) -> None:
    model = rig.moe if which == "in pieces" else rig.dense
    client = {"ours": rig.client(rig.a), "in pieces": rig.client(rig.b), "plain": rig.plain()}
    batch = items(40, seed=6)
    scores = good(run(client[which], lambda c: c.score_batch(batch, top_k=20)))
    for item in batch:
        score, rows = scores[item.sample_id], reference_rows(model, item)
        assert score.topk_ids is not None and score.topk_ids.shape == (len(item.response_ids), 20)
        assert worst({"": score.logprobs.tolist()}, {"": reference(model, item)}) < 1e-4
        best = rows.topk(20).values.numpy()
        assert np.abs(score.topk_logprobs - best).max() < 1e-4
        named = np.take_along_axis(rows.numpy(), score.topk_ids.astype(np.int64), 1)
        assert np.abs(score.topk_logprobs - named).max() < 1e-4


@pytest.mark.parametrize("which", ["ours", "in pieces"])
def test_given_candidates_get_the_logprobs_of_transformers(rig: Rig, which: str) -> None:
    server, model = (rig.a, rig.dense) if which == "ours" else (rig.b, rig.moe)
    rng = np.random.default_rng(0)
    batch = [
        replace(item, candidate_ids=rng.integers(0, 260, (len(item.response_ids), 3 + n % 3)))
        for n, item in enumerate(items(30, seed=7))  # of three widths, and one without
    ]
    batch[-1] = replace(batch[-1], candidate_ids=None)

    async def use(client: TeacherClient) -> Any:
        await client.probe(candidates=True)
        stock = client._ask(  # vLLM's own way, in the same engine steps
            client._servers[0],
            "POST",
            "/v1/completions",
            {
                "model": client._servers[0].model, "max_tokens": 1, "prompt_logprobs": 2,
                "prompt": [*batch[5].prompt_ids, *batch[5].response_ids],
            },
        )  # fmt: skip
        return await asyncio.gather(client.score_batch(batch), stock)

    outcomes, stock = run(rig.client(server), use)
    scores = good(outcomes)
    for item in batch:
        rows = reference_rows(model, item).numpy()
        score, given = scores[item.sample_id], item.candidate_ids
        assert worst({"": score.logprobs.tolist()}, {"": reference(model, item)}) < 1e-4
        if given is None:
            assert score.topk_ids is None
            continue
        assert np.array_equal(score.topk_ids, given)
        assert np.abs(score.topk_logprobs - np.take_along_axis(rows, given, 1)).max() < 1e-4
    entries = stock["choices"][0]["prompt_logprobs"][len(batch[5].prompt_ids) :]
    own = [e[str(t)]["logprob"] for e, t in zip(entries, batch[5].response_ids, strict=True)]
    assert worst({"": own}, {"": scores[batch[5].sample_id].logprobs.tolist()}) < 1e-5


@pytest.mark.parametrize("ask", ["sampled", "top-k", "candidates"])
def test_scores_that_begin_after_what_the_prefix_cache_holds(rig: Rig, ask: str) -> None:
    """Of every prompt all whole blocks but the last token's come from the cache the second time,
    and nothing of a response, though that is in the cache as well."""
    rng = random.Random(f"prefix {ask}")  # each its own tokens: the server is the module's

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 260) for _ in range(n))

    few_shot = ids(BLOCK)
    prompts = [few_shot + ids(1), few_shot + ids(16), few_shot, ids(33), ids(20), ids(60)]
    batch = [
        ScoreItem(f"0:p{p}:{i}", prompt, ids(rng.randint(1, 63 - len(prompt))))
        for p, prompt in enumerate(prompts)
        for i in range(4)
    ]
    first_turn = next(i for i in batch if len(i.prompt_ids) == 20 and len(i.response_ids) > 14)
    turn = (*first_turn.prompt_ids, *first_turn.response_ids[:14])
    batch.append(ScoreItem("0:second turn:0", turn, first_turn.response_ids[14:]))
    if ask == "candidates":
        batch = [
            replace(i, candidate_ids=np.array([[t, 5] for t in i.response_ids])) for i in batch
        ]
    top_k = 5 if ask == "top-k" else 0

    async def use(client: TeacherClient) -> Any:
        first = await client.score_batch(batch, top_k=top_k)
        assert 0 < client.metrics()["prefix_tokens"] < sum(len(i.prompt_ids) for i in batch)
        whole = await client.score_batch(batch, top_k=top_k)
        moved = [
            ScoreItem(i.sample_id, i.prompt_ids[:1], (*i.prompt_ids[1:], *i.response_ids))
            for i in batch
        ]
        return first, whole, await client.score_batch(moved)

    first, whole, moved = map(good, run(rig.client(rig.b), use))
    for item in batch:
        expected = reference(rig.moe, item)
        for scores in (first, whole):
            found = scores[item.sample_id]
            assert worst({"": found.logprobs.tolist()}, {"": expected}) < 1e-4
            if top_k:
                best = reference_rows(rig.moe, item).topk(top_k).values.numpy()
                assert np.abs(found.topk_logprobs - best).max() < 1e-4
            if item.candidate_ids is not None:
                rows = reference_rows(rig.moe, item).numpy()
                named = np.take_along_axis(rows, item.candidate_ids.astype(np.int64), 1)
                assert np.abs(found.topk_logprobs - named).max() < 1e-4
        assert whole[item.sample_id].cached_tokens == (len(item.prompt_ids) - 1) // BLOCK * BLOCK
        # A prompt of one token leaves nothing to take from the cache.
        tail = moved[item.sample_id].logprobs[-len(item.response_ids) :]
        assert worst({"": tail.tolist()}, {"": expected}) < 1e-4
        assert moved[item.sample_id].cached_tokens == 0


def test_c02_a_later_token_changes_no_score(rig: Rig) -> None:
    short = [ScoreItem(i.sample_id, i.prompt_ids, i.response_ids) for i in items(20, seed=2)]
    longer = [ScoreItem(i.sample_id, i.prompt_ids, (*i.response_ids, 77)) for i in short]
    client = rig.client(rig.a)
    before, after = scores_of(client, short), scores_of(client, longer)
    assert worst(before, {key: row[:-1] for key, row in after.items()}) < 1e-5
    # and the split between prompt and response moves no score either
    moved = [
        ScoreItem(i.sample_id, (*i.prompt_ids, i.response_ids[0]), i.response_ids[1:])
        for i in short
        if len(i.response_ids) > 1
    ]
    shifted = scores_of(client, moved)
    assert worst({key: before[key][1:] for key in shifted}, shifted) < 1e-5


def test_c05_ids_travel_as_ids(rig: Rig) -> None:
    """ "a", "b" would come back as one id if they went through text, and with a BOS in front."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(rig.dense_path)
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    assert tokenizer.encode(tokenizer.decode([a, b])) == [BOS, AB]
    apart = ScoreItem("apart", (BOS, 50), (a, b))
    joined = ScoreItem("joined", (BOS, 50), (AB,))
    for client in (rig.client(rig.a), rig.plain()):
        scores = scores_of(client, [apart, joined])
        assert worst(scores, {i.sample_id: reference(rig.dense, i) for i in (apart, joined)}) < 1e-4
    # Prompts that go out by ids are compared on their way back inside `generate`.
    assert len(run(rig.client(rig.a), lambda c: c.generate([(BOS, a, b)], max_tokens=3))) == 1


def test_c13_the_router_keeps_two_real_teachers_apart(rig: Rig) -> None:
    batch = items(30, seed=3)

    async def use() -> tuple[Any, Any]:
        router = TeacherRouter({"spell": rig.client(rig.a), "sums": rig.client(rig.b)})
        await router.probe()
        try:
            both = await asyncio.gather(
                router.score("spell", batch), router.score("sums", batch[::-1])
            )
            return lists(both[0]), lists(both[1])
        finally:
            await router.close()

    spell, sums = asyncio.run(use())
    dense = {i.sample_id: reference(rig.dense, i) for i in batch}
    moe = {i.sample_id: reference(rig.moe, i) for i in batch}
    assert worst(spell, dense) < 1e-4 and worst(sums, moe) < 1e-4
    assert worst(dense, moe) > 1.0  # else the above would not tell them apart


def test_greedy_answers_are_those_of_transformers(rig: Rig) -> None:
    import torch

    prompts = [item.prompt_ids for item in items(24, seed=4)]
    answers = run(rig.client(rig.a), lambda c: c.generate(prompts, max_tokens=12))
    reasons = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = rig.dense.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
            )
        want = tuple(whole[0, len(prompt) :].tolist())
        assert answer.token_ids == want
        assert answer.finish_reason == ("stop" if want[-1] == EOS else "length")
        reasons.add(answer.finish_reason)
    assert reasons == {"stop", "length"}, "the case must show both ends"


def test_equal_prompts_are_sampled_apart_and_the_same_call_gives_the_same(rig: Rig) -> None:
    """One seed for a request of both would give both the same noise."""
    prompt = (BOS, 40, 41)
    keys = [f"0:{i}:0" for i in range(6)]
    seeds = [sample_seed(5, key) for key in keys]

    async def use(client: TeacherClient) -> Any:
        how: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0}
        first = await client.generate([prompt] * 6, seeds=seeds, **how)
        return first, await client.generate([prompt] * 6, seeds=seeds[::-1], **how)

    first, again = run(rig.client(rig.a), use)
    assert len({answer.token_ids for answer in first}) == 6
    assert again[::-1] == first  # whatever stands beside it


def test_c11_at_the_context_s_end(rig: Rig) -> None:
    """The server has to generate one token, so M - 1 tokens fit and M do not."""
    fits = ScoreItem("fits", tuple(range(3, 23)), tuple(range(3, 3 + CONTEXT - 21)))
    full = ScoreItem("full", fits.prompt_ids, (*fits.response_ids, 5))
    alien = ScoreItem("alien", (3, 4), (260,))

    async def use(client: TeacherClient) -> Any:
        checked = await client.score_batch([fits, full, alien])
        client._servers[0].max_model_len = None  # what the server itself says
        return checked, await client.score_batch([full, fits])

    checked, unchecked = run(rig.client(rig.a), use)
    assert checked["full"].cause == "too long" and "64" in checked["full"].detail
    assert unchecked["full"].cause == "refused" and "64" in unchecked["full"].detail
    assert checked["alien"].cause == "refused" and "260" in checked["alien"].detail
    want = reference(rig.dense, fits)
    for scores in (checked["fits"], unchecked["fits"]):
        assert scores.logprobs.tolist() == pytest.approx(want, abs=1e-4)


def test_c37_a_stranger_on_the_port_is_found_by_its_name(rig: Rig, tmp_path: Path) -> None:
    with pytest.raises(TeacherError, match=f"serves .*{rig.a.served_name}.*expected 'moe@"):
        run(
            TeacherClient("moe", [Endpoint(rig.a.url, rig.b.served_name)]),
            lambda c: c.probe(),
        )
    # A port that is held is refused, never shared.
    taken = ServerProcess(
        ServerSpec("late", str(rig.dense_path), port=rig.a.port), tmp_path / "late.log"
    )
    with pytest.raises(TeacherError, match=f"'late': cannot listen on 127.0.0.1:{rig.a.port}"):
        taken.start()
    # Ours is still loading when somebody else already answers on its address.
    late = ServerProcess(ServerSpec("late", str(rig.dense_path)), tmp_path / "late.log")
    late.start()
    late.port = rig.a.port
    with pytest.raises(TeacherError, match="another server holds the port"):
        late.wait_healthy(30.0)
    assert not late.alive()


def test_c38_a_frozen_server_meets_the_deadline_and_comes_back(rig: Rig) -> None:
    """SIGSTOP: the kernel goes on accepting connections, nobody answers."""
    batch = items(5, seed=5)
    assert rig.b.pid is not None
    client = rig.client(rig.b, timeout_s=1.0, retries=1)

    async def use(client: TeacherClient) -> tuple[Any, Any, float]:
        assert rig.b.pid is not None
        os.killpg(rig.b.pid, signal.SIGSTOP)
        try:
            begin = time.monotonic()
            frozen = await client.score_batch(batch)
            took = time.monotonic() - begin
        finally:
            os.killpg(rig.b.pid, signal.SIGCONT)
        return frozen, await client.score_batch(batch), took

    frozen, after, took = run(client, use)
    assert {failure.cause for failure in frozen.values()} == {"timeout"}
    assert "teacher 'moe'" in frozen[batch[0].sample_id].detail
    assert 2.0 <= took < 5.0 and client.metrics()["retries"] == 1
    assert worst(lists(after), {i.sample_id: reference(rig.moe, i) for i in batch}) < 1e-4


def test_a_server_that_cannot_start_says_why(rig: Rig, tmp_path: Path) -> None:
    """An argument that vLLM does not know; a cache that the machine does not have."""
    typo = ServerSpec("typo", str(rig.dense_path), engine_args={"max_num_seks": 3})
    greedy = ServerSpec("greedy", str(rig.dense_path), kv_cache_gib=1e6)
    servers = [ServerProcess(spec, tmp_path / f"{spec.name}.log") for spec in (typo, greedy)]
    servers[0].log_path.write_text("ValueError: of an earlier start\n")
    try:
        for server in servers:
            server.start()
        with pytest.raises(TeacherError, match=r"(?s)'typo'.*exit code 2.*max-num-seks") as caught:
            servers[0].wait_healthy(START_S)
        assert "earlier start" not in str(caught.value)
        with pytest.raises(
            TeacherError, match=r"(?s)'greedy'.*ValueError: .*1000000.* GiB.*end of"
        ):
            servers[1].wait_healthy(START_S)
        assert not any(server.alive() for server in servers)
    finally:
        for server in servers:
            server.stop()


def test_a_start_that_takes_too_long_is_ended(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mopd_teachers.server._WAIT_NOTE_S", 0.3)
    server = ServerProcess(ServerSpec("slow", str(rig.dense_path)), tmp_path / "slow.log")
    server.start()
    process, notes = psutil.Process(server.pid), []
    with pytest.raises(TeacherError, match=r"not ready within 1 s; raise start_timeout_s"):
        server.wait_healthy(1.0, notes.append)
    assert not server.alive() and _gone([process], 0.0)
    assert len(notes) >= 2 and all("teacher slow: loading" in note for note in notes)


FAULTS = (
    "500", "reset", "stall", "drip", "truncated", "wrong ids", "duplicated", "reordered", "nan",
    "stranger",
)  # fmt: skip


def test_a_thousand_samples_through_three_teachers_that_fail_in_every_way(rig: Rig) -> None:
    """Two replicas each, of which every fifth answer is spoiled: nothing is lost, and nothing is
    scored by another teacher. The reference is the same servers without the proxies."""
    batches = {
        name: [replace(i, sample_id=f"{name}:{i.sample_id}") for i in items(334, seed=seed)]
        for seed, name in enumerate(("dense", "moe", "plain"), 10)
    }
    quiet = {"dense": rig.client(rig.a), "moe": rig.client(rig.b), "plain": rig.plain()}
    upstream = {"dense": rig.a.url, "moe": rig.b.url, "plain": rig.plain_url}
    other = {"dense": rig.b.url, "moe": rig.a.url, "plain": rig.a.url}
    names = {"dense": rig.a.served_name, "moe": rig.b.served_name, "plain": None}

    async def use() -> tuple[dict[str, Outcome], set[str], dict[str, float]]:
        async with AsyncExitStack() as stack:
            proxies, clients = [], {}
            for number, name in enumerate(names):
                pair = [
                    FaultProxy(upstream[name], FAULTS, 0.0, 2 * number + k, other[name])
                    for k in range(2)
                ]
                for proxy in pair:
                    await stack.enter_async_context(proxy)
                proxies += pair
                endpoints = [Endpoint(proxy.url, names[name]) for proxy in pair]
                clients[name] = TeacherClient(
                    name, endpoints, timeout_s=5.0, retries=6, concurrency=8
                )
                await stack.enter_async_context(clients[name])
            router = TeacherRouter(clients)
            await router.probe()
            for proxy in proxies:
                proxy.rate = 0.2
            # As a run asks: groups of samples as they are finished, all domains together.
            groups = [
                router.score(name, batch[i : i + 12])
                for i in range(0, 334, 12)
                for name, batch in batches.items()
            ]
            parts = await asyncio.gather(*groups)
            drawn = {fault for proxy in proxies for fault in proxy.drawn}
            return (
                {k: v for part in parts for k, v in part.items()},
                drawn,
                clients["dense"].metrics(),
            )

    outcomes, drawn, metrics = asyncio.run(use())
    assert drawn == set(FAULTS)
    want = {k: v for name, c in quiet.items() for k, v in scores_of(c, batches[name]).items()}
    assert worst(lists(outcomes), want) < 1e-4
    assert metrics["retries"] > 0 and metrics["failures"] == 0


def test_a_replica_that_stalls_is_covered_by_the_other(rig: Rig) -> None:
    """Each of its requests is put to the other one; after three it is left alone."""
    batch = items(72, seed=20)

    async def use() -> tuple[dict[str, Outcome], dict[str, float], int, float]:
        async with AsyncExitStack() as stack:
            pair = [FaultProxy(rig.a.url, ("stall",), 0.0, k) for k in range(2)]
            for proxy in pair:
                await stack.enter_async_context(proxy)
            client = TeacherClient(
                "dense", [Endpoint(p.url, rig.a.served_name) for p in pair],
                timeout_s=20.0, retries=0, hedge_after_s=0.3,
            )  # fmt: skip
            await stack.enter_async_context(client)
            await client.probe()
            pair[0].rate = 1.0
            begin = time.monotonic()
            outcomes: dict[str, Outcome] = {}
            for start in range(0, 72, 12):
                outcomes |= await client.score_batch(batch[start : start + 12])
            took = time.monotonic() - begin
            return outcomes, client.metrics(), pair[0].drawn["stall"], took

    outcomes, metrics, stalled, took = asyncio.run(use())
    assert worst(lists(outcomes), scores_of(rig.client(rig.a), batch)) < 1e-5
    assert metrics["hedges"] == metrics["hedges_won"] == stalled == 3
    assert metrics["servers_down"] == 1 and metrics["failures"] == metrics["retries"] == 0
    assert took < 15.0


def test_a_request_that_is_given_up_leaves_no_work_at_the_server(rig: Rig) -> None:
    def told(what: str) -> int:
        with urllib.request.urlopen(f"{rig.a.url}{wire.PATH}/metrics", timeout=10) as reply:
            return int(reply.read().decode().split(f"\nmopd_score_{what} ")[1].split()[0])

    row = wire.ids_to_bytes(range(3, 33))
    many = [wire.SequenceMsg(str(i), row, row) for i in range(8000)]
    body = wire.encode(wire.ScoreRequest(wire.PROTOCOL, rig.a.served_name, many))
    done = told("sequences_total")

    async def use(client: TeacherClient) -> float:
        how = {"binary": True, "content_type": wire.CONTENT_TYPE, "timeout_s": 1.5}
        asked = asyncio.create_task(client._ask(client._servers[0], "POST", wire.PATH, body, **how))
        while not await asyncio.to_thread(told, "sequences_in_flight"):
            await asyncio.sleep(0.02)
        with pytest.raises(RequestError, match="did not answer within"):
            await asked
        begin = time.monotonic()
        while await asyncio.to_thread(told, "sequences_in_flight"):
            await asyncio.sleep(0.02)
        return time.monotonic() - begin

    async def whole() -> float:
        async with rig.client(rig.a) as client:
            return await use(client)

    assert asyncio.run(whole()) < 5.0  # all of it takes more than ten
    assert told("sequences_total") == done
    batch = items(5, seed=21)
    want = {i.sample_id: reference(rig.dense, i) for i in batch}
    assert worst(scores_of(rig.client(rig.a), batch), want) < 1e-4


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{}", 400, "not a score request"),
        (wire.encode(wire.ScoreRequest(1, "?", [])), 400, "protocol 1"),
        (wire.encode(wire.ScoreRequest(wire.PROTOCOL, "other@9", [])), 404, "not 'other@9'"),
        (wire.encode(wire.ScoreRequest(wire.PROTOCOL, "@", [], 261)), 400, "outside 0..260"),
        (wire.encode(wire.ScoreRequest(wire.PROTOCOL, "@", [], -1)), 400, "outside 0..260"),
        (b"large", 413, "larger than"),
        (
            wire.encode(
                wire.ScoreRequest(wire.PROTOCOL, "@", [wire.SequenceMsg("", b"", b"")] * 16_385)
            ),
            429,
            "at most 16384",
        ),
    ],
    ids=["no request", "old", "other model", "top-k", "negative", "large", "many"],
)
def test_a_request_that_cannot_be_meant_is_refused(
    rig: Rig, body: bytes, status: int, says: str
) -> None:
    length = len(rig.a.served_name)
    if b"\xa1@" in body:  # "@" stands for the name that is served; msgpack: its length, its bytes
        body = body.replace(b"\xa1@", bytes([0xA0 + length]) + rig.a.served_name.encode())
    if body == b"large":
        body = bytes(257 << 20)
    request = urllib.request.Request(rig.a.url + wire.PATH, data=body)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            raise AssertionError(reply.status)
    except urllib.error.HTTPError as error:
        assert (error.code, says in error.read().decode()) == (status, True)
    except (ConnectionError, urllib.error.URLError):
        assert status == 413, "it may hang up on what is too large"


def test_a_server_with_a_key_asks_everybody_for_it(rig: Rig, tmp_path: Path) -> None:
    spec = ServerSpec("locked", str(rig.dense_path), max_model_len=CONTEXT, api_key="s3cret")
    with ServerProcess(spec, tmp_path / "locked.log") as server:
        server.start()
        server.wait_healthy(START_S)
        opened = TeacherClient("locked", [Endpoint(server.url, server.served_name, "s3cret")])
        batch = items(5, seed=8)
        want = {i.sample_id: reference(rig.dense, i) for i in batch}
        assert worst(scores_of(opened, batch), want) < 1e-4
        body = json.dumps({"model": server.served_name, "prompt": [1, 2], "max_tokens": 1}).encode()
        kind = {"Content-Type": "application/json"}
        # vLLM itself asks for it under /v1 alone, and gives completions elsewhere, too.
        for path, data in (
            ("/v1/models", None), (wire.PATH, None), ("/openapi.json", None),
            ("/v1/completions", body), ("/invocations", body), ("/tokenize", body),
        ):  # fmt: skip
            for key in (None, "another"):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                request = urllib.request.Request(server.url + path, data, headers | kind)
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    urllib.request.urlopen(request, timeout=10)
        for path in ("/health", "/metrics", f"{wire.PATH}/metrics"):
            with urllib.request.urlopen(server.url + path, timeout=10) as reply:
                assert reply.status == 200
        assert asyncio.run(opened.tokenize("a")), "with the key it answers"
        assert server.pid is not None
        for process in (psutil.Process(server.pid), *psutil.Process(server.pid).children()):
            assert "s3cret" not in " ".join(process.cmdline())
    assert "s3cret" not in server.log_path.read_text()


PARENT = """
import sys, threading, time
from pathlib import Path
from mopd_teachers.server import ServerProcess, ServerSpec
server = ServerProcess(ServerSpec("orphan", sys.argv[1]), Path(sys.argv[2]))
# From a thread that ends: a server must outlive the thread that started it, not the process.
thread = threading.Thread(target=server.start)
thread.start()
thread.join()
server.wait_healthy(200)
print(server.pid, flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_parent_is_killed(rig: Rig, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(rig.dense_path), str(tmp_path / "orphan.log")],
        stdout=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None
        leader = int(parent.stdout.readline())
        family = [p for p in psutil.process_iter() if _group(p) == leader]
        assert len(family) >= 2, "the server and its engine"
    finally:
        parent.kill()
        parent.wait()
    assert _gone(family, 10.0), f"left behind: {family}"


def test_the_engine_ends_with_its_server(rig: Rig, tmp_path: Path) -> None:
    with ServerProcess(ServerSpec("x", str(rig.dense_path)), tmp_path / "x.log") as server:
        server.start()
        server.wait_healthy(START_S)
        assert server.pid is not None
        engines = psutil.Process(server.pid).children(recursive=True)
        assert engines
        os.kill(server.pid, signal.SIGKILL)
        assert _gone(engines, 60.0)
        # An engine ends with the thread that started it, which can be before the server's other
        # threads do; until then the system has the server neither running nor ended.
        deadline = time.monotonic() + 60.0
        while server.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not server.alive()
    # stopped cleanly by its owner, as the module's servers are at the end
