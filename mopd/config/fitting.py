"""Values as YAML gives them, fitted to the types that the schema declares.

Shorthands are widened; what does not fit is told by file and line, and left out.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from mopd.config._yaml import KeyPath
from mopd.config.schema import PromptsConfig, TeacherConfig, VerifierConfig
from mopd.config.unread import Unread
from mopd.config.wording import kind_of, nearest

SHORTHANDS: dict[type, str] = {PromptsConfig: "jsonl", VerifierConfig: "name"}
"""A plain text where one of these is expected means this field of it, and nothing else set."""


LEFT_OUT = object()


class Whole(dict):
    """A mapping that replaces what stood there before, instead of being merged into it."""


@dataclass
class Source:
    """One file or override, with the place of each of its keys."""

    name: str
    lines: dict[KeyPath, int]

    def at(self, path: KeyPath) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.name}:{self.lines[path[:length]]}"
        return self.name


def type_at(kind: Any, path: KeyPath) -> Any:
    """The declared type of a dotted key, or None where the key is unknown or free."""
    for name in path:
        kind = plain_type(kind)
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind).get(name)
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        else:
            return None
    return None if kind is Any else kind


def options_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union; of any other, itself."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return typing.get_args(kind)
    return (kind,)


def plain_type(kind: Any) -> Any:
    """The type of a value that is not null."""
    return next(each for each in options_of(kind) if each is not type(None))


def fitted(value: Any, kind: Any, path: KeyPath, source: Source, unread: Unread) -> Any:
    """`value` with shorthands widened; whatever does not fit `kind` is told to `unread` and left
    out, so that `LEFT_OUT` may be what is left."""
    declared = kind
    if value is None:
        if type(None) not in options_of(kind) and kind is not Any:
            return _left_out(value, declared, path, source, unread)
        return value
    if kind is Any:
        return copy.deepcopy(value)  # YAML aliases share it; merging would change both
    if isinstance(value, str) and ("${" in value or value == "???"):
        return value  # resolved, then checked, by OmegaConf
    kind = plain_type(kind)
    if isinstance(value, str) and kind in SHORTHANDS:
        defaults = dataclasses.asdict(kind())
        return Whole(defaults | {SHORTHANDS[kind]: value})
    if isinstance(value, str) and path[-1:] == ("endpoints",) and len(path) == 3:
        value = [value]
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        result = {}
        for name, each in value.items():
            if name in hints:
                result[name] = fitted(each, hints[name], (*path, name), source, unread)
            else:
                full = ".".join((*path, name))
                hint = nearest(name, hints, prefix=full.removesuffix(name))
                unread.add(f"{source.at((*path, name))}: unknown key {full!r}{hint}")
        return {name: each for name, each in result.items() if each is not LEFT_OUT}
    origin = typing.get_origin(kind)
    if origin in (dict, list) and isinstance(value, origin):
        each_kind = typing.get_args(kind)[-1]
        items = value.items() if isinstance(value, dict) else enumerate(value)
        found = {
            name: fitted(each, each_kind, (*path, str(name)), source, unread)
            for name, each in items
        }
        if LEFT_OUT in found.values():
            unread.leave_out(path, kind)  # what is left is another list
        found = {name: each for name, each in found.items() if each is not LEFT_OUT}
        return found if origin is dict else list(found.values())
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str, bool) and type(value) is kind:
        return value
    return _left_out(value, declared, path, source, unread)


def _left_out(value: Any, declared: Any, path: KeyPath, source: Source, unread: Unread) -> Any:
    """What stands in the place of a value that does not fit: of a section, all its defaults."""
    unread.add(_misfit(value, declared, path, source))
    kind = plain_type(declared)
    unread.leave_out(path, kind)
    return {} if dataclasses.is_dataclass(kind) else LEFT_OUT


def _misfit(value: Any, declared: Any, path: KeyPath, source: Source) -> str:
    kind = plain_type(declared)
    origin = typing.get_origin(kind)
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(
        kind, "a list" if origin is list else "a mapping of keys"
    )
    if kind in SHORTHANDS:
        expected += f" (or text, for its {SHORTHANDS[kind]!r})"
    elif kind is TeacherConfig:
        expected += " such as {model: PATH}"
    if type(None) in options_of(declared):
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
