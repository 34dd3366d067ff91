"""The models of an evaluation: base, teachers, student, and any folder or URL beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mopd.build import Prepared
from mopd.config.model_files import folder_problem
from mopd.config.schema import RolloutConfig
from mopd.config.teachers import members_of
from mopd.data.prompts import load_domain
from mopd.errors import ConfigError, ModelError
from mopd.evaluation.fingerprints import endpoint_fingerprint, model_fingerprint
from mopd.evaluation.openai_models import Asked
from mopd.inputs import load_sets
from mopd.model_folders import load_tokenizer, teacher_folders
from mopd.types import Prompt
from mopd_teachers.errors import TeacherError as ServerError
from mopd_teachers.tokenizer_check import explain_difference, tokenizer_fingerprint


@dataclass(frozen=True)
class ModelUnderTest:
    """One model, the sets it answers, and where it is."""

    label: str
    role: str
    """base, teacher, student or other."""
    where: str
    """A folder, or URLs."""
    fingerprint: str
    sets: Mapping[str, Sequence[Prompt]]
    """The sets' prompts as this model's tokenizer has them."""
    tokenizer: Any
    engine: RolloutConfig
    dtype: str
    folder: Path | None = None
    endpoints: tuple[str, ...] = ()
    """vLLM servers that are asked by token ids (a configured teacher's)."""
    served: str | None = None
    texts: Mapping[str, Asked] | None = None
    """Item id -> what an OpenAI-compatible server is sent."""
    same_tokens: bool = True
    """Whether its token ids are the student's."""

    @property
    def scores(self) -> bool:
        """Whether it can give logprobs of another model's tokens."""
        return self.same_tokens and (self.folder is not None or bool(self.endpoints))

    def describe(self) -> dict[str, Any]:
        return {"role": self.role, "where": self.where, "fingerprint": self.fingerprint}


def models_under_test(
    prepared: Prepared, student: str | None, others: Mapping[str, str]
) -> tuple[list[ModelUnderTest], list[str]]:
    """Every model in the order in which they are asked (the student first: others score it).

    Returns the models and warnings.

    Raises:
        ConfigError, ModelError: a name is taken, or a place is neither a checkpoint nor a URL.
    """
    config = prepared.config
    warnings: list[str] = []
    held_out = prepared.evaluated()
    folders = teacher_folders(config)
    used = dict.fromkeys(
        member
        for domain in config.domains.values()
        for member in members_of(config, domain.teacher)
    )
    base = model_in_folder(prepared, "base", "base", Path(config.student.model), held_out)
    models = [] if student is None else [_any(prepared, "student", "student", student, warnings)]
    models.append(base)
    for name in used:
        teacher = config.teachers[name]
        label = f"teacher {name}"
        if teacher.endpoints:
            fingerprint = endpoint_fingerprint(" ".join(sorted(teacher.endpoints)), teacher.model)
            models.append(
                replace(
                    base,
                    label=label,
                    role="teacher",
                    where=", ".join(teacher.endpoints),
                    fingerprint=fingerprint,
                    folder=None,
                    endpoints=tuple(teacher.endpoints),
                    served=teacher.model,
                )
            )
            continue
        engine = replace(
            config.rollout,
            threads_per_engine=teacher.threads,
            gpus_per_engine=teacher.gpus,
            kv_cache_gib=teacher.kv_cache_gib,
        )
        own = model_in_folder(prepared, label, "teacher", folders[name], held_out)
        models.append(replace(own, engine=engine, dtype=teacher.dtype))
        warnings += _template_warnings(prepared, label, own.tokenizer)
    taken = {model.label for model in models}
    for name, where in others.items():
        if name in taken or name in ("student", "base"):
            raise ConfigError(
                f"the model name {name!r} is taken; taken are {sorted(taken | {'student'})}"
            )
        models.append(_any(prepared, name, "other", where, warnings))
        taken.add(name)
    return models, warnings


def model_in_folder(
    prepared: Prepared,
    label: str,
    role: str,
    folder: Path,
    sets: Mapping[str, Sequence[Prompt]],
    tokenizer: Any = None,
    same_tokens: bool = True,
) -> ModelUnderTest:
    """A checkpoint that is served as the run serves its student."""
    return ModelUnderTest(
        label=label,
        role=role,
        where=str(folder),
        fingerprint=model_fingerprint(folder),
        sets=sets,
        tokenizer=load_tokenizer(folder) if tokenizer is None else tokenizer,
        engine=prepared.config.rollout,
        dtype=prepared.config.student.dtype,
        folder=folder,
        same_tokens=same_tokens,
    )


def _any(
    prepared: Prepared, label: str, role: str, where: str, warnings: list[str]
) -> ModelUnderTest:
    """A model by folder or URL; one with a tokenizer of its own is asked in its own tokens."""
    if where.startswith(("http://", "https://")):
        url, _, served = where.partition("#")
        return ModelUnderTest(
            label=label,
            role=role,
            where=where,
            fingerprint=endpoint_fingerprint(url, served or None),
            sets=prepared.held_out(),
            tokenizer=prepared.tokenizer,
            engine=prepared.config.rollout,
            dtype=prepared.config.student.dtype,
            served=served or None,
            texts=_texts(prepared),
            same_tokens=False,
        )
    folder = Path(where)
    if problem := folder_problem(folder):
        raise ModelError(f"{label}: {problem}; expected a Hugging Face folder or http://HOST:PORT")
    try:
        theirs = tokenizer_fingerprint(folder)
        difference = explain_difference(
            tokenizer_fingerprint(Path(prepared.config.student.model)), theirs
        )
    except ServerError as error:
        raise ModelError(f"{label}: {error}") from error
    tokenizer = load_tokenizer(folder)
    if difference is None:
        warnings += _template_warnings(prepared, label, tokenizer)
        return model_in_folder(prepared, label, role, folder, prepared.evaluated(), tokenizer)
    warnings.append(
        f"{label} ({folder}): its tokenizer is not the student's ({difference}); it is asked in "
        "its own tokens and compared by its answers alone"
    )
    sets = _sets_for(prepared, tokenizer)
    return model_in_folder(prepared, label, role, folder, sets, tokenizer, same_tokens=False)


def _sets_for(prepared: Prepared, tokenizer: Any) -> dict[str, Sequence[Prompt]]:
    """Every held-out set in another model's tokens, through its own chat template where it has
    one; the items are the same, by id."""
    config = prepared.config
    domains = {
        name: load_domain(name, domain, tokenizer, known_domains=list(config.domains))
        for name, domain in config.domains.items()
    }
    return {n: data.held_out for n, data in {**domains, **load_sets(config, tokenizer)}.items()}


def _texts(prepared: Prepared) -> dict[str, Asked]:
    """What a server by URL is sent: the prompt's own text, or a chat that its own template renders.

    Raises:
        ConfigError: a chat's prompts cannot be had without a template.
    """
    texts: dict[str, Asked] = {}
    judged = prepared.judged()
    for name, prompts in prepared.held_out().items():
        cfg = judged[name]
        if not cfg.prompts.chat:
            texts |= {prompt.id: prompt.text for prompt in prompts}
            continue
        rows = {p.id: p.metadata.get("messages") for p in prompts}
        if not all(rows.values()):
            bare = replace(cfg, prompts=replace(cfg.prompts, chat=False))
            data = load_domain(name, bare, prepared.tokenizer)
            plain = {p.id: p.text for p in (*data.train, *data.held_out)}
            rows = {id: own or [{"role": "user", "content": plain[id]}] for id, own in rows.items()}
        texts |= {id: own for id, own in rows.items() if own}
    return texts


def _template_warnings(prepared: Prepared, label: str, tokenizer: Any) -> list[str]:
    chats = [n for n, cfg in prepared.judged().items() if cfg.prompts.chat]
    own = getattr(prepared.tokenizer, "chat_template", None)
    if not chats or getattr(tokenizer, "chat_template", None) == own:
        return []
    return [
        f"{label}: its chat template is not the student's; on {', '.join(chats)} it reads prompts "
        "as the student's template writes them, as it does in training, which may cost it points"
    ]
