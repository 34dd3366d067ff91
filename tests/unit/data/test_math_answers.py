"""C19, and the kinds of fault it stands for: boxes, percent signs, tiny and exact numbers."""

from __future__ import annotations

import threading

import pytest

from mopd.data.math_answers import final_answer, same_mathematics

VERDICTS = [
    # C19
    ("5", r"\boxed{5}", True),
    (r"\boxed{5}", "5", True),
    ("1/2004!", "1/2006!", False),
    ("$1/2004!$", "$1/2006!$", False),
    (r"\boxed{1/2004!}", r"so \boxed{1/2006!}", False),
    ("50", "50%", False),
    ("50", r"$50\%$", False),
    ("50", "so it is 50%", False),
    ("5", r"\boxed{7} wait \boxed{5}", True),
    ("7", r"\boxed{7} wait \boxed{5}", False),
    # the same kinds, elsewhere
    ("1/2004!", "1/2004!", True),
    ("1/2004!", r"\frac{1}{2004!}", True),
    ("1/10!", "1/3628800", True),
    ("1e-9", "2e-9", False),
    ("2^{100}", "1267650600228229401496703205376", True),
    ("2^{100}", "1267650600228229401496703205377", False),
    ("0", "0.0000001", False),
    ("0", "0", True),
    ("5", "5!", False),
    ("120", "5!", True),
    ("50%", "50", False),
    ("50%", r"\boxed{50\%}", True),
    ("0.5", "50%", True),
    ("100%", "1", True),
    ("3", r"\boxed{3", False),
    ("3", r"first \boxed{3}, then \boxed{4", True),
    (r"\boxed{\frac{1}{2}}", r"\boxed{\dfrac12}", True),
    # ordinary answers
    ("1/3", "0.333333", True),
    ("1/3", "0.33", False),
    (r"\sqrt{2}", "1.414214", True),
    (r"\sqrt{8}", r"2\sqrt{2}", True),
    ("x+1", "1+x", True),
    ("x+1", "x+2", False),
    ("3", "x=3", True),
    ("1000", "1,000", True),
    (r"\$5", "$5", True),
    (r"\{1,2\}", r"\{2,1\}", True),
    ("5", "the answer is 5", True),
    ("5", "the answer is 6", False),
    (r"\text{B}", "B", True),
    ("5", "", False),
    ("5", "   ", False),
]


@pytest.mark.parametrize(("reference", "answer", "right"), VERDICTS)
def test_verdict(reference: str, answer: str, right: bool) -> None:
    assert same_mathematics(reference, answer) is right


def test_the_same_in_a_thread() -> None:
    """The library's own deadline is a signal, which only the main thread may set."""
    found: list[object] = []

    def judge() -> None:
        for reference, answer, _ in VERDICTS[:10]:
            try:
                found.append(same_mathematics(reference, answer))
            except BaseException as error:
                found.append(error)

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    assert found == [right for _, _, right in VERDICTS[:10]]


def test_a_reference_that_cannot_be_read_is_no_wrong_answer() -> None:
    with pytest.raises(ValueError, match="is not mathematics"):
        same_mathematics("?", "5")
    assert same_mathematics("?", "?")


@pytest.mark.parametrize(
    ("text", "final"),
    [
        (r"\boxed{a{b}c} d", "a{b}c"),
        (r"\boxed{1} \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        ("none", "none"),
        (r"\boxed{}", ""),
    ],
)
def test_final_answer(text: str, final: str) -> None:
    assert final_answer(text) == final
