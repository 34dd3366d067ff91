"""Prompt text to token ids, once, with at most one beginning-of-sequence id.

Two ways lead to a second one: a chat template that writes it, and text that already holds it. A
third fault is a tokenizer that ends every text with its end-of-sequence id: the student would be
asked to go on after the end. So special ids are put on here, the leading ones only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mopd.errors import ConfigError, DataError


class PromptEncoder:
    """Encodes with one tokenizer; `chat` renders through its chat template first."""

    def __init__(self, tokenizer: Any, *, chat: bool, where: str = "prompts.chat") -> None:
        """tokenizer: transformers' interface. ConfigError if `chat` without a template."""
        self._tokenizer = tokenizer
        self._chat = chat
        self._where = where
        if chat and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"{where} is true, but the student's tokenizer has no chat template; "
                "set it to false, or use a tokenizer that has one"
            )
        self._prefix = () if chat else leading_special_ids(tokenizer)

    def encode(
        self, prompts: Sequence[str | list[dict[str, Any]]]
    ) -> list[tuple[str, tuple[int, ...]]]:
        """(text, [P] ids) of each prompt; a plain text is one user message where `chat` is on."""
        if not prompts:
            return []
        return self._encoded([self._render(prompt) for prompt in prompts])

    def _encoded(self, texts: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        bos = self._tokenizer.bos_token_id
        result = []
        for text, ids in zip(texts, encoded, strict=True):
            ids = self._prefix + tuple(ids)
            while bos is not None and ids[:2] == (bos, bos):
                ids = ids[1:]
            result.append((text, ids))
        return result

    def encode_pair(
        self, context: str | list[dict[str, Any]], continuation: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """([P] ids of the context, [C] ids of the continuation after it).

        Encoded together and cut where the context ends, its trailing blanks put to the
        continuation: so lm-evaluation-harness does it, and so a word keeps its own token.

        Raises:
            DataError: the continuation has no tokens of its own.
        """
        text = self._render(context)
        bare = text.rstrip()
        ((_, whole),) = self._encoded([text + continuation])
        ((_, first),) = self._encoded([bare])
        if not first or len(whole) <= len(first):
            raise DataError(
                f"the choice {continuation!r} after {bare[-40:]!r} has no tokens of its own"
            )
        return whole[: len(first)], whole[len(first) :]

    def _render(self, prompt: str | list[dict[str, Any]]) -> str:
        if not self._chat:
            if not isinstance(prompt, str):
                raise ConfigError(f"{self._where} must be true for a list of messages")
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like for roles they refuse
            raise DataError(
                f"{self._where}: the tokenizer's chat template refuses {messages}: {error}"
            ) from error
        assert isinstance(text, str)
        return text


def leading_special_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids the tokenizer itself puts before a text (its BOS, usually; often none)."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
