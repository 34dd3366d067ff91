"""The display of a run: what it shows, and that it never ends a run."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time

import pytest
from rich.file_proxy import FileProxy

from mopd.observe.progress import Progress
from mopd.observe.wording import duration, robust_mean


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads this")


def metrics(step_s: float = 2.0) -> dict:
    return {
        "time/step_s": step_s,
        "samples_per_s": 96.4,
        "tokens_per_s": 1530.0,
        "mask_fraction": 0.0021,
        "domain/spell/reward": 0.81,
        "domain/spell/reverse_kl": 0.0321,
        "domain/sum/reward": 0.5,
        "domain/sum/reverse_kl": None,
    }


def plain(**kw) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(100, ["spell", "sum"], file=out, **kw), out


def test_plain_step_line_shows_everything_at_once():
    progress, out = plain(min_interval_s=0.0)
    with progress:
        progress.step(10, metrics())
    assert out.getvalue() == (
        "step 10/100 | ETA 3 min 00 s | 96 samples/s | 1,530 tokens/s | masked 0.21% | "
        "spell: reward 0.810 KL 0.0321 | sum: reward 0.500 KL –\n"
    )


def test_a_checkpoint_that_is_being_written_is_shown():
    progress, out = plain(min_interval_s=0.0)
    with progress:
        progress.step(10, metrics() | {"checkpoint/writing": 8.0})
        progress.step(11, metrics() | {"checkpoint/step": 8.0, "checkpoint/write_s": 2.71})
    assert "masked 0.21% | checkpoint 8 being written | spell" in out.getvalue()
    assert "masked 0.21% | checkpoint 8 written in 2.7 s | spell" in out.getvalue()


def test_warnings_are_kept_those_before_the_place_was_known_and_when_nobody_reads(tmp_path):
    kept = tmp_path / "warnings.jsonl"
    progress = Progress(100, ["spell"], file=Broken(), plain=True)
    with progress:
        progress.warn("early")
        assert not kept.exists()
        progress.keep_warnings(kept)
        progress.warn("late, with 'ü'")
    lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    assert lines == [{"text": "early"}, {"text": "late, with 'ü'"}]


def test_a_teacher_is_shown_with_its_servers_and_in_plain_lines_when_one_is_ill():
    of = {"servers": 2.0, "servers_up": 2.0, "tokens_per_s": 12345.6, "restarts": 0.0}
    well = {f"teacher/math/{key}": value for key, value in of.items()}
    ill = well | {"teacher/math/servers_up": 1.0, "teacher/math/restarts": 1.0,
                  "teacher/math/failures": 14.0}  # fmt: skip
    said = "teacher math: 1 of 2 servers up, 12,346 tokens/s, 1 restarts, 14 failures"
    progress, out = plain(min_interval_s=0.0)
    with progress:
        progress.step(1, metrics() | well)
        assert "teacher" not in out.getvalue()
        progress.step(2, metrics() | ill)
    assert out.getvalue().endswith(f" | {said}\n")
    terminal = Terminal()
    with Progress(100, ["spell"], file=terminal) as live:
        live.step(1, metrics() | well)
    assert "teacher math: 2 of 2 servers up, 12,346 tokens/s" in terminal.getvalue()


def test_plain_lines_are_throttled_but_the_last_step_always_shows():
    progress, out = plain(min_interval_s=60.0)
    with progress:
        for step in range(1, 101):
            progress.step(step, metrics())
    assert [line.split(" |")[0] for line in out.getvalue().splitlines()] == [
        "step 1/100", "step 100/100"
    ]  # fmt: skip


def test_evaluations_hold_no_step_line_back():
    progress, out = plain(min_interval_s=2.0)
    clock = [0.0]
    progress._now = lambda: clock[0]
    with progress:
        for step in range(1, 5):
            clock[0] += 1.9
            progress.evaluation("student spell", 5, 200)
            progress.evaluation("student sum", 200, 200)
            clock[0] += 0.2
            progress.step(step, metrics())
    lines = out.getvalue().splitlines()
    assert [line.split(" |")[0] for line in lines if line.startswith("step")] == [
        f"step {step}/100" for step in range(1, 5)
    ]
    assert lines.count("evaluate student sum: 200/200") == 4


def test_waiting_says_for_whom_and_who_became_ready():
    progress, out = plain()
    with progress:
        progress.waiting({"teacher sum", "teacher spell"})
        progress.waiting({"teacher sum"})
        progress.waiting(set())
    assert out.getvalue().splitlines() == [
        "waiting for: teacher spell (0 s), teacher sum (0 s)",
        "ready: teacher spell (0 s)",
        "waiting for: teacher sum (0 s)",
        "ready: teacher sum (0 s)",
    ]


def test_parts_that_join_one_by_one_make_one_line():
    progress, out = plain()
    with progress:
        for names in ({"a"}, {"a", "b"}, {"a", "b", "c"}, {"b", "c"}):
            progress.waiting(names)
    assert out.getvalue().splitlines() == [
        "waiting for: a (0 s)",
        "ready: a (0 s)",
        "waiting for: b (0 s), c (0 s)",
    ]


def test_silence_is_broken_while_something_is_waited_for():
    progress, out = plain(heartbeat_s=0.1)
    with progress:
        progress.waiting({"teacher spell"})
        deadline = time.monotonic() + 5
        while out.getvalue().count("waiting for") < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        progress.waiting(set())
        progress.stage("evaluate")
        progress.evaluation("student spell", 3, 200)
        while "now: evaluate" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert out.getvalue().count("waiting for: teacher spell") >= 3
    assert "now: evaluate (0 s) student spell 3/200" in out.getvalue()
    assert "progress" not in {t.name for t in threading.enumerate()}


def test_eta_is_not_moved_by_one_slow_step():
    progress, _ = plain()
    assert progress.eta_s() is None
    with progress:
        for step in range(1, 21):
            progress.step(step, {"time/step_s": 300.0 if step == 15 else 2.0})
    assert progress.eta_s() == pytest.approx(80 * 2.0)
    assert robust_mean([5.0]) == 5.0


def test_without_a_step_time_the_clock_is_used():
    progress, _ = plain()
    clock = [0.0]
    progress._now = lambda: clock[0]
    with progress:
        for step in (1, 2, 3):
            clock[0] += 4.0
            progress.step(step, {})
            assert progress.eta_s() == (None if step == 1 else 4.0 * (100 - step))


def test_rates_follow_from_counts_and_a_resumed_run_counts_on():
    progress, out = plain(min_interval_s=0.0)
    with progress:
        progress.begin(40)
        progress.step(41, {"time/step_s": 2.0, "samples": 192.0, "tokens": 3000.0})
    assert "step 41/100 | ETA 1 min 58 s | 96 samples/s | 1,500 tokens/s" in out.getvalue()


def test_live_display_shows_bar_domains_and_stage():
    out = Terminal()
    with Progress(100, ["spell", "[x]"], file=out) as progress:
        progress.waiting({"teacher spell"})
        progress._live.refresh()
        progress.waiting(set())
        progress.stage("generate")
        progress.step(10, metrics())
        progress.note("saved [1]")
        progress.warn("a metric was not finite")
        progress._live.refresh()
    text = out.getvalue()
    for part in (
        "waiting for: teacher spell",
        "step 10/100",
        "1,530 tokens/s",
        "reverse KL",
        "0.0321",
        "[x]",
        "now: generate",
        "saved [1]",
        "warning: a metric",
    ):
        assert part in text, part


def test_a_terminal_that_goes_away_does_not_end_the_run(caplog):
    for out in (Broken(), type("B", (Broken, Terminal), {})()):
        caplog.clear()
        with caplog.at_level(logging.WARNING), Progress(10, ["spell"], file=out) as progress:
            progress.waiting({"teacher"})
            for step in range(1, 4):
                progress.step(step, metrics())
            progress.note("x")
        assert not isinstance(sys.stdout, FileProxy)
        assert caplog.text.count("progress display failed") == 1


def test_nonsense_metrics_do_not_end_the_run(caplog):
    for out in (io.StringIO(), Terminal()):
        with Progress(10, ["spell"], file=out, min_interval_s=0) as progress:
            progress.step(1, {"samples_per_s": "fast", "time/step_s": 1.0})
            if progress._live is not None:
                progress._live.refresh()
            progress.step(2, metrics())
        assert not isinstance(sys.stdout, FileProxy)
    assert "progress display failed" in caplog.text


def test_the_run_s_own_error_passes_through():
    with pytest.raises(KeyboardInterrupt), plain()[0]:
        raise KeyboardInterrupt


def test_many_threads_at_once_on_a_live_display_do_not_lock_up():
    """rich draws under its lock what we change under ours: see the module's docstring."""
    out = Terminal()
    progress = Progress(1000, ["spell"], file=out)

    def work(k: int) -> None:
        for step in range(60):
            progress.step(step, metrics())
            progress.note(f"thread {k} step {step}")
            progress.waiting({f"t{k}"} if step % 2 else set())
            progress._live.refresh()

    with progress:
        threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
            assert not thread.is_alive(), "the display locked up"
    assert not progress._broken


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (-3, "0 s")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
