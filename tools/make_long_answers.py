"""Make two domains of unequal answers, for the starvation run of tools/compare_objectives.py.

    python tools/make_long_answers.py --out runs/compare/long_answers

The short domain is the quickstart's words to spell backward (6 tokens an answer). The long one is
its cipher over six words in place of one (44 tokens). Words of the quickstart's held-out items are
in the long domain's held-out items alone. The base learns both domains and then, as the demo's
base did, sums alone until both are forgotten to about two thirds right; the long domain's teacher
is tuned on from it; the short one's is the demo's. Writes the long domain's prompts (JSONL), the
two models and config.yaml, the quickstart's configuration over these two domains.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from transformers import PreTrainedModel, Qwen3MoeForCausalLM  # noqa: E402

import make_demo_models as demo  # noqa: E402
from mopd.data.tasks import TaskItem  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
WORDS = 6
ITEMS, HELD_OUT = 12000, 400
ROTATIONS = (1, 2, 3)
LEARN = demo.Schedule(steps=600, batch=64, lr=1e-3, warmup=10, check_every=25, stop_at=0.93)
FORGET = replace(demo.FORGET, batch=64)
TEACHER = demo.Schedule(steps=300, batch=64, lr=5e-4, warmup=10, check_every=20, stop_at=0.99)


def encrypt(text: str, rotation: int) -> str:
    """Capitals moved on by `rotation` letters; everything else stays."""
    return "".join(chr(65 + (ord(c) - 65 + rotation) % 26) if "A" <= c <= "Z" else c for c in text)


def sentences(words: Sequence[str], count: int, rng: random.Random) -> list[TaskItem]:
    items = []
    for _ in range(count):
        answer, rotation = " ".join(rng.choices(words, k=WORDS)), rng.choice(ROTATIONS)
        prompt = f"decrypt {encrypt(answer, rotation)} {rotation}:"
        entry = {"question": prompt, "answer": answer, "metadata": {}}
        items.append(TaskItem(prompt, prompt, answer, entry))
    return items


def long_domain(short: demo.Domain, seed: int) -> demo.Domain:
    """The cipher over `WORDS` words; no held-out word is in an item to train on."""
    rng = random.Random(seed)
    held_out = {item.answer for item in short.held_out}
    known = sorted({item.answer for item in short.train} - held_out)
    train = sentences(known, ITEMS, rng)
    return demo.Domain(
        "caesar",
        short.spec,
        train[demo.VALIDATION :],
        train[: demo.VALIDATION],
        sentences(sorted(held_out), HELD_OUT, rng),
    )


def write_rows(items: Sequence[TaskItem], path: Path) -> None:
    rows = ({"prompt": item.prompt, "answer": item.answer} for item in items)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(out: Path, budget: int) -> None:
    config = OmegaConf.load(ROOT / "configs" / "quickstart.yaml")
    del config.teachers["rotate"], config.domains["rotate"]
    config.student.model = str(out / "base")
    config.rollout.max_response_tokens = budget
    config.teachers.caesar.model = str(out / "teacher_caesar")
    config.domains.caesar = {
        "teacher": "caesar",
        "verifier": "exact_match",
        "held_out": HELD_OUT,
        "prompts": {
            "jsonl": str(out / "caesar.jsonl"),
            "held_out_jsonl": str(out / "caesar_held_out.jsonl"),
        },
    }
    OmegaConf.save(config, out / "config.yaml")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    tokenizer = demo.make_tokenizer()
    shipped = demo.load_domains(ROOT / "demo" / "domains.yaml")
    caesar = long_domain(shipped["caesar"], args.seed)
    domains = {"backward": shipped["backward"], "caesar": caesar}
    write_rows(caesar.train, out / "caesar.jsonl")
    write_rows(caesar.held_out, out / "caesar_held_out.jsonl")

    def finish(model: PreTrainedModel, name: str) -> None:
        demo.silence(model, tokenizer, domains, args.seed)
        demo.save(model, out / name)
        reached = {
            other: demo.score(model, tokenizer, d, d.held_out)["exact"]
            for other, d in domains.items()
        }
        print(name, json.dumps(reached), flush=True)

    torch.manual_seed(args.seed)
    source = ROOT / "demo" / "models" / "teacher_caesar"
    model = Qwen3MoeForCausalLM.from_pretrained(source)
    demo.train("base: learn", model, tokenizer, domains, LEARN, seed=args.seed)
    later = {"later": demo.make_domain("later", demo.LATER)}
    demo.train("base: forget", model, tokenizer, later, FORGET, seed=args.seed, watched=domains)
    finish(model, "base")
    demo.train("teacher_caesar", model, tokenizer, {"caesar": caesar}, TEACHER, seed=args.seed + 1)
    finish(model, "teacher_caesar")
    write_config(out, budget=max(domain.budget for domain in domains.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
