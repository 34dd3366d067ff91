"""YAML files and ``key=value`` overrides into one checked `Config`.

    read each file -> widen shorthands -> refuse unknown keys and wrong types, by file and line
    -> merge in order -> overrides -> interpolations -> dataclasses

The first file is the run's; further ones may add to it (a domain and its teacher, say) or change
it. Ranges and contradictions are `mopd.config.checks`' business.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mopd.config._yaml import KeyPath, dump_yaml, parse_yaml, read_yaml
from mopd.config.fitting import LEFT_OUT, Source, Whole, fitted, options_of, plain_type, type_at
from mopd.config.schema import Config, TeacherConfig
from mopd.config.unread import STAND_INS, Unread
from mopd.errors import ConfigError

SELF = "self"
"""A domain's `teacher` that needs no entry in `teachers`."""


def load_config(
    paths: Sequence[str | Path], overrides: Sequence[str] = (), unread: Unread | None = None
) -> Config:
    """Merge YAML files in order, then ``key=value`` overrides; ConfigError lists every problem.

    unread: is told of unknown keys, of values of the wrong type and of keys that are missing,
        instead of ending it, for whoever wants to see what else is wrong.

    Shorthands: ``prompts: FILE`` is ``{jsonl: FILE}``, ``verifier: NAME`` is ``{name: NAME}``,
    ``endpoints: URL`` is a list of one. A shorthand replaces what an earlier file said there;
    mappings are merged key by key; lists and values are replaced. The value of an override is
    YAML, but for a key that takes text: there it is the text as it stands.
    """
    if isinstance(paths, str | Path):
        raise TypeError("load_config takes a sequence of paths")
    if not paths:
        raise ConfigError("no configuration file given")
    found = Unread() if unread is None else unread
    merged: dict[str, Any] = {}
    for path in paths:
        _refuse_a_key(str(path))
        value, lines = read_yaml(Path(path))
        _merge(merged, fitted(value, Config, (), Source(str(path), lines), found))
    for text in overrides:
        nested, source = _override(text)
        _merge(merged, fitted(nested, Config, (), source, found))
    if found.texts and unread is None:
        raise ConfigError.listing("the configuration does not fit", found.texts)
    while True:
        try:
            config = _config_of(merged, ", ".join(str(path) for path in paths), unread)
            break
        except OmegaConfBaseException as error:  # of an interpolation
            text = f"{error.full_key or 'configuration'}: {_first_line(error)}"
            key = tuple((error.full_key or "").partition("[")[0].split("."))
            if unread is None or not _drop(merged, key):
                raise ConfigError(text) from error
            unread.add(text)
            unread.leave_out(key, plain_type(type_at(Config, key)))
    _fill_in_self(config)
    return config


def _config_of(merged: Mapping[str, Any], names: str, unread: Unread | None) -> Config:
    """The dataclasses; with `unread`, a stand-in for each key that is missing, of which it is told
    unless it knows."""
    tree = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(_plain(merged)))
    assert isinstance(tree, DictConfig)
    missing = sorted(OmegaConf.missing_keys(tree))
    head = f"{names}: these keys have no default and must be given"
    if missing and unread is None:
        raise ConfigError.listing(head, missing)
    for key in missing:
        assert unread is not None
        kind = type_at(Config, tuple(key.split(".")))
        if key not in unread:
            unread.add(f"{head}: {key}")
            unread.leave_out(tuple(key.split(".")), kind)
        OmegaConf.update(tree, key, STAND_INS[kind])
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)
    return config


def _drop(merged: dict[str, Any], path: KeyPath) -> bool:
    """Take this key out; whether it was there."""
    *sections, name = path
    for section in sections:
        found = merged.get(section)
        if not isinstance(found, dict):
            return False
        merged = found
    return merged.pop(name, LEFT_OUT) is not LEFT_OUT


def load_teacher_settings(settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` of one teacher, as they would stand under ``teachers.NAME``, but for who it is.

    Raises ConfigError with every problem of keys and types; ranges are `check_config`'s business.
    """
    unread = Unread()
    merged: dict[str, Any] = {}
    for text in settings:
        nested, source = _override(f"teachers.new.{text}")
        _merge(merged, fitted(nested, Config, (), source, unread))
    found = _plain(merged).get("teachers", {}).get("new", {})
    for key in ("model", "endpoints", "mixture"):
        if key in found:
            unread.add(f"{key} is given by --model or --endpoint")
    if unread.texts:
        raise ConfigError.listing("the settings of the new teacher", unread.texts)
    return dict(found)


def _fill_in_self(config: Config) -> None:
    """The teacher `self` is the student as it starts, frozen: its checkpoint, in its type."""
    named = {domain.teacher for domain in config.domains.values()}
    if SELF in named | {config.objective.kl.reference}:
        config.teachers.setdefault(SELF, TeacherConfig(dtype=config.student.dtype))
    own = config.teachers.get(SELF)
    if own is not None and own.model is None and not own.endpoints:
        own.model = config.student.model


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved configuration, each key included, so that it loads to an equal one."""
    text = dump_yaml(_escaped(dataclasses.asdict(config)))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def _override(text: str) -> tuple[dict[str, Any], Source]:
    """``a.b=value`` as nested mappings. A value for a text key is taken as it stands."""
    key, equals, raw = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path) or key != key.strip():
        raise ConfigError(
            f"override {text!r}: expected key=value with a dotted key, "
            "such as student.optimizer.lr=1.0e-3"
        )
    source = Source(f"override {text!r}", {})
    expected = type_at(Config, path)
    value: Any
    if expected is not None and str in options_of(expected):
        value = _text_value(raw)
    else:
        try:
            value, _ = parse_yaml(raw, source.name)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; text that holds ':', '{{', '[' or '#' needs quotes that the shell "
                f"leaves: {key}='\"...\"'"
            ) from error
        if expected is None and isinstance(value, dict) and raw.lstrip()[:1] != "{":
            value = raw  # ``back {word}:`` for a free key; a mapping would come in braces
    for name in reversed(path):
        value = {name: value}
    return value, source


def _text_value(raw: str) -> str | None:
    """What stands after ``=`` for a key that takes text: that text, whatever YAML would make of
    it, since a shell user cannot be asked for a second pair of quotes round ``back {word}:`` or a
    name of digits. Only ``null`` is nothing, and quotes round all of it come off."""
    if raw.strip() in ("null", "Null", "NULL", "~"):
        return None
    if raw.strip()[:1] in ("'", '"'):
        try:
            value, _ = parse_yaml(raw, "")
        except ConfigError:
            return raw
        return value if isinstance(value, str) else raw
    return raw


def _refuse_a_key(path: str) -> None:
    """``train.steps 20`` where ``train.steps=20`` was meant is no missing file."""
    keys = tuple(path.split("."))
    known = keys[0] in typing.get_type_hints(Config) and type_at(Config, keys) is not None
    if known and not Path(path).exists():
        raise ConfigError(f"{path!r} is no file but a configuration key; write {path}=VALUE")


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        old = into.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and not isinstance(value, Whole):
            _merge(old, value)
        else:
            into[name] = value


def _plain(value: Any) -> Any:
    """Without `Whole`, which OmegaConf does not know."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _escaped(value: Any) -> Any:
    """Text that would be read as an interpolation or as missing, made to read as itself."""
    if isinstance(value, dict):
        return {name: _escaped(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    if isinstance(value, str) and "${" in value:
        return _escape_interpolation(value)
    return value


def _escape_interpolation(text: str) -> str:
    # Before "${", OmegaConf reads an odd number of backslashes as an escape and halves them.
    parts = text.split("${")
    doubled = []
    for part in parts[:-1]:
        tail = len(part) - len(part.rstrip("\\"))
        doubled.append(part + "\\" * (tail + 1))
    return "${".join([*doubled, parts[-1]])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
