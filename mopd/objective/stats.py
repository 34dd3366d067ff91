"""Per-token statistics -> sums that add over micro-batches and ranks -> named metrics.

Sums are float64 and [D, K]: D domains, K the columns below. Add (all-reduce) them, then call
`summarise` once. Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SUM_COLUMNS = (
    "sequences",  # with at least one live token
    "tokens",  # live
    "kept",  # inside the truncation's band
    "clipped",  # whose distillation advantage the clip changed
    "finite",  # with every number below finite; the sums down to k3 run over these
    "advantage",
    "advantage_squared",
    "k1",
    "k3",
    "policy_clipped",  # whose gradient the policy loss's own clip or mask cut
    "gradient",  # |dL/d log pi|, and |dL/dD| D of a divergence
    "prompts",  # prompt groups, each row counting for its part of its group
    # What is not always there: the number of tokens that have it, and their sum.
    "reverse_kl_tokens",
    "reverse_kl",
    "gap_tokens",
    "gap",
    "update_tokens",
    "update_k3",
    "reference_kl_tokens",
    "reference_kl",
    "entropy_tokens",
    "entropy",
)
_COLUMN = {name: index for index, name in enumerate(SUM_COLUMNS)}


@dataclass(frozen=True)
class TokenStats:
    """Detached [B, T] tensors, 0 or False at dead tokens; None where there is no such number."""

    reverse_kl_BT: Tensor | None
    """log pi - log T of the sampled token: its mean over y ~ pi estimates KL(pi || T), nats."""
    advantage_BT: Tensor
    """A of the loss, clip and ORM part included."""
    clipped_BT: Tensor
    kept_BT: Tensor
    log_ratio_BT: Tensor
    """log pi_old - log mu: trainer against rollout engine, on the same weights."""
    entropy_BT: Tensor | None = None
    gap_BT: Tensor | None = None
    """|clip(log T - log pi)|, or the divergence: how far the teacher is, nats."""
    update_BT: Tensor | None = None
    """log pi - log pi_old: how far the batch's updates have moved."""
    policy_clipped_BT: Tensor | None = None
    gradient_BT: Tensor | None = None
    reference_kl_BT: Tensor | None = None
    """The regulariser's k2 or k3, before its weight."""
    prompt_share_B: Tensor | None = None


def domain_sums(
    stats: TokenStats, mask_BT: Tensor, domain_index_B: Tensor, num_domains: int
) -> Tensor:
    """[D, K] float64 sums over the live tokens of each domain, on the stats' device.

    mask_BT: bool, the loss's own mask. domain_index_B: int64 in [0, D).
    k1 = -log(pi/mu) and k3 = pi/mu - 1 - log(pi/mu), whose means over y ~ mu estimate KL(mu || pi).
    """
    # float64 before exp: k3 of a log-ratio of 200 is a number there
    advantage_BT = stats.advantage_BT.double()
    log_ratio_BT = stats.log_ratio_BT.double()
    k3_BT = _k3(log_ratio_BT)
    finite_BT = mask_BT & (advantage_BT + log_ratio_BT + k3_BT).isfinite()
    if stats.reverse_kl_BT is not None:
        finite_BT = finite_BT & stats.reverse_kl_BT.isfinite()

    def total(values_BT: Tensor | None, where_BT: Tensor) -> Tensor:
        if values_BT is None:
            return torch.zeros_like(where_BT).sum(dim=1).double()
        return torch.where(where_BT, values_BT.double(), 0.0).sum(dim=1)

    ones_BT = torch.ones_like(advantage_BT)
    prompts_B = stats.prompt_share_B
    columns = {
        "sequences": mask_BT.any(dim=1).double(),
        "tokens": total(ones_BT, mask_BT),
        "kept": total(stats.kept_BT, mask_BT),
        "clipped": total(stats.clipped_BT, mask_BT),
        "finite": total(ones_BT, finite_BT),
        "advantage": total(advantage_BT, finite_BT),
        "advantage_squared": total(advantage_BT.square(), finite_BT),
        "k1": total(-log_ratio_BT, finite_BT),
        "k3": total(k3_BT, finite_BT),
        "policy_clipped": total(stats.policy_clipped_BT, mask_BT),
        "gradient": total(stats.gradient_BT, mask_BT),
        "prompts": total(None, mask_BT) if prompts_B is None else prompts_B.double(),
    }
    update_BT = None if stats.update_BT is None else _k3(stats.update_BT.double())
    for name, count, values_BT in (
        ("reverse_kl", "reverse_kl_tokens", stats.reverse_kl_BT),
        ("gap", "gap_tokens", stats.gap_BT),
        ("update_k3", "update_tokens", update_BT),
        ("reference_kl", "reference_kl_tokens", stats.reference_kl_BT),
        ("entropy", "entropy_tokens", stats.entropy_BT),
    ):
        there_BT = mask_BT & (mask_BT if values_BT is None else values_BT.isfinite())
        columns[count] = total(None if values_BT is None else ones_BT, there_BT)
        columns[name] = total(values_BT, there_BT)
    rows_BK = torch.stack([columns[name] for name in SUM_COLUMNS], dim=1)
    sums_DK = rows_BK.new_zeros(num_domains, len(SUM_COLUMNS))
    return sums_DK.index_add_(0, domain_index_B, rows_BK)


def _k3(log_ratio_BT: Tensor) -> Tensor:
    return torch.expm1(log_ratio_BT) - log_ratio_BT


OPTIONAL = {
    "reverse_kl": ("reverse_kl", "reverse_kl_tokens"),
    "gap": ("gap", "gap_tokens"),
    "policy_update_k3": ("update_k3", "update_tokens"),
    "reference_kl": ("reference_kl", "reference_kl_tokens"),
    "entropy": ("entropy", "entropy_tokens"),
}
"""Metric -> (sum, count): means that are there only if someone gave the numbers."""


def summarise(sums_DK: Tensor, domain_names: Sequence[str]) -> dict[str, float]:
    """Flat metrics of the added-up sums: `domain/NAME/...` and the same over all domains.

    Means are per live token. A domain without tokens reports 0 everywhere (its `tokens` says why).
    `advantage_std` is the population's. Tokens whose numbers are not finite are left out of the
    means and counted in `nonfinite_tokens`. Those of OPTIONAL are absent where no token had the
    number: no teacher, no reverse KL. The shares of a domain are of tokens, prompts (if the
    groups were given) and gradient: the sum over its tokens of |dL/d log pi|, which for a
    divergence D is |dL/dD| D.
    """
    if sums_DK.shape != (len(domain_names), len(SUM_COLUMNS)):
        raise ValueError(
            f"sums_DK is {tuple(sums_DK.shape)}; expected {(len(domain_names), len(SUM_COLUMNS))} "
            f"for the domains {list(domain_names)}"
        )
    sums = sums_DK.detach().double().cpu()
    all_sums = sums.sum(dim=0).tolist()
    overall = _describe(all_sums, all_sums)
    metrics = {
        "mask_fraction": overall["mask_fraction"],
        "clip_fraction": overall["clip_fraction"],
        "policy_clip_fraction": overall["policy_clip_fraction"],
        "advantage_mean": overall["advantage_mean"],
        "advantage_std": overall["advantage_std"],
        "train_rollout_kl_k1": overall["k1"],
        "train_rollout_kl_k3": overall["k3"],
        "tokens": overall["tokens"],
        "sequences": overall["sequences"],
        "nonfinite_tokens": overall["nonfinite_tokens"],
    }
    metrics |= {name: overall[name] for name in OPTIONAL if name in overall}
    for name, row in zip(domain_names, sums.tolist(), strict=True):
        of_domain = _describe(row, all_sums)
        metrics.update({f"domain/{name}/{key}": value for key, value in of_domain.items()})
    return metrics


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _describe(row: Sequence[float], all_row: Sequence[float]) -> dict[str, float]:
    """Metrics of one row of sums; shares are of `all_row`, which also says what there is."""
    sums = {name: row[index] for name, index in _COLUMN.items()}
    whole = {name: all_row[index] for name, index in _COLUMN.items()}
    tokens, finite = sums["tokens"], sums["finite"]
    mean = _ratio(sums["advantage"], finite)
    variance = _ratio(sums["advantage_squared"], finite) - mean * mean
    described = {
        "advantage_mean": mean,
        "advantage_std": max(variance, 0.0) ** 0.5,  # rounding may leave -1e-17
        "clip_fraction": _ratio(sums["clipped"], tokens),
        "policy_clip_fraction": _ratio(sums["policy_clipped"], tokens),
        "mask_fraction": _ratio(tokens - sums["kept"], tokens),
        "tokens": tokens,
        "sequences": sums["sequences"],
        "response_length": _ratio(tokens, sums["sequences"]),
        "k1": _ratio(sums["k1"], finite),
        "k3": _ratio(sums["k3"], finite),
        "nonfinite_tokens": tokens - finite,
        "token_share": _ratio(tokens, whole["tokens"]),
        "gradient_share": _ratio(sums["gradient"], whole["gradient"]),
    }
    if whole["prompts"]:
        described["prompt_share"] = sums["prompts"] / whole["prompts"]
    for name, (total, count) in OPTIONAL.items():
        if whole[count]:
            described[name] = _ratio(sums[total], sums[count])
    return described
