"""Student's t, Holm and paired comparisons against scipy, tables, integration and definitions."""

import itertools
import math
import random
import statistics as standard

import pytest
import scipy.integrate
import scipy.stats
from studies import results, run_entry, viewed

from temper_lab.report.stats import (
    NO_PAIR,
    ONE_SEED,
    Paired,
    baselines,
    compare,
    explanation,
    holm,
    mean,
    sd,
    t_quantile,
    t_tail,
)

# Any printed table of Student's t, two-sided 95%.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 30: 2.042}


@pytest.mark.parametrize(("degrees", "expected"), TABLE.items())
def test_quantiles_are_those_of_the_tables(degrees, expected):
    assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("degrees", [1, 1.5, 2, 3, 10, 200])
def test_tails_and_quantiles_are_those_of_scipy(degrees):
    for t in (0, 1e-3, 0.5, 1, 3, 12.7, 1e4):
        assert t_tail(t, degrees) == pytest.approx(scipy.stats.t.sf(t, degrees), rel=1e-11)
    for probability in (0.001, 0.025, 0.4, 0.5001, 0.975, 0.9999):
        expected = scipy.stats.t.ppf(probability, degrees)
        assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("degrees", [1, 2, 5])
def test_tails_are_integrals_of_the_density(degrees):
    front = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    for t in (0.3, 2.0, 9.0):
        area, _ = scipy.integrate.quad(lambda u: front * (1 + u * u / degrees) ** (-(degrees + 1) / 2), 0, t)
        assert t_tail(t, degrees) == pytest.approx(0.5 - area, abs=1e-10)


def test_quantiles_refuse_nonsense():
    for probability, degrees in ((0, 1), (1, 1), (0.5, 0)):
        with pytest.raises(ValueError, match="between 0 and 1"):
            t_quantile(probability, degrees)


def test_means_and_deviations():
    values = [2.01, 2.03, 1.98, 2.05]
    assert mean(values) == pytest.approx(standard.fmean(values), rel=1e-15)
    assert sd(values) == pytest.approx(standard.stdev(values), rel=1e-12)
    assert sd([2.0]) is None


@pytest.mark.parametrize("count", [2, 3, 8])
def test_paired_differences_are_the_t_test_of_scipy(count):
    rng = random.Random(count)
    differences = [rng.gauss(-0.01, 0.004) for _ in range(count)]
    paired, expected = Paired.of(differences), scipy.stats.ttest_1samp(differences, 0)
    interval = expected.confidence_interval(0.95)
    assert paired.pairs == count
    assert paired.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert (paired.low, paired.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_paired_differences_at_the_edges():
    assert Paired.of([0.25]) == Paired(0.25, 1, None, None, None)
    assert Paired.of([0.0, 0.0]).p == 1.0
    assert Paired.of([0.5, 0.5]).p == 0.0


def by_definition(ps):
    """Holm: the largest of (m - j) p(j) over all p(j) up to this one, at most 1."""
    order = sorted(ps)
    return [min(1.0, max((len(ps) - j) * order[j] for j in range(order.index(p) + 1))) for p in ps]


def test_holm():
    assert holm([]) == []
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    for ps in itertools.permutations([0.001, 0.2, 0.012, 0.9]):
        assert holm(ps) == pytest.approx(by_definition(list(ps)))


def study(**bpbs):
    """Runs of methods (underscores for dashes) with these bpb for seeds 0, 1, ..."""
    runs = []
    for name, values in bpbs.items():
        runs += [run_entry(name.replace("_", "-"), 4, seed, bpb=value) for seed, value in enumerate(values)]
    return viewed(results(runs))


def test_verdicts_follow_the_corrected_p():
    level = [2.00, 2.10, 1.95, 2.05]
    found = compare(
        study(
            residual=level,
            mhc=[value - shift for value, shift in zip(level, (0.100, 0.101, 0.099, 0.1), strict=True)],
            hc=[value + shift for value, shift in zip(level, (0.050, 0.051, 0.049, 0.05), strict=True)],
            kromhc=[value + shift for value, shift in zip(level, (0.02, -0.02, 0.03, -0.02), strict=True)],
        ),
        "residual",
    )
    # The levels of seeds differ far more than the methods: only pairing can tell.
    assert {one.label: one.verdict for one in found} == {"mhc": "better", "hc": "worse", "kromhc": "within noise"}
    tests = [scipy.stats.ttest_1samp(list(one.differences.values()), 0).pvalue for one in found]
    assert [one.p_holm for one in found] == pytest.approx(by_definition(tests), rel=1e-8)


def test_an_interval_without_zero_may_still_be_noise_after_correction():
    level = [2.0, 2.1, 1.9]
    shifts = {"mhc": (-0.010, -0.007, -0.008), "hc": (0.01, 0.00, -0.01), "kromhc": (0.02, 0.01, -0.02)}
    shifts |= {"temper_cp": (0.01, 0.02, -0.02), "temper_tt": (0.03, 0.01, -0.02)}
    methods = {name: [a + b for a, b in zip(level, shift, strict=True)] for name, shift in shifts.items()}
    found = {one.label: one for one in compare(study(residual=level, **methods), "residual")}["mhc"]
    assert found.paired.high < 0
    assert found.paired.p < 0.05 < found.p_holm
    assert found.verdict == "within noise"


def test_comparisons_are_corrected_for_each_number_of_streams_alone():
    runs = [run_entry("residual", 1, seed, bpb=2.0 + seed / 10) for seed in range(3)]
    for n in (4, 8):
        runs += [run_entry("mhc", n, seed, bpb=1.99 + seed / 10 + seed / 1000) for seed in range(3)]
    found = compare(viewed(results(runs)), "residual")
    assert [one.num_streams for one in found] == [4, 8]
    assert all(one.p_holm == one.paired.p for one in found)


def test_one_seed_and_no_common_seed():
    runs = [run_entry("residual", 1, 0, bpb=2.0), run_entry("mhc", 4, 0, bpb=1.9), run_entry("hc", 4, 1, bpb=1.9)]
    found = {one.label: one for one in compare(viewed(results(runs)), "residual")}
    assert found["mhc"].verdict == ONE_SEED
    assert found["mhc"].paired.mean == pytest.approx(-0.1)
    assert found["hc"].verdict == NO_PAIR
    assert "no statement" in explanation(list(found.values()))[-1]


def test_baselines_are_those_that_finished():
    assert baselines(study(residual=[2.0], mhc=[2.0])) == ["residual", "mhc"]
    assert baselines(study(mhc=[2.0], hc=[2.0])) == ["mhc"]
    assert baselines(viewed(results([run_entry("residual", status="failed"), run_entry("hc")]))) == []


def test_the_explanation_says_how_wide_few_seeds_are():
    text = " ".join(explanation(compare(study(residual=[2.0, 2.1, 2.2], mhc=[2.0, 2.2, 2.1]), "residual")))
    assert "4.3 for 3 pairs" in text
    assert "Holm" in text
