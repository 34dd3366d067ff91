"""Which models an evaluation has, on the demo's checkpoints; nothing is started."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mopd.build import Prepared, prepare
from mopd.config.load import load_config
from mopd.errors import ConfigError, DataError, ModelError, TeacherError
from mopd.evaluating.answers import Answering
from mopd.evaluating.command import further_models, result_folder, student_place
from mopd.evaluating.models import models_under_test
from mopd.evaluating.run import _Evaluation
from mopd.evaluating.sources import open_source
from mopd.evaluating.training_end import conclude_training
from mopd.evaluating.work import samplings
from mopd.evaluation.items import ItemResult, item_result
from mopd.observe.progress import Progress
from mopd.protocols import TeacherFailed
from mopd.types import Prompt, Rollout, TeacherScore, Verdict

ROOT = Path(__file__).resolve().parents[3]
WORDS = ("marble", "window", "rocket", "butter", "candle", "pencil")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    rows = [{"prompt": f"back {w}:", "answer": w[::-1]} for w in WORDS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "general.jsonl").write_text(json.dumps({"prompt": "x:", "answer": "y"}) + "\n")
    models = "".join(f"  {t}: {{model: demo/models/teacher_{t}}}\n" for t in ("backward", "rotate"))
    (folder / "run.yaml").write_text(
        f"""
name: small
run_dir: {folder}/runs
student: {{model: demo/models/base}}
rollout: {{max_response_tokens: 8}}
teachers:
{models}
domains:
  backward: {{teacher: backward, prompts: {folder}/rows.jsonl, verifier: exact_match, held_out: 3}}
evaluation:
  general: {{common: {{prompts: {folder}/general.jsonl, verifier: exact_match}}}}
train: {{steps: 1, prompts_per_step: 1, samples_per_prompt: 2}}
"""
    )
    return folder


@pytest.fixture(scope="module")
def prepared(folder: Path) -> Prepared:
    return prepare(load_config([folder / "run.yaml"], ["student.optimizer.warmup_steps=0"]))


def test_base_and_the_used_teachers_answer_every_set(prepared: Prepared) -> None:
    models, warnings = models_under_test(prepared, None, {})
    assert [m.label for m in models] == ["base", "teacher backward"]  # rotate has no domain
    assert all(set(m.sets) == {"backward", "common"} for m in models)
    assert warnings == [] and len({m.fingerprint for m in models}) == 2
    assert prepared.domain_of("common") is None
    assert prepared.domain_sets() == {"backward": ["backward"]}


def test_a_folder_and_a_url_beside_them(prepared: Prepared, folder: Path) -> None:
    copy = folder / "copy"
    shutil.copytree(ROOT / "demo/models/teacher_backward", copy)
    models, _ = models_under_test(prepared, str(copy), {"api": "http://127.0.0.1:9/v1#served"})
    by_label = {m.label: m for m in models}
    assert models[0].label == "student" and by_label["student"].scores
    assert by_label["student"].fingerprint == by_label["teacher backward"].fingerprint
    api = by_label["api"]
    assert not api.scores and api.served == "served" and api.texts is not None
    assert api.texts[prepared.held_out()["backward"][0].id].startswith("back ")


def test_a_teacher_whose_server_is_loading_is_waited_for(folder: Path) -> None:
    away = "{endpoints: [http://127.0.0.1:9], model: m, start_timeout_s: 0.3}"
    overrides = ["student.optimizer.warmup_steps=0", f"teachers.backward={away}"]
    prepared, told = prepare(load_config([folder / "run.yaml"], overrides)), list[str]()
    models, _ = models_under_test(prepared, None, {})
    (teacher,) = (m for m in models if m.label == "teacher backward")

    async def scenario() -> None:
        source = open_source(teacher, prepared, told.append)
        try:
            await source.start()
        finally:
            await source.close()

    with pytest.raises(TeacherError, match=r"http://127.0.0.1:9 was waited for 0.3 s"):
        asyncio.run(scenario())
    (text,) = told
    assert text.startswith("teacher backward: waiting for its server http://127.0.0.1:9 (0 of 0.3")


def test_costs_of_a_damaged_evaluation_are_not_taken_over(tmp_path: Path) -> None:
    evaluation = _Evaluation.__new__(_Evaluation)
    evaluation._out_dir = tmp_path
    router = {"router": None, "models": {}}
    took: dict[str, object] = {"wall_s": 2.5, "answers_asked": 4}
    for cost, found in (
        (took | {"earlier": [took, {"wall_s": 1.0, "answers_asked": 0}]}, [took, took]),
        ({"answers_asked": 4}, []),
        (took | {"earlier": [3]}, []),
    ):
        record = {"table": {}, "router": router, "cost": cost}
        (tmp_path / "evaluation.json").write_text(json.dumps(record))
        assert evaluation._earlier_costs() == found


def test_another_tokenizer_is_told_and_asked_in_its_own_tokens(
    prepared: Prepared, folder: Path
) -> None:
    other = folder / "other_tokens"
    shutil.copytree(ROOT / "demo/models/teacher_rotate", other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    a, b = list(vocab)[65], list(vocab)[66]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(content))
    models, warnings = models_under_test(prepared, str(other), {})
    assert not models[0].scores and "its tokenizer is not the student's" in warnings[0]
    assert "compared by its answers alone" in warnings[0]
    own = {p.id for p in prepared.held_out()["backward"]}
    assert {p.id for p in models[0].sets["backward"]} == own


def test_given_choices_are_for_engines_by_ids_and_never_for_training(prepared: Prepared) -> None:
    common = prepared.sets["common"]
    (item,) = common.held_out
    pairs = ((item.token_ids, (65,)), (item.token_ids, (66,)))
    data = replace(common, held_out=[replace(item, choices=pairs)])
    chosen = replace(prepared, sets={**prepared.sets, "common": data})
    assert set(chosen.held_out()) == {"backward"}  # what a training run's engines answer
    assert set(chosen.evaluated()) == {"backward", "common"}
    others = {"api": "http://localhost:1#m", "copy": str(ROOT / "demo/models/teacher_rotate")}
    models, _ = models_under_test(chosen, None, others)
    asked = {model.label: set(model.sets) for model in models}
    assert asked.pop("api") == {"backward"}
    assert all(sets == {"backward", "common"} for sets in asked.values())


def test_another_chat_template_is_told_where_prompts_are_chats(folder: Path) -> None:
    for name, model, end in (
        ("chatty", "base", "A:"),
        ("chatty_teacher", "teacher_backward", "Reply:"),
    ):
        shutil.copytree(ROOT / "demo/models" / model, folder / name)
        template = "{% for m in messages %}{{ m.content }}{% endfor %}" + end
        (folder / name / "chat_template.jinja").write_text(template)
    overrides = [
        "student.optimizer.warmup_steps=0",
        f"student.model={folder}/chatty",
        f"teachers.backward.model={folder}/chatty_teacher",
    ]
    chats = [*overrides, "domains.backward.prompts.chat=true"]
    _, warnings = models_under_test(prepare(load_config([folder / "run.yaml"], chats)), None, {})
    (told,) = warnings
    assert told.startswith("teacher backward: its chat template is not the student's; on backward")
    plain = prepare(load_config([folder / "run.yaml"], overrides))
    assert models_under_test(plain, None, {})[1] == []


@pytest.mark.parametrize(
    ("student", "others", "error", "said"),
    [
        ("nowhere", {}, ModelError, "student: nowhere does not exist"),
        (None, {"base": "x"}, ConfigError, "'base' is taken"),
        (None, {"teacher backward": "x"}, ConfigError, "is taken"),
    ],
)
def test_what_is_no_model_is_refused(prepared: Prepared, student, others, error, said) -> None:
    with pytest.raises(error, match=said):
        models_under_test(prepared, student, others)


def test_an_evaluation_set_that_is_trained_on_is_refused(folder: Path) -> None:
    overrides = [
        "student.optimizer.warmup_steps=0",
        f"evaluation.general.common.prompts.jsonl={folder}/rows.jsonl",
    ]
    with pytest.raises(DataError, match="3 evaluation items are trained on") as found:
        prepare(load_config([folder / "run.yaml"], overrides))
    assert "rows.jsonl:" in str(found.value)


def test_nothing_held_out_is_refused(folder: Path) -> None:
    overrides = ["student.optimizer.warmup_steps=0", "domains.backward.held_out=0"]
    with pytest.raises(ConfigError, match="nothing could be said of the result"):
        prepare(load_config([folder / "run.yaml"], overrides))


def test_items_bounds_a_set(folder: Path) -> None:
    overrides = ["student.optimizer.warmup_steps=0", "evaluation.general.common.items=5"]
    with pytest.raises(DataError, match="items is 5, but the set has only 1"):
        prepare(load_config([folder / "run.yaml"], overrides))


def test_places_and_names_on_the_command_line(prepared: Prepared, tmp_path: Path) -> None:
    config = prepared.config
    assert student_place(config, None) is None and student_place(config, "none") is None
    with pytest.raises(ConfigError, match="kept no best student"):
        student_place(config, "best")
    run_dir = Path(config.run_dir) / config.name
    assert result_folder(config, None) == run_dir.with_name("small.evaluation")
    (run_dir / "student").mkdir(parents=True)
    (run_dir / "config.yaml").write_text("")
    assert student_place(config, None) == str(run_dir / "student")
    assert result_folder(config, None) == run_dir and result_folder(config, tmp_path) == tmp_path
    with pytest.raises(ConfigError, match="cannot be made a folder"):
        result_folder(config, run_dir / "config.yaml")
    assert further_models(["a=x", "b=http://h#m"]) == {"a": "x", "b": "http://h#m"}
    for wrong in (["a"], ["=x"], ["a=x", "a=y"]):
        with pytest.raises(ConfigError, match="expected NAME=PLACE"):
            further_models(wrong)


class FakeStudent:
    """Gives the reference answer; asked again for one item it answers otherwise."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self.otherwise = ""
        self.temperatures: list[float] = []

    def answer(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(prompt.answer, add_special_tokens=False))

    async def generate(self, requests, *, temperature):
        self.temperatures.append(temperature)
        for key, prompt in requests:
            ids = self.answer(prompt)
            if temperature == 0 and prompt.id == self.otherwise:
                ids = ids[::-1]
            yield [Rollout(key, prompt, ids, (-0.5,) * len(ids), 3, "stop")]


class FakeTeachers:
    """Finds every token likelier by .2 nats, and cannot score one sampled answer."""

    async def score(self, rollouts, *, teacher):
        assert teacher == "backward"
        found: dict = {r.sample_id: TeacherScore((-0.3,) * len(r.response_ids)) for r in rollouts}
        first = min(found)
        if first.startswith("final:1:"):
            found[first] = TeacherFailed("timeout")
        return found


def test_a_finished_run_leaves_what_an_evaluation_leaves(prepared: Prepared, tmp_path) -> None:
    student = FakeStudent(prepared.tokenizer)
    prompts = prepared.held_out()
    student.otherwise = prompts["backward"][0].id

    def answers(right: bool, sets: list[str]) -> dict[str, list[ItemResult]]:
        return {
            s: [
                item_result(
                    p,
                    Rollout(p.id, p, student.answer(p), (), 0, "stop"),
                    Verdict(right, float(right)),
                    p.answer,
                )
                for p in prompts[s]
            ]
            for s in sets
        }

    retention = asyncio.run(
        conclude_training(
            prepared,
            tmp_path,
            base=answers(False, ["backward", "common"]),
            teacher=answers(True, ["backward"]),
            student=answers(True, ["backward", "common"]),
            rollouts=student,
            teachers=FakeTeachers(),
        )
    )
    assert retention["domains"]["backward"]["headroom_captured"] == 1.0
    assert retention["forgetting"]["common"]["forgetting"] == 1.0
    record = json.loads((tmp_path / "evaluation.json").read_text())
    kl = record["divergence"]["backward"]
    assert kl["answers"] == 2 and kl["k1"] == pytest.approx(-0.2)  # one was not scored
    assert record["router"]["router"] == 1.0
    samples = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    coloured = {s["id"] for s in samples if s["teacher_minus_student"]}
    own = {p.id for p in prompts["backward"]}
    assert coloured == own - {student.otherwise}  # its tokens are not those on record
    assert all(d == pytest.approx(0.2) for s in samples for d in s["teacher_minus_student"])
    assert student.temperatures == [1.0, 0.0]


def test_a_student_by_url_is_not_compared_token_by_token(prepared: Prepared) -> None:
    models, _ = models_under_test(prepared, "http://127.0.0.1:9", {})
    answering = Answering(prepared, Progress(1, []), models, samplings(prepared.config))
    student = answering.student()
    assert student is not None and set(student.files) == {"greedy"}
    # Sets of three items and of one, asked of student, base and teacher.
    assert answering.asked == 3 * 4
