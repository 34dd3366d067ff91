"""What Ctrl-C does while the loop trains, evaluates, or has not begun."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest

from mopd.observe.progress import Progress
from mopd.stopping import LeavableEvaluation, StopOnSignal, StoppedInEvaluation


class Evaluator:
    """Takes a while, and says how it ended."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self.ended = takes_s, ""

    async def evaluate_student(self, step: int) -> Mapping[str, float]:
        try:
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        self.ended = "finished"
        return {"d": float(step)}


def run(scenario: Any, *, finish_step_first: bool = True) -> str:
    """Run ``scenario(stop)`` with our signal handlers; what was shown."""
    out = io.StringIO()

    async def main() -> None:
        with Progress(10, ["d"], plain=True, file=out) as progress, StopOnSignal(progress) as stop:
            stop.finish_step_first = finish_step_first
            await scenario(stop)

    asyncio.run(main())
    return out.getvalue()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_evaluation_is_left_at_once_and_names_its_step() -> None:
    evaluator = Evaluator(3600.0)

    async def scenario(stop: StopOnSignal) -> None:
        asyncio.get_running_loop().call_later(0.05, interrupt)
        with pytest.raises(StoppedInEvaluation) as stopped:
            await LeavableEvaluation(evaluator, stop).evaluate_student(7)
        assert stopped.value.step == 7 and stop.requested and not stop.evaluating

    assert "leaving this evaluation and saving" in run(scenario)
    assert evaluator.ended == "cancelled"


def test_undisturbed_it_is_the_evaluation_itself() -> None:
    async def scenario(stop: StopOnSignal) -> None:
        leavable = LeavableEvaluation(Evaluator(0.0), stop)
        assert await leavable.evaluate_student(7) == {"d": 7.0}
        with pytest.raises(ZeroDivisionError):

            class Broken:
                async def evaluate_student(self, step: int) -> Mapping[str, float]:
                    return {"d": step / 0}

            await LeavableEvaluation(Broken(), stop).evaluate_student(7)

    assert run(scenario) == ""


def test_a_step_is_finished_and_a_second_signal_ends_it() -> None:
    async def scenario(stop: StopOnSignal) -> None:
        interrupt()
        await asyncio.sleep(0.01)
        assert stop.requested
        interrupt()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(3600)

    said = run(scenario)
    assert "finishing this step and saving" in said and "stopping now" in said


def test_what_is_not_the_loop_is_ended_at_once() -> None:
    async def scenario(stop: StopOnSignal) -> None:
        interrupt()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(3600)
        assert not stop.requested

    assert "stopping now" in run(scenario, finish_step_first=False)
