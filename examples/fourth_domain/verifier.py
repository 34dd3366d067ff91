"""A user's own verifier: any function of a prompt and an answer."""

from mopd.types import Prompt, Verdict


def spelled_backward(prompt: Prompt, answer: str) -> Verdict:
    """Exact when the whole word comes out backwards; partial credit for letters in place.

    ``prompt.metadata`` holds the other fields of the prompt's JSONL row.
    """
    wanted = prompt.metadata["word"][::-1]
    in_place = sum(a == b for a, b in zip(answer, wanted, strict=False))
    return Verdict(correct=answer == wanted, score=in_place / max(len(wanted), len(answer), 1))
