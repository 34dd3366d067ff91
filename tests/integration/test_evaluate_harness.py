"""`mopd evaluate` with a task of lm-evaluation-harness as a general set, on the demo's models.

Skipped where lm_eval is not installed: it is an extra of 600 MB, and no part of the lock.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from mopd.build import prepare
from mopd.config.load import load_config
from mopd.evaluating.run import run_evaluation
from mopd.observe.progress import Progress

pytestmark = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm_eval is not installed (extra lm-eval)"
)
ROOT = Path(__file__).resolve().parents[2]
ITEMS = 8


def test_the_harness_asks_and_judges_what_our_engines_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    text = (ROOT / "configs/quickstart.yaml").read_text()
    start, end = text.index("  rotate:\n    teacher"), text.index("objective:")
    (tmp_path / "one.yaml").write_text(text[:start] + text[end:])  # the domain `backward` alone
    overrides = [f"run_dir={tmp_path}/runs", "name=eval", "domains.backward.held_out=40"]
    # Words that nobody was trained on, or the sets would be refused for what they give away.
    domain = prepare(load_config([tmp_path / "one.yaml"], overrides)).domains["backward"]
    words = [prompt.text.removeprefix("back ").rstrip(":") for prompt in domain.held_out[:ITEMS]]
    rows = [json.dumps({"word": w, "reversed": w[::-1]}) + "\n" for w in words]
    (tmp_path / "test.jsonl").write_text("".join(rows))
    (tmp_path / "spelling.yaml").write_text(
        "task: spelling\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/test.jsonl}}}}\n"
        "test_split: test\noutput_type: generate_until\n"
        'doc_to_text: "back {{word}}:"\ndoc_to_target: "{{reversed}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 16}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    (tmp_path / "choosing.yaml").write_text(
        "task: choosing\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/test.jsonl}}}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "back {{word}}:"\ndoc_to_target: 1\ntarget_delimiter: ""\n'
        "doc_to_choice: \"{{[word, reversed, 'qqqqqq']}}\"\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    (tmp_path / "more.yaml").write_text(
        "evaluation:\n  bootstrap: 100\n  general:\n    spelling:\n"
        f"      prompts: {{lm_eval: spelling, lm_eval_folder: {tmp_path}}}\n"
        "      verifier: lm_eval\n    choosing:\n"
        f"      prompts: {{lm_eval: choosing, lm_eval_folder: {tmp_path}}}\n"
        "      verifier: lm_eval\n"
    )
    prepared = prepare(load_config([tmp_path / "one.yaml", tmp_path / "more.yaml"], overrides))
    with Progress(1, [], plain=True) as progress:
        student = str(ROOT / "demo/models/teacher_backward")
        outcome = run_evaluation(prepared, progress, tmp_path / "out", student=student)
    cell = outcome.record["table"]["student"]["spelling"]
    assert cell["n"] == ITEMS and cell["score"] >= 0.8
    assert outcome.record["table"]["base"]["spelling"]["score"] <= cell["score"]
    # The specialist finds the reversed word likelier than the word itself and than nonsense.
    chosen = outcome.record["table"]["student"]["choosing"]
    assert chosen["n"] == ITEMS and chosen["score"] == 1.0
    assert outcome.retention is not None
    assert outcome.retention["forgetting"]["choosing"]["n"] == ITEMS
    assert outcome.retention["forgetting"]["spelling"]["n"] == ITEMS
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    own = [r for r in map(json.loads, lines) if r["set"] == "spelling"]
    assert {r["prompt"] for r in own} <= {f"back {w}:" for w in words}
    for record in own:
        answer = record["answers"]["student"]
        assert answer["correct"] == (answer["text"] == record["reference"])
