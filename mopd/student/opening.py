"""A Hugging Face folder as the student sees it: its family, and its weights, both checked."""

from __future__ import annotations

import json
from pathlib import Path

from mopd.errors import ModelError
from mopd.student.families import family_of
from mopd.student.families.base import Family
from mopd.student.weights import SafetensorsFolder


def open_checkpoint(folder: Path) -> tuple[Family, SafetensorsFolder]:
    """The family and the weights of a folder.

    Raises ModelError for a folder without config.json, an unknown family, a setting that is not
    implemented, and tensors that are missing, unexpected or of another shape.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"student.model {str(folder)!r}: no config.json there. Expected a Hugging Face "
            "checkpoint folder."
        )
    from transformers import AutoConfig

    model_type = json.loads((folder / "config.json").read_text()).get("model_type", "")
    family = family_of(model_type, str(folder))(AutoConfig.from_pretrained(folder), str(folder))
    source = SafetensorsFolder(folder)
    source.check(family.shapes(), tied_head=family.tied)
    return family, source
