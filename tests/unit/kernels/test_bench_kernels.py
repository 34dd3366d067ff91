"""The benchmark runs, checks before it measures, and says what it could not do."""

from __future__ import annotations

import json

import pytest
import torch

import bench_kernels

SMALL = ["--device", "cpu", "--rows", "6", "--vocab", "160", "--hidden", "8", "--slots", "4"]


def test_one_json_object_as_the_last_line(capsys):
    assert bench_kernels.main([*SMALL, "--seconds", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["kernels"]) == {"gathered", "fused head", "top-k", "full"}
    for variants in report["kernels"].values():
        assert {"eager", "torch"} <= set(variants)
        for figures in variants.values():
            assert figures["forward_ms"] > 0 and figures["step_ms"] > 0
            assert figures["error"] < 1e-5 and figures["gradient_error"] < 1e-5
    assert "no CUDA device" in report["skipped"]["triton"] and "goals" not in report
    assert report["shape"]["rows"] == 6 and report["copy_gb_s"] > 0


def test_a_wrong_kernel_is_not_timed(capsys, monkeypatch):
    monkeypatch.setattr(
        bench_kernels,
        "topk_divergence",
        lambda logits, ids, teacher, backend: bench_kernels.eager_topk(logits * 1.01, ids, teacher),
    )
    assert bench_kernels.main([*SMALL, "--seconds", "0", "--only", "top-k", "--json"]) == 1
    printed = capsys.readouterr()
    assert "top-k, torch: errors" in printed.err and "step_ms" not in printed.out


def test_goals_read_what_a_gpu_run_reports():
    args = bench_kernels.parse(["--device", "cpu", "--dtype", "bfloat16"])
    args.rows, args.vocab, args.hidden = 8192, 151936, 4096
    gradients = (8192 + 151936) * 4096 * 2 / 2**20
    report = {
        "copy_gb_s": 4000.0,
        "bare_head_step_ms": 44.0,
        "kernels": {
            "gathered": {"triton": {"forward_gb_s": 3600.0, "step_ms": 2.0}},
            "fused head": {
                "triton": {"step_ms": 66.0, "peak_mib": gradients + 512},
                "cce": {"step_ms": 60.0},
            },
        },
    }
    found = bench_kernels.goals(report, args)
    assert {name: (g["measured"], g["met"]) for name, g in found.items()} == {
        "gathered forward, share of the copy's bandwidth": (0.9, True),
        "fused head step, times the bare products": (1.5, False),
        "fused head, GiB beyond inputs and gradients": (0.5, True),
        "fused head step, times cce's": (1.1, False),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        bench_kernels.main(["--device", "cuda"])
    assert "torch sees no CUDA device" in capsys.readouterr().err
