"""Tasks of lm-evaluation-harness as evaluation sets, through its own API.

The harness makes the prompts (its template, its few-shot examples) here; what it says of the
answers is asked in `mopd.data.harness_scoring`.

Imports lm_eval only when such a task is really asked for; it is not a dependency (extra
``lm-eval``). Written against lm_eval 0.4.13.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mopd.config.schema import PromptsConfig
from mopd.config.wording import nearest
from mopd.errors import ConfigError

FEWSHOT_SEED = 1234
"""The harness' own default, so that its examples are those of published numbers."""
DEFAULT_TOKENS = 256
"""What the harness allows an answer where the task says nothing."""


@dataclass(frozen=True)
class HarnessItem:
    """One document of a task, as the harness asks it.

    Example: ``HarnessItem(0, "Question: 1+1?\\nAnswer:", "1+1?", "2", ("\\n",), {...})``.
    """

    number: int
    """Its place in the task's evaluation split."""
    prompt: str | list[dict[str, Any]]
    """Text, or a chat's messages, few-shot examples included."""
    question: str | None
    """The document alone, without examples: what a training prompt may be equal to."""
    answer: str | None
    """The target as text; None where the task has several, or none in words."""
    stop: tuple[str, ...]
    """Texts at which the harness ends an answer."""
    metadata: Mapping[str, Any]
    choices: tuple[tuple[str | list[dict[str, Any]], str], ...] = ()
    """(context, continuation) of the texts whose likelihoods are compared; empty where the task is
    answered in text."""


def load_task(prompts: PromptsConfig, where: str) -> Any:
    """The harness' task object, with its documents.

    Args:
        where: the place in the configuration, for messages, such as ``evaluation.general.gsm``.

    Raises:
        ConfigError: the package or the data is missing, there is no such task, or it is of a kind
            that is not asked here; says which and why.
    """
    assert prompts.lm_eval is not None
    return _load(prompts.lm_eval, prompts.lm_eval_folder, prompts.fewshot, where)


@cache
def _load(name: str, folder: str | None, fewshot: int | None, where: str) -> Any:
    at = f"{where}.prompts.lm_eval"
    try:
        manager = _manager(folder)
    except ImportError as error:
        raise ConfigError(
            f"{at}: {name!r} needs lm-evaluation-harness, which does not import here ({error}); "
            "install the extra: pip install 'mopd[lm-eval]' (or 'lm-eval==0.4.13')"
        ) from error
    except Exception as error:  # a broken task file raises whatever YAML or jinja raise
        raise ConfigError(
            f"{where}.prompts.lm_eval_folder {folder}: the harness cannot read it: {error}"
        ) from error
    if name not in manager.all_subtasks:
        kind = "a group of tasks" if name in manager.all_tasks else "no task"
        hint = "; name one of its tasks" if name in manager.all_tasks else ""
        raise ConfigError(
            f"{at}: {name!r} is {kind} of the harness{hint or nearest(name, manager.all_subtasks)}"
        )
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars; faults are raised
            task = manager.load([name])["tasks"][name]
    except Exception as error:  # datasets and task code raise what they like
        raise ConfigError(
            f"{at}: {name!r} cannot be loaded: {type(error).__name__}: {error}; its data must be "
            "on this machine (a run fetches nothing by itself), as files that the task names or in "
            "the Hugging Face cache"
        ) from error
    if reason := refusal(task):
        raise ConfigError(f"{at}: {name!r} {reason}")
    if fewshot is not None:
        task.set_config("num_fewshot", fewshot)
    return task


@cache
def _manager(folder: str | None) -> Any:
    """The harness' index of its tasks and of those in `folder`; reading it takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder)


def refusal(task: Any) -> str | None:
    """Why a task cannot be asked here, or None."""
    kind = task.get_config("output_type") or task.OUTPUT_TYPE
    if kind not in ("generate_until", "multiple_choice"):
        return (
            f"is of the kind {kind}, which has no right and wrong by the item that retention could "
            "be taken of (perplexity), or wants to know what would be sampled; run the harness "
            "itself on RUN/student"
        )
    if "acc_mutual_info" in task.aggregation():
        return (
            "compares with likelihoods without a context (acc_mutual_info); take that metric out "
            "of a copy of the task"
        )
    if getattr(task, "MULTIMODAL", False):
        return "asks about images or sounds; only text is asked here"
    if getattr(task, "UNSAFE_CODE", False):
        return (
            "runs code that models write; run the harness itself on RUN/student, in a sandbox "
            "(--confirm_run_unsafe_code)"
        )
    if (repeats := task.get_config("repeats") or 1) > 1:
        return (
            f"wants {repeats} sampled answers an item (repeats) for one score; here every answer "
            "is judged by itself. Set repeats: 1 in a copy of the task, and evaluation.samples"
        )
    return None


def harness_items(task: Any, *, chat: bool) -> list[HarnessItem]:
    """Every document of the task's evaluation split, as the harness asks it.

    Args:
        chat: messages instead of text, few-shot examples as turns of their own (the harness'
            default for chats).

    Raises:
        ConfigError: a prompt ends with words put into the assistant's mouth (gen_prefix).
    """
    # The sampler is drawn from document by document: seeded anew, so that the prompts are the
    # same in every process that makes them.
    task.set_fewshot_seed(FEWSHOT_SEED)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        task.build_all_requests(
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            chat_template=_as_messages if chat else None,
        )
    generation = task.get_config("generation_kwargs") or {}
    until = generation.get("until") or []
    about = {
        "task": task.get_config("task"),
        "version": str(task.VERSION),
        "harness": importlib.metadata.version("lm_eval"),
    }
    by_document: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_document.setdefault(int(instance.doc_id), []).append(instance)
    items = []
    for number, instances in by_document.items():
        doc = instances[0].doc
        contexts = [_context(each.args[0], chat, str(about["task"])) for each in instances]
        choosing = instances[0].request_type == "loglikelihood"
        metadata: dict[str, Any] = {"lm_eval": about, "doc": doc}
        if chat:
            metadata["messages"] = contexts[0]
        question, target = task.doc_to_text(doc), task.doc_to_target(doc)
        pairs = [(c, each.args[1]) for c, each in zip(contexts, instances, strict=True)]
        items.append(
            HarnessItem(
                number=number,
                prompt=contexts[0],
                question=question if isinstance(question, str) else None,
                answer=target if isinstance(target, str) and not choosing else None,
                stop=() if choosing else tuple([until] if isinstance(until, str) else until),
                metadata=metadata,
                choices=tuple(pairs) if choosing else (),
            )
        )
    return items


def _context(text: str, chat: bool, task: str) -> str | list[dict[str, Any]]:
    """The text, or the messages that `_as_messages` wrote."""
    if not chat:
        return text
    messages = json.loads(text)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{task}: its prompts begin the answer themselves (gen_prefix), which a chat template "
            "that opens the answer cannot follow; set prompts.chat to false"
        )
    return messages


def _as_messages(messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
    """Stands in for a chat template: what it would be given, to be rendered by ours."""
    return json.dumps([dict(message) for message in messages])


def generation_notes(task: Any) -> list[str]:
    """What the task says of how answers are made, and is done otherwise here."""
    where = f"lm_eval {task.get_config('task')}"
    if task.get_config("output_type") == "multiple_choice":
        return [f"{where}: compares likelihoods of given choices; asked by mopd evaluate alone"]
    generation = dict(task.get_config("generation_kwargs") or {})
    tokens = generation.get("max_gen_toks", DEFAULT_TOKENS)
    notes = [
        f"{where}: the harness allows {tokens} tokens an answer; here rollout.max_response_tokens "
        "is the limit"
    ]
    if generation.get("do_sample") or generation.get("temperature"):
        notes.append(f"{where}: the task samples its answers; here they are greedy")
    return notes
