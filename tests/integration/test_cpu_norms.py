"""RMSNorm on the CPU under vLLM against the formula in float64; further settings there."""

from __future__ import annotations

import pytest
import torch


def reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.double()


@pytest.fixture(scope="module")
def ops():  # type: ignore[no-untyped-def]
    from vllm import ir

    from mopd.rollout import cpu_norms

    cpu_norms.register()
    cpu_norms.register()  # an engine made again in one process
    ours = {name: getattr(ir.ops, name) for name in cpu_norms.PRIORITY}
    before = {name: op.get_priority() for name, op in ours.items()}
    for name, op in ours.items():
        op.set_default(cpu_norms.PRIORITY[name])
    yield ir.ops
    for name, op in ours.items():
        op.set_default(before[name] or ["native"])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_both_norms_are_the_formula(ops, dtype: torch.dtype, bound: float) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    weight, small = torch.rand(96).to(dtype), torch.rand(32).to(dtype)
    x, residual = torch.randn(7, 96).to(dtype), torch.randn(7, 96).to(dtype)
    heads = torch.randn(7, 200).to(dtype)[:, 8:104].view(7, 3, 32)  # a view into a wider row
    for values, scale in ((x, weight), (heads, small)):
        assert ops.rms_norm.dispatch(values, scale, 1e-6).provider == "mopd_cpu"
        error = ops.rms_norm(values, scale, 1e-6).double() - reference(values, scale, 1e-6)
        assert error.abs().max() < bound
    summed = (x + residual).double()
    assert ops.fused_add_rms_norm.dispatch(x, residual, weight, 1e-6).provider == "mopd_cpu"
    normed, left = ops.fused_add_rms_norm.maybe_inplace(x.clone(), residual.clone(), weight, 1e-6)
    assert (left.double() - summed).abs().max() < bound
    assert (normed.double() - reference(summed, weight, 1e-6)).abs().max() < 2 * bound


def test_what_the_kernel_cannot_do_stays_with_vllms_own(ops) -> None:  # type: ignore[no-untyped-def]
    x, weight = torch.randn(7, 96), torch.rand(96)
    for arguments in ((x, None, 1e-6), (x, weight.bfloat16(), 1e-6), (x, weight, 1e-6, 48)):
        assert ops.rms_norm.dispatch(*arguments).provider == "native"
    wide = torch.randn(7, 192)[:, :96]
    assert ops.fused_add_rms_norm.dispatch(wide, x, weight, 1e-6).provider == "native"


def test_prefixes_are_kept_only_where_one_could_be_found_again(ops) -> None:  # type: ignore[no-untyped-def]
    from mopd.rollout.engine_arguments import cpu_arguments

    short, long = cpu_arguments(128 + 16, 16 + 1), cpu_arguments(128 + 16, 16)
    assert short["enable_prefix_caching"] is False and "enable_prefix_caching" not in long
