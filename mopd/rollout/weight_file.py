"""A safetensors file as it lies in memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mopd.errors import ModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}


class WeightFile:
    """Its tensors as views of the mapped file: what is written into it later is seen."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a file that is missing, truncated or not safetensors."""
        self.path = path
        try:
            found = path.stat()
            self._identity = (found.st_dev, found.st_ino, found.st_size)
            # shared: a private mapping need not see what others write.
            self._bytes = torch.from_file(
                str(path), shared=True, size=found.st_size, dtype=torch.uint8
            )
            start = 8 + int.from_bytes(self._bytes[:8].numpy().tobytes(), "little")
            self.header = self._bytes[:start].clone()
            if start > found.st_size:
                raise ValueError(f"its header should have {start} bytes of {found.st_size}")
            entries = json.loads(self.header[8:].numpy().tobytes())
            entries.pop("__metadata__", None)
            self.tensors = {
                name: self._bytes[start + entry["data_offsets"][0] : start + end]
                .view(_DTYPES[entry["dtype"]])
                .view(entry["shape"])
                for name, entry in sorted(entries.items(), key=lambda e: e[1]["data_offsets"])
                for end in [entry["data_offsets"][1]]
            }
            """In the order in which they lie in the file."""
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path}: not a readable safetensors file ({error})") from error
        self.body = self._bytes[start:]
        """Everything behind the header."""

    def is_still(self, path: Path) -> bool:
        """Whether `path` is this very file, and has the tensors that it had."""
        if path != self.path:
            return False
        try:
            found = path.stat()
        except OSError:
            return False
        return self._identity == (found.st_dev, found.st_ino, found.st_size) and torch.equal(
            self._bytes[: len(self.header)], self.header
        )

    def manifest(self) -> dict[str, tuple[int, ...]]:
        """name -> shape."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
