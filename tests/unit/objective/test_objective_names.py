"""One table of names for the checks and the functions; refusals say why."""

from __future__ import annotations

import ast
import inspect
import math

import pytest
from objective_cases import REQUIRED, objective, run, tensor
from objective_reference import BAND_DEFAULTS, LOSS_DEFAULTS

from mopd import objective_names as names
from mopd.errors import ConfigError
from mopd.objective.aggregation import SEQUENCE_WEIGHTS
from mopd.objective.inputs import TokenInputs
from mopd.objective.orm import ORM_ESTIMATORS
from mopd.objective.policy_losses import POLICY_LOSSES
from mopd.objective.reference_kl import REFERENCE_KL
from mopd.objective.truncation import TRUNCATIONS


def test_every_name_has_a_function_and_every_function_a_name():
    assert set(names.POLICY_LOSS_SPECS) == set(POLICY_LOSSES)
    assert set(names.TRUNCATION_BOUNDS) == set(TRUNCATIONS)
    assert set(names.AGGREGATIONS) == set(SEQUENCE_WEIGHTS)
    assert set(names.REFERENCE_KLS) == {"none", *REFERENCE_KL}
    assert set(names.ESTIMATORS) == {"reinforce", "ppo_gae", *ORM_ESTIMATORS}


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_reads_the_parameters_it_declares_and_no_other(name):
    """Read from the source: a declared parameter that nobody reads would be accepted in vain."""
    tree = ast.parse(inspect.getsource(inspect.getmodule(POLICY_LOSSES[name])))
    bodies = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    read, queue, seen = set(), [POLICY_LOSSES[name].__name__], set()
    while queue:
        function = queue.pop()
        if function in seen:
            continue
        seen.add(function)
        for node in ast.walk(bodies[function]):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "parameters":
                read.add(ast.literal_eval(node.slice))
            if isinstance(node, ast.Name) and node.id in bodies:
                queue.append(node.id)
    assert read == set(names.POLICY_LOSS_SPECS[name].parameters)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_defaults_are_the_published_ones(name):
    given = REQUIRED.get(name, {})
    assert names.loss_parameters(objective(loss={"name": name, **given}).loss) == {
        **LOSS_DEFAULTS.get(name, {}),
        **given,
    }
    for key in given:
        with pytest.raises(ConfigError, match=rf"objective.loss.{key} is required by .*{name}"):
            names.loss_parameters(objective(loss={"name": name}).loss)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ({"name": "pppo"}, "objective.loss.name is 'pppo'.*did you mean 'ppo'"),
        ({"name": "mopd", "clip_low": 0.1}, "clip_low is 0.1, but the loss 'mopd' does not read"),
        ({"name": "cispo", "clip_high": 0.2, "clip_low": 0.1}, "it reads clip_high"),
        ({"name": "ppo", "clip_low": 1.5}, r"clip_low is 1.5; expected .* in \[0, 1\]"),
        ({"name": "ppo", "clip_high": 0.0}, "clip_high is 0.0; expected .* > 0"),
        ({"name": "sapo", "tau_positive": math.nan}, "tau_positive is nan"),
        ({"name": "kimi", "mu": -1.0}, "mu is -1.0; expected .* >= 0"),
        ({"name": "dppo_tv", "delta": math.inf}, "delta is inf"),
    ],
)
def test_refused_losses(loss, text):
    with pytest.raises(ConfigError, match=text):
        names.loss_parameters(objective(loss=loss).loss)


@pytest.mark.parametrize("kind", sorted(TRUNCATIONS))
def test_bounds_of_each_truncation(kind):
    assert (
        names.truncation_bounds(objective(truncation={"kind": kind}).truncation)
        == (BAND_DEFAULTS[kind])
    )
    for bound, value in (("low", 0.25), ("high", 3.0)):
        config = objective(truncation={"kind": kind, bound: value}).truncation
        if bound in names.TRUNCATION_BOUNDS[kind]:
            assert names.truncation_bounds(config)[("low", "high").index(bound)] == value
        else:
            with pytest.raises(ConfigError, match=f"truncation.{bound} is .*no such bound"):
                names.truncation_bounds(config)


@pytest.mark.parametrize(
    ("truncation", "text"),
    [
        ({"kind": "icepopp"}, "did you mean 'icepop'"),
        ({"low": 6.0}, "low 6.0 and high 5.0; expected 0 <= low <= high"),
        ({"low": -0.1}, "expected 0 <="),
        ({"high": math.nan}, "expected 0 <="),
        ({"low": 0.0, "high": 0.0}, "high > 0"),
        ({"kind": "mis", "high": 0.0}, "high > 0"),
    ],
)
def test_refused_truncations(truncation, text):
    with pytest.raises(ConfigError, match=text):
        names.truncation_bounds(objective(truncation=truncation).truncation)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_which_ratio_the_truncation_takes(name):
    def ratio(kind: str) -> str:
        return names.truncation_ratio(objective(loss={"name": name}, truncation={"ratio": kind}))

    assert ratio("auto") == ("current" if name == "mopd" else "old")
    assert ratio("old") == "old"
    if name in ("mopd", "kimi"):
        assert ratio("current") == "current"
    else:
        with pytest.raises(ConfigError, match="weighed twice"):
            ratio("current")
    with pytest.raises(ConfigError, match="did you mean 'current'"):
        ratio("curent")


def test_an_unknown_loss_is_named_whoever_asks_first():
    with pytest.raises(ConfigError, match="objective.loss.name is 'grpo'"):
        names.truncation_ratio(objective(loss={"name": "grpo"}))


INPUTS = {
    "mask_BT": tensor([[True, True]], dtype=None),
    "sampler_logprobs_BT": tensor([[-1.0, -1.0]]),
    "orm_advantage_B": tensor([0.5]),
}


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({}, ValueError, "teacher_logprobs_BT is missing"),
        ({"teacher": {"signal": "topk"}}, ValueError, "'topk' needs divergence_BT"),
        ({"teacher": {"signal": "toppk"}}, ConfigError, "objective.teacher.signal.*'topk'"),
        ({"teacher": {"weight": 0.0}, "kl": {"kind": "k2"}}, ValueError, "reference_logprobs_BT"),
        ({"teacher": {"weight": 0.0}, "kl": {"kind": "k4"}}, ConfigError, "objective.kl.kind"),
        ({"teacher": {"weight": 0.0}, "aggregation": "prompt"}, ValueError, "group_tokens_B"),
        ({"teacher": {"weight": 0.0}, "aggregation": "tokens"}, ConfigError, "mean 'token'"),
        ({"teacher": {"weight": 0.0}, "denominator": "keep"}, ConfigError, "mean 'kept'"),
        ({"teacher": {"weight": 0.0}, "aggregation": "constant"}, ConfigError, "constant_length"),
        (
            {"teacher": {"weight": 0.0}, "loss": {"name": "dppo_topk", "delta": 0.1}},
            ValueError,
            "student_topk_BTK",
        ),
    ],
)
def test_what_the_objective_needs_is_asked_for_by_name(given, error, text):
    with pytest.raises(error, match=text):
        run([[-1.0, -1.0]], TokenInputs(**INPUTS), objective(**given))


def test_without_a_teacher_nothing_of_it_is_needed():
    loss, gradient, stats = run(
        [[-1.0, -2.0]],
        TokenInputs(**INPUTS),
        objective(teacher={"weight": 0.0}, truncation={"kind": "none"}),
    )
    assert loss == pytest.approx(0.5 * (1 + 2) / 2)
    assert gradient.tolist() == [[-0.25, -0.25]]
    assert stats.reverse_kl_BT is None and stats.gap_BT is None
