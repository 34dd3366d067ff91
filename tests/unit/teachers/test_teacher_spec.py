"""What a ServerSpec puts on vLLM's command line, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from mopd_teachers import serve
from mopd_teachers.errors import TeacherError
from mopd_teachers.server import ServerProcess, ServerSpec


def test_arguments() -> None:
    spec = ServerSpec(
        "math",
        "org/model",
        max_model_len=128,
        kv_cache_gib=0.5,
        engine_args={
            "max-num-seqs": 7,
            "enable_prefix_caching": True,
            "enforce_eager": False,
            "hf_overrides": {"a": 1},
            "middleware": ["x.y", "z"],
            "quantization": None,
        },
    )
    args = spec.vllm_arguments("math@1", 4711)
    text = " ".join(args)
    assert "--model org/model --served-model-name math@1 --host 127.0.0.1 --port 4711" in text
    assert "--dtype float32 --max-model-len 128" in text and "--revision" not in args
    assert args[args.index("--kv-cache-memory-bytes") + 1] == str(2**29)
    assert "--max-num-seqs 7" in text and "--no-enforce-eager" in args
    assert "--enable-prefix-caching" in args and "--no-enable-prefix-caching" not in args
    assert args[args.index("--hf-overrides") + 1] == '{"a": 1}'
    assert "--middleware x.y z" in text and "--quantization" not in args


def test_engine_args_cannot_say_what_has_a_key_of_its_own() -> None:
    with pytest.raises(TeacherError, match=r"'math'.*\['max-model-len', 'port'\]"):
        ServerSpec("math", "m", engine_args={"port": 1, "max-model-len": 2})


def test_a_folder_without_checkpoint_is_refused_before_anything_starts(tmp_path: Path) -> None:
    server = ServerProcess(ServerSpec("math", str(tmp_path)), tmp_path / "log")
    with pytest.raises(TeacherError, match=r"'math': no checkpoint at .*config.json"):
        server.start()
    assert not server.alive() and server.pid is None
    server.stop()


def test_how_prefixes_are_shared_is_the_caller_s_to_say() -> None:
    ours = ["--scheduler-cls", serve._SCHEDULER]
    off = ["--no-enable-prefix-caching"]
    for given, added in (
        ([], ours),
        (["--max-model-len", "128"], off + ours),  # no block of 128 comes before a last token
        (["--max_model_len=128", "--block-size", "64"], ours),
        (["--max_model_len=64", "--block_size=64"], off + ours),
        (["--max-model-len", "64", "--enable-prefix-caching"], ours),
        (["--max-model-len", "64", "--block-size", "many"], ours),  # vLLM's to refuse
        (["--scheduler-cls", "own.Scheduler"], []),
        (["--scheduler_cls=own.Scheduler"], []),
    ):
        args = list(given)
        serve._share_prefixes(args, cpu=True)
        assert args == given + added
