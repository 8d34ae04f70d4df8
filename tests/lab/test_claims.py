"""Claims: every kind against scipy, how often they err, and their way from a recipe to a report."""

import csv
import itertools
import json
import random
import re
from dataclasses import replace

import numpy
import pytest
import scipy.stats
from studies import computed, results, run_entry, viewed

from temper_lab import recipe
from temper_lab.cli import main
from temper_lab.report import plots_mpl, plots_plotly
from temper_lab.report.outcomes import claim_lines, explanation, outcomes
from temper_lab.report.table import Column, Table, as_markdown
from temper_lab.report.tables import core_table
from temper_lab.study.claims import Claim, Kind, Record, joined, judge, read_claims
from temper_lab.study.grid import read_grid
from temper_lab.study.spec import Study, claims_of

MARGIN = 0.003
RECORD = {"added": "2026-11-18", "runs_started": 0, "runs_finished": 0}


def claim(kind="not-worse", name="c", **options):
    """A claim about mhc against residual, or with what is given."""
    values = {"name": name, "text": "mhc is as it should be", "kind": kind, "methods": ["mhc"], "streams": [4]}
    rule = Kind.named(kind)
    own = {"against": "residual", "margin": MARGIN, "along": "streams"}
    return values | {key: own[key] for key in rule.options if key in own} | options


def judged(values, bpbs):
    """What becomes of a claim, with bpb by (method, N) as lists over seeds."""
    (outcome,) = judge([Claim.from_dict(values)], lambda method, n, _: dict(enumerate(bpbs.get((method, n), []))))
    return outcome


def simulated(differences, level=2.0):
    """mhc and residual whose paired differences are these."""
    rng = random.Random(str(differences))
    base = [level + rng.gauss(0, 0.05) for _ in differences]
    return {("residual", 4): base, ("mhc", 4): [a + b for a, b in zip(base, differences, strict=True)]}


def test_not_worse_is_a_one_sided_test_against_the_margin():
    differences = [0.0012, 0.0021, -0.0004, 0.0017, 0.0009]
    (found,) = judged(claim(), simulated(differences)).findings
    expected = scipy.stats.ttest_1samp(differences, MARGIN, alternative="less")
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6)
    # The upper end of the 90% interval is the one-sided 95% bound.
    assert found.high == pytest.approx(expected.confidence_interval(0.95).high, rel=1e-6)
    assert (found.low, found.high) == pytest.approx(
        tuple(scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.90)), rel=1e-6
    )
    assert found.estimate == pytest.approx(numpy.mean(differences))
    assert found.verdict == "shown"
    assert "mhc is not worse than residual by more than 0.003 bpb at N = 4" in found.sentence


@pytest.mark.parametrize("shift", [0.0, 0.002, -0.002, 0.02])
def test_equivalent_is_two_one_sided_tests(shift):
    differences = [shift + d for d in (0.0012, -0.0011, -0.0004, 0.0007, 0.0002)]
    (found,) = judged(claim("equivalent"), simulated(differences)).findings
    ps = [
        scipy.stats.ttest_1samp(differences, bound, alternative=side).pvalue
        for bound, side in ((MARGIN, "less"), (-MARGIN, "greater"))
    ]
    assert found.p == pytest.approx(max(ps), rel=1e-6)
    inside = tuple(scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.90))
    outside = tuple(scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.95))
    assert (found.low, found.high) == pytest.approx(inside, rel=1e-6)
    is_shown = inside[0] > -MARGIN and inside[1] < MARGIN
    is_refuted = outside[0] > MARGIN or outside[1] < -MARGIN
    assert found.verdict == ("shown" if is_shown else "refuted" if is_refuted else "open")
    assert found.verdict == {0.0: "shown", 0.02: "refuted"}.get(shift, "open" if max(ps) >= 0.05 else "shown")


@pytest.mark.parametrize(
    ("kind", "sign", "shift", "verdict"),
    [
        ("better", 1, -0.01, "shown"),
        ("better", 1, 0.01, "refuted"),
        ("better", 1, 0.0, "open"),
        ("worse", -1, 0.01, "shown"),
        ("worse", -1, -0.01, "refuted"),
    ],
)
@pytest.mark.parametrize("by", [0.0, 0.001])
def test_better_and_worse_are_two_sided_tests(kind, sign, shift, verdict, by):
    differences = [shift - sign * by + d for d in (0.0012, -0.0011, -0.0004, 0.0007)]
    (found,) = judged(claim(kind, by=by), simulated(differences)).findings
    expected = scipy.stats.ttest_1samp(differences, -sign * by)
    # On the wrong side there is nothing that would show it.
    is_right_side = sign * (numpy.mean(differences) + sign * by) < 0
    assert found.p == pytest.approx(expected.pvalue if is_right_side else 1.0, rel=1e-5)
    interval = scipy.stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert found.verdict == verdict
    if by and verdict != "open":
        negated = "not " if verdict == "refuted" else ""
        assert f"mhc is {negated}{kind} than residual by more than 0.001 bpb at N = 4" in found.sentence


@pytest.mark.parametrize(("kind", "sign"), [("grows", 1), ("shrinks", -1)])
def test_trends_are_slopes_of_each_seed(kind, sign):
    rng = random.Random(1)
    numbers = (2, 4, 8, 16)
    bpbs = {("residual", n): [2.0 + rng.gauss(0, 0.05) for _ in range(4)] for n in numbers}
    for place, n in enumerate(numbers):
        bpbs["mhc", n] = [base - 0.002 * place + rng.gauss(0, 0.0005) for base in bpbs["residual", n]]
    (found,) = judged(claim(kind, streams=list(numbers)), bpbs).findings
    slopes = [
        scipy.stats.linregress(
            numpy.log2(numbers), [bpbs["residual", n][seed] - bpbs["mhc", n][seed] for n in numbers]
        ).slope
        for seed in range(4)
    ]
    assert list(found.sample.by_seed.values()) == pytest.approx(slopes)
    expected = scipy.stats.ttest_1samp(slopes, 0)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-6)
    assert found.p == pytest.approx(expected.pvalue if sign == 1 else 1.0, rel=1e-5)
    assert found.verdict == ("shown" if sign == 1 else "refuted")
    assert "bpb per doubling" in found.sentence


def test_a_trend_of_two_values_is_the_difference_of_differences():
    bpbs = {
        ("residual", 4): [2.0, 2.1, 1.9],
        ("mhc", 4): [1.999, 2.098, 1.899],
        ("residual", 8): [2.05, 2.15, 1.95],
        ("mhc", 8): [2.04, 2.141, 1.938],
    }
    (found,) = judged(claim("grows", streams=[4, 8]), bpbs).findings
    assert list(found.sample.by_seed.values()) == pytest.approx([0.009, 0.007, 0.011])
    # A seed that lacks one value of the axis is left out.
    bpbs["mhc", 8].pop()
    assert len(judged(claim("grows", streams=[4, 8]), bpbs).findings[0].sample.by_seed) == 2


def test_flat_compares_all_pairs():
    rng = random.Random(2)
    names = ["temper-cp", "temper-cp:rank=4", "temper-cp:rank=8"]
    bpbs = {(name, 4): [2.0 + seed / 10 + rng.gauss(0, 0.0004) for seed in range(5)] for name in names}
    outcome = judged(claim("flat", methods=names), bpbs)
    pairs = [(one.sample.against, one.sample.method) for one in outcome.findings]
    assert pairs == list(itertools.combinations(names, 2))
    ps = []
    for one, other in pairs:
        differences = numpy.subtract(bpbs[other, 4], bpbs[one, 4])
        ps.append(
            max(
                scipy.stats.ttest_1samp(differences, MARGIN, alternative="less").pvalue,
                scipy.stats.ttest_1samp(differences, -MARGIN, alternative="greater").pvalue,
            )
        )
    assert [one.p for one in outcome.findings] == pytest.approx(ps, rel=1e-5)
    assert (outcome.verdict, outcome.p) == ("shown", pytest.approx(max(ps), rel=1e-5))
    bpbs["temper-cp:rank=8", 4] = [value + 0.01 for value in bpbs["temper-cp:rank=8", 4]]
    outcome = judged(claim("flat", methods=names), bpbs)
    assert [one.verdict for one in outcome.findings] == ["shown", "refuted", "refuted"]
    assert outcome.verdict == "refuted"


# True difference, then how often the claim is shown and refuted there.
ERRORS = {
    "not-worse": (MARGIN, 0.05, 0.05),
    "equivalent": (MARGIN, 0.05, 0.025),
    "better": (0.0, 0.025, 0.025),
    "worse": (0.0, 0.025, 0.025),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_at_the_edge_a_claim_errs_as_often_as_it_may(kind):
    edge, shown, refuted = ERRORS[kind]
    rng, count, seeds = random.Random(kind), 3000, 5
    seen = {"shown": 0, "refuted": 0, "open": 0}
    for _ in range(count):
        # So small a spread that the other margin of `equivalent` is far.
        differences = {seed: rng.gauss(edge, 0.0005) for seed in range(seeds)}
        (outcome,) = judge(
            [Claim.from_dict(claim(kind))],
            lambda method, n, _, found=differences: found if method == "mhc" else dict.fromkeys(found, 0.0),
        )
        seen[outcome.verdict] += 1
        assert (outcome.p < 0.05) == (outcome.verdict == "shown")
    for verdict, rate in (("shown", shown), ("refuted", refuted)):
        tolerance = 3.5 * (rate * (1 - rate) / count) ** 0.5
        assert seen[verdict] / count == pytest.approx(rate, abs=tolerance), verdict


def test_few_seeds_are_open_and_say_so():
    for bpbs, words in (
        ({}, "no seed has all of the runs"),
        ({("mhc", 4): [2.0]}, "no seed has"),
        ({("mhc", 4): [1.0], ("residual", 4): [2.0]}, "only one seed has"),
    ):
        outcome = judged(claim("better"), bpbs)
        assert (outcome.verdict, outcome.p, outcome.p_holm) == ("open", None, None)
        assert words in outcome.findings[0].sentence
        assert outcome.findings[0].sentence.startswith("Open: ")
    noisy = judged(claim(), simulated([0.02, -0.03, 0.01, 0.0, 0.01]))
    assert "Open: 5 seeds cannot tell whether mhc is not worse than residual" in noisy.findings[0].sentence


def test_a_study_that_goes_on_leaves_its_claims_open_with_what_there_is():
    def entries(method, finished, bpb):
        done = [run_entry(method, 4, seed, bpb=bpb + seed / 50) for seed in range(finished)]
        return done + [run_entry(method, 4, seed, status="waiting") for seed in range(finished, 4)]

    for finished, words in (
        (4, "Shown: mhc is better than residual at N = 4 (-0.1"),
        (2, "Open: 2 of 4 seeds have finished; so far mhc is better than residual at N = 4 (-0.1"),
        (1, "Open: only one seed has all of the runs that it takes (4 are planned)"),
        (0, "Open: no seed has all of the runs that it takes (4 are planned)"),
    ):
        runs = entries("residual", 3 if finished < 4 else 4, 2.0) + entries("mhc", finished, 1.9)
        # Seeds that were not planned do not count, whatever they say.
        runs += [run_entry("residual", seed=9, bpb=2.0), run_entry("mhc", 4, 9, bpb=5.0)]
        content = computed(results(runs, claims=[claim("better", planned=[[0, 1, 2, 3]], record=RECORD)]))
        (finding,) = content.claims[0].findings
        assert finding.sentence.startswith(words)
        assert (finding.seeds, finding.planned) == (finished, 4)
        assert content.claims[0].verdict == ("shown" if finished == 4 else "open")
        assert (finding.low is None) == (finished < 2)
        assert ("claims" in content.charts) == (finished > 0)
        (row,) = content.tables["claim-tests"].rows
        assert (row["seeds"], row["planned"], row["verdict"]) == (finished, 4, content.claims[0].verdict)
        text = as_markdown(content.tables["claims"])
        assert (f"| {finished} of 4 |" in text) == ("so far" in text) == (finished < 4)
        assert any("1 of 1 claims wait" in line for line in explanation(content.claims)) == (finished < 4)


@pytest.mark.parametrize("planned", [[[0, 1, 2, 3]], None], ids=["planned", "earlier version"])
def test_failed_runs_and_missing_seeds_leave_a_claim_open_and_are_named(planned):
    bpbs = {"residual": 2.0, "mhc": 1.9}
    runs = [run_entry(method, 4, seed, bpb=bpb + seed / 50) for method, bpb in bpbs.items() for seed in range(3)]
    plan = {} if planned is None else {"planned": planned}
    runs += [run_entry("residual", seed=3), run_entry("mhc", 4, 3, status="failed", reason="loss is nan")]
    (outcome,) = outcomes(viewed(results(runs, claims=[claim("better", **plan)])))
    assert (outcome.verdict, outcome.so_far, outcome.standing) == ("open", "shown", "open, 3 of 4 seeds")
    assert claim_lines([outcome])[1].startswith("c OPEN, 3 of 4 seeds: ")
    assert outcome.findings[0].sentence.startswith("Open: 3 of 4 seeds have finished; so far mhc is better")
    assert outcome.findings[0].sentence.endswith(" Failed: mhc-n4-s3 (loss is nan).")
    # A study that was narrowed, by --seeds 0 1, has not shown what was planned with four; that its grid was all that
    # was planned is believed of a file that does not say more.
    (outcome,) = outcomes(viewed(results([run for run in runs if run["seed"] < 2], claims=[claim("better", **plan)])))
    assert outcome.verdict == ("shown" if planned is None else "open")
    if planned:
        assert outcome.findings[0].sentence.endswith(" Planned, but not in this study: seeds 2 3.")


def test_the_least_complete_test_is_that_of_the_table():
    runs = [run_entry("residual", seed=seed, bpb=2.0) for seed in range(5)]
    runs += [run_entry("mhc", n, seed, bpb=1.9) for n, count in ((4, 3), (8, 2)) for seed in range(count)]
    planned = {"planned": [[0, 1, 2, 3, 4], [0, 1]]}
    found = outcomes(viewed(results(runs, claims=[claim("better", streams=[4, 8], **planned)])))
    assert [one.verdict for one in found[0].findings] == ["open", "shown"]
    assert found[0].standing == "open, 3 of 5 seeds"
    assert "| 3 of 5 |" in as_markdown(computed(results(runs, claims=[found[0].claim.to_dict()])).tables["claims"])


def test_the_grid_of_the_recipe_plans_the_seeds():
    section = {"streams": [4, 8], "grid": [{"seeds": [2, 0, 1]}, {"methods": ["mhc"], "streams": [4], "seeds": [7]}]}
    asked = [claim("flat", "pairs", methods=["mhc", "kromhc"]), claim("grows", "trend", streams=[4, 8])]
    section["claims"] = asked
    pairs, trend = claims_of(section, recipe.load("demo"), "x")
    # Seed 7 has no run to be compared with.
    assert (pairs.planned, trend.planned) == (((0, 1, 2),), ((0, 1, 2),))
    # Written into the study and read again; a claim keeps the seeds that it came with.
    study = demo((pairs,))
    assert Claim.from_dict(json.loads(json.dumps(pairs.to_dict()))) == pairs
    assert study.extended(study.grid, "again", (replace(pairs, planned=((0, 1),)),)).claims == (pairs,)


def test_seeds_that_agree_exactly():
    bpbs = {("residual", 4): [2.0, 2.0], ("mhc", 4): [1.5, 1.5]}
    assert judged(claim("better"), bpbs).verdict == "shown"
    assert judged(claim("worse"), bpbs).verdict == "refuted"
    assert judged(claim("better"), {**bpbs, ("mhc", 4): [2.0, 2.0]}).verdict == "open"


def test_several_methods_and_streams_and_the_correction():
    level = [2.0, 2.1, 1.9, 2.05]
    wiggle = [0.0001, -0.0001, 0.0002, 0.0]

    def near(shift):
        return [a + b + shift for a, b in zip(level, wiggle, strict=True)]

    bpbs = {("residual", 4): level, ("residual", 8): level, ("mhc", 4): near(-0.01), ("mhc", 8): near(-0.01)}
    bpbs |= {("hc", 4): near(-0.01), ("hc", 8): near(0.01)}
    claims = [
        Claim.from_dict(claim("better", "all", methods=["mhc"], streams=[4, 8])),
        Claim.from_dict(claim("better", "one-fails", methods=["mhc", "hc"], streams=[4, 8])),
        Claim.from_dict(claim("better", "one-lacks", methods=["mhc", "kromhc"])),
    ]
    found = judge(claims, lambda method, n, _: dict(enumerate(bpbs.get((method, n), []))))
    assert [one.verdict for one in found] == ["shown", "refuted", "open"]
    assert [len(one.findings) for one in found] == [2, 4, 2]
    assert [one.p is None for one in found] == [False, False, True]
    # A claim without a p counts as one of those that are corrected for.
    assert found[0].p_holm == pytest.approx(3 * found[0].p)


def made_up(claims=None, **changes):
    """mhc is better than residual by 0.01 at every depth and N; at depth 8 and 2, by 0.02 and 0."""
    rng, runs = random.Random(5), []
    for seed in range(4):
        level = 2 + seed / 50
        gains = {3: 0.01, 8: 0.02, 2: 0.0}
        for depth, gain in gains.items():
            vary = {} if depth == 3 else {"vary": {"model.depth": depth}, "key": f"depth{depth}-s{seed}"}
            base = level - depth / 10
            runs.append(run_entry("residual", seed=seed, bpb=base) | {**vary})
            key = {"key": f"mhc-{vary['key']}"} if vary else {}
            runs.append(run_entry("mhc", 4, seed, bpb=base - gain + rng.gauss(0, 0.0005)) | {**vary, **key})
        runs.append(run_entry("mhc", 8, seed, bpb=level - 0.3 - 0.01 + rng.gauss(0, 0.0005)) | {"vary": {}})
        # The recipe's own value is no variation.
        own = {"vary": {"model.depth": 3}, "key": f"hc-own-s{seed}"}
        runs.append(run_entry("hc", 4, seed, bpb=level - 0.3) | own)
    runs.append(run_entry("mhc", 4, 9, bpb=5.0) | {"status": "failed", "key": "broken"})
    runs.append(run_entry("residual", seed=9, bpb=1.0))
    return results(runs, **({} if claims is None else {"claims": claims}), **changes)


CLAIMS = [
    claim("better", "routing-helps", streams=[4, 8], planned=[[0, 1, 2, 3]] * 2, record=RECORD),
    claim("equivalent", "hc-is-residual", methods=["hc"], record=RECORD),
    claim("grows", "deeper-is-better", along="model.depth", values=[2, 3, 8], record=RECORD),
    claim("grows", "wider-is-better", along="streams", streams=[4, 8], record=RECORD | {"runs_started": 3}),
    claim("worse", "kromhc-is-worse", methods=["kromhc"], record=RECORD),
]


def test_runs_are_paired_at_equal_settings():
    found = {one.claim.name: one for one in outcomes(viewed(made_up(CLAIMS)))}
    for finding in found["routing-helps"].findings:
        assert finding.seeds == 4
        assert finding.estimate == pytest.approx(-0.01, abs=0.001)
    assert found["hc-is-residual"].findings[0].estimate == pytest.approx(0.0, abs=1e-12)
    (slope,) = found["deeper-is-better"].findings
    exact = scipy.stats.linregress(numpy.log2([2, 3, 8]), [0.0, 0.01, 0.02]).slope
    assert (slope.seeds, slope.estimate) == (4, pytest.approx(exact, abs=0.0005))
    assert [one.verdict for one in found.values()] == ["shown", "shown", "shown", "open", "open"]
    lines = claim_lines(list(found.values()))
    assert lines[0] == "5 claims: 3 shown, 0 refuted, 2 open."
    text = " ".join(explanation(list(found.values())))
    assert "Not known to precede the first run: wider-is-better" in text
    assert "still shown: " in text


@pytest.fixture
def only_words(monkeypatch):
    monkeypatch.setattr(plots_mpl, "draw", lambda chart, folder: [])
    monkeypatch.setattr(plots_plotly, "script", lambda: "")


@pytest.mark.usefixtures("only_words")
def test_a_report_has_claims_in_every_form(tmp_path, capsys):
    hostile = CLAIMS[0] | {"name": "hostile", "text": "<script>alert(1)</script> 5% | of_mhc"}
    (tmp_path / "results.json").write_text(json.dumps(made_up([*CLAIMS, hostile])))
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "6 claims: 4 shown, 0 refuted, 2 open." in out
    html = (tmp_path / "report.html").read_text()
    assert 'data-tab="claims"' in html
    assert "<script>alert" not in html
    assert re.search(r"<td[^>]*>2026-11-18, before the first run", html)
    assert "2026-11-18, when 3 runs had started and 0 had finished" in html
    with open(tmp_path / "tables" / "claim-tests.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [finding for one in outcomes(viewed(made_up([*CLAIMS, hostile]))) for finding in one.findings]
    assert [row["verdict"] for row in rows] == [finding.verdict for finding in found]
    assert [float(row["low"] or "nan") for row in rows] == pytest.approx(
        [finding.low if finding.low is not None else float("nan") for finding in found], nan_ok=True
    )
    markdown = (tmp_path / "tables" / "claims.md").read_text()
    assert r"\<script\>alert(1)\</script\> 5% \| of\_mhc" in markdown
    assert r"5\%" in (tmp_path / "tables" / "claims.tex").read_text()
    # Reported again without claims, nothing of them is left.
    (tmp_path / "results.json").write_text(json.dumps(made_up()))
    assert main(["report", str(tmp_path), "--json"]) == 0
    assert "claims" not in json.loads(capsys.readouterr().out)
    assert 'data-tab="claims"' not in (tmp_path / "report.html").read_text()
    assert not list((tmp_path / "tables").glob("claim*"))


def test_figures_show_intervals_above_what_is_allowed(tmp_path):
    content = computed(made_up(CLAIMS))
    panel = content.charts["claims"].panels[0]
    names = [name for _, name in panel.y.ticks]
    assert names[:3] == ["routing-helps: shown", "mhc vs residual, N = 4", "mhc vs residual, N = 8"]
    bands = [mark for mark in panel.marks if mark.low]
    # Better is everything below 0; equivalent has two ends; worse everything above.
    assert [mark.x for mark in bands][1:3] == [(panel.x.limits[0], 0.0), (-MARGIN, MARGIN)]
    assert bands[-1].x == (0.0, panel.x.limits[1])
    bars = [mark for mark in panel.marks if mark.x_low]
    assert [mark.x_low[0] for mark in bars] == [
        finding.low
        for one in content.claims
        if not one.claim.rule.is_trend
        for finding in one.findings
        if finding.low is not None
    ]
    assert content.charts["claims-trends"].panels[0].x.label == "gain in bpb per doubling"
    written = plots_mpl.draw(content.charts["claims"], tmp_path)
    assert written[0].read_bytes().startswith(b"\x89PNG")


def test_a_claim_that_cannot_be_read_is_an_error(tmp_path, capsys):
    (tmp_path / "results.json").write_text(json.dumps(made_up([claim() | {"kind": "obvious"}])))
    assert main(["report", str(tmp_path)]) == 1
    assert (
        "results.json is not a study: the claims in the results: claim c: unknown kind of claim 'obvious'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"margin": 0}, "margin is 0; expected a number > 0, in bpb"),
        ({"margin": "small"}, "margin is 'small'; expected a number"),
        ({"kind": "not-wrose"}, "unknown kind of claim 'not-wrose'. Did you mean 'not-worse'"),
        ({"kind": "better", "margin": 1}, "unknown option of a claim of kind better 'margin'"),
        ({"text": " "}, "text is ' '; expected a sentence"),
        ({"name": "Big Claim"}, "name 'Big Claim'; expected small letters"),
        ({"methods": []}, r"methods is \[\]; expected a list of names"),
        ({"methods": ["mch"]}, "unknown method 'mch'. Did you mean 'mhc'"),
        ({"methods": ["temper-tt"]}, "the grid has no temper-tt; expected some of residual, mhc, kromhc"),
        ({"against": "mhc"}, "mhc is compared with itself"),
        ({"streams": [8]}, "the grid has no mhc at N = 8; expected some of 4"),
        ({"streams": 4}, "streams is 4; expected a list of whole numbers >= 2"),
        ({"record": RECORD}, "has a record or planned seeds; expected none in a recipe"),
        ({"planned": [[0]]}, "has a record or planned seeds; expected none in a recipe"),
        ({"planned": [[0], [0]]}, "planned has 2 lists of seeds; expected one for each test, 1"),
        ({"planned": [0]}, r"planned is \[0\]; expected the seeds of each test"),
        ({"record": {"added": 3}}, "record is .*expected added, runs_started"),
    ],
)
def test_a_bad_claim_says_what_is_bad(values, words):
    changed = {**claim(), **values}
    if values.get("kind") == "better":
        changed.pop("against")
    with pytest.raises(ValueError, match=words) as caught:
        claims_of({"claims": [changed]}, recipe.load("demo"), "mine.toml")
    assert str(caught.value).startswith("mine.toml: [compare] ")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (claim("flat", margin=0.1), "methods has only mhc; expected the members of a family"),
        (claim("grows"), r"streams is \[4\]; expected at least two values"),
        (claim("grows", streams=[4, 8], values=[1]), "those of streams are in streams"),
        (claim("grows", along="model.depth", values=[4]), "expected at least two values of model.depth"),
        (claim("grows", along="model.dept", values=[4, 8]), "unknown axis 'model.dept'. Did you mean 'model.depth'"),
        (
            claim("grows", along="model.depth", values=[4, 8]),
            "the grid has no residual with model.depth = 4; expected some of the recipe as it is",
        ),
        (claim("better", by=-1), "by is -1; expected a number >= 0"),
        (3, "a claim is 3; expected a table"),
    ],
)
def test_a_bad_claim_of_another_kind(values, words):
    with pytest.raises(ValueError, match=words):
        claims_of({"claims": [values]}, recipe.load("demo"), "mine.toml")


def demo(claims=()):
    settings, section = recipe.load_study("demo")
    return Study("demo", settings, read_grid(section, settings, "demo"), ("first",), claims)


def test_claims_are_a_list_and_each_has_its_name():
    for values, words in (
        ({}, "claims is {}; expected a list"),
        ([claim(), claim()], "several claims have the name c"),
    ):
        with pytest.raises(ValueError, match=words):
            read_claims(values)
    assert read_claims([]) == ()


@pytest.mark.parametrize("kind", Kind.members)
def test_claims_written_and_read_are_the_same(kind):
    needed = {"flat": {"methods": ["mhc", "hc"]}, "grows": {"streams": [4, 8]}, "shrinks": {"streams": [4, 8]}}
    first = Claim.from_dict(claim(kind, **needed.get(kind, {}), record=RECORD))
    assert Claim.from_dict(json.loads(json.dumps(first.to_dict()))) == first
    assert first.record == Record("2026-11-18", 0, 0)


def test_methods_have_one_spelling():
    section = {"methods": ["residual", "mhc:method=newton:iters=50"]}
    for text in ("mhc:iters=50:method=newton", "mhc:method=newton:iters=50"):
        section["claims"] = [claim(methods=[text])]
        (found,) = claims_of(section, recipe.load("demo"), "x")
        assert found.methods == ("mhc:iters=50:method=newton",)
    section["claims"] = [claim(methods=["mhc:iters=50:method=newton"], against="mhc:method=newton:iters=50")]
    with pytest.raises(ValueError, match="is compared with itself"):
        claims_of(section, recipe.load("demo"), "x")


def test_a_study_keeps_its_claims_as_they_were_written(tmp_path):
    first, second = (Claim.from_dict(claim(name=name)) for name in ("first", "second"))
    study = demo((first,)).recorded(tmp_path)
    today = study.claims[0].record.added
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", today)
    assert str(study.claims[0].record) == f"{today}, before the first run"
    study.write(tmp_path)
    assert Study.read(tmp_path) == study
    assert study.extended(study.grid, "again", (first,)) is study
    more = study.extended(study.grid, "more", (first, second))
    assert ([claim.name for claim in more.claims], more.commands) == (["first", "second"], ("first", "more"))
    # What is left out of a recipe later is still claimed.
    assert study.extended(study.grid, "none", ()) is study
    with pytest.raises(ValueError, match=r"claim first is in the study already .*margin was 0.003, is 0.1"):
        joined(study.claims, [replace(first, limit=0.1)])
    content = json.loads((tmp_path / "study.json").read_text())
    del content["claims"]
    (tmp_path / "study.json").write_text(json.dumps(content))
    assert Study.read(tmp_path).claims == ()


def core_entry(accuracies, core=None, items=100, baseline=0.25):
    tasks = {
        name: {
            "accuracy": accuracy,
            "centered": (accuracy - baseline) / (1 - baseline),
            "baseline": baseline,
            "items": items,
        }
        for name, accuracy in accuracies.items()
    }
    return {"core": {"CORE": core, "max_per_task": items, "tasks": tasks}}


def test_core_has_standard_errors_and_says_what_is_chance():
    guessed, known = {"copa": 0.27, "piqa": 0.24, "mine": 0.9}, {"copa": 0.5, "piqa": 0.6, "mine": 0.9}
    runs = [run_entry("mhc", 4, 0) | core_entry(guessed), run_entry("hc", 4, 0) | core_entry(known)]
    runs += [run_entry("mhc", 4, 1) | core_entry(guessed), run_entry("kromhc", 4, 0, core=0.2)]
    runs += [run_entry("temper-tt", 4, 0) | core_entry({"copa": 0.0, "piqa": 0.01})]
    raw = results(runs)
    rows = {row["method"]: row for row in core_table(viewed(raw)).rows}
    answers = numpy.repeat([1, 0], [27, 73])
    error = answers.std(ddof=1) / 10 / 0.75
    assert rows["mhc"]["copa_se"] == pytest.approx(error)
    other = numpy.repeat([1, 0], [24, 76]).std(ddof=1) / 10 / 0.75
    # Two seeds have answered the same items, and a task that is none of CORE's does not count.
    assert rows["mhc"]["mean_se"] == pytest.approx((error**2 + other**2) ** 0.5 / 2)
    assert rows["mhc"]["mean"] == pytest.approx((0.02 - 0.01) / 0.75 / 2)
    chances = {name: row["chance"] for name, row in rows.items()}
    # Of kromhc the items are not known.
    assert chances == {"mhc": "within chance", "hc": "above chance", "kromhc": None, "temper-tt": "below chance"}
    (line,) = [line for line in computed(raw).lines if "standard error" in line]
    assert line.startswith(
        "N = 4: mean of 2 tasks, centered accuracy ± standard error: within chance: mhc 0.007 ± 0.04"
    )
    assert "above chance: hc 0.400 ± " in line


def test_markdown():
    columns = (
        Column("a_b", lambda row: row["a"], "a", lambda row: row["a"] == "x", True),
        Column("n", lambda row: "1", "n"),
    )
    table = Table("t", "T", ({"a": "x", "n": 1}, {"a": "y|\nz", "n": 1}), columns, "A note.")
    assert as_markdown(table) == "| a\\_b | n |\n| --- | ---: |\n| **x** | 1 |\n| y\\| z | 1 |\n\nA note.\n"
