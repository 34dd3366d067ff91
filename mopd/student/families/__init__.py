"""Model families by Hugging Face ``model_type``. A new one is a file and a line here."""

from __future__ import annotations

from mopd.errors import ModelError
from mopd.student.families.base import Family
from mopd.student.families.deepseek_v3 import DeepseekV3
from mopd.student.families.llama import Llama
from mopd.student.families.mixtral import Mixtral
from mopd.student.families.qwen3 import Qwen3
from mopd.student.families.qwen3_moe import Qwen3Moe

FAMILIES: dict[str, type[Family]] = {
    "deepseek_v3": DeepseekV3,
    "llama": Llama,
    "mixtral": Mixtral,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}


def family_of(model_type: str, where: str) -> type[Family]:
    """The family of a checkpoint; raises ModelError naming the known ones."""
    try:
        return FAMILIES[model_type]
    except KeyError:
        raise ModelError(
            f"{where}: model_type {model_type!r} cannot be trained; known are "
            f"{', '.join(sorted(FAMILIES))}. Choose such a checkpoint for student.model, or add "
            "the family under mopd/student/families/."
        ) from None
