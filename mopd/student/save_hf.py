"""Everything of a Hugging Face folder but its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_WEIGHTS = {".safetensors", ".bin", ".pt", ".gguf"}


def copy_settings(source: Path, out: Path, dtype: str) -> None:
    """Copy `source`'s config, tokenizer and other files, but no weights, into `out`.

    The config then says `dtype`. Raises OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        weights = file.suffix in _WEIGHTS or file.name.endswith(".index.json")
        if file.is_file() and not weights:
            shutil.copyfile(file, out / file.name)
    config_file = out / "config.json"
    settings = json.loads(config_file.read_text())
    settings["dtype"] = dtype
    config_file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
