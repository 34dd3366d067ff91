"""`mopd check CONFIG [--live] [--json]`: every finding as a row; nothing is trained.

Without ``--live`` no server is asked and no model loaded. With it the teachers are started or
asked as a run would, each is put to the test, and everything that was started is ended.

Exit code 0: a run may start; 1: something failed, each fault in a row of its own; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mopd.build import Prepared, prepare
from mopd.checking.estimates import disk_rows, memory_rows, placement_lines
from mopd.checking.rows import FAILED, OK, WARNING, Row, as_json, is_good
from mopd.config.checks import check_config
from mopd.config.load import load_config
from mopd.config.objective_text import objective_lines
from mopd.config.schema import Config
from mopd.config.teachers import members_of
from mopd.config.unread import Unread
from mopd.data.sampling import resolve_rules
from mopd.errors import MopdError
from mopd.inputs import concern, read_inputs
from mopd.model_folders import teacher_folders
from mopd.weight_sync.publish import transfer_directory

_ANOTHER_TEMPLATE = (
    "is not the student's, by which its prompts are written: its scores may be those of a form "
    "that it does not know"
)


def check_command(arguments: argparse.Namespace) -> int:
    """Print every row as it is found; the exit code."""
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        if not arguments.json:
            print(row, flush=True)

    files = [arguments.config, *(item for item in arguments.more if "=" not in item)]
    overrides = [item for item in arguments.more if "=" in item]
    prepared = _prepared(files, overrides, show)
    if prepared is not None:
        static_rows(prepared, show)
        if arguments.live and is_good(rows):
            from mopd.checking.live import live_rows

            live_rows(prepared, show, lambda text: print(text, file=sys.stderr, flush=True))
    if arguments.json:
        print(json.dumps(as_json([str(file) for file in files], rows)))
    elif not is_good(rows):
        faults = sum(row.status == FAILED for row in rows)
        print(f"{faults} fault{'s' * (faults != 1)}: the run would not start or end")
    else:
        unseen = "" if arguments.live else " (servers and models were not started: --live does)"
        print(f"no fault found{unseen}")
    return 0 if is_good(rows) else 1


def _prepared(
    files: list[str | Path], overrides: list[str], show: Callable[[Row], None]
) -> Prepared | None:
    """The run as far as it needs no model, or None after a row for each of its faults."""
    part = "configuration"
    try:
        unread = Unread()
        config = load_config(files, overrides, unread)
        problems = [text for text in check_config(config) if not unread.explains(text)]
        for text in (*unread.texts, *problems):
            show(Row(part, "", FAILED, text))
        part = "files"
        if not unread.texts and not problems:
            return prepare(config)
        problems += unread.left_out()
        if not concern(problems, "student.model"):  # without a tokenizer no prompt can be read
            read_inputs(config, problems)
    except MopdError as error:
        for text in error.faults or (str(error),):
            show(Row(part, "", FAILED, text))
    return None


def sampling_text(config: Config) -> str:
    """Which prompts are drawn, and drawn again, with the defaults of what was chosen."""
    rules = resolve_rules(config.train.sampling, config.train.steps)
    order = rules.pop("order")
    set_to = [f"{key} {value:g}" for key, value in rules.items() if value is not None]
    if rounds := config.train.sampling.dynamic_rounds:
        set_to.append(f"groups of equal rewards replaced in up to {rounds} further rounds")
    return ", ".join([order, *set_to])


def template_rows(config: Config, folders: Mapping[str, Path]) -> Iterator[Row]:
    """Whether teachers that read chats know the form in which the student's template writes them.

    Ids mean the same either way; but a teacher scores best what looks as what it was trained on.
    """
    chats = [domain for domain in config.domains.values() if domain.prompts.chat]
    asked = {m for domain in chats for m in members_of(config, domain.teacher)} & folders.keys()
    own = chat_template(Path(config.student.model))
    for name in sorted(asked):
        same = chat_template(folders[name]) == own
        text = "is the student's" if same else _ANOTHER_TEMPLATE
        yield Row("tokenizers", f"chat template of {name}", OK if same else WARNING, text)


def chat_template(folder: Path) -> str | None:
    """A checkpoint's chat template, from either place where they are kept."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8").strip()
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    found = settings.get("chat_template")
    return found.strip() if isinstance(found, str) else json.dumps(found) if found else None


def static_rows(prepared: Prepared, show: Callable[[Row], None]) -> None:
    """What `prepare` found right, and what the run will need of the machine."""
    config = prepared.config
    names = ", ".join(str(name) for name in config.teachers)
    show(Row("configuration", "", OK, f"{config.name}; teachers: {names}"))
    for text in prepared.warnings:
        show(Row("configuration", "", WARNING, text))
    for what, text in objective_lines(config).items():
        show(Row("objective", what, OK, text))
    show(Row("prompts", "order", OK, sampling_text(config)))
    folders = teacher_folders(config)
    compared = ", ".join(folders) or "none of them is on this machine"
    show(Row("tokenizers", "equal to the student's by content", OK, compared))
    for row in template_rows(config, folders):
        show(row)
    for name, data in {**prepared.domains, **prepared.sets}.items():
        show(Row(f"prompts {name}", "", OK, data.describe()))
    longest = prepared.max_model_len
    show(Row("lengths", "fit every model", OK, f"longest prompt + response + 1: {longest} tokens"))
    asked = [name for name, judged in prepared.judged().items() if judged.verifier is not None]
    text = ", ".join(asked) or "no domain has one"
    show(Row("verifiers", "tell right answers from wrong ones", OK, text))
    try:
        for line in placement_lines(config):
            show(Row("placement", "", OK, line))
    except MopdError as error:
        show(Row("placement", "", FAILED, str(error)))
    for row in memory_rows(config, folders, longest):
        show(row)
    for row in disk_rows(config, Path(config.run_dir) / config.name, transfer_directory()):
        show(row)
