"""What a run shows while it runs: a live display on a terminal, plain lines anywhere else.

Calls may come from any thread; they are made one after another under a lock of ours. rich draws
from a thread of its own and under a lock of its own, so drawing must not ask for ours (it would
wait for a call that waits for it). It needs no lock: what it reads is replaced, never changed.

Nothing that goes wrong in here may end a run: a method that fails turns the display off, says so
once in the log, and every later call does nothing.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mopd.observe.wording import domain_cells, duration, rates, robust_mean, teacher_states

P = ParamSpec("P")
logger = logging.getLogger(__name__)
RECENT = 20  # steps that the estimate of the remaining time looks back on


def _guarded(
    method: Callable[Concatenate[Progress, P], None],
) -> Callable[Concatenate[Progress, P], None]:
    """Run under the lock; a failure of the display ends the display, never the caller."""

    @functools.wraps(method)
    def guarded(self: Progress, /, *args: P.args, **kwargs: P.kwargs) -> None:
        with self._lock:
            if self._broken:
                return
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                self._give_up(error)

    return guarded


class _Console(Console):
    """rich ends the process when its terminal has gone away; a run goes on without one."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the terminal has gone away")


class Progress:
    """The display of one run; a context manager.

    Args:
        total_steps: of the whole run; 0: there are no steps to show (an evaluation).
        domains: in the order to show them.
        plain: True for plain lines, False for the live display, None: live if `file` is a terminal.
        first_step: steps already done when a resumed run goes on.
        min_interval_s: plain lines of steps come no faster than this (the last one always comes),
            nor do those of evaluations; neither holds the other back.
        heartbeat_s: plain: how long silence may last while something is waited for.
        file: where to write; None is stdout as it is at `__enter__`.
    """

    def __init__(
        self,
        total_steps: int,
        domains: Sequence[str],
        plain: bool | None = None,
        *,
        first_step: int = 0,
        min_interval_s: float = 2.0,
        heartbeat_s: float = 15.0,
        file: Any = None,
    ) -> None:
        self._total = total_steps
        self._domains = tuple(domains)
        self._plain_wanted = plain
        self._plain = True
        self._min_interval_s = min_interval_s
        self._heartbeat_s = heartbeat_s
        self._file = file
        self._lock = threading.RLock()
        self._broken = False
        self._warned: list[str] = []
        self._warnings_path: Path | None = None
        self._began = self._now()
        self._console: Console | None = None
        self._live: Live | None = None
        self._closing = threading.Event()
        self._heart: threading.Thread | None = None
        self._step = first_step
        self._metrics: dict[str, Any] = {}
        self._step_times: tuple[float, ...] = ()
        self._last_step_at: float | None = None
        self._waiting: dict[str, float] = {}  # what -> since when
        self._stage: tuple[str, float] | None = None
        self._evaluation: tuple[str, int, int] | None = None
        self._last_line_at = -1e9  # of any kind: when silence began
        self._due_at = {"step": -1e9, "evaluation": -1e9}  # when the next plain line of a kind may

    # --- what the loop calls ---

    @_guarded
    def waiting(self, what: Collection[str]) -> None:
        """Start-up: all that is being waited for now; call again as the set shrinks."""
        now = self._now()
        before = dict(self._waiting)
        self._waiting = {name: before.get(name, now) for name in sorted(what)}
        for name in before:
            if name not in self._waiting:
                self._print(f"ready: {name} ({duration(now - before[name])})")
        # Parts join one by one within a moment: who joins shows with the next line or heartbeat.
        news = not before or before.keys() - self._waiting.keys()
        if news and self._waiting and self._plain:
            self._print(self._waiting_line(self._waiting))

    @_guarded
    def begin(self, first_step: int) -> None:
        """The loop starts, `first_step` steps being done already (0, or those before a resume)."""
        self._waiting = {}
        self._step = first_step
        self._last_step_at = self._now()

    @_guarded
    def stage(self, name: str) -> None:
        """What the step does now: generate, score, train, sync, evaluate, checkpoint, ..."""
        self._stage = (name, self._now())
        if not name.startswith("evaluate"):
            self._evaluation = None

    @_guarded
    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step number `step` (the first is 1) is done; metrics named as in `mopd.observe.metrics`.

        Its time is ``time/step_s`` if given, else the time since the step before. Rates are
        ``samples_per_s`` and ``tokens_per_s``, or else ``samples`` and ``tokens`` over that time.
        """
        now = self._now()
        taken = metrics.get("time/step_s")
        if taken is None and self._last_step_at is not None:
            taken = now - self._last_step_at
        if taken is not None:
            self._step_times = (*self._step_times, float(taken))[-RECENT:]
        self._last_step_at = now
        self._step, self._metrics = step, dict(metrics)
        if self._plain and self._due("step", last=step >= self._total):
            self._print(self._step_line())

    @_guarded
    def evaluation(self, what: str, done: int, total: int) -> None:
        """How far an evaluation is, e.g. ``("student spell", 120, 200)``."""
        self._evaluation = (what, done, total)
        if self._plain and self._due("evaluation", last=done >= total):
            self._print(f"evaluate {what}: {done}/{total}")

    @_guarded
    def note(self, text: str) -> None:
        """A line that stays."""
        self._print(text)

    def warn(self, text: str) -> None:
        """A line that stays and stands out, and is kept once it is known where."""
        self._warned.append(text)
        self._write_warnings()
        self._show_warning(text)

    @_guarded
    def _show_warning(self, text: str) -> None:
        self._print(f"warning: {text}", style="bold yellow")

    def keep_warnings(self, path: Path) -> None:
        """Append every warning so far, and from now on, to `path`: one ``{"text": ...}`` a line."""
        self._warnings_path = path
        self._write_warnings()

    def _write_warnings(self) -> None:
        if self._warnings_path is None or not self._warned:
            return
        with self._warnings_path.open("a", encoding="utf-8") as file:
            for text in self._warned:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        self._warned.clear()

    # --- context ---

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._heart is not None and self._heart is not threading.current_thread():
            self._heart.join(timeout=2)
        with self._lock:
            self._waiting, self._stage, self._evaluation = {}, None, None
            self._stop_live()

    @_guarded
    def _start(self) -> None:
        file = sys.stdout if self._file is None else self._file
        is_terminal = bool(getattr(file, "isatty", lambda: False)())
        self._plain = not is_terminal if self._plain_wanted is None else self._plain_wanted
        if self._plain:
            self._file = file
            self._heart = threading.Thread(target=self._beat, name="progress", daemon=True)
            self._heart.start()
        else:
            self._console = _Console(file=file, force_terminal=True)
            self._live = Live(
                get_renderable=self._render_guarded, console=self._console, refresh_per_second=4
            )
            self._live.start()

    def _give_up(self, error: Exception) -> None:
        """Called under the lock."""
        self._broken = True
        self._closing.set()
        logger.warning("the progress display failed and is off for the rest of the run: %r", error)
        self._stop_live()

    def _stop_live(self) -> None:
        """Also when the display has failed: rich must give stdout and stderr back."""
        live, self._live = self._live, None
        if live is None:
            return
        try:
            live.stop()
        except Exception as error:
            logger.debug("stopping the display failed: %r", error)

    # --- plain lines ---

    def _now(self) -> float:
        return time.monotonic()

    def _due(self, kind: str, *, last: bool) -> bool:
        """Whether a plain line of this kind may come now; if so, the next one waits."""
        now = self._now()
        if now < self._due_at[kind] and not last:
            return False
        self._due_at[kind] = now + self._min_interval_s
        return True

    def _print(self, text: str, style: str = "") -> None:
        if self._console is not None:
            self._console.print(Text(text, style=style))
        else:
            file = sys.stdout if self._file is None else self._file
            file.write(text + "\n")
            file.flush()
        self._last_line_at = self._now()

    def _beat(self) -> None:
        while not self._closing.wait(min(1.0, self._heartbeat_s / 2)):
            self._say_what_is_waited_for()

    @_guarded
    def _say_what_is_waited_for(self) -> None:
        if self._now() - self._last_line_at < self._heartbeat_s:
            return
        if self._waiting:
            self._print(self._waiting_line(self._waiting))
        elif self._stage is not None:
            self._print(self._stage_line())

    def _waiting_line(self, waiting: Mapping[str, float]) -> str:
        now = self._now()
        names = [f"{name} ({duration(now - since)})" for name, since in waiting.items()]
        return "waiting for: " + ", ".join(names)

    def _stage_line(self) -> str:
        stage, evaluation = self._stage, self._evaluation
        if stage is None:
            return ""
        name, since = stage
        line = f"now: {name} ({duration(self._now() - since)})"
        if evaluation is not None:
            what, done, total = evaluation
            line += f" {what} {done}/{total}"
        return line

    def _step_line(self) -> str:
        parts = [
            f"step {self._step}/{self._total}",
            *self._rates(),
        ]
        for domain in self._domains:
            reward, kl, _ = domain_cells(self._metrics, domain)
            parts.append(f"{domain}: reward {reward} KL {kl}")
        ill = [text for text, well in teacher_states(self._metrics) if not well]
        return " | ".join([*parts, *ill])

    # --- what both forms show ---

    def eta_s(self) -> float | None:
        """Estimated seconds to the last step; None before the first step's time is known."""
        times = self._step_times
        return robust_mean(times) * max(0, self._total - self._step) if times else None

    def _rates(self) -> list[str]:
        return rates(self._metrics, self._step_times, self.eta_s())

    # --- the live display ---

    def _render_guarded(self) -> RenderableType:
        """Called by rich's own thread, where an exception would end the refreshing silently."""
        if self._broken:
            return Text("")
        try:
            return self._render()
        except Exception as error:
            self._broken = True
            logger.warning("the progress display failed and is off: %r", error)
            return Text("")

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._total and (self._metrics or not self._waiting):
            head = Table.grid(padding=(0, 1))
            elapsed = f"elapsed {duration(self._now() - self._began)}"
            head.add_row(
                Text(f"step {self._step}/{self._total}", style="bold"),
                ProgressBar(total=max(1, self._total), completed=self._step, width=30),
                Text(" · ".join([elapsed, *self._rates()])),
            )
            parts.append(head)
        if self._metrics:
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            table.add_column("domain")
            for name in ("reward", "reverse KL", "masked"):
                table.add_column(name, justify="right")
            for domain in self._domains:
                table.add_row(Text(domain), *domain_cells(self._metrics, domain))
            parts.append(table)
            for text, well in teacher_states(self._metrics):
                parts.append(Text(text, style="dim" if well else "bold yellow"))
        waiting = self._waiting
        waits = self._waiting_line(waiting) if waiting else self._stage_line()
        if waits:
            parts.append(Text(waits, style="cyan"))
        return Group(*parts)
