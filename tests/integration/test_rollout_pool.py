"""Real vLLM engines under Ray: logprobs, in-place updates, prefix cache, padding rows.

C08 temperature, C32 and C33 repeated updates of a MoE model, C34 refused updates, C39 padded ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mopd.config.schema import RolloutConfig
from mopd.errors import WeightSyncError
from mopd.kernels.word_sums import word_sums
from mopd.types import Prompt, Rollout

LONG = 150
"""Tokens of a prompt that leaves a whole block (128 on the CPU) in the prefix cache."""
VOCAB, VALID, EOS = 68, 61, 1
HEAD_ROWS_BIAS = 4.0
"""Padding rows that would be sampled often, were they not excluded."""


def checkpoint(folder: Path, seed: int) -> Path:
    """A MoE student whose unused head rows are likely on purpose."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        initializer_range=0.15,
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight[VALID:] *= HEAD_ROWS_BIAS
    model.save_pretrained(folder)
    return folder


def fingerprints(path: Path) -> dict[str, int]:
    weights = load_file(path)
    return dict(zip(weights, word_sums(list(weights.values())), strict=True))


class Rig:
    """Two engines on checkpoint A, the checkpoints, and transformers' own logprobs."""

    def __init__(self, a: Path, b: Path, pool: Any, loop: asyncio.AbstractEventLoop) -> None:
        from transformers import AutoModelForCausalLM

        self.paths = {"a": a, "b": b}
        self.models = {
            k: AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32)
            for k, p in self.paths.items()
        }
        self.pool, self._loop = pool, loop

    def do(self, awaitable: Any) -> Any:
        return self._loop.run_until_complete(awaitable)

    def generate(
        self, requests: list[tuple[str, Prompt]], temperature: float, top_k: int = 0
    ) -> list[Rollout]:
        async def collect() -> list[Rollout]:
            stream = self.pool.generate(requests, temperature=temperature, top_k=top_k)
            return [rollout async for group in stream for rollout in group]

        return self.do(collect())

    def update(self, name: str, version: int, probe: Any = ()) -> Any:
        path = self.paths[name] / "model.safetensors"
        return self.do(self.pool.update_weights(path, version, fingerprints(path), probe))

    def all_logprobs(self, name: str, rollout: Rollout, temperature: float) -> torch.Tensor:
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.response_ids]])
        with torch.no_grad():
            logits = self.models[name](ids).logits[0, :, :VALID].double() / temperature
        return logits.log_softmax(-1)[len(rollout.prompt.token_ids) - 1 : -1]

    def expected(self, name: str, rollout: Rollout, temperature: float) -> torch.Tensor:
        logprobs = self.all_logprobs(name, rollout, temperature)
        return logprobs.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]

    def worst(self, name: str, rollouts: list[Rollout], temperature: float) -> float:
        return max(
            float(
                (self.expected(name, r, temperature) - torch.tensor(r.sampler_logprobs)).abs().max()
            )
            for r in rollouts
        )


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    import ray

    from mopd.runtime.rollout_pool import RolloutPool
    from mopd.runtime.startup import Startup

    folder = tmp_path_factory.mktemp("rollout")
    a, b = checkpoint(folder / "a", 0), checkpoint(folder / "b", 1)
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    loop = asyncio.new_event_loop()
    try:
        pool = RolloutPool(RolloutConfig(engines=2, max_response_tokens=12))
        loop.run_until_complete(
            pool.build(
                Startup(lambda _: None, print, print),
                model=a,
                config=RolloutConfig(max_response_tokens=12),
                dtype="float32",
                max_model_len=LONG + 14,
                valid_vocab=VALID,
                vocab_size=VOCAB,
                eos_token_ids=(EOS,),
                seed=3,
            )
        )
        yield Rig(a, b, pool, loop)
    finally:
        ray.shutdown()
        loop.close()


def requests(count: int, length: int = 20, tag: str = "s") -> list[tuple[str, Prompt]]:
    return [
        (
            f"{tag}{i}",
            Prompt(f"p{i}", "d", "", tuple((3 + i * 7 + j * 5) % VALID for j in range(length))),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_c08_sampler_logprobs_are_those_of_the_sampled_distribution(
    rig: Rig, temperature: float
) -> None:
    rig.update("a", 0)
    asked = requests(24)
    rollouts = rig.generate(asked, temperature)
    assert sorted(r.sample_id for r in rollouts) == sorted(key for key, _ in asked)
    assert rig.worst("a", rollouts, temperature) < 1e-4
    for rollout in rollouts:
        ended = rollout.response_ids[-1] == EOS
        assert rollout.finish_reason == ("stop" if ended else "length")
        assert EOS not in rollout.response_ids[:-1]
        assert ended or len(rollout.response_ids) == 12


def test_top_k_is_that_of_the_sampled_distribution(rig: Rig) -> None:
    rig.update("a", 0)
    for rollout in rig.generate(requests(8, tag="k"), 0.5, top_k=3):
        assert rollout.topk is not None
        ids, values = torch.tensor(rollout.topk.ids), torch.tensor(rollout.topk.logprobs)
        full = rig.all_logprobs("a", rollout, 0.5)
        assert ids[:, 0].tolist() == list(rollout.response_ids)
        used = ids >= 0
        picked = full.gather(1, ids.clamp(min=0).long())
        assert (picked - values)[used].abs().max() < 1e-4
        for position, best in enumerate(full.topk(3).indices.tolist()):
            sampled = rollout.response_ids[position]
            assert set(ids[position][used[position]].tolist()) == {sampled, *best}


def test_c39_ids_no_tokenizer_has_are_never_sampled(rig: Rig) -> None:
    rig.update("a", 0)
    rollouts = rig.generate(requests(64, tag="pad"), 1.0)
    assert max(token for r in rollouts for token in r.response_ids) < VALID
    # ... although the model gives them much of its probability:
    with torch.no_grad():
        mass = rig.models["a"](torch.tensor([[3, 8, 13]])).logits.softmax(-1)[..., VALID:].sum(-1)
    assert mass.max() > 0.2


@pytest.mark.parametrize("way", ["vllm", "direct"])
def test_c32_c33_updates_take_effect_again_and_again(rig: Rig, way: str) -> None:
    """By vLLM's own reload, and copied to the places that were learned from it. What is learned is
    the first file that comes a second time with a probe; both engines say what they do."""
    asked = requests(12, length=LONG)
    probe = [] if way == "vllm" else [((3, 8, 13), (60, 2, 33)), ((5,), (17, 40))]
    if probe:
        rig.update("b", 0, probe)
        rig.update("b", 0, probe)
    for version, name in enumerate("abab", start=1):
        proofs = rig.update(name, version, probe)
        assert [p.direct for p in proofs] == [way == "direct"] * 2
        for proof in proofs:
            for (prompt, response), got in zip(probe, proof.logprobs, strict=True):
                with torch.no_grad():
                    logits = rig.models[name](torch.tensor([[*prompt, *response]])).logits[0]
                want = logits.log_softmax(-1)[len(prompt) - 1 : -1]
                want = want.gather(1, torch.tensor(response)[:, None])[:, 0]
                assert torch.allclose(torch.tensor(got), want, atol=1e-4)
        for temperature in (1.0, 0.0):
            rollouts = rig.generate(asked, temperature)
            assert {r.weight_version for r in rollouts} == {version}
            if temperature:
                assert rig.worst(name, rollouts, temperature) < 1e-4
                continue
            for rollout in rollouts:  # greedy: the most likely id at every place
                ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.response_ids]])
                with torch.no_grad():
                    best = rig.models[name](ids).logits[0, LONG - 1 : -1, :VALID].argmax(-1)
                assert tuple(best.tolist()) == rollout.response_ids
    sequences = [(r.prompt.token_ids, r.response_ids) for r in rollouts]
    for engine in rig.do(rig.pool.logprobs(sequences)):
        for (prompt, response), got in zip(sequences, engine, strict=True):
            with torch.no_grad():
                logits = rig.models["b"](torch.tensor([[*prompt, *response]])).logits[0]
            want = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            want = want.gather(1, torch.tensor(response)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(got), want, atol=1e-4)


def test_a_tensor_that_is_not_the_trainers_is_named(rig: Rig, tmp_path: Path) -> None:
    """In both ways to load: one number of one tensor, in a file of the right names and shapes."""
    path = tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    for probe in ([], [((3, 8), (60, 2))]):
        weights = load_file(rig.paths["b"] / "model.safetensors")
        expected = fingerprints(rig.paths["b"] / "model.safetensors")
        weights[name][5, 7] += 1e-6
        save_file(weights, path, metadata={"format": "pt"})
        with pytest.raises(WeightSyncError, match=f"engine 0: .* 1 of .*differ.*: {name}"):
            rig.do(rig.pool.update_weights(path, 9, expected, probe))
        assert {r.weight_version for r in rig.generate(requests(2), 1.0)} == {-1}


def test_a_file_that_no_engine_sees(rig: Rig, tmp_path: Path) -> None:
    rig.update("a", 0)
    with pytest.raises(WeightSyncError, match="engine 0: .*there is no .*transport=shared_memory"):
        rig.do(rig.pool.update_weights(tmp_path / "gone.safetensors", 1))
    assert {r.weight_version for r in rig.generate(requests(2), 1.0)} == {0}


def test_a_sample_does_not_depend_on_engine_or_batch(rig: Rig) -> None:
    rig.update("a", 0)
    many = {r.sample_id: r.response_ids for r in rig.generate(requests(30), 1.0)}
    few = {r.sample_id: r.response_ids for r in rig.generate(requests(30)[7:12], 1.0)}
    assert few == {key: many[key] for key in few}
    assert len(set(many.values())) > 20


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda w: w.pop("model.layers.1.mlp.gate.weight"),
            r"missing model.layers.1.mlp.gate.weight",
        ),
        (lambda w: w.update(extra=torch.zeros(2)), r"unexpected extra \[2\]"),
        (
            lambda w: w.update({"lm_head.weight": torch.zeros(VALID, 64)}),
            rf"lm_head.weight: shape \[{VALID}, 64\], expected \[{VOCAB}, 64\]",
        ),
    ],
)
def test_c34_a_partial_update_is_refused_and_changes_nothing(
    rig: Rig, tmp_path: Path, change: Any, text: str
) -> None:
    rig.update("a", 5)
    weights = load_file(rig.paths["b"] / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "bad.safetensors")
    with pytest.raises(WeightSyncError, match=text):
        rig.do(rig.pool.update_weights(tmp_path / "bad.safetensors", 6))
    rollouts = rig.generate(requests(6), 1.0)
    assert rig.worst("a", rollouts, 1.0) < 1e-4
    assert {r.weight_version for r in rollouts} == {5}
