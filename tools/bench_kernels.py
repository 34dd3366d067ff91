"""The kernels of the loss head beside plain torch and others' kernels, on whatever device there is.

    python tools/bench_kernels.py --json                     CPU: about 30 s; a GPU: under 3 minutes
    python tools/bench_kernels.py --rows 8192 --vocab 151936 --hidden 4096 --dtype bfloat16

Needs torch, and triton on a GPU; of this repository only mopd/kernels and mopd/errors.py. Liger-
Kernel and cut-cross-entropy take part on a GPU where they are installed; what did not is told.

Correctness comes first: on some of the rows every variant of ours is compared with float64, beside
plain torch in the same dtype, and the run ends with status 1 if it is less accurate (x 1.5). Times
are medians; a step is a forward and a backward. Bandwidths are of the bytes a kernel must move,
beside a copy of the logits measured in the same run; FLOPs are of the products it must make, beside
one bare product.

With --json the last line of standard output is one JSON object:
    {"device", "torch", "triton", "threads", "shape": {rows, vocab, hidden, slots, dtype},
     "copy_gb_s", "matmul_tflop_s", "bare_head_step_ms", "skipped": {variant: why},
     "kernels": {kernel: {variant: {"error", "gradient_error", "forward_ms", "step_ms",
        "largest_tensor_mib", "peak_mib" (GPU), "forward_gb_s", "step_gb_s" | "step_tflop_s"}}},
     "goals": {goal: {"measured", "wanted", "met"}} (GPU)}
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs where mopd is not installed

from mopd.kernels import reference  # noqa: E402
from mopd.kernels.select import (  # noqa: E402
    full_divergence,
    fused_head_logprobs,
    gathered_logprobs,
    topk_divergence,
)

CHECKED_ROWS = 32
ACCURACY_FACTOR, FLOOR = 1.5, 5e-7
"""The floor is for values that plain float32 torch happens to hit exactly: half an ulp at 10."""
COPY_SHARE, MATMUL_RATIO, EXTRA_GIB = 0.85, 1.4, 1.0
"""The goals on a Hopper GPU: of the copy's bandwidth forward; of the bare products' time; memory
beyond inputs, outputs and gradients."""

Variant = Callable[..., Any]
"""(inputs of the kernel) -> [N], differentiable in the first ones; or a tuple that starts so."""


@dataclass(frozen=True)
class Kernel:
    """One computation, by several variants."""

    inputs: tuple[Tensor, ...]
    """The first `leaves` of them get gradients."""
    leaves: int
    by_rows: tuple[bool, ...]
    """Which inputs are a row per token (the head's weights are not)."""
    exact: Variant
    """The float64 reference."""
    variants: dict[str, Variant]
    ours: frozenset[str]
    """Variants that must be accurate."""
    forward_bytes: int = 0
    step_bytes: int = 0
    step_flop: int = 0
    mean_only: frozenset[str] = frozenset()
    """Others' variants that give the mean's gradient alone: timed, not checked."""


# --- plain torch, the baseline: what one would write without kernels --------------------


def eager_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs, and entropies without gradient, in float32."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def eager_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return eager_logprobs(hidden @ weight.t(), targets)


def eager_topk(logits: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits.float(), dim=-1).gather(1, ids)
    rest, teacher_rest = (
        torch.log1p(-t.exp().sum(1).clamp(max=1 - 1e-6)) for t in (log_p, teacher)
    )
    listed = (log_p.exp() * (log_p - teacher)).sum(1)
    return listed + rest.exp() * (rest - teacher_rest)


def eager_full(logits: Tensor, teacher: Tensor) -> Tensor:
    log_p, log_q = (torch.log_softmax(t.float(), dim=-1) for t in (logits, teacher))
    return (log_p.exp() * (log_p - log_q)).sum(1)


# --- the kernels ------------------------------------------------------------------------


def kernels(args: argparse.Namespace, device: str, skipped: dict[str, str]) -> dict[str, Any]:
    """name -> a function that makes the Kernel (one at a time: they are large)."""
    dtype = getattr(torch, args.dtype)
    rows, vocab, size, slots = args.rows, args.vocab, args.hidden, args.slots
    generator = torch.Generator(device).manual_seed(0)
    item = dtype.itemsize

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(shape, device=device, dtype=dtype)
        return made.normal_(generator=generator).mul_(scale)

    def ids(*shape: int) -> Tensor:
        return torch.randint(0, vocab, shape, device=device, generator=generator)

    backends = ["torch"] + (["triton"] if device == "cuda" else [])
    if device != "cuda":
        skipped["triton"] = "no CUDA device; on a CPU Triton has only its interpreter"

    def with_backends(function: Variant, **options: Any) -> dict[str, Variant]:
        return {b: functools.partial(function, backend=b, **options) for b in backends}

    def compiled(function: Variant) -> dict[str, Variant]:
        if not args.compile:
            skipped["torch.compile"] = "off (--compile turns it on; on by default on a GPU)"
            return {}
        return {"torch.compile": torch.compile(function)}

    def gathered() -> Kernel:
        ours = with_backends(gathered_logprobs, return_entropy=True)
        return Kernel(
            inputs=(normal(rows, vocab, scale=2.0), ids(rows)),
            leaves=1,
            by_rows=(True, True),
            exact=reference.gathered_logprobs_reference,
            variants={"eager": eager_logprobs, **compiled(eager_logprobs), **ours}
            | others_gathered(device, skipped),
            ours=frozenset(ours),
            forward_bytes=rows * vocab * item,
            step_bytes=3 * rows * vocab * item,
            mean_only=frozenset({"liger"}),
        )

    def fused_head() -> Kernel:
        def logits_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
            return gathered_logprobs(
                hidden @ weight.t(),
                targets,
                backend=backends[-1],
                inplace_backward=True,
                return_entropy=True,
            )

        ours = with_backends(fused_head_logprobs, return_entropy=True)
        ours["unfused, in place"] = logits_head
        return Kernel(
            inputs=(normal(rows, size), normal(vocab, size, scale=2 * size**-0.5), ids(rows)),
            leaves=2,
            by_rows=(True, False, True),
            exact=lambda h, w, t: reference.gathered_logprobs_reference(h @ w.t(), t),
            variants={"eager": eager_head, **compiled(eager_head), **ours}
            | others_head(device, skipped),
            ours=frozenset(ours),
            step_flop=3 * 2 * rows * vocab * size,
            mean_only=frozenset({"liger"}),
        )

    def topk() -> Kernel:
        logits, listed = normal(rows, vocab, scale=2.0), ids(rows, slots)
        listed = listed - listed % slots + torch.arange(slots, device=device)  # no repeats
        listed = listed.clamp(max=vocab - 1)
        teacher = torch.full((rows, slots), 0.9 / slots, device=device).log()
        ours = with_backends(topk_divergence)
        return Kernel(
            inputs=(logits, listed, teacher),
            leaves=1,
            by_rows=(True, True, True),
            exact=reference.topk_divergence_reference,
            variants={"eager": eager_topk, **compiled(eager_topk), **ours},
            ours=frozenset(ours),
            forward_bytes=rows * vocab * item,
            step_bytes=3 * rows * vocab * item,
        )

    def full() -> Kernel:
        ours = with_backends(full_divergence)
        return Kernel(
            inputs=(normal(rows, vocab, scale=2.0), normal(rows, vocab, scale=2.0)),
            leaves=1,
            by_rows=(True, True),
            exact=reference.full_divergence_reference,
            variants={"eager": eager_full, **compiled(eager_full), **ours},
            ours=frozenset(ours),
            forward_bytes=2 * rows * vocab * item,
            step_bytes=5 * rows * vocab * item,
        )

    return {"gathered": gathered, "fused head": fused_head, "top-k": topk, "full": full}


def others_gathered(device: str, skipped: dict[str, str]) -> dict[str, Variant]:
    """Liger's cross entropy. It writes the gradient over the logits in its forward."""
    if device != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        skipped["liger"] = "not installed" if device == "cuda" else "no CUDA device"
        return {}
    from liger_kernel.transformers import LigerCrossEntropyLoss

    loss = LigerCrossEntropyLoss()
    return {"liger": lambda logits, targets: -loss(logits * 1, targets).reshape(1)}


def others_head(device: str, skipped: dict[str, str]) -> dict[str, Variant]:
    """Liger's fused linear cross entropy, and cut-cross-entropy's."""
    found: dict[str, Variant] = {}
    if device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss()
        found["liger"] = lambda h, w, t: -loss(w, h, t).reshape(1)
    if device == "cuda" and importlib.util.find_spec("cut_cross_entropy") is not None:
        from cut_cross_entropy import linear_cross_entropy

        found["cce"] = lambda h, w, t: -linear_cross_entropy(h, w, t, reduction="none")
    elif device == "cuda":
        skipped["cut-cross-entropy"] = "not installed"
    else:
        skipped["cut-cross-entropy"] = "no CUDA device"
    return found


# --- measuring --------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage made while active."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage().data_ptr() for t in known}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.bytes = max(self.bytes, storage.nbytes())
        return out


def median_ms(function: Callable[[], Any], device: str, seconds: float) -> float:
    """Median of at least 3 and at most 50 runs, after 2 to warm up (one where they are slow).

    On a CPU with one thread it is the processor's time: what else runs there counts less.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    if time.perf_counter() - begin < seconds / 4 or device == "cuda":
        function()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (len(times) < 50 and time.perf_counter() - begin < seconds):
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            at = clock()
            function()
            times.append(1e3 * (clock() - at))
    return statistics.median(times)


def first(out: Any) -> Tensor:
    """The differentiable one of what a variant returns."""
    return out[0] if isinstance(out, tuple) else out


def errors(kernel: Kernel, function: Variant, rows: int) -> tuple[float, float]:
    """Largest absolute errors of values and gradients against float64, on the first rows."""

    def run(inputs: list[Tensor], function: Variant) -> tuple[Tensor, list[Tensor]]:
        leaves = [t.detach().clone().requires_grad_() for t in inputs[: kernel.leaves]]
        out = first(function(*leaves, *inputs[kernel.leaves :]))
        grads = torch.autograd.grad(out, leaves, grad.to(out)) if out.shape == grad.shape else []
        return out.detach().double(), [g.double() for g in grads]

    some = [t[:rows] if by else t for t, by in zip(kernel.inputs, kernel.by_rows, strict=True)]
    grad = torch.linspace(-1, 1, rows, device=some[0].device)
    value, grads = run(some, function)
    wide = [t.double() if t.is_floating_point() else t for t in some]
    want, wants = run(wide, kernel.exact)
    if value.shape != want.shape:
        return float((value - want.mean()).abs().max()), float("nan")
    worst = max(float((a - b).abs().max()) for a, b in zip(grads, wants, strict=True))
    return float((value - want).abs().max()), worst


def measure(kernel: Kernel, name: str, device: str, seconds: float) -> dict[str, float]:
    """Times and memory of one variant."""
    function = kernel.variants[name]
    leaves = [t.detach().requires_grad_() for t in kernel.inputs[: kernel.leaves]]
    inputs = (*leaves, *kernel.inputs[kernel.leaves :])
    grad = torch.full((1,), 1.0, device=device)

    def forward() -> None:
        with torch.no_grad():
            function(*inputs)

    def step() -> None:
        out = first(function(*inputs))
        torch.autograd.grad(out, leaves, grad.to(out).expand(out.shape))

    found: dict[str, float] = {}
    if name not in kernel.mean_only:  # these make the gradient in their forward
        found["forward_ms"] = median_ms(forward, device, seconds)
    found["step_ms"] = median_ms(step, device, seconds)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    if name != "torch.compile":
        with LargestTensor(kernel.inputs) as seen:
            step()
        found["largest_tensor_mib"] = seen.bytes / 2**20
    if kernel.forward_bytes and "forward_ms" in found:
        found["forward_gb_s"] = kernel.forward_bytes / found["forward_ms"] / 1e6
    if kernel.step_bytes:
        found["step_gb_s"] = kernel.step_bytes / found["step_ms"] / 1e6
    if kernel.step_flop:
        found["step_tflop_s"] = kernel.step_flop / found["step_ms"] / 1e9
    return found


def roofs(args: argparse.Namespace, device: str) -> dict[str, float]:
    """What the device can do at all: a copy of the logits, and the head's bare products."""
    dtype = getattr(torch, args.dtype)
    source = torch.zeros(args.rows, args.vocab, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), device, args.seconds)
    hidden = torch.randn(args.rows, args.hidden, device=device).to(dtype)
    weight = torch.randn(args.vocab, args.hidden, device=device).to(dtype)
    d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
    product_ms = median_ms(lambda: torch.mm(hidden, weight.t(), out=target), device, args.seconds)

    def step() -> None:
        torch.mm(hidden, weight.t(), out=target)
        torch.mm(target, weight, out=d_hidden)
        torch.mm(target.t(), hidden, out=d_weight)

    return {
        "copy_gb_s": 2 * source.nbytes / copy_ms / 1e6,
        "matmul_tflop_s": 2 * args.rows * args.vocab * args.hidden / product_ms / 1e9,
        "bare_head_step_ms": median_ms(step, device, args.seconds),
    }


def goals(report: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What was wanted of a Hopper GPU at 8192 x 151,936 bfloat16 and H = 4096."""

    def goal(measured: float, wanted: float, at_least: bool) -> dict[str, Any]:
        met = measured >= wanted if at_least else measured <= wanted
        return {"measured": measured, "wanted": wanted, "met": met}

    gathered, head = report["kernels"]["gathered"], report["kernels"]["fused head"]
    item = getattr(torch, args.dtype).itemsize
    gradients = (args.rows + args.vocab) * args.hidden * item / 2**20
    found = {
        "gathered forward, share of the copy's bandwidth": goal(
            gathered["triton"]["forward_gb_s"] / report["copy_gb_s"], COPY_SHARE, True
        ),
        "fused head step, times the bare products": goal(
            head["triton"]["step_ms"] / report["bare_head_step_ms"], MATMUL_RATIO, False
        ),
        "fused head, GiB beyond inputs and gradients": goal(
            (head["triton"]["peak_mib"] - gradients) / 1024, EXTRA_GIB, False
        ),
    }
    for name, kernel in (("gathered", gathered), ("fused head", head)):
        for other in ("liger", "cce"):
            if other in kernel:
                found[f"{name} step, times {other}'s"] = goal(
                    kernel["triton"]["step_ms"] / kernel[other]["step_ms"], 1.0, False
                )
    return found


# --- the report -------------------------------------------------------------------------


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()} ({torch.get_num_threads()} threads)"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--slots", type=int, default=16, help="listed ids a row of the top-k KL")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--seconds", type=float, help="most time per figure")
    parser.add_argument("--only", help="comma-separated kernels: gathered,fused head,top-k,full")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not gpu:
        parser.error("--device cuda: torch sees no CUDA device")
    cuda = args.device == "cuda"
    for name, value in {
        "rows": 8192 if cuda else 512,
        "vocab": 151936 if cuda else 32768,
        "hidden": 4096 if cuda else 128,
        "dtype": "bfloat16" if cuda else "float32",
        "seconds": 0.6 if cuda else 0.5,
        "compile": cuda,
    }.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    skipped: dict[str, str] = {}
    report: dict[str, Any] = {
        "device": device_name(args.device),
        "torch": torch.__version__,
        "triton": triton_version(),
        "threads": torch.get_num_threads(),
        "shape": {k: getattr(args, k) for k in ("rows", "vocab", "hidden", "slots", "dtype")},
        **roofs(args, args.device),
        "skipped": skipped,
        "kernels": {},
    }
    print(f"{report['device']}, torch {report['torch']}, {report['shape']}")
    print(
        f"copy {report['copy_gb_s']:.1f} GB/s, product {report['matmul_tflop_s']:.3f} TFLOP/s, "
        f"head's three products {report['bare_head_step_ms']:.2f} ms"
    )
    inaccurate = []
    for name, make in kernels(args, args.device, skipped).items():
        if args.only and name not in args.only.split(","):
            continue
        kernel = make()
        rows = min(CHECKED_ROWS, args.rows)
        found: dict[str, dict[str, float]] = {}
        plain = errors(kernel, kernel.variants["eager"], rows)
        for variant, function in kernel.variants.items():
            found[variant] = {}
            if variant == "torch.compile":
                continue  # the same program as eager; another shape would compile it once more
            mine = plain if variant == "eager" else errors(kernel, function, rows)
            if variant in kernel.ours and any(
                e > ACCURACY_FACTOR * p + FLOOR for e, p in zip(mine, plain, strict=True)
            ):
                inaccurate.append(f"{name}, {variant}: errors {mine}, plain torch {plain}")
            found[variant]["error"] = mine[0]
            if variant not in kernel.mean_only:
                found[variant]["gradient_error"] = mine[1]
        if inaccurate:
            break
        for variant in kernel.variants:
            found[variant] |= measure(kernel, variant, args.device, args.seconds)
            figures = "  ".join(f"{k} {v:.4g}" for k, v in found[variant].items())
            print(f"{name:10s} {variant:18s} {figures}", flush=True)
        report["kernels"][name] = found
        del kernel
        if args.device == "cuda":
            torch.cuda.empty_cache()
    for what, why in skipped.items():
        print(f"not run: {what}: {why}")
    if inaccurate:
        print("less accurate than plain torch:", *inaccurate, sep="\n  ", file=sys.stderr)
        return 1
    if args.device == "cuda" and not args.only:
        report["goals"] = goals(report, args)
        for goal, figures in report["goals"].items():
            print(f"goal: {goal}: {figures}")
    if args.json:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
