"""`temper report`: everything from results.json alone, in every form, whatever is in it."""

import csv
import json
import math
import re
import statistics as standard
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects
import pytest
from studies import EFFECTS, SITES, WIDTH, computed, full_study, loaded, results, run_entry, viewed

import temper
from temper_lab.cli import main
from temper_lab.report import charts, palette, plots_bench, plots_mpl, plots_plotly, sweeps
from temper_lab.report.page import Tab, page
from temper_lab.report.stats import average, frontier, gap_reference, smooth, thin
from temper_lab.report.table import latex
from temper_lab.report.tables import paper
from temper_lab.report.write import write_report

# Between them they have everything that a chart can have: bands, bars, rules, rows, logarithms.
DRAWN = ("curves", "pareto-bpb", "parameters", "forest-residual")
SCRIPT = "</script><script>alert(1)</script>"


def drawing(*names):
    """Draws these charts only: drawing is most of the work of a report."""
    return lambda chart, folder, real=plots_mpl.draw: real(chart, folder) if chart.name in names else []


@pytest.fixture
def few_figures(monkeypatch):
    monkeypatch.setattr(plots_mpl, "draw", drawing("curves"))


@pytest.fixture(scope="module")
def raw():
    return full_study(noise=0.0003)


@pytest.fixture(scope="module")
def written(raw, tmp_path_factory):
    """A folder with a results.json and nothing else, and what `temper report` made of it."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "results.json").write_text(json.dumps(raw))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots_mpl, "draw", drawing(*DRAWN))
        return folder, write_report(loaded(json.loads((folder / "results.json").read_text())), folder)


@pytest.fixture
def only_words(monkeypatch):
    """No figures and no plotly: only what a page says matters."""
    monkeypatch.setattr(plots_mpl, "draw", lambda chart, folder: [])
    monkeypatch.setattr(plots_plotly, "script", lambda: "")


class Page(HTMLParser):
    """The cells of tables, the tags that are open at the end, and what a browser would load."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, html):
        super().__init__()
        self.open, self.loads, self.tables, self.tags = [], [], {}, []
        self._table = self._cell = None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append((tag, values))
        if tag not in self.VOID:
            self.open.append(tag)
        self.loads += [values[key] for key in ("src", "href") if values.get(key) and tag != "a"]
        if tag == "table":
            self._table = self.tables[values["data-table"]] = []
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            self._cell = ""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("td", "th") and self._cell is not None:
            self._table[-1].append(self._cell)
            self._cell = None
        elif tag == "table":
            self._table = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data


def numbers_of(raw, label, streams, name):
    """The final numbers of a method, straight from the file; residual has those of the seeds that others have at N."""
    runs = [run for run in raw["runs"] if run["method"] == label and run["status"] == "finished"]
    if label == "residual":
        seeds = {run["seed"] for run in raw["runs"] if run["streams"] == streams}
        return [run["final"][name] for run in runs if run["seed"] in seeds]
    return [run["final"][name] for run in runs if run["streams"] == streams]


def shown(values, digits=4):
    text = f"{standard.fmean(values):.{digits}f}"
    return text + (f" ± {standard.stdev(values):.{digits}f}" if len(values) > 1 else "")


def test_every_number_of_the_main_table_is_in_the_data(raw, written):
    header, *rows = Page(written[1].page.read_text()).tables["main"]
    assert len(rows) == sum(2 if method in EFFECTS else 1 for method in {run["method"] for run in raw["runs"]}) + 1
    seen = 0
    for cells in (dict(zip(header, row, strict=True)) for row in rows):
        label, streams = cells["method"], int(cells["N"])
        losses = numbers_of(raw, label, streams, "train_loss")
        assert cells["train loss"] == (shown(losses) if losses else "–")  # noqa: RUF001
        bpbs = numbers_of(raw, label, streams, "bpb")
        assert cells["bpb"] == (shown(bpbs) if bpbs else "–")  # noqa: RUF001
        run = next(r for r in raw["runs"] if r["method"] == label and (r["streams"] == streams or label == "residual"))
        assert cells["seeds"] == (str(len(bpbs)) if bpbs else run["status"])
        assert int(cells["added parameters"].replace(",", "")) == run["parameters"]["added"]
        config = temper.preset(run["preset"], num_streams=streams, dim=768, **run["options"])
        assert int(cells["paper: added"].replace(",", "")) == 24 * temper.count_parameters(config)
        theirs = paper()["table"][str(streams)].get(label)
        if theirs and theirs["bpb"]:
            seen += 1
            assert [cells[f"paper: {name}"] for name in ("loss", "bpb", "CORE")] == [
                f"{theirs[name]:.3f}" for name in ("loss", "bpb", "core")
            ]
    assert seen == 11


def test_the_papers_numbers_agree_with_the_library():
    for n, methods in paper()["table"].items():
        for name, row in methods.items():
            config = temper.preset(name, num_streams=int(n), dim=paper()["dim"])
            count = paper()["sites"] * temper.count_parameters(config)
            # mhc-lite is printed rounded down.
            assert row["thousands"] in (round(count / 1000), count // 1000)


def test_csv_gives_back_the_same_numbers(written):
    content = written[1].content
    for name, table in content.tables.items():
        with open(written[0] / "tables" / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(table.rows) > 0
        for read, row in zip(rows, table.rows, strict=True):
            for key, value in row.items():
                kind = str if value is None else type(value)
                assert kind(read[key]) == ("" if value is None else value), (name, key)


def test_latex_is_balanced_and_escaped(written):
    paths = list((written[0] / "tables").glob("*.tex"))
    assert {path.stem for path in paths} == {"main", "significance", "cost", "core", "runs", "claims", "claim-tests"}
    for path in paths:
        # A backslash pair ends a row; after it and escaped characters are gone, only structure is left.
        text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("%"))
        bare = re.sub(r"\\[{}$&#_%\\]", "", text.replace("\\\\", ""))
        assert bare.count("{") == bare.count("}")
        assert re.findall(r"\\begin{(\w+)}", text) == list(reversed(re.findall(r"\\end{(\w+)}", text)))
        assert bare.count("$") % 2 == 0
        assert not re.search(r"[_%#]", bare)
        columns = len(re.search(r"{tabular}{([lr]+)}", text)[1])
        rows = [line for line in text.splitlines() if line.endswith(r"\\")]
        assert all(len(re.findall(r"(?<!\\)&", line)) == columns - 1 for line in rows)
        assert all(ord(character) < 128 for character in text), path
    assert latex("a_b 5% {x}\\ #1 & $2") == r"a\_b 5\% \{x\}\textbackslash{} \#1 \& \$2"


def test_figures_are_there_as_png_and_svg(written):
    names = {"curves", "gaps", "loss", "pareto-bpb", "pareto-core", "parameters", "cost", "sweep-streams"}
    names |= {"mixing-n4", "mixing-n8", "forest-residual", "forest-mhc", "sweep-temper-cp-rank-n4"}
    names |= {"sweep-streams-gap", "claims", "claims-trends"}
    assert set(written[1].content.charts) == names
    for suffix, beginning in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        files = {path.stem: path for path in (written[0] / "figures").glob(f"*{suffix}")}
        assert set(files) == set(DRAWN)
        assert all(path.read_bytes().startswith(beginning) for path in files.values())
    assert "temper-tucker" in (written[0] / "figures" / "curves.svg").read_text()


def test_the_page_is_well_formed_and_loads_nothing(written):
    html = written[1].page.read_text()
    found = Page(html)
    assert found.open == []
    assert [load for load in found.loads if not load.startswith("data:")] == []
    css = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    assert not re.search(r"url\(|@import", css)
    assert html.count("plotly.js v") == 1
    tabs = [values["data-tab"] for tag, values in found.tags if values.get("role") == "tab"]
    assert tabs == ["overview", "claims", "curves", "sweeps", "parameters", "cost", "significance", "about"]
    for word in (
        "loss is not finite at step 12",
        "0123abcd+changes",
        "a made-up CPU",
        "temper compare --recipe made-up",
    ):
        assert word in html
    assert "not comparable" in html


def test_plotly_accepts_every_chart(written):
    for chart in written[1].content.charts.values():
        for panel in chart.panels:
            # It raises for a property or a value that plotly does not have.
            plotly.graph_objects.Figure(plots_plotly.figure(panel))


def test_charts_show_the_data(raw, written):
    charts = written[1].content.charts
    curve = next(mark for mark in charts["curves"].panels[0].marks if mark.name == "mhc")
    runs = [run for run in raw["runs"] if run["method"] == "mhc" and run["streams"] == 4]
    columns = list(zip(*(run["val"]["bpb"] for run in runs), strict=True))
    assert curve.y == pytest.approx([standard.fmean(column) for column in columns])
    assert curve.high == pytest.approx([standard.fmean(column) + standard.stdev(column) for column in columns])
    gap = next(mark for mark in charts["gaps"].panels[0].marks if mark.name == "mhc")
    others = [run for run in raw["runs"] if run["method"] == "temper-tucker" and run["streams"] == 4]
    last = [run["final"]["bpb"] - other["final"]["bpb"] for run, other in zip(runs, others, strict=True)]
    # The end of a smoothed curve is not smoothed: it is the difference of the table.
    assert gap.y[-1] == pytest.approx(standard.fmean(last))
    counted = {mark.name: mark for mark in charts["parameters"].panels[0].marks if mark.line}
    assert {*temper.PRESETS} - {"residual"} <= set(counted)
    config = temper.preset("temper-tt", num_streams=8, dim=WIDTH)
    assert dict(zip(counted["temper-tt"].x, counted["temper-tt"].y, strict=True))[8] == SITES * temper.count_parameters(
        config
    )
    marked = {mark.name for mark in charts["parameters"].panels[0].marks if mark.points}
    assert marked == {
        label for label in (run["method"] for run in raw["runs"]) if label not in ("residual", "hc", "mhc-lite")
    }
    sweep = charts["sweep-temper-cp-rank-n4"].panels
    assert sweep[0].marks[0].x == (2, 4, 8, 16)
    assert charts["cost"].panels[0].marks[2].name == "temper-cp:rank=8"


def varied_study():
    """Five depths for three methods with two seeds, three seeds at the recipe's own depth; and two rates for mhc."""
    runs = []
    for place, method in enumerate(("residual", "mhc", "temper-cp")):
        for seed in range(3):
            runs.append(run_entry(method, 4, seed, bpb=2.03 + 0.5 * (seed == 2) + seed / 100 - place / 100))
        for depth in (2, 6, 12, 24):
            for seed in range(2):
                bpb = 2.0 + abs(depth - 12) / 50 + seed / 100 - place * depth / 1000
                runs.append(run_entry(method, 4, seed, bpb=bpb, vary={"model.depth": depth}))
    for rate, bpb in ((0.02, 1.8), (0.03, 1.9)):
        runs.append(run_entry("mhc", 4, 0, bpb=bpb, vary={"optim.routing_lr": rate}))
    return results(runs)


def test_a_varied_study_compares_equal_settings_only(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots_mpl, "draw", drawing("sweep-model.depth-n4"))
        done = write_report(loaded(varied_study()), tmp_path)
    content, page = done.content, Page(done.page.read_text())
    assert {path.name for path in done.figures} == {"sweep-model.depth-n4.png", "sweep-model.depth-n4.svg"}
    assert page.open == []

    rows = {(row["method"], row["model.depth"], row["optim.routing_lr"]): row for row in content.tables["main"].rows}
    assert len(rows) == 3 + 3 * 4 + 2 * 2
    # The recipe's own settings first.
    assert list(rows)[:4] == [
        *((name, 3, 0.0125) for name in ("residual", "mhc", "temper-cp")),
        ("residual", 2, 0.0125),
    ]
    assert rows["mhc", 3, 0.0125]["bpb"] == pytest.approx((2.02 + 2.03 + 2.54) / 3)
    assert rows["mhc", 12, 0.0125]["bpb"] == pytest.approx(2.005 - 0.012)
    assert rows["mhc", 3, 0.02]["seeds"] == 1
    # Residual has no routing: the same run stands at every rate, of the seeds that others have.
    assert rows["residual", 3, 0.02]["bpb"] == 2.03
    assert page.tables["main"][0][:4] == ["method", "N", "depth", "routing_lr"]
    assert page.tables["main"][1][2:5] == ["3", "0.0125", "3"]
    (bpb,) = (column for column in content.tables["main"].columns if column.title == "bpb")
    assert [bpb.is_strong(row) for row in list(rows.values())[:6]] == [False, False, True] * 2

    found = {
        (row["against"], row["method"], row["model.depth"], row["optim.routing_lr"]): row
        for row in content.tables["significance"].rows
    }
    assert [found["residual", "mhc", depth, 0.0125]["pairs"] for depth in (2, 3, 6)] == [2, 3, 2]
    for depth in (2, 6, 12, 24):
        assert found["residual", "temper-cp", depth, 0.0125]["difference"] == pytest.approx(-2 * depth / 1000)
    assert found["residual", "mhc", 3, 0.02]["difference"] == pytest.approx(-0.23)
    assert len(found) == 2 * (2 * 5 + 2)
    text = (tmp_path / "tables" / "main.csv").read_text()
    assert text.startswith("method,streams,model.depth,optim.routing_lr,seeds,")
    assert r"method & N & depth & routing\_lr & seeds" in (tmp_path / "tables" / "main.tex").read_text()
    keys = {row["key"]: row for row in content.tables["runs"].rows}
    assert keys["mhc-n4-s0-depth2"]["model.depth"] == 2
    assert (keys["residual-n1-s0"]["model.depth"], keys["residual-n1-s0"]["optim.routing_lr"]) == (3, None)
    depths = [(row["model.depth"], row["optim.routing_lr"]) for row in content.tables["curves"].rows]
    assert len(set(depths)) == 7
    assert "With depth = 3, routing_lr = 0.0125: temper-cp has the lowest mean of 3 methods" in content.lines[0]
    assert any(
        "lowest mean bpb of the values tried: 12 for residual, mhc, temper-cp." in line for line in content.lines
    )
    assert content.charts["curves"].title == "Validation bits per byte, depth = 3, routing_lr = 0.0125"


def test_figures_of_varied_fields():
    charts = computed(varied_study()).charts
    assert [name for name in charts if name.startswith("sweep-")] == [
        *("sweep-model.depth-n4", "sweep-model.depth-n4-gap"),
        *("sweep-optim.routing_lr-n4", "sweep-optim.routing_lr-n4-gap"),
    ]
    (panel,) = charts["sweep-model.depth-n4"].panels
    assert (panel.title, panel.x.is_log) == ("Validation bpb, routing_lr = 0.0125", True)
    assert panel.x.ticks == ((2, "2"), (3, "3"), (6, "6"), (12, "12"), (24, "24"))
    line, seeds, ring = (mark for mark in panel.marks if mark.method == "mhc")
    # Over the two seeds that all depths have: the third is left out where it is there.
    bpbs = [2.2 - 0.002, 2.03 - 0.01, 2.12 - 0.006, 2.0 - 0.012, 2.24 - 0.024]
    assert line.x == (2, 3, 6, 12, 24)
    assert line.y == pytest.approx([bpb + 0.005 for bpb in bpbs])
    assert (len(seeds.x), seeds.is_faint, seeds.line) == (10, True, False)
    assert seeds.y[:4] == pytest.approx([bpbs[0], bpbs[0] + 0.01, bpbs[1], bpbs[1] + 0.01])
    assert (ring.is_ring, ring.x, ring.y[0]) == (True, (12,), pytest.approx(bpbs[3] + 0.005))
    assert "mean over seeds 0, 1, which all points have" in charts["sweep-model.depth-n4"].caption

    (panel,) = charts["sweep-model.depth-n4-gap"].panels
    assert {mark.method for mark in panel.marks} == {"mhc", "temper-cp"}
    line, seeds = (mark for mark in panel.marks if mark.method == "temper-cp")
    assert line.y == pytest.approx([-0.004, -0.02, -0.012, -0.024, -0.048])
    assert seeds.y == pytest.approx([gap for gap in line.y for _ in range(2)])
    assert [(rule.name, rule.value) for rule in panel.rules] == [("residual", 0.0)]

    # Less than a decade; and residual is level, so none of its points is the best.
    (panel,) = charts["sweep-optim.routing_lr-n4"].panels
    assert not panel.x.is_log
    assert [mark.x for mark in panel.marks if mark.method == "mhc" and mark.line] == [(0.0125, 0.02, 0.03)]
    assert [mark.x for mark in panel.marks if mark.is_ring] == [(0.02,)]
    for chart in charts.values():
        for one in chart.panels:
            plotly.graph_objects.Figure(plots_plotly.figure(one))


def test_values_that_are_no_numbers_stand_one_after_the_other():
    runs = [
        run_entry("mhc", 4, 0, bpb=bpb, vary={"train.precision": precision})
        for bpb, precision in ((2.0, "float64"), (1.9, "bfloat16"))
    ]
    content = computed(results(runs))
    (panel,) = content.charts["sweep-train.precision-n4"].panels
    assert panel.x.ticks == ((0, "float64"), (1, "bfloat16"))
    # There is no residual to compare with, and nothing has the recipe's own setting.
    assert "sweep-train.precision-n4-gap" not in content.charts
    assert content.study.here == {"train.precision": "float64"}


def test_results_of_before_there_were_axes(raw):
    old = json.loads(json.dumps(raw))
    del old["vary"]
    for run in old["runs"]:
        del run["vary"]
    assert computed(old).to_dict() == computed(raw).to_dict()
    for vary in ([1], {"model.depth": {"a": 1}}):
        old["runs"][0]["vary"] = vary
        with pytest.raises(ValueError, match="vary is"):
            viewed(old)


def test_mixing_over_training():
    runs = [run_entry(method, 4, seed) for method in ("residual", "mhc", "mhc-identity") for seed in (0, 1)]
    (chart,) = charts.mixing(viewed(results(runs)))
    assert chart.name == "mixing-n4"
    mass, gain, back, likeness = chart.panels
    # Residual has no streams to mix, and what is not mixed has no logarithm.
    assert [mark.name for mark in mass.marks] == ["mhc"]
    for panel in (gain, back, likeness):
        assert [mark.name for mark in panel.marks] == ["mhc", "mhc-identity"]
    assert (gain.y.label, back.y.label) == ("largest row sum", "largest column sum")
    assert max(back.marks[0].y) > max(gain.marks[0].y)
    columns = list(zip(*(run["routing"]["res_off_diagonal"] for run in runs[2:4]), strict=True))
    mark = mass.marks[0]
    assert (mark.x, mass.y.is_log) == (tuple(range(15, 121, 15)), True)
    assert mark.y == pytest.approx([standard.fmean(column) for column in columns])
    assert (mark.low, mark.high) == (tuple(map(min, columns)), tuple(map(max, columns)))
    # Rounding is not drawn as if it were a finding.
    assert gain.y.limits == pytest.approx((0.975, 1.025), abs=1e-5)
    # Runs of earlier versions, which measured it forward alone.
    for run in runs[2:]:
        run["routing"].pop("composite_backward_gain")
    assert charts.mixing(viewed(results(runs)))[0].panels == (mass, gain, likeness)
    for run in runs:
        run.pop("routing", None)
    assert charts.mixing(viewed(results(runs))) == []


def test_statements_are_computed(written):
    content = written[1].content
    text = "\n".join(content.lines)
    row = next(
        row for row in content.tables["significance"].rows if (row["method"], row["against"]) == ("temper-cp", "mhc")
    )
    assert f"temper-cp adds 10.4% of mhc's parameters; its bpb differs by {row['difference']:+.4f}" in text
    assert "temper-tucker has the lowest mean of 10 methods" in text
    assert "in the paper (6,000 steps) temper-tucker < kromhc = temper-cp < residual < mhc" in text


def test_one_look_per_method():
    looks = palette.styles(
        {name: name for name in temper.PRESETS} | {f"mhc-x{i}": "mhc" for i in range(4)} | {"new": "new"}
    )
    assert set(temper.PRESETS) <= set(palette.STYLES)
    assert len({look.color for look in looks.values()}) == len(looks)
    assert len(set(looks.values())) == len(looks)
    for look in looks.values():
        assert look.dash in palette.DASHES
        assert look.marker in palette.MARKERS
        # Both on a white and on a dark card a line has to be seen.
        parts = [int(look.color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        light = sum(
            w * (p / 12.92 if p < 0.04 else ((p + 0.055) / 1.055) ** 2.4)
            for w, p in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )
        assert min(1.05 / (light + 0.05), (light + 0.05) / 0.064) > 2.0, look


def test_series():
    curve = tuple((step, float(step**2)) for step in range(10))
    smoothed = smooth(curve)
    assert (smoothed[0], smoothed[-1]) == (curve[0], curve[-1])
    assert smoothed[5] == (5, pytest.approx((16 + 25 + 36) / 3))
    assert smooth(curve[:5]) == curve[:5]
    long = tuple((step, 0.0) for step in range(5000))
    assert len(thin(long)) == 400
    assert (thin(long)[0], thin(long)[-1]) == (long[0], long[-1])
    series = average([((1, 1.0), (2, 2.0)), ((2, 4.0), (3, 9.0))])
    assert (series.steps, series.means) == ((2,), (3.0,))
    assert average([]) is None
    points = [(1, 5.0), (2, 4.0), (3, 4.5), (4, 4.0), (5, 1.0)]
    assert frontier(points) == [(1, 5.0), (2, 4.0), (5, 1.0)]


@pytest.mark.parametrize(
    ("methods", "expected"),
    [
        (["residual", "temper-tucker", "mhc"], "temper-tucker"),
        (["residual", "temper-tt", "temper-cp", "mhc"], "temper-cp"),
        (["residual", "mhc", "kromhc"], "kromhc"),
    ],
)
def test_gaps_are_taken_to_tucker_or_the_next_best(methods, expected):
    study = viewed(results([run_entry(method, bpb=2.0 - place / 10) for place, method in enumerate(methods)]))
    assert gap_reference(study, 4)[0] == expected


@pytest.mark.usefixtures("few_figures")
def test_hostile_names_stay_text(tmp_path):
    entry = run_entry("mhc", reason=SCRIPT, status="failed") | {"method": f"m{SCRIPT}<b>$x$_%"}
    other = run_entry("hc") | {"method": f"_h{SCRIPT}%{{x}}", "key": SCRIPT}
    plain = run_entry("residual") | {"method": f"../../up{SCRIPT}"}
    raw = results([entry, other, plain], study=f"s{SCRIPT}", commit=SCRIPT, command=SCRIPT)
    raw["recipe"]["data"]["corpus"] = SCRIPT
    done = write_report(loaded(raw), tmp_path)
    html = done.page.read_text()
    assert "<script>alert(1)" not in html
    found = Page(html)
    assert found.open == []
    # Charts are JSON inside script elements; all of them parse.
    charts = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    assert charts
    assert all(json.loads(chart) for chart in charts)
    assert any(SCRIPT in cell for row in found.tables["main"] for cell in row)
    assert "forest-.._.._up" in "".join(done.content.charts)
    assert all(re.fullmatch(r"[\w.-]+", name) for name in done.content.charts)


def entries(**changes):
    return results([run_entry("residual"), run_entry("temper-cp", bpb=1.9)], **changes)


def variants():
    broken = run_entry("mhc", bpb=math.nan)
    broken["val"]["bpb"][2] = None
    broken["train"]["loss"][5] = math.inf
    yield "one-method", results([run_entry("temper-cp")]), "temper-cp is the only method"
    yield "no-residual", results([run_entry("mhc"), run_entry("temper-cp")]), "nothing is compared with residual"
    yield "only-residual", results([run_entry("residual")]), "residual is the only method"
    yield "nan", results([run_entry("residual"), broken]), "finished without a finite bpb"
    yield "nothing-finished", results([run_entry("mhc", status="waiting")]), "nothing to compare"
    yield "no-runs", results([]), "nothing to compare"
    yield "no-cost", entries(), "was not measured"
    yield "no-recipe", entries(recipe=None), "does not say the size of the model"
    yield "one-seed", entries(), "no statement (one seed)"


@pytest.mark.parametrize(("raw", "sentence"), [case[1:] for case in variants()], ids=[case[0] for case in variants()])
@pytest.mark.usefixtures("only_words")
def test_whatever_a_study_has_there_is_a_page(raw, sentence, tmp_path):
    done = write_report(loaded(raw), tmp_path)
    html = done.page.read_text()
    assert Page(html).open == []
    assert sentence in html
    json.dumps(done.content.to_dict(), allow_nan=False)


@pytest.mark.usefixtures("few_figures")
def test_the_command(tmp_path, capsys):
    raw = entries()
    (tmp_path / "study").mkdir()
    file = tmp_path / "study" / "results.json"
    file.write_text(json.dumps(raw))
    old = tmp_path / "new" / "figures" / "cost.png"
    old.parent.mkdir(parents=True)
    old.write_text("of an earlier report")
    mine = old.with_name("mine.png")
    mine.write_text("not ours")
    assert main(["report", str(file), "--out", str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    for text in ("temper-cp", "1.9000", "12,018", str(tmp_path / "new" / "report.html"), "not comparable"):
        assert text in out
    assert [path.name for path in (tmp_path / "study").iterdir()] == ["results.json"]
    assert (mine.exists(), old.exists()) == (True, False)
    assert not [path for path in (tmp_path / "new").rglob("*") if path.name.startswith(".")]


@pytest.mark.usefixtures("only_words")
def test_json(tmp_path, capsys):
    (tmp_path / "results.json").write_text(json.dumps(entries()))
    assert main(["report", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == computed(entries()).to_dict()
    assert printed["tables"]["main"][1]["bpb"] == 1.9


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no results.json in"),
        ("{", "is not JSON"),
        ("[]", "expected a JSON object"),
        ('{"format": "temper-run-1"}', "have format 'temper-run-1', expected 'temper-results-1'"),
        ('{"format": "temper-results-1"}', "no list of runs"),
        ('{"format": "temper-results-1", "runs": [{"key": "a"}]}', "run 0 (a) in the results: a run lacks preset"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_more_bad_input(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 1
    assert "there is no" in capsys.readouterr().err
    (tmp_path / "results.json").write_text(json.dumps(entries()))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "results.json")]) == 1
    assert "is a file; expected a folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="several runs with the key"):
        viewed(results([run_entry(), run_entry()]))


@pytest.mark.usefixtures("only_words")
def test_extra_tabs_and_what_a_page_refuses(tmp_path):
    extra = Tab("explorer", "A & B", "<p>here</p>", css=".e{color:red}", js='const end = "</script>";')
    html = write_report(loaded(entries()), tmp_path, [extra]).page.read_text()
    found = Page(html)
    assert found.open == []
    assert [values["data-tab"] for _, values in found.tags if values.get("role") == "tab"][-2:] == ["explorer", "about"]
    assert '"<\\/script>"' in html
    for tabs in ([], [Tab("A b", "", "")], [Tab("a", "", ""), Tab("a", "", "")]):
        with pytest.raises(ValueError, match="tab"):
            page("title", tabs)


def test_all_colours_come_from_the_palette():
    root = Path(__file__).parents[2]
    folders = ("src/temper_lab", "examples", "benchmarks")
    sources = {path: path.read_text(encoding="utf-8") for folder in folders for path in (root / folder).rglob("*.py")}
    assert len(sources) > 50
    written = {path.name for path, text in sources.items() if re.search(r"[\"']#[0-9a-fA-F]{6}\b", text)}
    assert written == {"palette.py"}
    drawing = [path for path, text in sources.items() if re.search(r"\b(color|marker)=", text)]
    drawing = [path for path in drawing if path.name != "palette.py"]
    assert len(drawing) > 3
    assert all("temper_lab.report.palette import" in sources[path] for path in drawing), drawing
    # In the page, methods have their colours from the charts: its scripts and styles name none of its own.
    for path in (root / "src/temper_lab").rglob("assets/*.js"):
        assert not re.search(r"#[0-9a-fA-F]{6}\b", path.read_text(encoding="utf-8")), path


def test_a_method_looks_the_same_in_every_figure(tmp_path, monkeypatch):
    looks = palette.styles_of([*temper.PRESETS, "temper-cp:rank=8", "pypi-hc", "my-own"])
    assert len({(look.color, look.dash, look.marker) for look in looks.values()}) == len(looks)
    assert all(looks[name] == palette.STYLES[name] for name in temper.PRESETS)
    seen = []
    monkeypatch.setattr("temper_lab.report.plots_bench.save", lambda figure, path: seen.append(figure))
    monkeypatch.setattr(plots_mpl, "save", lambda figure, path: seen.append(figure))
    spread = {"median": 1.1, "low": 1.0, "high": 1.2}
    row = {"streams": 4, "backend": "cpu", "ratio": 1.1, "ratio_spread": spread, "site_ms": spread}
    rows = [{**row, "method": name} for name in ("mhc", "temper-cp")]
    setting = {"width": 8, "tokens": 8, "threads": 1}
    plots_bench.draw({"pair": rows, "peers": [], "growth": rows, "setting": setting}, tmp_path / "bench.png")
    counts = {"mhc": {2: 10, 4: 20}, "temper-cp": {2: 5, 4: 7}}
    plots_mpl.draw_to(sweeps.parameters_per_site(counts, 8), tmp_path / "parameters.png")
    bench, parameters = seen
    for axes in (bench.axes[-1], parameters.axes[0]):
        drawn = {line.get_color(): line.get_marker() for line in axes.get_lines()}
        assert drawn == {looks[name].color: palette.MARKERS[looks[name].marker] for name in counts}
    study = viewed(full_study())
    (panel, *_) = charts.curves(study).panels
    assert all(mark.style == palette.styles(study.preset_of)[mark.method] for mark in panel.marks)
    assert {mark.style for mark in panel.marks if mark.method == "mhc"} == {looks["mhc"]}
