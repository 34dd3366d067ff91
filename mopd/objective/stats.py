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
    "finite",  # with every number below finite; the sums below run over these
    "reverse_kl",
    "advantage",
    "advantage_squared",
    "k1",
    "k3",
    "entropy_tokens",
    "entropy",
)
_COLUMN = {name: index for index, name in enumerate(SUM_COLUMNS)}


@dataclass(frozen=True)
class TokenStats:
    """Detached [B, T] tensors, 0 or False at dead tokens."""

    reverse_kl_BT: Tensor
    """log pi - log T of the sampled token: its mean over y ~ pi estimates KL(pi || T), nats."""
    advantage_BT: Tensor
    """A of the loss, clip and ORM part included."""
    clipped_BT: Tensor
    kept_BT: Tensor
    log_ratio_BT: Tensor
    """log pi - log mu: trainer against rollout engine."""
    entropy_BT: Tensor | None = None


def domain_sums(
    stats: TokenStats, mask_BT: Tensor, domain_index_B: Tensor, num_domains: int
) -> Tensor:
    """[D, K] float64 sums over the live tokens of each domain, on the stats' device.

    mask_BT: bool, the loss's own mask. domain_index_B: int64 in [0, D).
    k1 = -log(pi/mu) and k3 = pi/mu - 1 - log(pi/mu), whose means over y ~ mu estimate KL(mu || pi).
    """
    # float64 before exp: k3 of a log-ratio of 200 is a number there
    reverse_kl_BT = stats.reverse_kl_BT.double()
    advantage_BT = stats.advantage_BT.double()
    log_ratio_BT = stats.log_ratio_BT.double()
    k3_BT = torch.expm1(log_ratio_BT) - log_ratio_BT
    finite_BT = mask_BT & (reverse_kl_BT + advantage_BT + log_ratio_BT + k3_BT).isfinite()
    if stats.entropy_BT is None:
        entropy_BT = torch.zeros_like(reverse_kl_BT)
        entropy_mask_BT = torch.zeros_like(mask_BT)
    else:
        entropy_BT = stats.entropy_BT.double()
        entropy_mask_BT = mask_BT & entropy_BT.isfinite()

    def total(values_BT: Tensor, where_BT: Tensor) -> Tensor:
        return torch.where(where_BT, values_BT.double(), 0.0).sum(dim=1)

    ones_BT = torch.ones_like(reverse_kl_BT)
    columns = {
        "sequences": mask_BT.any(dim=1).double(),
        "tokens": total(ones_BT, mask_BT),
        "kept": total(stats.kept_BT, mask_BT),
        "clipped": total(stats.clipped_BT, mask_BT),
        "finite": total(ones_BT, finite_BT),
        "reverse_kl": total(reverse_kl_BT, finite_BT),
        "advantage": total(advantage_BT, finite_BT),
        "advantage_squared": total(advantage_BT.square(), finite_BT),
        "k1": total(-log_ratio_BT, finite_BT),
        "k3": total(k3_BT, finite_BT),
        "entropy_tokens": total(ones_BT, entropy_mask_BT),
        "entropy": total(entropy_BT, entropy_mask_BT),
    }
    rows_BK = torch.stack([columns[name] for name in SUM_COLUMNS], dim=1)
    sums_DK = rows_BK.new_zeros(num_domains, len(SUM_COLUMNS))
    return sums_DK.index_add_(0, domain_index_B, rows_BK)


def summarise(sums_DK: Tensor, domain_names: Sequence[str]) -> dict[str, float]:
    """Flat metrics of the added-up sums: `domain/NAME/...` and the same over all domains.

    Means are per live token. A domain without tokens reports 0 everywhere (its `tokens` says why).
    `advantage_std` is the population's. Tokens whose numbers are not finite are left out of the
    means and counted in `nonfinite_tokens`; `entropy` is there if anyone gave it.
    """
    if sums_DK.shape != (len(domain_names), len(SUM_COLUMNS)):
        raise ValueError(
            f"sums_DK is {tuple(sums_DK.shape)}; expected {(len(domain_names), len(SUM_COLUMNS))} "
            f"for the domains {list(domain_names)}"
        )
    sums = sums_DK.detach().double().cpu()
    overall = _describe(sums.sum(dim=0).tolist())
    metrics = {
        "reverse_kl": overall["reverse_kl"],
        "mask_fraction": overall["mask_fraction"],
        "clip_fraction": overall["clip_fraction"],
        "advantage_mean": overall["advantage_mean"],
        "advantage_std": overall["advantage_std"],
        "train_rollout_kl_k1": overall["k1"],
        "train_rollout_kl_k3": overall["k3"],
        "tokens": overall["tokens"],
        "sequences": overall["sequences"],
        "nonfinite_tokens": overall["nonfinite_tokens"],
    }
    if "entropy" in overall:
        metrics["entropy"] = overall["entropy"]
    for name, row in zip(domain_names, sums.tolist(), strict=True):
        of_domain = _describe(row)
        of_domain["token_share"] = _ratio(of_domain["tokens"], overall["tokens"])
        metrics.update({f"domain/{name}/{key}": value for key, value in of_domain.items()})
    return metrics


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0


def _describe(row: Sequence[float]) -> dict[str, float]:
    sums = {name: row[index] for name, index in _COLUMN.items()}
    tokens, finite = sums["tokens"], sums["finite"]
    mean = _ratio(sums["advantage"], finite)
    variance = _ratio(sums["advantage_squared"], finite) - mean * mean
    described = {
        "reverse_kl": _ratio(sums["reverse_kl"], finite),
        "advantage_mean": mean,
        "advantage_std": max(variance, 0.0) ** 0.5,  # rounding may leave -1e-17
        "clip_fraction": _ratio(sums["clipped"], tokens),
        "mask_fraction": _ratio(tokens - sums["kept"], tokens),
        "tokens": tokens,
        "sequences": sums["sequences"],
        "response_length": _ratio(tokens, sums["sequences"]),
        "k1": _ratio(sums["k1"], finite),
        "k3": _ratio(sums["k3"], finite),
        "nonfinite_tokens": tokens - finite,
    }
    if sums["entropy_tokens"]:
        described["entropy"] = sums["entropy"] / sums["entropy_tokens"]
    return described
