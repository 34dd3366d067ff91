"""Prompt files and tasks: what each fault says, the split, and the ids (C05, C11, C14)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from mopd.config.schema import DomainConfig, PromptsConfig, VerifierConfig
from mopd.data.prompts import ContextLimit, DomainData, check_lengths, load_domain
from mopd.errors import ConfigError, DataError

TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(*, adds: str = "", template: str | None = None) -> PreTrainedTokenizerFast:
    """259 ids: pad, bos, eos, then the bytes; `adds` is what it puts round every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    core = Tokenizer(models.BPE(vocab, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if adds:
        core.post_processor = processors.TemplateProcessing(
            single=adds, special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


Write = Callable[..., DomainConfig]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Rows (dicts, or raw lines) to p.jsonl, and the domain's configuration."""
    monkeypatch.chdir(tmp_path)

    def to_file(rows: Sequence[object], *, file: str = "p.jsonl", **fields: Any) -> DomainConfig:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        Path(file).write_bytes(b"\n".join(lines) + b"\n")
        own = ("chat", "held_out_jsonl", "difficulty")
        prompts = {key: fields.pop(key) for key in own if key in fields}
        fields = {"held_out": 1} | fields
        return DomainConfig(teacher="t", prompts=PromptsConfig(jsonl=file, **prompts), **fields)

    return to_file


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(start, start + count)]


def fault(cfg: DomainConfig, tokenizer: Any, kind: type = DataError, **more: Any) -> str:
    with pytest.raises(kind) as error:
        load_domain("math", cfg, tokenizer, **more)
    return str(error.value)


def test_a_file_of_prompts(write: Write, plain: Any) -> None:
    given = rows(20)
    given[3] |= {"domain": "math", "level": 2}
    data = load_domain("math", write(given, held_out=5), plain)
    assert (len(data.train), len(data.held_out)) == (15, 5)
    every = {prompt.id: prompt for prompt in (*data.train, *data.held_out)}
    assert len(every) == 20
    one = every["math/00004"]
    assert (one.text, one.answer, dict(one.metadata)) == ("3+3=", "6", {"level": 2})
    assert plain.decode(list(one.token_ids)) == "3+3=" and len(one.token_ids) == 4
    assert data.places["math/00004"] == "p.jsonl:4"
    assert data.majority_baseline == 0.2
    assert data.describe() == "15 prompts to train on, 5 held out, majority baseline 0.200"


def test_the_split_is_by_content(write: Write, plain: Any) -> None:
    """Neither the order of the rows nor repeats move a prompt across."""
    first = load_domain("math", write(rows(50), held_out=10), plain)
    shuffled = rows(50) + rows(7)
    random.Random(0).shuffle(shuffled)
    again = load_domain("math", write(shuffled, held_out=10), plain)
    assert {p.text for p in first.held_out} == {p.text for p in again.held_out}
    assert {p.text for p in first.train} == {p.text for p in again.train}
    assert not {p.text for p in again.train} & {p.text for p in again.held_out}
    assert again.notes == ("p.jsonl: 7 rows repeat an earlier prompt and were dropped",)
    grown = load_domain("math", write(rows(60), held_out=10), plain)
    kept = {p.text for p in first.train} & {p.text for p in grown.held_out}
    assert not kept  # only new prompts may push old ones out of the held-out part


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "answer": "1", "domain": "mtah"}, 'domain is "mtah", but this file'),
        ({"prompt": "a", "answer": "1", "domain": "mtah"}, "did you mean 'math'?"),
        ({"prompt": "a", "answer": "1", "domain": "Math "}, 'domain is "Math "'),
        ({"prompt": "a", "answer": "1", "domain": "Math "}, "did you mean 'math'?"),
        ({"prompt": "a", "answer": "1", "domain": None}, "domain is null"),
        ({"prompt": "a", "answer": "1", "domain": "code"}, 'domain is "code"'),
        ({"prompt": "a", "answer": "1", "domain": ["math"]}, 'domain is ["math"]'),
        ({"promt": "a", "answer": "1"}, "got neither (its keys: promt, answer)"),
        ({"prompt": "a", "messages": [], "answer": "1"}, "got both"),
        ({"prompt": "", "answer": "1"}, "prompt should be text, got the text ''"),
        ({"prompt": " \n", "answer": "1"}, "prompt should be text"),
        ({"prompt": 5, "answer": "1"}, "prompt should be text, got the number 5"),
        ({"prompt": None, "answer": "1"}, "prompt should be text, got nothing"),
        ({"prompt": "a", "answer": 1}, "answer should be text in quotes, got the number 1"),
        ({"prompt": "a"}, "no answer, which the verifier exact_match compares with"),
        ({"prompt": "a", "answer": None}, "no answer"),
        ({"messages": [{"role": "user", "content": "a"}], "answer": "1"}, "prompts.chat: true"),
        ({"prompt": "0+0=", "answer": "1"}, "the same prompt as row 1 with another answer"),
        ([], "expected a JSON object, got a list"),
        (b'{"prompt": "a", "answer"', "not valid JSON"),
        (b'{"prompt": "a", "answer": "1", "x": NaN}', "NaN is not JSON"),
        (b'{"prompt": "a", "prompt": "b", "answer": "1"}', "'prompt' is given twice"),
        (b'{"prompt": "\xff", "answer": "1"}', "not UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_bad_row_is_named(write: Write, plain: Any, row: object, says: str) -> None:
    cfg = write([*rows(3), row, *rows(3, 5)], verifier=VerifierConfig(name="exact_match"))
    message = fault(cfg, plain, known_domains=["math", "code"])
    assert message.startswith("domain 'math': p.jsonl:4: ") and says in message


def test_all_faults_of_a_file_are_told_up_to_twenty(write: Write, plain: Any) -> None:
    message = fault(write([{"prompt": 1}, b"{", {"prompt": "a", "domain": "x"}]), plain)
    assert "3 problems" in message
    assert all(f"p.jsonl:{n}: " in message for n in (1, 2, 3))
    many = fault(write([{"prompt": 1}] * 50), plain)
    assert "p.jsonl:20: " in many and "p.jsonl:21" not in many and "and 30 more" in many


def test_blank_lines_a_byte_order_mark_and_odd_separators_are_no_faults(
    write: Write, plain: Any
) -> None:
    text = '{"prompt": "a\u2028b", "answer": "1"}'.encode()
    cfg = write([b"\xef\xbb\xbf" + text, b"", b'{"prompt": "c"}\r', b"  "])
    data = load_domain("math", cfg, plain)
    every = {prompt.id: prompt.text for prompt in (*data.train, *data.held_out)}
    assert every == {"math/00001": "a\u2028b", "math/00003": "c"}


@pytest.mark.parametrize("content", [[], [b""], [b"  ", b""]])
def test_a_domain_without_prompts(write: Write, plain: Any, content: list[bytes]) -> None:
    assert fault(write(content), plain) == "domain 'math': p.jsonl: no prompts in it"


def test_other_ways_to_have_nothing(write: Write, plain: Any, tmp_path: Path) -> None:
    assert "nix.jsonl: cannot be read" in fault(
        DomainConfig(teacher="t", prompts=PromptsConfig(jsonl="nix.jsonl")), plain
    )
    assert "needs jsonl" in fault(DomainConfig(teacher="t"), plain, ConfigError)
    message = fault(write(rows(5), held_out=5), plain)
    assert message.startswith("domains.math: held_out is 5") and "only 5 different" in message


def test_held_out_file_and_its_leaks(write: Write, plain: Any) -> None:
    write(rows(6, 100), file="h.jsonl")
    cfg = write(rows(10), held_out_jsonl="h.jsonl", held_out=200)
    data = load_domain("math", cfg, plain)
    assert (len(data.train), len(data.held_out)) == (10, 6)
    assert len({p.id for p in (*data.train, *data.held_out)}) == 16
    assert data.places[data.held_out[0].id] == "h.jsonl:1"
    cfg.held_out = 4
    fewer = load_domain("math", cfg, plain)
    assert len(fewer.held_out) == 4 and len(fewer.train) == 10
    assert fewer.notes == ("h.jsonl: 4 of 6 rows used (held_out)",)
    write([*rows(2, 100), *rows(1, 7)], file="h.jsonl")
    message = fault(cfg, plain)
    assert "h.jsonl:3: this held-out prompt is also trained on (p.jsonl:8)" in message


def test_difficulties_of_rows(write: Write, plain: Any) -> None:
    given = [row | {"level": n / 2, "name": "x"} for n, row in enumerate(rows(6))]
    data = load_domain("math", write(given, held_out=2, difficulty="level"), plain)
    found = {p.id: p.difficulty for p in (*data.train, *data.held_out)}
    assert found == {f"math/{n + 1:05d}": n / 2 for n in range(6)}
    plain_data = load_domain("math", write(given, held_out=2), plain)
    assert all(p.difficulty is None for p in plain_data.train)
    message = fault(write(given, difficulty="levle"), plain)
    assert "p.jsonl:1: no 'levle' to take the difficulty from; did you mean 'level'?" in message
    write(rows(2, 100), file="h.jsonl")  # held out: never drawn, needs none
    cfg = write(given, held_out_jsonl="h.jsonl", held_out=2, difficulty="level")
    assert [p.difficulty for p in load_domain("math", cfg, plain).held_out] == [None, None]


@pytest.mark.parametrize("value", ["3", True, None, [1], b"1e999", b"1" + b"0" * 400])
def test_a_difficulty_that_is_no_finite_number_is_named(
    write: Write, plain: Any, value: object
) -> None:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    row = b'{"prompt": "a", "level": ' + text + b"}"
    good = [each | {"level": 1} for each in rows(3)]
    message = fault(write([*good, row], difficulty="level"), plain)
    assert message.startswith("domain 'math': p.jsonl:4: level should be a finite number (the diff")


def test_difficulties_of_a_task(plain: Any) -> None:
    prompts = PromptsConfig(task="rotate_matrix", size=20, difficulty="num_rotations")
    data = load_domain("turn", DomainConfig(teacher="t", prompts=prompts, held_out=4), plain)
    every = (*data.train, *data.held_out)
    assert {p.difficulty for p in every} == {
        float(p.metadata["metadata"]["num_rotations"]) for p in every
    }
    prompts.difficulty = "matrix"  # a list
    with pytest.raises(DataError, match="'matrix' .20 problems.(.|\n)*task rotate_matrix item 0 "):
        load_domain("turn", DomainConfig(teacher="t", prompts=prompts, held_out=4), plain)
    prompts.difficulty = "rotations"
    with pytest.raises(DataError, match="no 'rotations' to take.*did you mean 'num_rotations'"):
        load_domain("turn", DomainConfig(teacher="t", prompts=prompts, held_out=4), plain)


def test_a_task(plain: Any) -> None:
    prompts = PromptsConfig(
        task="chain_sum",
        params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        size=60,
        template="sum {expression}:",
        key_fields=["expression"],
        unordered_key=True,
    )
    cfg = DomainConfig(teacher="t", prompts=prompts, held_out=8)
    data = load_domain("sums", cfg, plain)
    assert len(data.held_out) == 8 and len(data.train) > 8
    assert data.notes and "different items among 60 generated" in data.notes[0]
    one = data.train[0]
    assert one.text.startswith("sum ") and one.metadata["question"] and one.answer is not None
    assert one.domain == "sums" and one.id.startswith("sums/")
    assert data.majority_baseline is not None and 0 < data.majority_baseline < 1
    assert data == load_domain("sums", cfg, plain)
    cfg.prompts.task = "chain_sun"
    with pytest.raises(ConfigError, match="domains.sums.prompts: .*did you mean 'chain_sum'"):
        load_domain("sums", cfg, plain)
    cfg.prompts.task, cfg.held_out = "chain_sum", 59
    with pytest.raises(DataError, match="domains.sums: held_out is 59"):
        load_domain("sums", cfg, plain)


# ids -------------------------------------------------------------------------------------------


def ids_of(
    write: Write, tokenizer: Any, row: dict[str, Any], *, chat: bool = False
) -> tuple[int, ...]:
    data = load_domain("math", write([row, {"prompt": "other"}], held_out=0, chat=chat), tokenizer)
    return data.train[0].token_ids


@pytest.mark.parametrize("adds", ["<bos> $A", "<bos> $A <eos>", "$A <eos>", ""])
def test_one_bos_at_most_and_no_eos(write: Write, adds: str) -> None:
    """C05: text that already holds the BOS gets no second one; the prompt never ends the text."""
    tokenizer = byte_tokenizer(adds=adds)
    text = tuple(tokenizer("hi", add_special_tokens=False)["input_ids"])
    bos = (1,) if "<bos>" in adds else ()
    assert ids_of(write, tokenizer, {"prompt": "hi"}) == bos + text
    assert ids_of(write, tokenizer, {"prompt": "<bos>hi"}) == (1, *text)
    assert ids_of(write, tokenizer, {"prompt": "<bos><bos>hi"}) == (1, *text)


@pytest.mark.parametrize("adds", ["<bos> $A", ""])
def test_chat_templates(write: Write, adds: str) -> None:
    """C05: the template writes the BOS; the tokenizer must not write it again."""
    tokenizer = byte_tokenizer(adds=adds, template=TEMPLATE)
    ids = ids_of(write, tokenizer, {"prompt": "hi"}, chat=True)
    assert ids.count(1) == 1 and ids[0] == 1 and 2 not in ids
    assert tokenizer.decode(list(ids)) == "<bos><user>hi<assistant>"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    ids = ids_of(write, tokenizer, {"messages": messages}, chat=True)
    assert tokenizer.decode(list(ids)) == "<bos><system>s<user>hi<assistant>"
    same = tuple(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )
    assert ids == same


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "should be a list of {role, content}, got a list"),
        ("a", "should be a list of {role, content}, got the text 'a'"),
        ([1], "messages[0] should be {role, content}"),
        ([{"role": "user"}], "messages[0].content should be text"),
        ([{"role": 1, "content": "a"}], "messages[0] should be"),
        ([{"role": "assistant", "content": "a"}], "nothing left to answer"),
    ],
)
def test_bad_chats(write: Write, plain: Any, messages: Any, says: str) -> None:
    tokenizer = byte_tokenizer(template=TEMPLATE)
    message = fault(write([{"messages": messages}, *rows(2)], chat=True), tokenizer)
    assert message.startswith("domain 'math': p.jsonl:1: ") and says in message


def test_chat_without_a_template(write: Write, plain: Any) -> None:
    message = fault(write(rows(2), chat=True), plain, ConfigError)
    assert "domains.math.prompts.chat is true" in message and "no chat template" in message


def test_a_template_that_refuses(write: Write) -> None:
    tokenizer = byte_tokenizer(template="{{ raise_exception('no system role') }}")
    assert "refuses" in fault(write(rows(2), chat=True), tokenizer)


def test_ids_come_back_as_the_text(write: Write, plain: Any) -> None:
    texts = ["a b  c\n", "naïve ✓ 漢", "\t", "<pad", "é" * 50, "x"]
    data = load_domain(
        "math", write([{"prompt": t} for t in texts if t.strip()], held_out=0), plain
    )
    for prompt in data.train:
        assert plain.decode(list(prompt.token_ids)) == prompt.text


# lengths ---------------------------------------------------------------------------------------


@pytest.fixture
def two(write: Write, plain: Any) -> dict[str, DomainData]:
    """The longest prompt of `math` has 10 tokens (row 2), of `code` 30 (row 1)."""
    math_cfg = write([{"prompt": "a"}, {"prompt": "b" * 10}], held_out=0)
    domains = {"math": load_domain("math", math_cfg, plain)}
    code_cfg = write([{"prompt": "c" * 30}, {"prompt": "d"}], held_out=0, file="c.jsonl")
    return domains | {"code": load_domain("code", code_cfg, plain)}


def test_context_to_the_token(two: dict[str, DomainData]) -> None:
    """C11: M fits, M + 1 does not; a scoring server needs one token more."""
    check_lengths(two, 6, {"student": 36})
    with pytest.raises(ConfigError) as error:
        check_lengths(two, 7, {"student": 36})
    assert "student takes 36 tokens, but c.jsonl:1 (30 tokens) + 7 of response = 37" in str(
        error.value
    )
    assert "lower rollout.max_response_tokens to 6 or less" in str(error.value)
    scorer = [ContextLimit("teacher code_rl", 36, frozenset({"code"}), reserved=1)]
    check_lengths(two, 5, scorer)
    with pytest.raises(ConfigError, match=r"teacher code_rl .* \+ 1 that scoring generates = 37"):
        check_lengths(two, 6, scorer)


def test_a_teacher_needs_room_for_its_own_domains_only(two: dict[str, DomainData]) -> None:
    check_lengths(two, 6, [ContextLimit("teacher math_rl", 16, frozenset({"math"}))])
    with pytest.raises(ConfigError, match="p.jsonl:2"):
        check_lengths(two, 7, [ContextLimit("teacher math_rl", 16, frozenset({"math"}))])
    with pytest.raises(ConfigError) as error:
        check_lengths(two, 7, {"student": 20, "other": 36})
    assert "2 problems" in str(error.value) and "take a model of longer context" in str(error.value)
