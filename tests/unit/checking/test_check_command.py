"""`mopd check`: every fault at once, what a run will need of the machine, exit codes, JSON."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mopd.checking import estimates
from mopd.checking.command import template_rows
from mopd.checking.estimates import GIB, Size, disk_rows, memory_rows, size_of, student_bytes
from mopd.cli import main
from mopd.config.schema import Config, DomainConfig, TeacherConfig

ROOT = Path(__file__).parents[3]
BASE = ROOT / "demo/models/base"


def written(tmp_path: Path, **domains: Any) -> str:
    """A configuration of two teachers, `up` started by the run and `away` at a dead address."""
    (tmp_path / "good.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {i}:", "answer": str(i)}) + "\n" for i in range(40))
    )
    domain = {
        "teacher": "away",
        "prompts": {"jsonl": str(tmp_path / "good.jsonl")},
        "held_out": 8,
        "verifier": {"name": "exact_match"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "checked",
                "run_dir": str(tmp_path / "runs"),
                "student": {"model": str(BASE)},
                "rollout": {"max_response_tokens": 8},
                "teachers": {"away": {"endpoints": ["http://127.0.0.1:9"], "start_timeout_s": 0.3}},
                "domains": {"good": domain} | {n: domain | d for n, d in domains.items()},
                "train": {"steps": 10, "prompts_per_step": 4},
            }
        )
    )
    return str(file)


def checked(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    code = main(["check", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def failed(found: dict[str, Any]) -> list[dict[str, str]]:
    return [row for row in found["rows"] if row["status"] == "failed"]


def test_what_is_right_is_told_in_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = checked(capsys, written(tmp_path))
    assert code == 0 and found["good"] and not failed(found)
    parts = {row["part"] for row in found["rows"]}
    assert {"configuration", "tokenizers", "prompts good", "lengths", "verifiers", "placement",
            "memory", "disk"} <= parts  # fmt: skip
    assert main(["check", written(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "--live does" in said and "prompts good: 32 prompts" in said
    assert "prompts: order: shuffle\n" in said
    chosen = ["train.sampling={order: curriculum, retire_above: 0.9}", "objective.orm.alpha=0.1"]
    assert main(["check", written(tmp_path), *chosen]) == 1  # no prompt has a difficulty
    assert capsys.readouterr().out.endswith("\n1 fault: the run would not start or end\n")
    chosen[0] = "train.sampling={order: prioritised, retire_above: 0.9}"
    assert main(["check", written(tmp_path), *chosen]) == 0
    said = capsys.readouterr().out
    assert "order: prioritised, min_priority 0.05, retire_above 0.9, retire_after 4" in said


def test_every_fault_of_every_part_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": 3}\n{')
    (tmp_path / "wrong.py").write_text("def yes(prompt, answer):\n    return True\n")
    bad = {n: {"prompts": {"jsonl": str(tmp_path / f"{n}.jsonl")}} for n in ("one", "two")}
    bad["lax"] = {"verifier": {"target": "wrong:yes"}}
    config = written(tmp_path, **bad)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setenv("PYTHONPATH", str(tmp_path))
        code, found = checked(capsys, config, "rollout.max_response_tokens=250")
    texts = [row["detail"] for row in failed(found)]
    assert code == 1 and not found["good"] and len(texts) == 10, texts
    for name in ("one", "two"):
        for row in (2, 3):
            own = [t for t in texts if f"{name}.jsonl:{row}: " in t]
            assert own and all(t.startswith(f"domain '{name}': ") for t in own)
    assert any("context too short" in t for t in texts)
    assert any("domains.lax.verifier does not do its work" in t for t in texts)


def test_faults_of_the_configuration_do_not_hide_those_of_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is left out is what the faulty keys would be needed for."""
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}\n{')
    bad = {"prompts": {"jsonl": str(tmp_path / "bad.jsonl")}, "teacher": "awy"}
    lost = {"prompts": {"jsonl": str(tmp_path / "nowhere.jsonl")}}
    config = written(tmp_path, bad=bad, lost=lost)
    faulty = ["train.steps=0", "student.dtype=int3", "student.modle=x"]
    faulty += ["teachers.away.retries=-1"]
    for name, file, items in (("few", "good", 99), ("odd", "bad", 1), ("off", "bad", 0)):
        own = f"prompts: {tmp_path}/{file}.jsonl, verifier: exact_match, items: {items}"
        faulty.append(f"evaluation.general.{name}={{{own}}}")
    code, found = checked(capsys, config, *faulty)
    told = [(row["part"], row["detail"]) for row in failed(found)]
    assert code == 1
    starts = [
        ("configuration", "train.steps must be"),
        ("configuration", "student.dtype"),
        ("configuration", "unknown key 'student.modle'; did you mean 'student.model'?"),
        ("configuration", "domains.bad.teacher: there is no teacher 'awy'; did you mean 'away'?"),
        ("configuration", "domains.lost.prompts.jsonl: no such file"),
        ("files", f"domain 'bad': {tmp_path}/bad.jsonl:1: prompt should be text"),
        ("files", f"domain 'bad': {tmp_path}/bad.jsonl:2: not valid JSON"),
        ("configuration", "evaluation.general.off.items must be"),
        ("files", "evaluation.general.few.items is 99, but the set has only 40 different items"),
        ("files", f"domain 'odd': {tmp_path}/bad.jsonl:2: not valid JSON"),
    ]
    for start in starts:
        assert [text for part, text in told if part == start[0] and start[1] in text], start
    assert not [text for _, text in told if "good.jsonl" in text or "domain 'off'" in text]
    # Values of another type, which have their defaults for the rest, are no more in the way.
    config = written(tmp_path, bad=bad | {"teacher": "away"})
    wrong = {
        "train.steps": "many",
        "rollout.max_response_tokens": "[8]",
        "student": "{parallel: 2, modle: x}",
        "domains.good.verifier": "[exact_match]",
        "teachers.away.timeout_s": "soon",
        "objective.orm.alpha": "${name}",
    }
    code, found = checked(capsys, config, *(f"{key}={value}" for key, value in wrong.items()))
    told = [(row["part"], row["detail"]) for row in failed(found)]
    assert code == 1 and len(told) == 10, "\n".join(map(str, told))
    for start in (
        ("configuration", "train.steps: expected a whole number"),
        ("configuration", "rollout.max_response_tokens: expected a whole number"),
        ("configuration", "student.parallel: expected a mapping of keys"),
        ("configuration", "unknown key 'student.modle'"),
        ("configuration", "domains.good.verifier: expected a mapping of keys"),
        ("configuration", "teachers.away.timeout_s: expected a number"),
        ("configuration", "objective.orm.alpha: While dereferencing"),
        *(start for start in starts if "domain 'bad'" in start[1]),
    ):
        assert [text for part, text in told if part == start[0] and start[1] in text], (start, told)
    config = written(tmp_path, bad=bad, lost=lost)
    mended = ["domains.bad.teacher=away", f"domains.lost.prompts.jsonl={tmp_path / 'good.jsonl'}"]
    (row,) = failed(checked(capsys, config, "student.model=nowhere", *mended)[1])
    assert "student.model" in row["detail"], "without a student no file can be read"
    with pytest.raises(SystemExit) as wrong:
        main(["check"])
    assert wrong.value.code == 2


@pytest.mark.parametrize(
    ("settings", "without", "options", "text"),
    [
        ({"model_type": "gemma3_text"}, "", [], "model_type 'gemma3_text' cannot be trained"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "",
            [],
            "rope_parameters is",
        ),
        ({"hidden_size": "64"}, "", [], "'hidden_size' expected int"),
        ({}, "model.layers.0.mlp.gate.weight", [], "1 missing: model.layers.0.mlp.gate.weight"),
        (
            {},
            "",
            ["student.freeze_routers=false", "student.router_bias_update_rate=0.001"],
            "has no expert biases",
        ),
    ],
)
def test_a_student_that_no_rank_could_load(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    without: str,
    options: list[str],
    text: str,
) -> None:
    """Found without starting one: the family, its settings, its tensors, what it has not."""
    from safetensors.torch import load_file, save_file

    student = tmp_path / "student"
    shutil.copytree(BASE, student)
    config = json.loads((student / "config.json").read_text()) | settings
    (student / "config.json").write_text(json.dumps(config))
    weights = load_file(student / "model.safetensors")
    weights.pop(without, None)
    save_file(weights, student / "model.safetensors", metadata={"format": "pt"})
    code, found = checked(capsys, written(tmp_path), f"student.model={student}", *options)
    (row,) = failed(found)
    assert code == 1 and row["part"] == "files" and text in row["detail"], row


def test_a_teacher_that_is_not_there_fails_the_live_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = checked(capsys, written(tmp_path), "--live")
    (row,) = failed(found)
    assert code == 1 and (row["part"], row["what"]) == ("teacher away", "answers")
    assert "http://127.0.0.1:9" in row["detail"]


def config_of(tmp_path: Path, **student: Any) -> Config:
    config = Config(
        name="x",
        run_dir=str(tmp_path),
        teachers={"t": TeacherConfig(model=str(BASE), replicas=2)},
        domains={"d": DomainConfig(teacher="t")},
    )
    config.student.model = str(BASE)
    for key, value in student.items():
        setattr(config.student, key, value)
    return config


def test_parameters_are_counted_from_the_headers() -> None:
    from safetensors.torch import load_file

    weights = load_file(BASE / "model.safetensors")
    size = size_of(BASE)
    assert size.total == sum(tensor.numel() for tensor in weights.values())
    assert size.expert == sum(t.numel() for name, t in weights.items() if ".experts." in name) > 0


@pytest.mark.parametrize(
    ("dtype", "distributed", "each"),
    [("float32", False, 16), ("bfloat16", False, 18), ("bfloat16", True, 2 + 4 + 12 / 2)],
)
def test_bytes_a_parameter(tmp_path: Path, dtype: str, distributed: bool, each: float) -> None:
    """Weights, float32 gradients, Adam's two moments, and float32 copies under bfloat16."""
    config = config_of(tmp_path, dtype=dtype)
    config.student.parallel.dp = 2
    config.student.optimizer.distributed = distributed
    kept, grows = student_bytes(config, Size(1000, 0), 100)
    assert kept == pytest.approx(1000 * each) and grows > 0
    config.student.parallel.tp, config.student.parallel.ep = 2, 2
    kept, _ = student_bytes(config, Size(1000, 600), 100)
    assert kept == pytest.approx((200 + 300) * each)
    config.student.loss_head = "fused"
    assert student_bytes(config, Size(1000, 600), 100)[1] < grows / 2
    config.student.checkpoint_async = True  # weights and moments once more, in float32
    assert student_bytes(config, Size(1000, 600), 100)[0] == kept + 500 * 12


def test_a_teacher_of_another_chat_template_is_told(tmp_path: Path) -> None:
    for name, text in (("mine", "{{ a }}"), ("jinja", "{{ a }}\n"), ("other", "{{ b }}")):
        (tmp_path / name).mkdir()
        settings = {} if name == "jinja" else {"chat_template": text}
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(settings))
        if name == "jinja":
            (tmp_path / name / "chat_template.jinja").write_text(text)
    config = config_of(tmp_path, model=str(tmp_path / "mine"))
    config.teachers["u"] = TeacherConfig(model="u")
    config.domains["e"] = DomainConfig(teacher="u")
    folders = {"t": tmp_path / "jinja", "u": tmp_path / "other"}
    assert list(template_rows(config, folders)) == []  # nobody reads chats
    for domain in config.domains.values():
        domain.prompts.chat = True
    assert status(template_rows(config, folders)) == {
        "chat template of t": "ok", "chat template of u": "warning"
    }  # fmt: skip


def status(rows: Iterable[Any]) -> dict[str, str]:
    return {row.what: row.status for row in rows}


def test_memory_and_disk_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    rows = memory_rows(config, {"t": BASE}, 64, available=64 * GIB)
    assert set(status(rows).values()) == {"ok"}
    assert {"student rank", "rollout engine", "teacher t", "of this machine"} <= status(rows).keys()
    assert "2 x 1." in next(row.detail for row in rows if row.what == "teacher t")
    rows = memory_rows(config, {"t": BASE}, 64, available=2 * GIB)
    assert status(rows)["of this machine"] == "warning"
    assert set(status(disk_rows(config, tmp_path / "new/run", tmp_path)).values()) == {"ok"}
    usage = namedtuple("usage", "free")
    size = size_of(BASE).total
    for share, want in ((0.99, "failed"), (1.1, "warning"), (2.0, "ok")):
        free = share * size * (12 * 3 + 2 * 4)  # three checkpoints, two students of float32
        monkeypatch.setattr(estimates.shutil, "disk_usage", lambda place, free=free: usage(free))
        rows = disk_rows(config, tmp_path / "run", tmp_path)
        assert status(rows)["checkpoints and students"] == want
