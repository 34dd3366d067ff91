"""Answers to read: training transcripts, and the browser of held-out answers side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mopd.evaluation.run_files import Record, RunFiles

TRANSCRIPTS_PER_DOMAIN = 3
CLIP_NATS = 5.0  # a token's colour is full at |teacher - student| of this many nats
KINDS = {
    "lost": "wrong now, right as base",
    "missed": "the teacher has it, the student not",
    "wrong": "wrong by all who were asked",
    "gained": "right now, wrong as base",
    "kept": "right before and after",
    "unjudged": "nobody judged it",
}
"""Classes of held-out answers, in the order of the browser."""
_VERDICTS = {True: "right", False: "wrong", None: "not judged"}


def chosen_transcripts(run: RunFiles) -> list[dict[str, Any]]:
    """Per domain the first recorded answer, the last wrong one and the last right one."""
    chosen: list[dict[str, Any]] = []
    for domain in run.domains:
        own = [t for t in run.transcripts if t["domain"] == domain]
        picks = [
            *own[:1],
            *[t for t in own[1:] if not t.get("correct")][-1:],
            *[t for t in own[1:] if t.get("correct")][-1:],
        ]
        chosen += [_transcript(t) for t in picks[:TRANSCRIPTS_PER_DOMAIN]]
    return chosen


def _transcript(record: Record) -> dict[str, Any]:
    return {
        "step": record["step"],
        "domain": record["domain"],
        "verdict": _VERDICTS.get(record.get("correct"), "not judged"),
        "prompt": record["prompt"],
        "response": record["response"],
        "spans": _spans(record),
    }


def _span(token: str, difference: float | None) -> dict[str, str]:
    """A token with its colour: hue by the sign, strength by the size, nothing below 0.05 nats."""
    if difference is None:
        return {"text": _visible(token), "css": "none", "strength": "0", "title": "not scored"}
    size = min(1.0, abs(difference) / CLIP_NATS)
    side = "neg" if difference < 0 else "pos"
    return {
        "text": _visible(token),
        "css": side if abs(difference) >= 0.05 else "none",
        "strength": f"{0.1 + 0.7 * size:.2f}",
        "title": f"teacher − student = {difference:+.3f} nats",
    }


def _spans(record: Record) -> list[dict[str, str]]:
    """The record's tokens with their colours; without colour where the differences do not fit."""
    tokens = record.get("tokens") or []
    differences: Sequence[float | None] = record.get("teacher_minus_student") or []
    if len(differences) != len(tokens):
        differences = [None] * len(tokens)
    return [_span(str(token), d) for token, d in zip(tokens, differences, strict=True)]


def _visible(token: str) -> str:
    """Line ends and an empty token would be invisible as coloured spans."""
    return token.replace("\n", "⏎\n").replace("\t", "⇥") or "∅"


def sample_browser(run: RunFiles) -> dict[str, Any] | None:
    """Sets, classes and samples of the browser; None where no samples were kept."""
    usable = [s for s in run.samples if s.get("class") in KINDS and isinstance(s["answers"], dict)]
    if not usable:
        return None
    sets = list(dict.fromkeys(str(s["set"]) for s in usable))
    count = Counter(s["class"] for s in usable)
    return {
        "sets": sets,
        "kinds": [(kind, text, count[kind]) for kind, text in KINDS.items() if count[kind]],
        "samples": [
            _sample(s, sets.index(str(s["set"])))
            for s in sorted(usable, key=lambda s: list(KINDS).index(s["class"]))
        ],
        "coloured": any(s.get("teacher_minus_student") for s in usable),
    }


def _sample(record: Record, index: int) -> dict[str, Any]:
    answers = []
    for role in ("base", "teacher", "student"):
        answer = record["answers"].get(role)
        if answer is None:
            continue
        text = answer.get("text")
        answers.append(
            {
                "role": role,
                "verdict": _VERDICTS.get(answer.get("correct"), "not judged"),
                "note": ", cut off" if answer.get("finish_reason") == "length" else "",
                "tokens": answer.get("tokens"),
                "text": "(not kept)" if text is None else text or "(empty)",
                "spans": _spans(record) if role == "student" else [],
            }
        )
    return {
        "set": record["set"],
        "index": index,
        "kind": record["class"],
        "prompt": record["prompt"],
        "reference": record.get("reference"),
        "answers": answers,
    }
