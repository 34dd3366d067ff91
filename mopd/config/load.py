"""YAML files and ``key=value`` overrides into one checked `Config`.

    read each file -> widen shorthands -> refuse unknown keys and wrong types, by file and line
    -> merge in order -> overrides -> interpolations -> dataclasses

The first file is the run's; further ones may add to it (a domain and its teacher, say) or change
it. Ranges and contradictions are `mopd.config.checks`' business.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mopd.config._yaml import KeyPath, dump_yaml, parse_yaml, read_yaml
from mopd.config.schema import Config, PromptsConfig, TeacherConfig, VerifierConfig
from mopd.config.wording import kind_of, nearest
from mopd.errors import ConfigError

SELF = "self"
"""A domain's `teacher` that needs no entry in `teachers`."""

SHORTHANDS: dict[type, str] = {PromptsConfig: "jsonl", VerifierConfig: "name"}
"""A plain text where one of these is expected means this field of it, and nothing else set."""


_UNKNOWN = "unknown key"


class _Whole(dict):
    """A mapping that replaces what stood there before, instead of being merged into it."""


@dataclass
class _Source:
    """One file or override, with the place of each of its keys."""

    name: str
    lines: dict[KeyPath, int]

    def at(self, path: KeyPath) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


def load_config(
    paths: Sequence[str | Path], overrides: Sequence[str] = (), told: list[str] | None = None
) -> Config:
    """Merge YAML files in order, then ``key=value`` overrides; ConfigError lists every problem.

    told: unknown keys are put there and left out, instead of ending it, for whoever wants to see
        what else is wrong.

    Shorthands: ``prompts: FILE`` is ``{jsonl: FILE}``, ``verifier: NAME`` is ``{name: NAME}``,
    ``endpoints: URL`` is a list of one. A shorthand replaces what an earlier file said there;
    mappings are merged key by key; lists and values are replaced. The value of an override is
    YAML, but for a key that takes text: there it is the text as it stands.
    """
    if isinstance(paths, str | Path):
        raise TypeError("load_config takes a sequence of paths")
    if not paths:
        raise ConfigError("no configuration file given")
    problems: list[str] = []
    merged: dict[str, Any] = {}
    for path in paths:
        _refuse_a_key(str(path))
        value, lines = read_yaml(Path(path))
        _merge(merged, _typed(value, Config, (), _Source(str(path), lines), problems))
    for text in overrides:
        nested, source = _override(text)
        _merge(merged, _typed(nested, Config, (), source, problems))
    if told is not None and all(_UNKNOWN in problem for problem in problems):
        told += problems
    elif problems:
        raise ConfigError.listing("the configuration does not fit", problems)
    try:
        tree = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(_plain(merged)))
        assert isinstance(tree, DictConfig)
        missing = sorted(OmegaConf.missing_keys(tree))
        if missing:
            names = ", ".join(str(path) for path in paths)
            raise ConfigError.listing(
                f"{names}: these keys have no default and must be given", missing
            )
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'configuration'}: {_first_line(error)}") from error
    assert isinstance(config, Config)
    _fill_in_self(config)
    return config


def load_teacher_settings(settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` of one teacher, as they would stand under ``teachers.NAME``, but for who it is.

    Raises ConfigError with every problem of keys and types; ranges are `check_config`'s business.
    """
    problems: list[str] = []
    merged: dict[str, Any] = {}
    for text in settings:
        nested, source = _override(f"teachers.new.{text}")
        _merge(merged, _typed(nested, Config, (), source, problems))
    found = _plain(merged).get("teachers", {}).get("new", {})
    for key in ("model", "endpoints", "mixture"):
        if key in found:
            problems.append(f"{key} is given by --model or --endpoint")
    if problems:
        raise ConfigError.listing("the settings of the new teacher", problems)
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


def _override(text: str) -> tuple[dict[str, Any], _Source]:
    """``a.b=value`` as nested mappings. A value for a text key is taken as it stands."""
    key, equals, raw = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path) or key != key.strip():
        raise ConfigError(
            f"override {text!r}: expected key=value with a dotted key, "
            "such as student.optimizer.lr=1.0e-3"
        )
    source = _Source(f"override {text!r}", {})
    expected = _type_at(Config, path)
    value: Any
    if expected is not None and str in _options(expected):
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
    known = keys[0] in typing.get_type_hints(Config) and _type_at(Config, keys) is not None
    if known and not Path(path).exists():
        raise ConfigError(f"{path!r} is no file but a configuration key; write {path}=VALUE")


def _type_at(kind: Any, path: KeyPath) -> Any:
    """The declared type of a dotted key, or None where the key is unknown or free."""
    for name in path:
        kind = next((each for each in _options(kind) if each is not type(None)), None)
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind).get(name)
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        else:
            return None
    return None if kind is Any else kind


def _options(kind: Any) -> tuple[Any, ...]:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return typing.get_args(kind)
    return (kind,)


def _typed(value: Any, kind: Any, path: KeyPath, source: _Source, problems: list[str]) -> Any:
    """`value` with shorthands widened; whatever does not fit `kind` is added to `problems`."""
    options = _options(kind)
    if value is None:
        if type(None) not in options and kind is not Any:
            problems.append(_misfit(value, options, path, source))
        return value
    if kind is Any:
        return copy.deepcopy(value)  # YAML aliases share it; merging would change both
    if isinstance(value, str) and ("${" in value or value == "???"):
        return value  # resolved, then checked, by OmegaConf
    kind = next(each for each in options if each is not type(None))
    if isinstance(value, str) and kind in SHORTHANDS:
        defaults = dataclasses.asdict(kind())
        return _Whole(defaults | {SHORTHANDS[kind]: value})
    if isinstance(value, str) and path[-1:] == ("endpoints",) and len(path) == 3:
        value = [value]
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        result = {}
        for name, each in value.items():
            if name in hints:
                result[name] = _typed(each, hints[name], (*path, name), source, problems)
            else:
                full = ".".join((*path, name))
                hint = nearest(name, hints, prefix=full.removesuffix(name))
                problems.append(f"{source.at((*path, name))}: {_UNKNOWN} {full!r}{hint}")
        return result
    origin = typing.get_origin(kind)
    if origin is dict and isinstance(value, dict):
        each_kind = typing.get_args(kind)[1]
        return {
            name: _typed(each, each_kind, (*path, name), source, problems)
            for name, each in value.items()
        }
    if origin is list and isinstance(value, list):
        each_kind = typing.get_args(kind)[0]
        return [
            _typed(each, each_kind, (*path, str(index)), source, problems)
            for index, each in enumerate(value)
        ]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str, bool) and type(value) is kind:
        return value
    problems.append(_misfit(value, options, path, source))
    return value


def _misfit(value: Any, options: tuple[Any, ...], path: KeyPath, source: _Source) -> str:
    kind = next(each for each in options if each is not type(None))
    origin = typing.get_origin(kind)
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        kind, "a list" if origin is list else "a mapping of keys"
    )
    if kind in SHORTHANDS:
        expected += f" (or text, for its {SHORTHANDS[kind]!r})"
    elif kind is TeacherConfig:
        expected += " such as {model: PATH}"
    if type(None) in options:
        expected += " or null"
    text = f"{source.at(path)}: {'.'.join(path)}: expected {expected}, got {kind_of(value)}"
    if path[0] == "domains" and path[2:] == ("teacher",):
        return f"{text}; a domain has exactly one teacher, by name"
    if isinstance(value, str) and kind in (int, float):
        number = _number(value)
        if number is not None and (kind is float or number == int(number)):
            wanted = int(number) if kind is int else _spelled(number)
            return f"{text}; write {wanted} without quotes"
    if isinstance(value, float) and kind is int and value.is_integer():
        return f"{text}; write {int(value)}"
    if isinstance(value, str) and kind is bool and value.lower() in ("yes", "on", "no", "off"):
        return f"{text}; write {'true' if value.lower() in ('yes', 'on') else 'false'}"
    if kind is str and isinstance(value, int | float):
        return f"{text}; put it in quotes"
    return text


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def _spelled(number: float) -> str:
    """``1.0e-06``-like text that every YAML reader takes for a number."""
    mantissa, e, exponent = repr(number).partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}{e}{exponent}"


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        old = into.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and not isinstance(value, _Whole):
            _merge(old, value)
        else:
            into[name] = value


def _plain(value: Any) -> Any:
    """Without `_Whole`, which OmegaConf does not know."""
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
