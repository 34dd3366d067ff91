"""A Hugging Face folder as the student sees it: its family, and its weights, both checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mopd.config.schema import StudentConfig
from mopd.errors import ModelError
from mopd.student import expert_bias, parallel
from mopd.student.families import family_of
from mopd.student.families.base import Family
from mopd.student.tensor_files import SafetensorsFolder


def read_settings(folder: Path) -> dict[str, Any]:
    """What the folder's config.json holds. Raises ModelError where that is no JSON object."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{folder}: no config.json there. Expected a Hugging Face checkpoint folder."
        )
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error}).") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{file}: expected a JSON object, got {type(settings).__name__}.")
    return settings


def open_checkpoint(folder: Path) -> tuple[Family, SafetensorsFolder]:
    """The family and the weights of a folder.

    Raises ModelError for a folder without config.json, an unknown family, a setting that is not
    implemented, and tensors that are missing, unexpected, of another shape, or no numbers with a
    fraction.
    """
    family = family_of(read_settings(folder).get("model_type", ""), str(folder))
    from transformers import AutoConfig

    try:
        hf = AutoConfig.from_pretrained(folder)
    except Exception as error:  # of many types: each setting has its own check
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{folder}: transformers refuses its config.json ({said[-1]}).") from error
    opened = family(hf, str(folder))
    source = SafetensorsFolder(folder)
    source.check(opened.shapes(), tied_head=opened.tied)
    return opened, source


def require_trainable(config: StudentConfig) -> None:
    """What a rank would refuse before it loads a weight, found without one.

    Raises ModelError for the checkpoint (`open_checkpoint`), ConfigError for a layout that does not
    divide it and for settings that mean nothing to it.
    """
    try:
        family, _ = open_checkpoint(Path(config.model))
    except ModelError as error:
        raise ModelError(f"student.model: {error}") from error
    expert_bias.check_rate(config, family)
    layout = config.parallel
    parallel.check_layout(
        layout,
        family,
        layout.dp * layout.tp * layout.pp,
        # Where GPUs do the work, they may be in other machines than this one.
        transformer_engine=True if config.gpus_per_rank > 0 else None,
    )
