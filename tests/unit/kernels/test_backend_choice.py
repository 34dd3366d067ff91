"""Who computes the logprobs: chosen by device, said once, refused clearly, never a fallback."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from mopd.errors import ConfigError
from mopd.kernels import torch_rows
from mopd.kernels.backends import choose_backend, forget_choices
from mopd.kernels.select import gathered_logprobs


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], env={**clean, **env}, capture_output=True, text=True
    )


def test_auto_is_torch_on_cpu_and_says_so_once(caplog):
    forget_choices()
    with caplog.at_level(logging.INFO, logger="mopd.kernels.backends"):
        for _ in range(3):
            gathered_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["logprob kernel: torch on cpu (student.kernel: auto)"]
    assert choose_backend("auto", "cpu") is torch_rows


def test_triton_on_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    forget_choices()
    with pytest.raises(ConfigError, match=r"student.kernel.*cpu.*TRITON_INTERPRET=1"):
        gathered_logprobs(torch.zeros(1, 3), torch.tensor([0]), backend="triton")


def test_the_interpreter_asked_for_too_late_is_refused():
    done = _python(
        "import triton, os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from mopd.kernels.select import choose_backend\n"
        "from mopd.errors import ConfigError\n"
        "try: choose_backend('triton', 'cpu')\n"
        "except ConfigError as error: print(error)\n"
    )
    assert "too late" in done.stdout, done.stderr


def test_cuda_never_falls_back(monkeypatch):
    """auto on CUDA is Triton; without triton it is an error, not torch."""
    forget_choices()
    monkeypatch.setitem(sys.modules, "mopd.kernels.gathered_logprob", None)
    monkeypatch.delattr("mopd.kernels.gathered_logprob", raising=False)
    with pytest.raises(ConfigError, match="does not import"):
        choose_backend("auto", "cuda")
    forget_choices()


def test_imports_stay_slim():
    """CPU trainers and laptops: no vllm, ray or triton until they are asked for."""
    done = _python(
        "import sys\n"
        "import mopd.kernels.select, mopd.objective.loss, mopd.objective.orm\n"
        "heavy = {'triton', 'vllm', 'ray', 'megatron', 'transformers'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))\n"
    )
    assert done.stdout.strip() == "heavy: []", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("logits", "targets", "options", "words"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64), {}, r"\(2, 3, 4\)"),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), {}, r"\(3,\)"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32), {}, "int32"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), {}, "floating"),
        (torch.zeros(1, 3), torch.tensor([0]), {"temperature": 0.0}, "temperature is 0.0"),
        (torch.zeros(1, 3), torch.tensor([0]), {"temperature": float("nan")}, "temperature"),
        (torch.zeros(1, 3), torch.tensor([0]), {"valid_vocab": 0}, "valid_vocab 0"),
        (
            torch.zeros(1, 3).expand(4, 3),
            torch.zeros(4, dtype=torch.int64),
            {"inplace_backward": True},
            "share memory",
        ),
    ],
)
def test_contract_violations(logits, targets, options, words):
    with pytest.raises(ValueError, match=words):
        gathered_logprobs(logits, targets, **options)


def test_unknown_backend_and_dtype():
    with pytest.raises(ConfigError, match="'tritn'"):
        gathered_logprobs(torch.zeros(1, 3), torch.tensor([0]), backend="tritn")
    double = torch.zeros(1, 3, dtype=torch.float64)
    got = gathered_logprobs(double, torch.tensor([0]), backend="torch")
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(-1.0986122886681098, abs=1e-15)
