"""Mathematical equality of an answer and its reference: math-verify, with its known faults mended.

math-verify 0.9.0 as it comes, on the inputs of CASES C19:
- several boxes are read as one set, so ``\\boxed{7} wait \\boxed{5}`` is {5, 7}: here the last box
  that is complete is the answer;
- ``50`` equals ``50%``, because it compares with and without the sign: here the sign divides by
  100, once, and both sides are compared as values;
- ``1/2004!`` equals ``1/2006!``, because differences are rounded at an absolute 6 decimals: here
  exact values must be exactly equal, and decimals also agree to 4 significant digits;
- ``5!`` outside of math delimiters is read as 5: here an answer without words is all mathematics.
Its timeouts, which need SIGALRM and so the main thread, are off; the caller keeps the deadline.
"""

from __future__ import annotations

import logging
import re
from typing import Any

_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_DELIMITERS = ("$", "\\(", "\\[", "\\begin{")
_TEXT = re.compile(r"^\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}$")
DECIMAL_TOLERANCE = 1e-4
"""Relative, where at least one side is a decimal fraction."""


def same_mathematics(reference: str, answer: str) -> bool:
    """Whether `answer`'s final answer equals `reference`.

    An answer in which nothing can be read is wrong. ValueError if the reference cannot be read.
    """
    wanted, given = final_answer(reference), final_answer(answer)
    if wanted and _bare(wanted) == _bare(given):
        return True
    import math_verify  # slow to import (sympy), and only some domains need it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that timeouts are off
    gold = _parse(wanted, math_verify, boxed=True)
    if not gold:
        raise ValueError(f"the reference answer {reference!r} is not mathematics")
    target = _parse(given, math_verify, boxed=given != answer)
    if not target:
        return False
    equal = math_verify.verify(gold, target, timeout_seconds=None, raise_on_error=True)
    return bool(equal) and not any(_far_apart(a, b) for a in gold[:1] for b in target[:1])


def final_answer(text: str) -> str:
    """The content of the last complete ``\\boxed{...}``, or the text itself where there is none."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        for index in range(start + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : index]
        end = start
    return text


def _bare(text: str) -> str:
    text = text.strip().strip("$").strip()
    match = _TEXT.match(text)
    return (match.group(1) if match else text).strip()


def _parse(text: str, math_verify: Any, *, boxed: bool) -> list[Any]:
    """sympy values read from `text` (not its fallback strings), percent signs carried out."""
    text = text.replace("\\$", "")  # dollars of money are no delimiters
    delimited = any(mark in text for mark in _DELIMITERS)
    if not delimited and (boxed or not _WORD.search(text)):
        text = f"${text.strip()}$"
    found = math_verify.parse(text, parsing_timeout=None)
    # The library keeps 50% as an unevaluated 50 * 1/100, and undoes it when comparing.
    return [_evaluated(each) for each in found if not isinstance(each, str)]


def _evaluated(value: Any) -> Any:
    import sympy  # type: ignore[import-untyped]

    if not (isinstance(value, sympy.Expr) and value.is_number) or value.has(sympy.factorial):
        # A factorial carried out may have thousands of digits, and its quotient none.
        return value
    return value.doit()


def _far_apart(a: Any, b: Any) -> bool:
    """Whether two numbers that the library calls equal are not; False for all else."""
    import sympy  # type: ignore[import-untyped]

    numbers = isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)
    if not numbers or not (a.is_number and b.is_number):
        return False
    if a == b:
        return False
    tolerance = DECIMAL_TOLERANCE if a.has(sympy.Float) or b.has(sympy.Float) else 1e-12
    scale = sympy.Max(sympy.Abs(a), sympy.Abs(b)).evalf(30)
    if scale == 0:
        return False
    return bool(sympy.Abs((a - b) / scale).evalf(30) > tolerance)
