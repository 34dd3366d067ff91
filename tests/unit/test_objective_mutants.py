"""The list of planted faults fits the objective as it is, and covers it."""

from __future__ import annotations

import ast

import pytest

from mutate_objective import MUTANTS, ROOT, Mutant, mutated, read_mutants

FEW = {"state_dict", "load_state_dict"}
LEFT_OUT = {"registry.py"}
"""The lookup of names."""


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return read_mutants(MUTANTS.read_text())


def test_every_fault_can_be_planted_and_is_python(mutants):
    for mutant in mutants:
        source = (ROOT / "mopd" / mutant.file).read_text()
        changed = mutated(source, mutant)
        assert changed != source, mutant
        compile(changed, mutant.file, "exec", ast.PyCF_ONLY_AST)
    assert len(set(mutants)) == len(mutants)


def test_every_function_of_the_objective_has_at_least_four(mutants):
    short = []
    for path in sorted((ROOT / "mopd" / "objective").glob("*.py")):
        if path.name in LEFT_OUT:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            own = [
                m for m in mutants if (m.file, m.function) == (f"objective/{path.name}", node.name)
            ]
            if len(own) < (2 if node.name in FEW else 4):
                short.append(f"{path.name} {node.name}: {len(own)}")
    assert not short, short


def test_a_fault_that_fits_nowhere_or_twice_is_refused():
    source = "def f(x):\n    return x + x\n\n\ndef g(y):\n    return y + 1\n"
    assert mutated(source, Mutant("a.py", "g", "y + 1", "y - 1")).endswith("return y - 1\n")
    for function, before, text in (("f", "x", "3 times"), ("f", "y", "0 times"), ("h", "x", "no")):
        with pytest.raises(ValueError, match=text):
            mutated(source, Mutant("a.py", function, before, "z"))
    for listed in ("- a\n+ b", "@ file\n", "@ a.py f\n+ b", "@ a.py f\n- a\n- b", "nothing"):
        with pytest.raises(ValueError, match=r"line \d"):
            read_mutants(listed)
