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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        bench_kernels.main(["--device", "cuda"])
    assert "torch sees no CUDA device" in capsys.readouterr().err
