"""What a step's metrics say in words, for the live display and for plain lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def robust_mean(values: Sequence[float]) -> float:
    """Mean without the lowest and highest fifth: one slow step (an evaluation) does not move it."""
    assert values
    ordered = sorted(values)
    cut = len(ordered) // 5
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def rates(
    metrics: Mapping[str, Any], step_times: Sequence[float], eta_s: float | None
) -> list[str]:
    """Remaining time, samples and tokens a second, share of masked tokens, a save in progress.

    Args:
        step_times: seconds of the last steps, newest last, for rates that the metrics lack.
    """
    parts = [] if eta_s is None else [f"ETA {duration(eta_s)}"]
    for name in ("samples", "tokens"):
        rate = metrics.get(f"{name}_per_s")
        if rate is None and metrics.get(name) is not None and step_times and step_times[-1] > 0:
            rate = float(metrics[name]) / step_times[-1]
        if rate is not None:
            parts.append(f"{float(rate):,.0f} {name}/s")
    if metrics.get("mask_fraction") is not None:
        parts.append(f"masked {float(metrics['mask_fraction']):.2%}")
    if metrics.get("checkpoint/writing") is not None:
        parts.append(f"checkpoint {metrics['checkpoint/writing']:.0f} being written")
    if metrics.get("checkpoint/write_s") is not None:
        step, took_s = metrics["checkpoint/step"], metrics["checkpoint/write_s"]
        parts.append(f"checkpoint {step:.0f} written in {took_s:.1f} s")
    return parts


def domain_cells(metrics: Mapping[str, Any], domain: str) -> tuple[str, str, str]:
    """(reward, reverse KL, share of masked tokens) of a domain; a dash where there is none."""

    def cell(key: str, form: str) -> str:
        value = metrics.get(f"domain/{domain}/{key}")
        return "–" if value is None else format(float(value), form)

    return cell("reward", ".3f"), cell("reverse_kl", ".4f"), cell("mask_fraction", ".2%")


def teacher_states(metrics: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Each teacher's servers in words, and whether all of them are well."""
    found = []
    for key in metrics:
        name = key.removeprefix("teacher/").removesuffix("/servers_up")
        if f"teacher/{name}/servers_up" != key:
            continue
        of = {
            what: float(metrics.get(f"teacher/{name}/{what}") or 0.0)
            for what in ("servers", "servers_up", "tokens_per_s", "restarts", "failures")
        }
        text = f"teacher {name}: {of['servers_up']:.0f} of {of['servers']:.0f} servers up"
        if of["tokens_per_s"]:
            text += f", {of['tokens_per_s']:,.0f} tokens/s"
        for what in ("restarts", "failures"):
            if of[what]:
                text += f", {of[what]:.0f} {what}"
        found.append((text, of["servers_up"] == of["servers"]))
    return found
