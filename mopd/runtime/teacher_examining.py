"""A configured teacher put to the test: with which ids, how strictly, and against what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mopd.config.model_files import read_model_limits
from mopd.config.schema import TeacherConfig
from mopd.runtime.teacher_actor import wait_of
from mopd_teachers.client import TeacherClient
from mopd_teachers.examination import Finding, Reference, examine
from mopd_teachers.scores import ScoreItem

FLOAT32_TOLERANCE = 2e-3
OTHER_TOLERANCE = 0.3
"""Nats between two scores of the same tokens: in half precision another batch shape is another
rounding, of tenths of a nat where a router's choice hangs on it. Of servers that run elsewhere
nobody here knows the precision."""
COMPARE_UP_TO_GIB = 2.0


async def examined(
    client: TeacherClient,
    teacher: TeacherConfig,
    folder: Path | None,
    student: Path,
    told: Callable[[str], None],
) -> list[Finding]:
    """What `examine` finds; raises TeacherError (of mopd_teachers) when it does not answer.

    folder: the teacher's checkpoint, where it is on this machine.
    told: hears of external servers that are waited for while they load.
    """
    exact = teacher.dtype == "float32" and not teacher.endpoints
    return await examine(
        client,
        # Ids past the tokenizer are in no sample; in padded models their rows are noise.
        vocabulary=read_model_limits(folder or student).vocab_size,
        tolerance=FLOAT32_TOLERANCE if exact else OTHER_TOLERANCE,
        reference=None if folder is None else _reference(folder),
        wait_s=wait_of(teacher),
        told=told,
    )


def _reference(folder: Path) -> Reference | None:
    """The checkpoint's own logprobs by transformers; None when it is too large to load here."""
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    if not size or size > COMPARE_UP_TO_GIB * 2**30:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(item: ScoreItem) -> list[float]:
        ids = torch.tensor([[*item.prompt_ids, *item.response_ids]])
        with torch.no_grad():
            rows = model(ids).logits[0, len(item.prompt_ids) - 1 : -1].log_softmax(-1)
        picked = rows.gather(1, torch.tensor(list(item.response_ids))[:, None])[:, 0]
        return picked.tolist()  # type: ignore[no-any-return]

    return logprobs
