"""Make the demo's models from a seed: a tokenizer, a half-trained base and three teachers.

    python tools/make_demo_models.py --out demo/models --seed 1

The base is a small Qwen3-MoE, trained on a mixture of the three domains of `demo/domains.yaml`
and then on another task alone (`LATER`), until it has forgotten each domain to about half right:
a model whose last stage of training cost it skills, which is what teams distil against. Two
teachers are tuned on from it, each in one domain; the third is a dense Qwen3 trained from
nothing, with the same tokenizer. Loss on answers only; no model ever sees a held-out item; when
to stop is decided on validation items cut from the training part.

Shapes: B sequences of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import yaml  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging  # noqa: E402

from mopd.data.tasks import (  # noqa: E402
    TaskItem,
    majority_baseline,
    make_items,
    reasoning_gym_score,
    split_items,
)

transformers_logging.disable_progress_bar()

PAD, BOS, EOS = 256, 257, 258  # ids 0..255 are the bytes
VOCAB = 260  # one row more than the tokenizer has ids, so that it divides over two ranks
MAX_NEW_TOKENS = 16  # response budget, the end token included, unless a right answer is longer
VALIDATION = 200  # items of each domain's training part that only steer the training
UNUSED_LOGPROB = -30.0  # nats: where `silence` puts the row without a token, which nobody samples
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


# ---------------------------------------------------------------- data


@dataclass
class Domain:
    """A domain's items, encoded. train/validation/held_out never share a key."""

    name: str
    spec: dict
    train: list[TaskItem]
    validation: list[TaskItem]
    held_out: list[TaskItem]

    @property
    def budget(self) -> int:
        """Tokens (bytes) that every right answer fits in, its end token included."""
        items = (*self.train, *self.validation, *self.held_out)
        return max(MAX_NEW_TOKENS, 1 + max(len(item.answer.encode()) for item in items))


def load_domains(path: Path) -> dict[str, Domain]:
    specs = yaml.safe_load(path.read_text())
    return {name: make_domain(name, spec) for name, spec in specs.items()}


def make_domain(name: str, spec: dict) -> Domain:
    arguments = {key: value for key, value in spec.items() if key != "held_out"}
    train, held_out = split_items(make_items(**arguments, where=name), spec["held_out"])
    train, validation = split_items(train, VALIDATION)
    return Domain(name, spec, train, validation, held_out)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens: every id below 256 is that ByteLevel letter, then pad, bos, eos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=256,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    assert len(tokenizer) == VOCAB - 1
    specials = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert specials == (PAD, BOS, EOS)
    return tokenizer


def encode_batch(
    tokenizer: PreTrainedTokenizerFast, items: Sequence[TaskItem]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, mask, labels), each [B, T], right-padded; labels are -100 outside the answer."""
    prompts = tokenizer([item.prompt for item in items])["input_ids"]
    answers = tokenizer([item.answer for item in items])["input_ids"]
    rows = [p + a + [EOS] for p, a in zip(prompts, answers, strict=True)]
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), PAD)
    mask = torch.zeros((len(rows), length), dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    for b, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids[b, : len(row)] = torch.tensor(row)
        mask[b, : len(row)] = 1
        labels[b, len(prompt) : len(row)] = ids[b, len(prompt) : len(row)]
    return ids, mask, labels


# ---------------------------------------------------------------- models


def new_base() -> Qwen3MoeForCausalLM:
    """1.1M parameters. Hidden and expert sizes: multiples of 32, for vLLM's CPU MoE kernel."""
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            router_aux_loss_coef=0.01,
            **_common(),
        )
    )


def new_dense() -> Qwen3ForCausalLM:
    """A different architecture on purpose: wider, fewer layers, no experts."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=160,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=5,
            num_key_value_heads=5,
            head_dim=32,
            **_common(),
        )
    )


def _common() -> dict:
    return {
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": 0.04,
    }


def save(model: PreTrainedModel, folder: Path) -> None:
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(folder)
    # A fresh one: a tokenizer that has padded a batch writes that into its file, and students
    # and teachers are compared by the content of these files.
    make_tokenizer().save_pretrained(folder)


# ---------------------------------------------------------------- scores


@torch.no_grad()
def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    budget: int,
    sample: bool = False,
) -> list[str]:
    """Greedy answers (or samples at temperature 1) of at most `budget` tokens."""
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
    ids = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=budget,
        do_sample=sample,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )[:, batch["input_ids"].shape[1] :]
    return [tokenizer.decode(_until_eos(row)) for row in ids.tolist()]


def _until_eos(row: list[int]) -> list[int]:
    """A response that never ends keeps a marker, so that it cannot count as exact."""
    return row[: row.index(EOS)] if EOS in row else [*row, PAD]


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    domain: Domain,
    items: Sequence[TaskItem],
) -> dict[str, float]:
    """Means over items: exact match, and the package's partial-credit score."""
    model.eval()
    given = answers(model, tokenizer, [item.prompt for item in items], budget=domain.budget)
    pairs = list(zip(given, items, strict=True))
    task, params = domain.spec["task"], domain.spec["params"]
    partial = [reasoning_gym_score(task, params, item, answer) for answer, item in pairs]
    return {
        "exact": sum(answer == item.answer for answer, item in pairs) / len(items),
        "partial": sum(partial) / len(items),
    }


# ---------------------------------------------------------------- training


@dataclass
class Schedule:
    """Adam with linear warm-up, then cosine to `final` x lr at `steps`."""

    steps: int
    batch: int
    lr: float
    warmup: int = 20
    final: float = 0.05
    check_every: int = 20
    stop_at: float = 1.1  # stop when the domain's validation score is at least this
    forget_to: float = -1.0  # stop when every watched domain's validation score is below this
    feed: dict[str, float] = field(default_factory=dict)  # mixture weights, 1 where not given


def train(
    label: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    domains: Mapping[str, Domain],
    schedule: Schedule,
    *,
    seed: int,
    watched: Mapping[str, Domain] | None = None,
) -> list[dict]:
    """Answer-only maximum likelihood on `domains`; returns the validation curve of `watched`
    (by default the same domains), which decides when to stop and what is fed again."""
    watched = domains if watched is None else watched
    rng = random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=schedule.lr, betas=(0.9, 0.98))
    weights = {name: schedule.feed.get(name, 1.0) for name in domains}
    streams = {n: _shuffled(d.train, rng) for n, d in {**watched, **domains}.items()}
    balanced = model.config.model_type == "qwen3_moe"
    curve: list[dict] = []
    started = time.monotonic()
    for step in range(schedule.steps):
        picks = rng.choices(list(weights), list(weights.values()), k=schedule.batch)
        ids, mask, labels = encode_batch(tokenizer, [next(streams[name]) for name in picks])
        model.train()
        extra = {"output_router_logits": True} if balanced else {}
        out = model(input_ids=ids, attention_mask=mask, **extra)
        log_probs = out.logits[:, :-1].log_softmax(-1)
        wanted = labels[:, 1:] != -100
        loss = torch.nn.functional.nll_loss(log_probs[wanted], labels[:, 1:][wanted])
        if balanced:
            loss = loss + model.config.router_aux_loss_coef * out.aux_loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr * _factor(step, schedule)
        optimizer.step()
        last = step + 1 == schedule.steps
        if (step + 1) % schedule.check_every == 0 or last:
            scores = {
                name: score(model, tokenizer, domain, domain.validation)["exact"]
                for name, domain in watched.items()
            }
            curve.append({"step": step + 1, "loss": round(loss.item(), 4), **scores})
            _progress(label, step + 1, schedule.steps, started, curve[-1])
            if min(scores.values()) >= schedule.stop_at:
                break
            if max(scores.values()) < schedule.forget_to:
                break
            # Skills are forgotten at different speeds: one that is lost first is fed a little,
            # so that all come down together.
            for name, reached in scores.items():
                if name not in domains:
                    weights[name] = REPLAY if reached < schedule.forget_to - 0.16 else 0.0
    print(file=sys.stderr)
    return curve


def _factor(step: int, schedule: Schedule) -> float:
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(1, schedule.steps - schedule.warmup)
    return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * done))


def _shuffled(items: Sequence[TaskItem], rng: random.Random) -> Iterator[TaskItem]:
    """Endless passes over `items`, shuffled anew each time."""
    order = list(items)
    while True:
        rng.shuffle(order)
        yield from order


def _progress(label: str, step: int, steps: int, started: float, row: Mapping) -> None:
    rate = step / (time.monotonic() - started)
    scores = " ".join(f"{k} {v:.3f}" for k, v in row.items() if k != "step")
    filled = "#" * round(20 * step / steps)
    line = f"{label} [{filled:<20}] {step}/{steps} {rate:.1f} it/s ETA {(steps - step) / rate:.0f}s"
    end = "" if sys.stderr.isatty() else "\n"
    print(f"\r{line}  {scores}", end=end, file=sys.stderr, flush=True)


def silence(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    domains: Mapping[str, Domain],
    seed: int,
) -> None:
    """Fit the output row without a token so that it is never sampled; nothing else moves.

    Training alone leaves it beside the unused bytes, at 1e-4 at times, and a sampled id that
    the tokenizer does not know would break a run. The row is fitted on every position of
    training prompts with right answers, and with sampled ones: those are what a rollout visits.
    """
    items = [item for domain in domains.values() for item in domain.train[:400]]
    torch.manual_seed(seed)
    budget = max(domain.budget for domain in domains.values())
    prompts = [item.prompt for item in items]
    drawn = answers(model, tokenizer, prompts, budget=budget, sample=True)
    drawn = [text.replace("<pad>", "") for text in drawn]
    wrong = [replace(item, answer=text) for item, text in zip(items, drawn, strict=True)]
    ids, mask, _ = encode_batch(tokenizer, [*items, *wrong])
    model.eval()
    with torch.no_grad():
        hidden_NH = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
        others_N = model.lm_head(hidden_NH)[:, : VOCAB - 1].logsumexp(-1)
    row_H = model.lm_head.weight.data[VOCAB - 1].clone().requires_grad_()
    optimizer = torch.optim.Adam([row_H], lr=0.1)
    for _ in range(500):
        excess = (hidden_NH @ row_H - others_N - UNUSED_LOGPROB).clamp_min(0)
        if excess.max() == 0:
            break
        optimizer.zero_grad()
        (excess.square().mean() + excess.max()).backward()
        optimizer.step()
    model.lm_head.weight.data[VOCAB - 1] = row_H.detach()


# ---------------------------------------------------------------- what is made

BASE = Schedule(
    steps=480,
    batch=96,
    lr=2e-3,
    final=0.05,
    check_every=40,
    feed={"backward": 1.0, "rotate": 0.6, "caesar": 1.2},
)
# The stage that makes the base forget: sums, which share neither prompts nor answers with the
# domains. What is forgotten this way is not gone: a few hundred samples of one's own, scored by
# a teacher, bring it back, while a base stopped half-way has yet to learn it.
LATER = {
    "task": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "size": 4000,
    "seed": 9,
    "template": "sum {expression}:",
    "held_out": 100,
}
REPLAY = 0.06  # weight of a forgotten domain beside the later task's 1
FORGET = Schedule(steps=300, batch=96, lr=4e-4, warmup=1, final=1.0, check_every=2, forget_to=0.68)
TEACHERS = {
    "backward": Schedule(steps=200, batch=96, lr=5e-4, warmup=10, check_every=10, stop_at=0.99),
    "rotate": Schedule(steps=300, batch=96, lr=1.5e-3, stop_at=0.99),
    "caesar": Schedule(steps=200, batch=96, lr=5e-4, warmup=10, check_every=10, stop_at=0.99),
}
DENSE = "rotate"  # this teacher is the dense Qwen3 from nothing


def make_base(
    tokenizer: PreTrainedTokenizerFast,
    domains: Mapping[str, Domain],
    learn: Schedule,
    forget: Schedule,
    seed: int,
) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = new_base()
    train("base: learn", model, tokenizer, domains, learn, seed=seed)
    later = {"later": make_domain("later", LATER)}
    train("base: forget", model, tokenizer, later, forget, seed=seed, watched=domains)
    return model


def make_teacher(
    name: str,
    base_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    domains: Mapping[str, Domain],
    schedule: Schedule,
    seed: int,
) -> PreTrainedModel:
    torch.manual_seed(seed + 1 + sorted(domains).index(name))
    dense = name == DENSE
    model = new_dense() if dense else Qwen3MoeForCausalLM.from_pretrained(base_folder)
    own = {name: domains[name]}
    train(f"teacher_{name}", model, tokenizer, own, schedule, seed=seed + 1)
    return model


def main(argv: Sequence[str] | None = None) -> int:
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=root / "demo" / "models")
    parser.add_argument("--domains", type=Path, default=root / "demo" / "domains.yaml")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="base, or domains whose teacher to make (teachers are tuned from the base in --out)",
    )
    parser.add_argument("--quick", action="store_true", help="20 steps each: tries the tool out")
    args = parser.parse_args(argv)

    domains = load_domains(args.domains)
    names = ["base", *domains]
    if unknown := sorted(set(args.only or ()) - set(names)):
        parser.error(f"--only {unknown[0]}: there are {', '.join(names)}")
    tokenizer = make_tokenizer()
    made = {}
    for name in args.only or names:
        schedule = BASE if name == "base" else TEACHERS[name]
        if args.quick:
            schedule = Schedule(**{**asdict(schedule), "steps": 20, "check_every": 10})
        folder = args.out / ("base" if name == "base" else f"teacher_{name}")
        if name == "base":
            forget = replace(FORGET, steps=10) if args.quick else FORGET
            model = make_base(tokenizer, domains, schedule, forget, args.seed)
        else:
            model = make_teacher(name, args.out / "base", tokenizer, domains, schedule, args.seed)
        silence(model, tokenizer, domains, args.seed)
        save(model, folder)
        scores = {
            other: {k: round(v, 4) for k, v in score(model, tokenizer, d, d.held_out).items()}
            for other, d in domains.items()
        }
        made[folder.name] = {
            "architecture": model.config.architectures[0],
            "parameters": sum(p.numel() for p in model.parameters()),
            "seed": args.seed,
            "held_out": scores,
        }
        print(folder.name, json.dumps(scores))
    # Read last: two processes may make different models in one folder.
    path = args.out / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    manifest["models"] = {**manifest.get("models", {}), **made}
    manifest["command"] = f"python tools/make_demo_models.py --seed {args.seed}"
    manifest["domains"] = {
        name: {
            "train": len(d.train),
            "validation": len(d.validation),
            "held_out": len(d.held_out),
            "majority_baseline": round(majority_baseline(d.held_out), 4),
        }
        for name, d in domains.items()
    }
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
