"""What must be known of models' folders before any weight is loaded: tokenizers and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mopd.config.model_files import ModelLimits, hub_cache_folder, read_model_limits
from mopd.config.schema import Config
from mopd.config.teachers import members_of
from mopd.data.prompts import ContextLimit
from mopd.errors import ConfigError, ModelError
from mopd_teachers.errors import TeacherError as ServerError
from mopd_teachers.tokenizer_check import Fingerprint, explain_difference, tokenizer_fingerprint


def teacher_folders(config: Config) -> dict[str, Path]:
    """Teacher -> its checkpoint on this machine; a teacher given by URL may have none here.

    Raises:
        ModelError: a teacher that is to be started is a hub name that was never fetched.
    """
    folders: dict[str, Path] = {}
    for name, teacher in config.teachers.items():
        if teacher.model is None:
            continue
        folder: Path | None = Path(teacher.model)
        if folder is not None and not folder.is_dir():
            folder = hub_cache_folder(teacher.model, teacher.revision)
        if folder is not None:
            folders[name] = folder
        elif not teacher.endpoints:
            raise ModelError(
                f"teachers.{name}.model: {teacher.model!r} is neither a folder here nor in the "
                "Hugging Face cache; a run fetches nothing by itself. Fetch it first: "
                f"hf download {teacher.model}"
            )
    return folders


def context_limits(
    config: Config, student: ModelLimits, local_teachers: Mapping[str, Path]
) -> list[ContextLimit]:
    """What each model can read; an external teacher whose limit nobody knows yet is left out
    (its server is asked before training)."""
    # A vLLM engine or server that scores must be asked to generate at least one token.
    who = f"student ({config.student.model})"
    limits = [ContextLimit(who, student.max_position_embeddings, reserved=1)]
    for name, teacher in config.teachers.items():
        tokens = teacher.max_model_len
        if tokens is None and name in local_teachers:
            try:
                tokens = read_model_limits(local_teachers[name]).max_position_embeddings
            except ModelError as error:
                raise ModelError(f"teachers.{name}.model: {error}") from error
        if tokens is not None:
            asks = {d: members_of(config, domain.teacher) for d, domain in config.domains.items()}
            own = {d for d, members in asks.items() if name in members}
            benchmarks = config.evaluation.benchmarks.items()
            reads = frozenset(own | {b for b, each in benchmarks if each.domain in own})
            limits.append(ContextLimit(f"teacher {name}", tokens, reads, reserved=1))
    return limits


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer, loaded once for the whole run.

    Raises:
        ModelError: there is none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of many types: it reads the model's config, too
        raise ModelError(
            f"{folder}: no readable tokenizer ({error}); expected tokenizer.json and "
            "tokenizer_config.json beside the weights"
        ) from error


def require_known_ids(student: Path, limits: ModelLimits, tokenizer: Any) -> None:
    """Raises ModelError if the tokenizer has ids for which the model has no row."""
    if limits.vocab_size < len(tokenizer):
        raise ModelError(
            f"{student}: the tokenizer has {len(tokenizer)} ids but the model only "
            f"{limits.vocab_size} rows (vocab_size in config.json)"
        )


def require_same_tokenizer(student: Path, teachers: Mapping[str, Path]) -> None:
    """Ids travel between student and teachers, so their tokenizers must agree by content.

    Raises:
        ModelError: naming the teacher and the first tokens that differ.
    """
    own = _fingerprint(student, "student.model")
    faults = [
        f"teacher {name} ({path}): {difference}"
        for name, path in teachers.items()
        if (difference := explain_difference(own, _fingerprint(path, f"teachers.{name}.model")))
        is not None
    ]
    if faults:
        raise ModelError(
            f"the tokenizer of the student ({student}) is not that of every teacher, so that "
            "token ids would mean other tokens there:\n  " + "\n  ".join(faults)
        )


def _fingerprint(folder: Path, key: str) -> Fingerprint:
    try:
        return tokenizer_fingerprint(folder)
    except ServerError as error:  # the teachers package knows no configuration keys
        raise ModelError(f"{key}: {error}") from error


def end_of_sequence_ids(tokenizer: Any, folder: Path) -> tuple[int, ...]:
    """Ids that end an answer: the tokenizer's and those of generation_config.json.

    Raises:
        ConfigError: there is none, so that no answer would ever end by itself.
    """
    from transformers import GenerationConfig

    ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    if (folder / "generation_config.json").exists():
        more = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(more if isinstance(more, list) else [] if more is None else [more])
    if not ids:
        raise ConfigError(
            f"{folder}: neither the tokenizer nor generation_config.json names an end-of-sequence "
            "token; every answer would run to rollout.max_response_tokens"
        )
    return tuple(sorted(ids))
