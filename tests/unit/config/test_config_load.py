"""Reading YAML and overrides: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.config import Config, load_config, save_config
from mopd.config._yaml import dump_yaml, parse_yaml
from mopd.config.schema import PromptsConfig, VerifierConfig
from mopd.errors import ConfigError

Load = Callable[..., Config]


def refusal(text: str, *more: str, overrides: tuple[str, ...] = ()) -> str:
    """The error of loading this text (and further ones, each in its own file)."""
    files = []
    for index, each in enumerate((text, *more)):
        files.append(Path(f"file{index}.yaml"))
        files[-1].write_text(each)
    with pytest.raises(ConfigError) as error:
        load_config(files, overrides)
    return str(error.value)


def test_good_configuration_is_dataclasses_all_the_way_down(loaded: Load) -> None:
    config = loaded()
    assert isinstance(config, Config)
    assert config.student.optimizer.lr == 1e-3
    assert config.teachers["code_rl"].endpoints == ["http://10.0.0.7:8000"]
    assert config.domains["math"].prompts == PromptsConfig(jsonl="math.jsonl")
    assert config.domains["math"].verifier == VerifierConfig(name="exact_match")
    assert config.domains["code"].prompts.params == {"max_word_len": 6}
    assert config.domains["code"].verifier is None


def test_a_domain_is_added_by_a_second_file_alone(loaded: Load) -> None:
    Path("more.yaml").write_text(
        "teachers: {sql_rl: {model: teacher}}\n"
        "domains: {sql: {teacher: sql_rl, prompts: sql.jsonl, verifier: {target: 'a.b:c'}}}\n"
    )
    config = load_config(["good.yaml", "more.yaml"])
    assert list(config.domains) == ["math", "code", "sql"]
    assert config.domains["sql"].verifier == VerifierConfig(target="a.b:c")
    before = loaded()
    assert config.domains["math"] == before.domains["math"]
    assert config.teachers["math_rl"] == before.teachers["math_rl"]


def test_later_files_and_overrides_win(loaded: Load) -> None:
    Path("more.yaml").write_text("train: {steps: 30}\n")
    config = load_config(["good.yaml", "more.yaml"], ["train.prompts_per_step=9"])
    assert (config.train.steps, config.train.prompts_per_step) == (30, 9)
    assert load_config(["good.yaml", "more.yaml"], ["train.steps=40"]).train.steps == 40


def test_a_shorthand_replaces_what_an_earlier_file_said(loaded: Load) -> None:
    config = loaded("domains.code.prompts=code.jsonl", "domains.code.verifier=math_verify")
    assert config.domains["code"].prompts == PromptsConfig(jsonl="code.jsonl")
    assert config.domains["code"].verifier == VerifierConfig(name="math_verify")


@pytest.mark.parametrize("spelled", ["1e-6", "1.0e-6", "1E-6", "0.000001", ".1e-5", "10e-7"])
def test_a_small_number_is_a_number_however_it_is_spelled(loaded: Load, spelled: str) -> None:
    """YAML 1.1 readers take an unquoted 1e-6 for text."""
    assert loaded(f"student.optimizer.lr={spelled}").student.optimizer.lr == 1e-6
    text = Path("good.yaml").read_text().replace("1e-3", spelled)
    Path("spelled.yaml").write_text(text)
    assert load_config(["spelled.yaml"]).student.optimizer.lr == 1e-6


def test_a_number_in_quotes_is_refused_with_the_cure(place: Path) -> None:
    text = Path("good.yaml").read_text().replace("1e-3", '"1e-6"')
    message = refusal(text)
    assert "file0.yaml:4: student.optimizer.lr" in message
    assert "'1e-6'" in message and "write 1.0e-06 without quotes" in message
    overridden = refusal(Path("good.yaml").read_text(), overrides=("student.optimizer.lr='1e-6'",))
    assert "student.optimizer.lr" in overridden and "without quotes" in overridden


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps=true", "expected a whole number, got the boolean true"),
        ("train.steps=2.5", "expected a whole number, got the number 2.5"),
        ("train.steps=1e2", "write 100"),
        ("train.steps=010", "write 10 without quotes"),
        ("train.steps=1:30", "expected a whole number, got the text '1:30'"),
        ("train.steps=", "got nothing (null)"),
        ("student.optimizer.lr=true", "expected a number, got the boolean true"),
        ("student.optimizer.lr=fast", "expected a number, got the text 'fast'"),
        ("resume=yes", "write true"),
        ("resume=1", "expected true or false, got the number 1"),
        ("domains.math.teacher=null", "got nothing (null)"),
        ("domains.math=null", "domains.math: expected a mapping of keys, got nothing"),
        ("teachers.math_rl=base", "such as {model: PATH}"),
        ("domains.code.prompts.params=3", "expected a mapping of keys, got the number 3"),
        ("teachers.code_rl.endpoints=[1]", "teachers.code_rl.endpoints.0: expected text"),
        ("student=base", "student: expected a mapping of keys, got the text 'base'"),
    ],
)
def test_wrong_types_are_refused(place: Path, override: str, says: str) -> None:
    message = refusal(Path("good.yaml").read_text(), overrides=(override,))
    assert says in message and override.partition("=")[0] in message


def test_whole_numbers_stand_for_decimals(loaded: Load) -> None:
    lr = loaded("student.optimizer.lr=1").student.optimizer.lr
    assert lr == 1.0 and type(lr) is float


def test_an_override_of_text_is_taken_as_it_stands(loaded: Load) -> None:
    config = loaded(
        "name=123", "teachers.math_rl.revision=0e5", "domains.code.prompts.template=a=b"
    )
    assert config.name == "123"
    assert config.teachers["math_rl"].revision == "0e5"
    assert config.domains["code"].prompts.template == "a=b"
    assert loaded("domains.math.verifier=null").domains["math"].verifier is None


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("back {word}:", "back {word}:"),
        ("{question}", "{question}"),
        ("a: b # c", "a: b # c"),
        ("[x, y]", "[x, y]"),
        ("true", "true"),
        ("'back {word}:\\n'", "back {word}:\\n"),
        ('"back {word}:\\n"', "back {word}:\n"),  # YAML's escapes, for those who want them
        ('"x" and "y"', '"x" and "y"'),
        ("", ""),
    ],
)
def test_text_with_yaml_in_it_stays_text(loaded: Load, raw: str, text: str) -> None:
    config = loaded(f"domains.code.prompts.template={raw}", "domains.code.prompts.jsonl=null")
    assert config.domains["code"].prompts.template == text
    assert config.domains["code"].prompts.jsonl is None


def test_a_free_key_takes_yaml_and_says_how_to_quote_what_is_none(loaded: Load) -> None:
    key = "domains.code.prompts.params.x"
    for raw, value in [("back {word}:", "back {word}:"), ("{a: 1}", {"a": 1}), ("2", 2)]:
        assert loaded(f"{key}={raw}").domains["code"].prompts.params["x"] == value
    message = refusal("name: x", overrides=(f"{key}=a: b: c",))
    assert "not valid YAML" in message and "domains.code.prompts.params.x='\"" in message


@pytest.mark.parametrize("key", ["train.steps", "resume", "domains.code.prompts.template"])
def test_a_key_without_equals_is_no_missing_file(place: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{key}' is no file but a .* write {key}=VALUE"):
        load_config(["good.yaml", key, "20"])
    with pytest.raises(ConfigError, match="no such file"):
        load_config(["train.yaml"])


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ("studnet: {}", "studnet", "'student'"),
        ("student: {optimiser: {}}", "student.optimiser", "'student.optimizer'"),
        ("teachers: {a: {modle: x}}", "teachers.a.modle", "'teachers.a.model'"),
        ("domains: {d: {verfier: x}}", "domains.d.verfier", "'domains.d.verifier'"),
        ("domains: {d: {prompts: {json: x}}}", "domains.d.prompts.json", "prompts.jsonl'"),
    ],
)
def test_unknown_keys_are_named_in_full_with_the_nearest(
    place: Path, text: str, key: str, near: str
) -> None:
    message = refusal("\n" + text)
    assert f"file0.yaml:2: unknown key {key!r}; did you mean" in message and near in message
    dotted = refusal("name: x", overrides=(f"{key}=1",))
    assert f"unknown key {key!r}" in dotted


def test_all_problems_of_all_files_are_told_at_once(place: Path) -> None:
    message = refusal(
        "name: 5\nfoo: 1\n", "train: {steps: x}\n", overrides=("seed=z", "resume=2", "bar=1")
    )
    for part in [
        "file0.yaml:1: name",
        "file0.yaml:2",
        "file1.yaml:1",
        "seed=z",
        "resume=2",
        "'bar'",
    ]:
        assert part in message
    assert "6 problems" in message


def test_missing_values_are_listed_all_at_once(place: Path) -> None:
    message = refusal("name: x\nteachers: {a: {model: m}}\ndomains: {d: {prompts: p.jsonl}}\n")
    for key in [
        "student.model",
        "rollout.max_response_tokens",
        "domains.d.teacher",
        "train.steps",
        "train.prompts_per_step",
    ]:
        assert f"- {key}" in message
    assert "name" not in message.replace("file0.yaml", "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- 1\n", "got a list"),
        ("just words\n", "got the text 'just words'"),
        ("name: x\ntrain: [\n", "file0.yaml:3:1: not valid YAML"),
        ("name: x\n\ttrain: 1\n", "file0.yaml:2:1: not valid YAML"),
        ("name: a: b\n", "file0.yaml:1:8: not valid YAML"),
        ("name: x\nseed: 1\nname: y\n", "file0.yaml:3: the key 'name' is given twice (first on "),
        ("domains:\n  m: {teacher: a}\n  m: {teacher: b}\n", "file0.yaml:3: the key 'domains.m'"),
        ("1: x\n", "file0.yaml:1: the key '1' under the top level is not text"),
        ("teachers: &a {t: *a}\n", "contains itself"),
        ("name: !!python/object/apply:os.getcwd []\n", "file0.yaml:1:7: not valid YAML"),
        ("name: x\n---\nname: y\n", "file0.yaml:2:1: not valid YAML"),
    ],
)
def test_broken_files_name_their_place(place: Path, text: str, says: str) -> None:
    assert says in refusal(text)


def test_files_that_are_not_there_or_not_files(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"nix\.yaml: no such file .working directory"):
        load_config(["nix.yaml"])
    with pytest.raises(ConfigError, match="base is a folder"):
        load_config(["base"])
    Path("latin.yaml").write_bytes("name: é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8"):
        load_config(["latin.yaml"])
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config([])


@pytest.mark.parametrize("override", ["train.steps", "=1", "a..b=1", ".=1", " seed=1"])
def test_overrides_that_are_none(place: Path, override: str) -> None:
    assert "expected key=value" in refusal("name: x", overrides=(override,))


def test_interpolation(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        loaded("student.optimizer.min_lr=${student.optimizer.lr}").student.optimizer.min_lr == 1e-3
    )
    with pytest.raises(ConfigError, match="student.optimizer.lr.*nix"):
        loaded("student.optimizer.lr=${nix}")
    with pytest.raises(ConfigError, match="train.steps"):
        loaded("train.steps=${name}")


def test_yaml_aliases_stay_apart_when_one_is_overridden(place: Path) -> None:
    Path("two.yaml").write_text(
        "domains:\n  a: {teacher: math_rl, prompts: {task: t, params: {deep: &p {x: 1}}}}\n"
        "  b: {teacher: math_rl, prompts: {task: t, params: {deep: *p}}}\n"
    )
    config = load_config(["good.yaml", "two.yaml"], ["domains.a.prompts.params.deep.x=2"])
    assert config.domains["a"].prompts.params == {"deep": {"x": 2}}
    assert config.domains["b"].prompts.params == {"deep": {"x": 1}}


def test_saved_configuration_loads_to_an_equal_one(loaded: Load) -> None:
    config = loaded(
        "student.optimizer.lr=1e-6",
        "name=0123",
        "teachers.math_rl.engine_args={enforce_eager: true, x: [1, 2.5, 'no', '1e-6', null]}",
        "domains.code.prompts.template='\\${x}: {question}\\n'",
    )
    config.domains["code"].prompts.template = "${x} \\${y} \\\\${z}: {question}\n"
    save_config(config, Path("runs/try/config.yaml"))
    again = load_config(["runs/try/config.yaml"])
    assert again == config
    saved = yaml.safe_load(Path("runs/try/config.yaml").read_text())
    for field in dataclasses.fields(Config):  # every key is there, defaults too
        assert field.name in saved
    assert saved["student"]["optimizer"]["lr"] == 1e-6  # other readers see a number as well


TEXTS = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"])),
    st.sampled_from(
        ["1e-6", "no", "0x1F", "1_0", "null", "~", "1:30", "${a}", "\\${a}", "\\\\${", "="]
    ),
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_any_yaml_value_survives_writing(value: object) -> None:
    assert parse_yaml(dump_yaml({"x": value}), "here")[0] == {"x": value}


@given(text=TEXTS, number=st.floats(min_value=1e-300, max_value=1e300))
@settings(max_examples=100, deadline=None)
def test_any_text_and_number_survives_a_saved_run(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: float
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    config = Config(name=text)
    config.student.model, config.student.optimizer.lr = "m", number
    config.train.steps = config.train.prompts_per_step = config.rollout.max_response_tokens = 1
    save_config(config, folder / "c.yaml")
    assert load_config([folder / "c.yaml"]) == config


def test_configuration_imports_nothing_heavy() -> None:
    code = (
        "import sys, mopd.config\n"
        "bad = {'torch', 'vllm', 'ray', 'transformers', 'megatron', 'triton', 'reasoning_gym'}\n"
        "sys.exit(', '.join(sorted(bad & set(sys.modules))) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
