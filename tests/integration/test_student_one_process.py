"""The student against transformers and the formula, in one process.

C03, C04, C06, C07, C08, C20, C24, C30 (expert bias), C39; checkpoints, failures, bfloat16.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "student"))

from student_harness import Context, launch, require_passed  # noqa: E402
from student_tiny import (  # noqa: E402
    KINDS,
    PAD,
    VALID,
    VOCAB,
    make_checkpoint,
    make_samples,
)

SAMPLES = make_samples(6)
SEQUENCES = [(s.prompt_ids, s.response_ids) for s in SAMPLES]


def transformers_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def transformers_logprobs(
    model: Any, sequence: tuple[Sequence[int], Sequence[int]], temperature: float, vocabulary: int
) -> Any:
    """[R] logprobs of the response, from one unpadded forward; differentiable."""
    import torch

    prompt, response = sequence
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, :, :vocabulary]
    logprobs = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(response)[:, None]).squeeze(1)


def largest_difference(a: Any, b: Any) -> float:
    return max(abs(x - y) for u, v in zip(a, b, strict=True) for x, y in zip(u, v, strict=True))


def all_gradients_zero(student: Any) -> bool:
    return all(not g.any() for g in student.gradients().values())


def logprobs_equal_transformers(c: Context) -> None:
    """Every family; C08: logits / T, over the head's rows or the tokenizer's ids as asked."""
    import torch

    ids = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    for kind in KINDS:
        model = transformers_model(c.folder / kind)
        student = c.student(kind, world=1)
        with torch.no_grad():
            logits = student._parts.ddp(ids, torch.arange(20).expand(2, -1), None)
            assert (logits - model(ids).logits).abs().max() < 1e-5, kind
        for temperature in (1.0, 0.5):
            for whole_head, vocabulary in ((True, VOCAB), (False, VALID)):
                with torch.no_grad():
                    expected = [
                        transformers_logprobs(model, s, temperature, vocabulary).tolist()
                        for s in SEQUENCES
                    ]
                got = student.logprobs(SEQUENCES, temperature, whole_head)
                assert largest_difference(got, expected) < 1e-5, (kind, temperature, vocabulary)
        student.close()


def round_trip(c: Context) -> None:
    """Import -> export returns every bit, expert biases included, in the checkpoint's names."""
    from safetensors.torch import load_file

    for kind in KINDS:
        student = c.student(kind, world=1)
        shapes = student.export(c.folder / "round_trip.safetensors")
        student.close()
        source = load_file(c.folder / kind / "model.safetensors")
        exported = load_file(c.folder / "round_trip.safetensors")
        assert exported.keys() == source.keys() == shapes.keys(), kind
        assert all(exported[name].equal(source[name]) for name in source), kind


def gradients_equal_the_formula(c: Context) -> None:
    """MATH 1 written out over transformers' own autograd, at T = 0.7, some tokens dropped."""
    from safetensors.torch import load_file

    temperature, low, high, clip = 0.7, 0.5, 2.0, 0.5
    for kind in ("moe", "tied", "mixtral", "deepseek"):
        model = transformers_model(c.folder / kind)
        loss, kept, clipped, tokens = 0.0, 0, 0, 0
        samples = []
        for sample, sequence in zip(SAMPLES, SEQUENCES, strict=True):
            logprobs = transformers_logprobs(model, sequence, temperature, VALID)
            pi = logprobs.detach()
            # sampler and teacher near enough that both sides of the band and the clip are met
            mu = pi + 0.7 * (pi.new_tensor(sample.sampler_logprobs) + 2.5)
            teacher = (
                pi + pi.new_tensor(sample.teacher_logprobs) - mu.new_tensor(sample.sampler_logprobs)
            )
            ratio = (pi - mu).exp()
            weight = ratio * ((ratio >= low) & (ratio <= high))
            advantage = (teacher - pi).clamp(-clip, clip) + sample.orm_advantage
            loss = loss - (weight * advantage * logprobs).mean() / len(SAMPLES)
            kept += int((weight > 0).sum())
            clipped += int(((teacher - pi).abs() > clip).sum())
            tokens += len(pi)
            samples.append(
                replace(
                    sample,
                    sampler_logprobs=tuple(mu.tolist()),
                    teacher_logprobs=tuple(teacher.tolist()),
                )
            )
        assert 0 < kept < tokens and 0 < clipped < tokens
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.data = parameter.grad
            else:
                assert "embed" not in name
        model.save_pretrained(c.folder / f"{kind}_gradients")  # renames to the checkpoint's names
        expected = load_file(c.folder / f"{kind}_gradients" / "model.safetensors")

        student = c.student(
            kind,
            world=1,
            temperature=temperature,
            objective={
                "truncation": {"kind": "icepop", "low": low, "high": high},
                "teacher": {"clip": clip},
            },
        )
        got_loss, _ = student._updates.forward_backward(samples)
        assert got_loss == pytest.approx(float(loss.detach()), abs=3e-6), kind
        got = student.gradients()
        trained = {name for name in expected if ".gate." not in name}
        assert got.keys() == trained
        for name in trained:
            scale = expected[name].abs().max().item()
            error = (got[name] - expected[name]).abs().max().item()
            assert error < 1e-5 * max(scale, 0.1), (kind, name, error, scale)
        metrics = student.step(samples, 0)
        assert metrics["mask_fraction"] == pytest.approx(1 - kept / tokens)
        assert metrics["clip_fraction"] == pytest.approx(clipped / tokens)
        assert metrics["domain/a/tokens"] + metrics["domain/b/tokens"] == tokens
        student.close()


def batch_equals_solo(c: Context) -> None:
    """C03: prompts of 3 and 7 tokens together, and each alone. Rows are padded on the right;
    packed, a sample lies behind whatever came before it, as it would behind padding on the left."""
    pair = [
        (tuple(range(2, 5)), tuple(range(10, 14))),
        (tuple(range(20, 27)), tuple(range(30, 32))),
    ]
    for packing in (False, True):
        student = c.student("moe", world=1, micro_batch_size=8, packing=packing)
        together = student.logprobs(pair)
        solo = [student.logprobs([sequence])[0] for sequence in pair]
        assert largest_difference(together, solo) < 2e-6
        assert student.logprobs(pair[::-1]) == together[::-1]
        # One-token prompts and one-token responses (C01's edge) have a prediction too.
        assert len(student.logprobs([((5,), (6,))])[0]) == 1
        student.close()


def _own(student: Any, temperature: float = 1.0) -> list[Any]:
    """The samples as this student would have drawn and scored them itself."""
    logprobs = student.logprobs(SEQUENCES, temperature, whole_head=False)
    return [
        replace(s, sampler_logprobs=tuple(lp), teacher_logprobs=tuple(lp), orm_advantage=0.0)
        for s, lp in zip(SAMPLES, logprobs, strict=True)
    ]


def teacher_equal_to_student(c: Context) -> None:
    """C06: A is exactly 0 on the same computation; any misalignment by one token is not."""
    for temperature in (1.0, 0.5):
        student = c.student("moe", world=1, temperature=temperature)
        before = student.weights.collect(dict(student.model.named_parameters()))
        own = _own(student, temperature)
        metrics = student.step(own, 0)
        assert metrics["reverse_kl"] == 0.0 and metrics["advantage_std"] == 0.0
        assert metrics["train_rollout_kl_k1"] == 0.0  # C08: ratio 1 on equal weights at any T
        assert metrics["grad_norm"] == 0.0 and all_gradients_zero(student)
        after = student.weights.collect(dict(student.model.named_parameters()))
        assert all(after[name].equal(before[name]) for name in before)
        shifted = [replace(s, teacher_logprobs=_roll(s.teacher_logprobs)) for s in own]
        metrics = student.step(shifted, 1)
        assert metrics["advantage_std"] > 0.3 and metrics["grad_norm"] > 0.1
        student.close()


def weight_decay_spares_norms_and_routers(c: Context) -> None:
    """With every gradient exactly 0, decay alone moves matrices by lr * decay, and nothing else."""
    student = c.student("moe", world=1, optimizer={"lr": 0.1, "weight_decay": 0.5})
    before = student.weights.collect(dict(student.model.named_parameters()))
    assert student.step(_own(student), 9)["lr"] == 0.0  # the schedule's end
    metrics = student.step(_own(student), 2)
    after = student.weights.collect(dict(student.model.named_parameters()))
    for name, tensor in before.items():
        still = "norm" in name or name.endswith("mlp.gate.weight")
        expected = tensor if still else tensor * (1 - metrics["lr"] * 0.5)
        assert (after[name] - expected).abs().max() < 1e-6, name
    student.close()


def _roll(values: tuple[float, ...]) -> tuple[float, ...]:
    return (*values[1:], values[0])


def teacher_scores_plus_one(c: Context) -> None:
    """C20: the gradient is linear in A, so a teacher 1 nat surer adds the gradient of A = 1."""
    student = c.student("moe", world=1, objective={"teacher": {"clip": 0.0}})

    def gradients(samples: list[Any]) -> dict[str, Any]:
        student._updates.forward_backward(samples)
        return student.gradients()

    own = _own(student)
    teacher = [
        replace(s, teacher_logprobs=t.teacher_logprobs) for s, t in zip(own, SAMPLES, strict=True)
    ]
    plus_one = [
        replace(s, teacher_logprobs=tuple(x + 1 for x in s.teacher_logprobs)) for s in teacher
    ]
    base, moved = gradients(teacher), gradients(plus_one)
    unit = gradients([replace(s, orm_advantage=1.0) for s in own])  # A = 0 + 1
    both = gradients([replace(s, orm_advantage=1.0) for s in teacher])  # alpha * A_ORM = 1
    for name in base:
        size = unit[name].abs().max().item()
        assert size > 1e-4 or "experts" in name
        for other in (moved, both):
            error = (other[name] - base[name] - unit[name]).abs().max().item()
            assert error < 1e-5 * max(size, 0.1), (name, error)
    student.close()


def icepop_on_real_ratios(c: Context) -> None:
    """C24: log-ratios of +-200 give exactly nothing; a kept token's weight is its ratio."""
    student = c.student("moe", world=1, objective={"truncation": {"kind": "icepop"}})
    own = [replace(s, orm_advantage=1.0) for s in _own(student)]

    def moved(by: float) -> list[Any]:
        return [replace(s, sampler_logprobs=tuple(x + by for x in s.sampler_logprobs)) for s in own]

    student._updates.forward_backward(own)
    plain = student.gradients()
    student._updates.forward_backward(moved(-math.log(2.0)))  # pi / mu = 2
    doubled = student.gradients()
    for name in plain:
        error = (doubled[name] - 2 * plain[name]).abs().max().item()
        assert error < 1e-5 * max(plain[name].abs().max().item(), 0.1), name
    for by in (200.0, -200.0, -math.log(5.001), -math.log(0.4999)):
        loss, _ = student._updates.forward_backward(moved(by))
        assert loss == 0.0 and all_gradients_zero(student), by
    student.close()


def refused_samples(c: Context) -> None:
    """C04, C39 and C07: what cannot be trained on is named, and nothing is touched."""
    from mopd.errors import ModelError

    student = c.student("moe", world=1)
    before = student.weights.collect(dict(student.model.named_parameters()))
    good = SAMPLES[0]
    n = len(good.response_ids)
    bad = {
        "padded head row": replace(good, response_ids=(VALID, *good.response_ids[1:])),
        "nan": replace(good, teacher_logprobs=(math.nan,) * n),
        "infinite": replace(good, sampler_logprobs=(-math.inf,) * n),
        "long scores": replace(good, teacher_logprobs=good.teacher_logprobs + (0.0,)),
        # C04: a response with a tool's output in the middle, mask 0 1 1 0 0 1, scored where the
        # mask is 1. There is no mask: every response token is trained on, or none.
        "scores of the masked response": replace(
            good, response_ids=tuple(range(2, 8)), teacher_logprobs=(-1.0, -2.0, -3.0)
        ),
        "no such domain": replace(good, domain="c"),
        "empty": replace(good, response_ids=(), sampler_logprobs=(), teacher_logprobs=()),
        "too long": replace(good, prompt_ids=(3,) * 200),
    }
    for reason, sample in bad.items():
        sample = replace(sample, sample_id=reason)
        assert list(student.refusals([good, sample])) == [reason]
        with pytest.raises(ModelError, match=reason):
            student.step([good, sample], 0)
    last = replace(good, response_ids=(VALID - 1, *good.response_ids[1:]))
    assert student.refusals([last]) == {}
    # PAD is an id like any other when it was really sampled.
    assert student.refusals([replace(good, response_ids=(PAD, *good.response_ids[1:]))]) == {}
    after = student.weights.collect(dict(student.model.named_parameters()))
    assert all(after[name].equal(before[name]) for name in before)
    student.close()


def not_finite(c: Context) -> None:
    """A loss or a gradient beyond float32 stops the step before the weights are touched."""
    from mopd.errors import ModelError

    student = c.student("moe", world=1, objective={"teacher": {"clip": 0.0}})
    before = student.weights.collect(dict(student.model.named_parameters()))
    huge = [replace(s, teacher_logprobs=(3e38,) * len(s.response_ids)) for s in SAMPLES]
    with pytest.raises(ModelError, match=r"step 7: the (loss|gradient norm) is"):
        student.step(huge, 7)
    large = [replace(s, teacher_logprobs=(1e30,) * len(s.response_ids)) for s in SAMPLES]
    with pytest.raises(ModelError, match="step 8: the gradient norm is inf"):
        student.step(large, 8)  # a finite loss, whose squared gradients are not
    after = student.weights.collect(dict(student.model.named_parameters()))
    assert all(after[name].equal(before[name]) for name in before)
    assert student._optimizer.steps == 0
    assert student.step(SAMPLES, 9)["grad_norm"] > 0  # and it can go on
    student.close()


def expert_bias_stays(c: Context) -> None:
    """C30: a router that has an expert bias keeps it through steps that would move it."""
    moved = []
    for options in (
        {"freeze_routers": False, "router_bias_update_rate": 1e-2},
        {"freeze_routers": False},
        {"optimizer": {"weight_decay": 0.1}},
    ):
        student = c.student("deepseek", world=1, **options)
        name = "model.layers.1.mlp.gate."
        before = student.weights.collect(student._parameters())
        for step in range(3):
            student.step(SAMPLES[:2], step)
        after = student.weights.collect(student._parameters())
        parts = ("weight", "e_score_correction_bias")
        moved.append([not after[name + part].equal(before[name + part]) for part in parts])
        student.close()
    # The first lines show that both would move where they are not held.
    assert moved == [[True, True], [True, False], [False, False]]


def expert_biases_count_tokens(c: Context) -> None:
    """C22: however the samples are cut into forwards, biases move by where their tokens went, and
    not by padding; and not at all with an update that is not made."""
    from student_tiny import make_checkpoint

    from mopd.errors import ModelError

    # One long answer and five of one token: side by side, most positions are padding.
    short = [
        replace(s, **{n: getattr(s, n)[:1] for n in ("response_ids", "sampler_logprobs")})
        for s in SAMPLES[:5]
    ]
    short = [replace(s, teacher_logprobs=s.teacher_logprobs[:1]) for s in short]
    long = replace(
        SAMPLES[5],
        response_ids=tuple(2 + i % 50 for i in range(60)),
        sampler_logprobs=(-2.0,) * 60,
        teacher_logprobs=(-2.5,) * 60,
    )
    samples, rate = [*short, long], 1e-2
    trained = {"freeze_routers": False, "router_bias_update_rate": rate}
    make_checkpoint(c.folder / "ungrouped", "deepseek", seed=1, n_group=1, topk_group=1)
    moves = []
    for options in (
        {"micro_batch_size": 1},
        {"micro_batch_size": 8},
        {"micro_batch_size": 8, "recompute": "layers"},
        {"packing": True, "max_tokens_per_microbatch": 80},
    ):
        student = c.student("ungrouped", world=1, **trained, **options)
        bias = student._parameters()["decoder.layers.1.mlp.router.expert_bias"]
        before = bias.clone()
        student.step(samples, 0)
        moves.append(((bias - before) / rate).round().tolist())
        student.close()
    assert set(moves[0]) == {-1.0, 1.0} and all(m == moves[0] for m in moves), moves

    student = c.student(
        "ungrouped", world=1, **trained, objective={"truncation": {"kind": "icepop"}}
    )
    bias = student._parameters()["decoder.layers.1.mlp.router.expert_bias"]
    before = bias.clone()
    dead = [
        replace(s, sampler_logprobs=tuple(x - 200 for x in s.sampler_logprobs)) for s in samples
    ]
    assert student.step(dead, 0)["grad_norm"] == 0.0
    assert bias.equal(before)
    broken = [replace(samples[0], weight=float("nan")), *samples[1:]]
    with pytest.raises(ModelError, match="this update was not made"):
        student.step(broken, 0)
    assert bias.equal(before)
    student.step(samples, 0)
    assert not bias.equal(before)
    student.close()


def unfrozen_routers_train(c: Context) -> None:
    """The switch does something: without it the routers move, and their gradient is checked."""
    student = c.student("moe", world=1, freeze_routers=False)
    student.step(SAMPLES, 0)
    gates = {n: g for n, g in student.gradients().items() if n.endswith("mlp.gate.weight")}
    assert len(gates) == 2 and all(g.abs().max() > 1e-4 for g in gates.values())
    student.close()


def bfloat16(c: Context) -> None:
    """bfloat16 weights with float32 copies in the optimizer: steps, saves, resumes to the bit."""
    import torch

    options: dict[str, Any] = {"dtype": "bfloat16", "optimizer": {"clip_grad": 1.0}}
    straight = c.student("moe", world=1, **options)
    reference = c.kept["first loss"]
    assert straight.step(SAMPLES, 0)["loss"] == pytest.approx(reference, rel=0.1)
    straight.save(c.folder / "bfloat16")
    straight.step(SAMPLES, 1)
    main = {n: p.clone() for n, p in straight._main_parameters().items()}
    assert any(p.dtype == torch.float32 for p in main.values())
    straight.close()
    resumed = c.student("moe", world=1, **options)
    resumed.load(c.folder / "bfloat16")
    resumed.step(SAMPLES, 1)
    for name, parameter in resumed._main_parameters().items():
        assert parameter.equal(main[name]), name
    for name, parameter in resumed.model.named_parameters():
        assert parameter.equal(main[name].to(torch.bfloat16)), name
    moments = resumed._optimizer.empty_moments()
    held = {t.data_ptr() for named in moments.values() for t in named.values()}
    resumed._optimizer.restore(2, moments)
    assert not any(moments.values())  # taken over, not copied
    taken = resumed._optimizer.moments()
    assert held == {t.data_ptr() for named in taken.values() for t in named.values()}
    resumed.close()


def replayed_routes(c: Context) -> None:
    """MATH 9: with expert choices that no router would make, logprobs and gradients are those of
    transformers with its routers told the same; padded and packed rows alike."""
    import torch
    from student_tiny import with_routes
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    samples = with_routes(SAMPLES, layers=2, top_k=2, experts=8)
    model = transformers_model(c.folder / "moe")
    router = modeling_qwen3_moe.Qwen3MoeTopKRouter
    own, told = router.forward, {}

    def forced(self: Any, hidden: Any) -> Any:
        logits = torch.nn.functional.linear(hidden.view(-1, hidden.shape[-1]), self.weight)
        chosen = told[id(self)]
        return logits, torch.softmax(logits.gather(1, chosen), -1), chosen

    def logprobs_of(sample: Any) -> Any:
        sequence = (sample.prompt_ids, sample.response_ids)
        for layer, block in enumerate(model.model.layers):
            # The last response token is an input there; where it goes changes nothing before it.
            routes = torch.from_numpy(sample.routed_experts[:, layer].astype("int64"))
            told[id(block.mlp.gate)] = torch.cat([routes, routes[-1:]])
        return transformers_logprobs(model, sequence, 1.0, VALID)

    router.forward = forced
    expected = [logprobs_of(s) for s in samples]
    sum(e.mean() for e in expected).backward()
    router.forward = own
    for packing in (False, True):
        student = c.student(
            "moe", world=1, routing_replay=True, freeze_routers=False, packing=packing
        )
        plain = student.logprobs(SEQUENCES, whole_head=False)
        replayed = student.logprobs(SEQUENCES, whole_head=False, samples=samples)
        wanted = [e.tolist() for e in expected]
        assert largest_difference(replayed, wanted) < 1e-5
        assert largest_difference(plain, wanted) > 0.1
        # And the step trains on them: the router's gradient flows through the given experts.
        # A = 1 and w = 1 make the loss the mean of -log pi over samples.
        even = [
            replace(
                s,
                sampler_logprobs=tuple(lp),
                teacher_logprobs=tuple(lp),
                orm_advantage=1.0,
            )
            for s, lp in zip(samples, replayed, strict=True)
        ]
        student.step(even, 0)
        got = student.gradients()["model.layers.1.mlp.gate.weight"]
        gate = model.model.layers[1].mlp.gate.weight.grad / -len(samples)
        assert (got - gate).abs().max() < 1e-5 * gate.abs().max().clamp(min=0.1)
        missing = replace(samples[0], routed_experts=None)
        short = replace(samples[1], routed_experts=samples[1].routed_experts[1:])
        odd = [
            replace(s, routed_experts=change(s.routed_experts))
            for s, change in (
                (samples[2], lambda r: r.astype("int32") - 8),
                (samples[3], lambda r: r + 0.5),
            )
        ]
        reasons = student.refusals([missing, short, *odd, samples[4]])
        assert list(reasons) == [s.sample_id for s in (missing, short, *odd)]
        assert "expert -" in reasons[odd[0].sample_id]
        assert "expected whole numbers" in reasons[odd[1].sample_id]
        assert "no expert choices" in reasons[missing.sample_id]
        assert "expected [" in reasons[short.sample_id]
        student.close()


def head_in_float32(c: Context) -> None:
    """bfloat16 weights, float32 head: the logits are those of float32 matrices."""
    import torch

    for kind in ("moe", "tied"):
        seen = {}
        for fp32_head in (False, True):
            student = c.student(kind, world=1, dtype="bfloat16", fp32_head=fp32_head)
            ids = torch.randint(2, VALID, (2, 12), generator=torch.Generator().manual_seed(0))
            hidden: list[Any] = []
            hook = student.model.decoder.register_forward_hook(
                lambda *a, out=hidden: out.append(a[2])
            )
            with torch.no_grad():
                logits = student._parts.ddp(ids, None, None)
            hook.remove()
            weights = student.weights.collect(student._parameters())
            head = weights["lm_head.weight" if kind == "moe" else "model.embed_tokens.weight"]
            exact = (hidden[0].double() @ head.double().T).transpose(0, 1)
            seen[fp32_head] = (logits.double() - exact).abs().max().item()
            assert logits.dtype == (torch.float32 if fp32_head else torch.bfloat16)
            assert student.step(SAMPLES, 2)["grad_norm"] > 0
            student.close()
        assert seen[True] < 1e-4 < seen[False], (kind, seen)


def learning_rate_reported(c: Context) -> None:
    student = c.student("moe", world=1, optimizer={"lr": 1e-3, "warmup_steps": 2})
    first = student.step(SAMPLES, 0)
    c.kept["first loss"] = first["loss"]
    rates = [first["lr"]] + [student.step(SAMPLES, i)["lr"] for i in (1, 9)]
    assert rates == pytest.approx([5e-4, 1e-3, 0.0])
    student.close()


def save_hf_loads(c: Context) -> None:
    """The exported folder is an ordinary Hugging Face checkpoint of the trained weights; of the
    tokenizer's ids: what becomes of the head's other rows is seen in test_student_publishing."""
    import torch

    for kind in ("moe", "tied"):
        student = c.student(kind, world=1)
        student.step(SAMPLES, 2)
        student.save_hf(c.folder / f"{kind}_out")
        expected = student.logprobs(SEQUENCES, whole_head=False)
        student.close()
        model = transformers_model(c.folder / f"{kind}_out")
        with torch.no_grad():
            got = [transformers_logprobs(model, s, 1.0, VALID).tolist() for s in SEQUENCES]
        assert largest_difference(got, expected) < 1e-5
        assert (c.folder / f"{kind}_out" / "notes.txt").read_text() == "kept"


def interrupted_save(c: Context) -> None:
    """A save that dies half-way leaves the checkpoint before it whole and loadable."""
    from mopd.errors import ModelError
    from mopd.student import files

    student = c.student("moe", world=1)
    directory = c.folder / "checkpoints" / "last"
    student.step(SAMPLES, 0)
    student.save(directory)
    saved = {f.name: f.read_bytes() for f in directory.iterdir()}
    assert len(saved) == 5
    student.step(SAMPLES, 1)
    add, written = files.TensorWriter.add, []

    def full_disk(writer: Any, name: str, tensor: Any) -> None:
        if len(written) > len(student.family.shapes()):  # in the second file
            raise OSError("No space left on device")
        written.append(name)
        add(writer, name, tensor)

    files.TensorWriter.add = full_disk
    with pytest.raises(ModelError, match="No space left"):
        student.save(directory)
    files.TensorWriter.add = add
    assert len(written) > len(student.family.shapes())
    assert {f.name: f.read_bytes() for f in directory.iterdir()} == saved
    student.load(directory)
    assert student._optimizer.steps == 1
    student.step(SAMPLES, 1)
    student.save(directory)  # over the old one
    assert {f.name for f in directory.iterdir()} == saved.keys()
    assert {f.name for f in directory.parent.iterdir()} == {"last"}
    student.close()


def wrong_checkpoints(c: Context) -> None:
    """C34 on resuming: cut off, of another architecture, short of a tensor or with one too many:
    named, and nothing is loaded."""
    import json
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    from mopd.errors import ModelError

    student = c.student("moe", world=1)
    student.step(SAMPLES, 0)
    student.save(c.folder / "good")
    broken = c.folder / "broken"
    shutil.copytree(c.folder / "good", broken)
    file = broken / "exp_avg_sq.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    tensors = load_file(c.folder / "good" / "model.safetensors")
    for name, changed in (
        ("missing", {k: v for k, v in tensors.items() if k != "model.layers.1.mlp.gate.weight"}),
        ("extra", tensors | {"model.stray": tensors["model.norm.weight"].clone()}),
    ):
        shutil.copytree(c.folder / "good", c.folder / name)
        save_file(changed, c.folder / name / "model.safetensors")
    student.step(SAMPLES, 1)
    weights = {n: p.clone() for n, p in student.model.named_parameters()}
    with pytest.raises(ModelError, match="exp_avg_sq.safetensors: not a readable"):
        student.load(broken)
    with pytest.raises(ModelError, match=r"1 missing: model\.layers\.1\.mlp\.gate\.weight"):
        student.load(c.folder / "missing")
    with pytest.raises(ModelError, match=r"1 unexpected: model\.stray"):
        student.load(c.folder / "extra")
    with pytest.raises(ModelError, match="not a student checkpoint"):
        student.load(c.folder / "nothing here")
    shutil.copytree(c.folder / "good", c.folder / "damaged")
    state = json.loads((c.folder / "good" / "state.json").read_text())
    for text, fault in (
        ("[]", "expected a JSON object"),
        (json.dumps({k: v for k, v in state.items() if k != "optimizer_steps"}), "steps None"),
        (json.dumps(state | {"optimizer_steps": -1}), "optimizer_steps -1"),
        (json.dumps(state | {"tensors": "zip"}), "tensors 'zip'"),
    ):
        (c.folder / "damaged" / "state.json").write_text(text)
        with pytest.raises(ModelError, match=fault):
            student.load(c.folder / "damaged")
    (c.folder / "damaged" / "state.json").write_text(json.dumps(state))
    save_file({"cpu": torch.zeros(7, dtype=torch.uint8)}, c.folder / "damaged" / "rng.safetensors")
    with pytest.raises(ModelError, match=r"rng\.safetensors: cpu is torch\.uint8 \[7\]"):
        student.load(c.folder / "damaged")
    assert all(p.equal(weights[n]) for n, p in student.model.named_parameters())
    student.config.checkpoint_format = "megatron"
    student.save(c.folder / "good_megatron")
    student.close()
    mixed = c.student("mixed", world=1)  # the same architecture, but its first layer is dense
    weights = {n: p.clone() for n, p in mixed.model.named_parameters()}
    fault = r"[1-9]\d* missing: .*; [1-9]\d* unexpected: decoder\.layers\.0\.mlp\.experts"
    with pytest.raises(ModelError, match=fault):
        mixed.load(c.folder / "good_megatron")
    assert all(p.equal(weights[n]) for n, p in mixed.model.named_parameters())
    mixed.close()
    unfrozen = c.student("moe", world=1, freeze_routers=False)
    with pytest.raises(ModelError, match="frozen_routers"):
        unfrozen.load(c.folder / "good")
    unfrozen.close()
    dense = c.student("dense", world=1)
    with pytest.raises(ModelError, match="model_type is 'qwen3_moe', this run's is 'qwen3'"):
        dense.load(c.folder / "good")
    dense.close()


CASES = [
    logprobs_equal_transformers,
    round_trip,
    gradients_equal_the_formula,
    batch_equals_solo,
    teacher_equal_to_student,
    weight_decay_spares_norms_and_routers,
    teacher_scores_plus_one,
    icepop_on_real_ratios,
    refused_samples,
    not_finite,
    expert_bias_stays,
    expert_biases_count_tokens,
    unfrozen_routers_train,
    replayed_routes,
    head_in_float32,
    learning_rate_reported,
    bfloat16,
    save_hf_loads,
    interrupted_save,
    wrong_checkpoints,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("student_one_process")
    for kind in KINDS:
        make_checkpoint(path / kind, kind)
        (path / kind / "notes.txt").write_text("kept")
    launch(1, path, CASES)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_one_process(folder: Path, case: Any) -> None:
    require_passed(folder, case, world=1)
