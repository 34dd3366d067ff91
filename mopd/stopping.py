"""Ctrl-C and SIGTERM: what is finished first, what is left at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping

from mopd.observe.progress import Progress
from mopd.protocols import Evaluator


class StopOnSignal:
    """SIGINT and SIGTERM: the first asks the loop to stop, or ends what is not the loop."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._asked = asyncio.Event()
        self.evaluating = False
        """True while the loop only evaluates: its step is finished, nothing else is in hand."""
        self.finish_step_first = False
        """True while the loop runs: a step in hand is worth finishing and saving."""

    def __enter__(self) -> StopOnSignal:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    @property
    def requested(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        """Returns once the loop has been asked to stop."""
        await self._asked.wait()

    def _on_signal(self) -> None:
        if self.finish_step_first and not self.requested:
            self._asked.set()
            what = "leaving this evaluation" if self.evaluating else "finishing this step"
            self._progress.note(f"stopping: {what} and saving; again to stop at once")
        elif self._task is not None:
            self._progress.note("stopping now")
            self._task.cancel()


class StoppedInEvaluation(Exception):
    """The loop was asked to stop while it evaluated after `step` finished steps."""

    def __init__(self, step: int) -> None:
        super().__init__(f"after step {step}")
        self.step = step


class LeavableEvaluation:
    """An `Evaluator` that a request to stop ends at once, by `StoppedInEvaluation`: evaluations
    take minutes, and whoever stops a run wants its weights, not its score."""

    def __init__(self, evaluator: Evaluator, stop: StopOnSignal) -> None:
        self._evaluator, self._stop = evaluator, stop

    async def evaluate_student(self, step: int) -> Mapping[str, float]:
        self._stop.evaluating = True
        work = asyncio.ensure_future(self._evaluator.evaluate_student(step))
        asked = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise StoppedInEvaluation(step)
            return work.result()
        finally:
            self._stop.evaluating = False
            for task in (work, asked):
                task.cancel()
            await asyncio.gather(work, asked, return_exceptions=True)
