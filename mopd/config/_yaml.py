"""YAML as this project reads and writes it: numbers are numbers, keys are unique, lines are known.

PyYAML follows YAML 1.1, where ``1e-6`` and ``0o10`` are text, ``on`` and ``no`` are booleans,
``010`` is eight and ``1:30`` is ninety. Here ``1e-6`` is a number, only ``true`` and ``false``
are booleans, and the other oddities are text (which a typed key then refuses by name).
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from mopd.config.wording import kind_of
from mopd.errors import ConfigError

KeyPath = tuple[str, ...]

_TAG = "tag:yaml.org,2002:"
_OURS = [
    (_TAG + "bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    (_TAG + "int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), "-+0123456789"),
    (
        _TAG + "float",
        re.compile(
            r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        "-+0123456789.",
    ),
]
_REPLACED = {_TAG + name for name in ("bool", "int", "float", "timestamp")}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list] = {
        first: [entry for entry in entries if entry[0] not in _REPLACED]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    # Quotes whatever either dialect would take for something else than text.
    yaml_implicit_resolvers: dict[str, list] = {
        first: list(entries) for first, entries in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _OURS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, _pattern, list(_first))


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The file's mapping and the line (from 1) of each of its keys; ConfigError names the place."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file (working directory {Path.cwd()})") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, expected a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    value, lines = parse_yaml(text, str(path))
    if value is None:
        raise ConfigError(f"{path}: the file is empty, expected `key: value` lines")
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: expected `key: value` lines at the top level, got {kind_of(value)}"
        )
    return value, lines


def parse_yaml(text: str, where: str) -> tuple[Any, dict[KeyPath, int]]:
    """One YAML value and the lines of its keys; `where` starts the text of every error."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines: dict[KeyPath, int] = {}
        _note_keys(node, (), lines, where, frozenset())
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{at}: not valid YAML: {what}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    finally:
        loader.dispose()


def dump_yaml(value: dict[str, Any]) -> str:
    """YAML text which `parse_yaml` reads back to an equal value."""
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )


def _note_keys(
    node: yaml.Node,
    path: KeyPath,
    lines: dict[KeyPath, int],
    where: str,
    above: frozenset[int],
) -> None:
    """Record each key's line; refuse duplicate keys, keys that are not text, endless aliases."""
    at = f"{where}:{node.start_mark.line + 1}"
    if id(node) in above:
        raise ConfigError(f"{at}: this value contains itself through an alias")
    above = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _note_keys(child, (*path, str(index)), lines, where, above)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[Hashable, int] = {}
    for key, child in node.value:
        line = key.start_mark.line + 1
        if key.tag == _TAG + "merge":
            _note_keys(child, path, lines, where, above)
            continue
        if key.tag != _TAG + "str":
            raise ConfigError(
                f"{where}:{line}: the key {getattr(key, 'value', '?')!r} under "
                f"{'.'.join(path) or 'the top level'} is not text; put it in quotes"
            )
        if key.value in seen:
            full = ".".join((*path, key.value))
            raise ConfigError(
                f"{where}:{line}: the key {full!r} is given twice (first on line "
                f"{seen[key.value]}); the second would silently replace the first"
            )
        seen[key.value] = line
        lines[(*path, key.value)] = line
        _note_keys(child, (*path, key.value), lines, where, above)
