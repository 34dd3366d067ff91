"""Tasks of lm-evaluation-harness: the prompts and scores are the harness' own.

The harness is optional and 600 MB with what it needs: tests that need it are skipped without it
(`pip install 'mopd[lm-eval]'` into a copy of the environment runs them).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mopd.config.schema import EvaluationSetConfig, PromptsConfig, VerifierConfig
from mopd.data.evaluation_sets import load_set
from mopd.data.harness import load_task
from mopd.data.prompts import DomainData
from mopd.data.tokens import PromptEncoder
from mopd.data.verifiers import VerifierError, build_verifier
from mopd.errors import ConfigError, DataError
from mopd.evaluating.answers import weighed
from mopd.evaluating.work import Sampling
from mopd.evaluation.fingerprints import set_fingerprint
from mopd.evaluation.items import item_result
from mopd.evaluation.leaks import find_leaks
from mopd.types import Prompt, Rollout, Verdict

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm_eval is not installed (extra lm-eval)"
)
ROOT = Path(__file__).resolve().parents[3]
WORDS = ("abcd", "hello", "world", "level", "mopd")

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/test.jsonl, shots: {folder}/shots.jsonl}}}}
test_split: test
fewshot_split: shots
output_type: {kind}
doc_to_text: "back {{{{word}}}}:"
doc_to_target: "{{{{reversed}}}}"
generation_kwargs: {{until: ["\\n", "back"], max_gen_toks: 16}}
num_fewshot: 2
filter_list:
  - name: bare
    filter: [{{function: remove_whitespace}}, {{function: take_first}}]
  - name: last-word
    filter: [{{function: regex, regex_pattern: "(\\\\w+)", group_select: -1}}, {{function: take_first}}]
metric_list:
  - {{metric: exact_match, aggregation: {aggregation}, higher_is_better: true}}
{more}
"""  # noqa: E501


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, words in (("test", WORDS), ("shots", ("cat", "dog", "bird", "fish"))):
        rows = [json.dumps({"word": w, "reversed": w[::-1]}) + "\n" for w in words]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    write_task(tmp_path, "spelling")
    return tmp_path


def write_task(
    folder: Path, name: str, kind: str = "generate_until", aggregation: str = "mean", more: str = ""
) -> None:
    text = TASK.format(name=name, folder=folder, kind=kind, aggregation=aggregation, more=more)
    (folder / f"{name}.yaml").write_text(text)


def prompts_of(folder: Path, name: str = "spelling", **changes: Any) -> PromptsConfig:
    return PromptsConfig(lm_eval=name, lm_eval_folder=str(folder), **changes)


def load(folder: Path, **changes: Any) -> DomainData:
    from transformers import AutoTokenizer

    prompts = prompts_of(folder, **changes)
    cfg = EvaluationSetConfig(prompts, VerifierConfig("lm_eval", args={"filter": "bare"}))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/models/base")
    return load_set("evaluation.general.spelling", "spelling", cfg, tokenizer)


@needs_harness
def test_prompts_and_scores_are_those_of_a_run_of_the_harness(tasks: Path) -> None:
    """The harness itself evaluates a model that gives these answers; it says what is right."""
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    answers = {
        "abcd": " dcba\nback cat: tac",  # right up to the stop text
        "hello": "olleh",
        "world": "dlrow and more",
        "level": "it is level",
        "mopd": "",
    }

    class Canned(LM):
        asked: list[str] = []

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            found = []
            for request in requests:
                text, settings = request.args
                self.asked.append(text)
                answer = answers[text.rpartition("back ")[2].rstrip(":")]
                for stop in settings["until"]:
                    answer = answer.split(stop)[0]
                found.append(answer)
            return found

        def loglikelihood(self, requests: Any) -> Any:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: Any) -> Any:
            raise NotImplementedError

    model = Canned()
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    theirs = simple_evaluate(model, tasks=["spelling"], task_manager=manager, bootstrap_iters=0)
    data = load(tasks)
    assert [p.text for p in data.held_out] == model.asked and len(model.asked) == len(WORDS)
    assert data.train == [] and data.held_out[0].stop == ("\n", "back")
    assert [p.answer for p in data.held_out] == [w[::-1] for w in WORDS]
    for name, expected in (("bare", 0.4), ("last-word", 0.6)):
        verifier = build_verifier(
            VerifierConfig("lm_eval", args={"filter": name}), "spelling", prompts_of(tasks)
        )
        assert verifier is not None
        verdicts = [verifier(p, answers[p.metadata["doc"]["word"]]) for p in data.held_out]
        ours = sum(v.score for v in verdicts) / len(verdicts)
        assert ours == theirs["results"]["spelling"][f"exact_match,{name}"] == expected
        assert [v.correct for v in verdicts] == [v.score == 1.0 for v in verdicts]


@needs_harness
def test_number_of_examples_and_chat(tasks: Path) -> None:
    from transformers import AutoTokenizer

    assert load(tasks).held_out[0].text.count("back ") == 3
    assert load(tasks, fewshot=0).held_out[0].text == "back abcd:"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/models/base")
    tokenizer.chat_template = (
        "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}<assistant>"
    )
    cfg = EvaluationSetConfig(prompts_of(tasks, chat=True, fewshot=1), VerifierConfig("lm_eval"))
    first = load_set("evaluation.general.s", "s", cfg, tokenizer).held_out[0]
    roles = [message["role"] for message in first.metadata["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert first.text.endswith("<user>back abcd:<assistant>")


CHOICES = """
task: choosing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/test.jsonl, shots: {folder}/shots.jsonl}}}}
test_split: test
fewshot_split: shots
output_type: multiple_choice
doc_to_text: "back {{{{word}}}}:"
doc_to_choice: "{{{{[word, reversed, 'no such word']}}}}"
doc_to_target: 1
num_fewshot: 1
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


@needs_harness
def test_choices_are_weighed_and_scored_as_by_the_harness(tasks: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM, TemplateLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    (tasks / "choosing.yaml").write_text(CHOICES.format(folder=tasks))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/models/base")

    def likelihood(ids: Sequence[int]) -> float:
        return -(sum(k * i for k, i in enumerate(ids, 1)) % 97) / 7

    class Weighing(LM):
        backend = "causal"
        pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

        def tok_encode(self, text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        def loglikelihood(self, requests: Any) -> Any:
            for request in requests:
                first, then = TemplateLM._encode_pair(self, *request.args)  # type: ignore[arg-type]
                self.pairs.append((tuple(first), tuple(then)))
            return [(likelihood(a + b), False) for a, b in self.pairs]

        def loglikelihood_rolling(self, requests: Any) -> Any:
            raise NotImplementedError

        def generate_until(self, requests: Any) -> Any:
            raise NotImplementedError

    model = Weighing()
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    theirs = simple_evaluate(model, tasks=["choosing"], task_manager=manager, bootstrap_iters=0)
    prompts = prompts_of(tasks, "choosing")
    cfg = EvaluationSetConfig(prompts, VerifierConfig("lm_eval", args={"metric": "acc"}))
    items = load_set("evaluation.general.c", "c", cfg, tokenizer).held_out
    assert [pair for item in items for pair in item.choices] == model.pairs
    assert len(items[0].choices) == 3 and items[0].answer is None and items[0].stop == ()
    assert len(items[0].token_ids) == max(len(a + b) for a, b in items[0].choices)
    said = [json.dumps([likelihood(a + b) for a, b in item.choices]) for item in items]
    shares = {}
    for metric in ("acc", "acc_norm"):
        verifier = build_verifier(VerifierConfig("lm_eval", args={"metric": metric}), "c", prompts)
        assert verifier is not None
        verdicts = [verifier(item, each) for item, each in zip(items, said, strict=True)]
        shares[metric] = sum(v.score for v in verdicts) / len(verdicts)
        assert shares[metric] == theirs["results"]["choosing"][f"{metric},none"]
    assert 0 < shares["acc"] < 1
    with pytest.raises(VerifierError, match="2 likelihoods of 3 choices"):
        verifier(items[0], "[0.0, 1.0]")
    with pytest.raises(ConfigError, match="put it under evaluation.general"):
        load_set("evaluation.benchmarks.c", "c", cfg, tokenizer)


@needs_harness
@pytest.mark.parametrize(
    ("kind", "more", "part"),
    [
        ("loglikelihood", "", "of the kind loglikelihood"),
        ("generate_until", "repeats: 4", "wants 4 sampled answers"),
        ("generate_until", "unsafe_code: true", "runs code that models write"),
    ],
)
def test_kinds_that_are_not_asked_are_refused_with_the_reason(
    tasks: Path, kind: str, more: str, part: str
) -> None:
    write_task(tasks, "other", kind, more=more)
    with pytest.raises(ConfigError, match=part):
        load_task(prompts_of(tasks, "other"), f"evaluation.general.{kind}{len(more)}")


@needs_harness
def test_what_is_missing_or_ambiguous_is_named(tasks: Path) -> None:
    where = "evaluation.general.spelling"
    with pytest.raises(ConfigError, match="no task of the harness; did you mean 'spelling'"):
        load_task(prompts_of(tasks, "speling"), where)
    with pytest.raises(ConfigError, match="a group of tasks"):
        load_task(prompts_of(tasks, "mmlu"), where)
    with pytest.raises(ConfigError, match="several, name one of bare, last-word"):
        build_verifier(VerifierConfig("lm_eval"), "spelling", prompts_of(tasks))
    with pytest.raises(ConfigError, match="no filter 'bar'; did you mean 'bare'"):
        cfg = VerifierConfig("lm_eval", args={"filter": "bar"})
        build_verifier(cfg, "spelling", prompts_of(tasks))
    # A folder is read once in a process: these two lie in one of their own.
    tasks = tasks / "more"
    tasks.mkdir()
    for name in ("test", "shots"):
        (tasks / f"{name}.jsonl").write_text((tasks.parent / f"{name}.jsonl").read_text())
    write_task(tasks, "middle", aggregation="median")
    write_task(tasks, "gone")
    file = tasks / "gone.yaml"
    file.write_text(file.read_text().replace("test.jsonl", "nowhere.jsonl"))
    with pytest.raises(ConfigError, match="not a mean over items"):
        cfg = VerifierConfig("lm_eval", args={"filter": "bare"})
        build_verifier(cfg, "middle", prompts_of(tasks, "middle"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_task(prompts_of(tasks, "gone"), where)


@needs_harness
def test_a_task_whose_code_fails_has_not_judged(tasks: Path) -> None:
    cfg = VerifierConfig("lm_eval", args={"filter": "bare"})
    verifier = build_verifier(cfg, "spelling", prompts_of(tasks))
    assert verifier is not None
    broken = replace(load(tasks).held_out[0], metadata={"doc": {"word": "abcd"}})
    with pytest.raises(VerifierError, match="cannot judge prompt spelling/00000"):
        verifier(broken, "dcba")


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"evaluation\.general\.g.*mopd\[lm-eval\]"):
        load_task(PromptsConfig(lm_eval="gsm8k"), "evaluation.general.g")


# --- what the rest of the evaluation makes of such prompts ---


def asked(text: str, stop: Sequence[str] = ("\n",), **metadata: Any) -> Prompt:
    return Prompt("set/1", "set", text, (1, 2), "4", metadata, stop=tuple(stop))


def test_an_answer_ends_at_the_first_stop_text() -> None:
    prompt = asked("2+2=", ("\n\n", "Q:"))
    assert prompt.ended("4 Q: 5\n\n") == ("4 ", True)
    assert prompt.ended("4") == ("4", False)
    assert asked("2+2=", ()).ended("a\n") == ("a\n", False)
    rollout = Rollout("s:1", prompt, (5, 6, 7), (0.0, 0.0, 0.0), 0, "length")
    cut = item_result(prompt, rollout, Verdict(True, 1.0), "4Q: and on")
    assert (cut.finish_reason, cut.response, cut.format_error) == ("stop", "4", False)
    assert cut.response_tokens == 3
    whole = item_result(prompt, rollout, Verdict(False, 0.0), "4 and on")
    assert (whole.finish_reason, whole.format_error) == ("length", True)


def test_stop_texts_are_part_of_what_an_answer_depends_on() -> None:
    with_stop, without = asked("2+2="), asked("2+2=", ())
    assert set_fingerprint([with_stop], None) != set_fingerprint([without], None)


def test_a_question_behind_examples_is_still_found_in_the_training_prompts() -> None:
    item = asked("1+1=2\n\n2+2=", lm_eval={"task": "sums"}, question="2+2=")
    trained = Prompt("math/1", "math", "2+2=", (1,), "4")
    (leak,) = find_leaks({"math": [trained]}, {"set": [item]})
    assert leak.exact and leak.trained is trained
    of_a_file = asked("1+1=2\n\n2+2=", question="2+2=")  # a row's own key of that name
    assert find_leaks({"math": [trained]}, {"set": [of_a_file]}) == []


# --- texts whose likelihoods are compared ---


def choosing(name: str = "c/1") -> Prompt:
    pairs = (((1, 2), (3,)), ((1, 2), (4, 5)))
    return Prompt(name, "c", "q", (1, 2, 4, 5), metadata={"doc": {}}, choices=pairs)


def test_a_choice_is_encoded_with_its_context() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "demo/models/base")
    encoder = PromptEncoder(tokenizer, chat=False)
    first, then = encoder.encode_pair("back cat: ", "tac")
    assert tokenizer.decode(first) == "back cat:" and tokenizer.decode(then) == " tac"
    with pytest.raises(DataError, match="'' after 'back cat:' has no tokens"):
        encoder.encode_pair("back cat:", "")


def test_choices_are_weighed_by_sums_and_never_sampled() -> None:
    class Engine:
        async def logprobs(self, sequences: Any) -> list[list[float]]:
            return [[-float(i) for i in then] for _, then in sequences]

    answers = asyncio.run(weighed(Engine(), [("a", choosing()), ("b", choosing())]))  # type: ignore[arg-type]
    assert [(a.key, json.loads(a.text), a.ids) for a in answers] == [
        ("a", [-3.0, -9.0], None),
        ("b", [-3.0, -9.0], None),
    ]
    sets = {"c": [choosing()], "s": [asked("2+2=")]}
    assert set(Sampling("greedy", 0.0, 1, {}).wanted(sets)) == {"c/1#0", "set/1#0"}
    assert set(Sampling("sampled", 1.0, 2, {}).wanted(sets)) == {"set/1#0", "set/1#1"}
    assert set_fingerprint([choosing()], None) != set_fingerprint(
        [replace(choosing(), choices=())], None
    )
