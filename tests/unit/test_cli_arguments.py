"""The command line: options may stand anywhere; what is no option and no argument is refused."""

from __future__ import annotations

import itertools

import pytest

from mopd.cli import _parse


@pytest.mark.parametrize("place", range(5))
def test_plain_may_stand_anywhere(place: int) -> None:
    argv = ["train", "a.yaml", "b.yaml", "x=1"]
    arguments = _parse([*argv[:place], "--plain", *argv[place:]])
    assert arguments.plain
    assert (arguments.config, arguments.more) == ("a.yaml", ["b.yaml", "x=1"])
    assert not _parse(argv).plain


@pytest.mark.parametrize("command", ["train", "check"])
def test_order_is_kept_round_several_options(command: str) -> None:
    for first, second in itertools.combinations(range(1, 6), 2):
        argv = [command, "a.yaml", "b.yaml", "x=1", "c.yaml"]
        argv.insert(second - 1, "--plain")
        argv.insert(first, "--plain")
        assert _parse(argv).more == ["b.yaml", "x=1", "c.yaml"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train", "a.yaml", "--plian", "x=1"], "unrecognized arguments: --plian"),
        (["report", "runs/x", "more"], "unrecognized arguments: more"),
        (["train"], "required: CONFIG"),
        ([], "required: COMMAND"),
    ],
)
def test_nonsense_is_refused(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        _parse(argv)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err
