"""`temper bench` at a size at which it takes seconds."""

import importlib
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import temper
from temper.ops import fused
from temper.ops.plan import MIXER_KINDS
from temper_lab.bench import Setting, cases, count, gpu
from temper_lab.bench.benchmark import ahead_of_peers
from temper_lab.bench.cases import RESIDUAL, Case, Stack, branches, sort_out
from temper_lab.bench.measure import Run, interleave, kept_bytes, pinned, saved_bytes, site_bytes, spread
from temper_lab.cli import main
from temper_lab.console import keep_freed_memory

TINY = ["bench", "--width", "32", "--tokens", "16", "--rounds", "2", "--streams", "2", "--growth", "2", "4"]
FAST = [*TINY, "--methods", "temper-cp", "--parts", "pair"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out, plot = (tmp_path_factory.mktemp("bench") / name for name in ("bench.json", "bench.png"))
    options = [
        "--methods",
        "temper-cp",
        "kromhc",
        "--backends",
        "fused",
        "naive",
        "--out",
        str(out),
        "--plot",
        str(plot),
    ]
    assert main([*TINY, *options]) == 0
    assert plot.stat().st_size > 5_000
    return json.loads(out.read_text())


def test_the_report_is_complete(report):
    setting = report["setting"]
    assert (setting["width"], setting["tokens"], setting["threads"], setting["rounds"]) == (32, 16, 1, 2)
    assert setting["versions"]["torch"] == torch.__version__
    assert setting["bandwidth_gb_s"] > 0.1
    assert {(row["method"], row["streams"], row["backend"]) for row in report["pair"]} == {
        (method, 2, backend) for method in ("temper-cp", "kromhc") for backend in ("fused", "naive")
    }
    assert {row["method"] for row in report["peers"]} == {"pypi-hc", "pypi-mhc"}
    assert len(report["growth"]) == 2 * (2 * 2 + 2)
    assert len(report["step"]) == 2 * 2 + 2
    assert len(report["recompute"]) == 2
    assert {row["logits"] for row in report["sinkhorn"]} == {"initial", "normal"}
    assert set(report["ahead_of_peers"]) == {"2"}
    assert set(report["ahead_of_peers"]["2"]) == {"time", "memory"}
    assert report["skipped"] == []


def test_the_values_are_sensible(report):
    for row in [*report["pair"], *report["peers"]]:
        assert 0 < row["site_ms"]["min"] <= row["site_ms"]["low"] <= row["site_ms"]["median"] <= row["site_ms"]["high"]
        assert row["ratio"] > 1
        assert row["chained_ratio"] > 1
        assert row["pair_ratio"] > 0
        assert 1.2 < row["saved_ratio"] < 10
        assert row["bytes"] == site_bytes(2, 32, 16) == (8 * 2 + 5) * 32 * 16 * 4
        assert 0 <= row["bandwidth_share"] < 1
    for row in report["step"]:
        assert row["ratio"] > 0
        assert row["saved_ratio"] > 1
    for row in report["recompute"]:
        assert 1 < row["recompute_saved_ratio"] < row["saved_ratio"]
        assert row["group"] > 1
    for row in report["growth"]:
        assert row["times_least"] == 1 if row["streams"] == 2 else row["times_least"] > 0
    for row in report["sinkhorn"]:
        assert row["speedup"] > 0
        assert row["newton_column_error"] <= 1e-5


def test_the_tables(capsys):
    assert main([*FAST, "--backends", "naive"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("1 thread,", "temper-cp", "pypi-mhc", "whole pair", "memory bandwidth"))


def test_threads_are_pinned_for_as_long_as_it_takes():
    before = torch.get_num_threads()
    with pinned(3):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == before


def test_a_backend_that_is_wrong_is_refused(monkeypatch, capsys):
    right = fused.begin_backward

    def wrong(*arguments):
        d_streams, d_fold = right(*arguments)
        return d_streams * 1.001, d_fold

    monkeypatch.setattr(fused, "begin_backward", wrong)
    assert main([*FAST, "--backends", "fused", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: temper-cp, N=2, fused: the gradient of streams is off by 1." in captured.err
    assert main([*FAST, "--backends", "naive", "--json"]) == 0


def test_a_backend_without_a_number_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(fused, "finish", lambda streams, *_: torch.full_like(streams, torch.nan))
    assert main([*FAST, "--backends", "fused"]) == 1
    assert "the next x is off by nan" in capsys.readouterr().err


def test_kept_bytes_of_a_case_by_hand():
    x, weight = torch.randn(10, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)

    def forward():
        # exp keeps its result (60 floats), the product x (40) and the weight (24); a view of x is not kept twice.
        return (x @ weight).exp().sum() + x.view(40).square().sum()

    assert kept_bytes(forward) == 4 * (60 + 40 + 24)
    assert kept_bytes(forward, [weight]) == 4 * (60 + 40)
    # What is forgotten before the backward is not kept.
    assert kept_bytes(lambda: [x.exp().sum(), x.sin().sum()][:1]) == 4 * 40


def test_the_residual_pair_keeps_sixteen_vectors_a_token():
    width, tokens = 256, 32
    stack = Stack(branches(width), [RESIDUAL.site(width) for _ in range(2)])
    assert stack.branches[0].num_heads == 2
    x = torch.randn(RESIDUAL.shape(tokens, width), requires_grad=True)
    vectors = saved_bytes(RESIDUAL, stack, x) / (4 * tokens * width)
    # Beside them a few numbers a token: the norms' and the attention's.
    assert 16 <= vectors < 16.1


def test_the_residual_pair_is_the_residual_preset():
    blocks = branches(32)
    x = torch.randn(1, 5, 32)
    config = temper.preset("residual", num_streams=4, dim=32)
    ours = Stack(blocks, [temper.HyperConnection(config) for _ in range(2)])
    plain = Stack(blocks, [RESIDUAL.site(32) for _ in range(2)])
    assert torch.equal(ours(x.unsqueeze(-2)).squeeze(-2), plain(x))
    hidden = x + blocks[0](x)
    up = F.relu(blocks[1].up(F.rms_norm(hidden, (32,)))).square()
    assert torch.equal(plain(x), hidden + blocks[1].down(up))


def test_every_variant_takes_its_turn_and_the_order_rotates():
    order, leaf = [], torch.zeros(1, requires_grad=True)
    leaf.grad = torch.ones(1)
    runs = {name: Run(lambda name=name: order.append(name), [leaf]) for name in "abc"}
    seconds = interleave(runs, 4, "test")
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = ["".join(order[start : start + 3]) for start in range(0, len(order), 3)]
    assert len(rounds) == 6
    assert set(rounds) == {"abc", "bca", "cab"}
    assert leaf.grad is None


def test_the_spread():
    assert spread([5, 1, 2, 3, 4]) == {"median": 3, "min": 1, "low": 2, "high": 4}
    assert spread([7]) == {"median": 7, "min": 7, "low": 7, "high": 7}


def test_what_cannot_run_is_listed_with_its_reason():
    cases, skipped = sort_out(("mhc", "mhc-lite", "hc"), (4, 32), ("fused", "naive"), 768)
    assert [case for case in cases if case.backend] == [
        Case("mhc", 4, "fused"),
        Case("mhc", 4, "naive"),
        Case("mhc-lite", 4, "fused"),
        Case("mhc-lite", 4, "naive"),
        Case("hc", 4, "naive"),
        Case("hc", 32, "naive"),
    ]
    reasons = {(entry["method"], entry["streams"], entry["backend"]): entry["reason"] for entry in skipped}
    assert "more than 10,000,000" in reasons["mhc", 32, None]
    assert reasons["mhc-lite", 32, None]
    assert reasons["hc", 4, "fused"] == "the backend fused leaves this to naive"


def test_without_the_peers_the_bench_goes_on(monkeypatch, capsys):
    real = importlib.import_module

    def missing(name, *arguments):
        if name == "hyper_connections":
            raise ModuleNotFoundError(name=name)
        return real(name, *arguments)

    monkeypatch.setattr(cases.importlib, "import_module", missing)
    assert main([*FAST, "--backends", "naive"]) == 0
    out = capsys.readouterr().out
    assert "hyper-connections is not installed" in out
    assert "pypi-hc" not in out


def test_ahead_means_every_method_and_both_times():
    def row(method, backend, ratio, pair_ratio, saved_ratio):
        return {
            "method": method,
            "streams": 4,
            "backend": backend,
            "ratio": ratio,
            "pair_ratio": pair_ratio,
            "saved_ratio": saved_ratio,
        }

    peer = [row("pypi-hc", None, 1.2, 1.2, 3.4)]
    good = [row("temper-cp", "cpu", 1.1, 1.1, 1.6), row("temper-cp", "naive", 1.5, 1.5, 4.5)]
    assert ahead_of_peers(good, peer) == {"4": {"time": True, "memory": True}}
    assert ahead_of_peers([*good, row("temper-tucker", "cpu", 1.1, 1.3, 3.5)], peer) == {
        "4": {"time": False, "memory": False}
    }
    assert ahead_of_peers([*good, row("mhc", "cpu", 9, 9, 9)], peer)["4"]["time"]
    assert ahead_of_peers(good, []) == {}


def test_quick_is_less_of_everything():
    quick = Setting().quick()
    assert (quick.streams, quick.growth, quick.width) == ((4,), (2, 4, 8), 768)
    assert quick.tokens < 512
    assert quick.rounds < 9
    assert Setting(tokens=16, rounds=2, growth=(16,)).quick().growth == (16,)


def test_freed_memory_is_kept_once_and_for_all():
    assert keep_freed_memory() is keep_freed_memory()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; expected at least 1"),
        (["--threads", "0"], "--threads is 0"),
        (["--tokens", "1"], "--tokens is 1"),
        (["--width", "0"], "--width is 0"),
        (["--streams", "1"], "--streams has 1; expected numbers of streams >= 2"),
        (["--methods", "temper-cb"], "Did you mean 'temper-cp'"),
        (["--methods", "residual"], "leave it out"),
        (["--backends", "gpu"], "unknown backend 'gpu'"),
        (["--parts", "pair,steps"], "unknown part 'steps'. Did you mean 'step'"),
        (["--parts", ","], "--parts is empty"),
        (["--plot", "bench.gif"], "ends in .png, .svg, .pdf"),
        (["--plot", "bench.png", "--parts", "step"], "--plot shows the parts pair and growth"),
        (["--out", "."], "cannot write JSON to .: it is a folder"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, capsys):
    assert main([*TINY, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


def test_a_gpu_check_has_a_case_of_everything():
    """Every mixer that kernels know with its options, every padding of N, and as many tokens as are timed."""
    cases = gpu.full().cases
    assert {case.preset for case in cases} <= set(temper.PRESETS)
    kinds, turned, has_tol = set(), set(), set()
    for case in cases:
        with torch.device("meta"):
            config = temper.preset(case.preset, num_streams=case.num_streams, dim=case.dim, **case.options)
            mixer = temper.HyperConnection(config).spec.mixer
        kinds.add(mixer.kind)
        turned |= {mixer.kind} if mixer.last_columns else set()
        has_tol.add(mixer.tol > 0)
    assert kinds == set(MIXER_KINDS)
    assert turned == {"sinkhorn", "guarded", "newton"}
    assert has_tol == {True, False}
    assert {2, 3, 4, 6, 8, 12, 16} == {case.num_streams for case in cases}
    assert {4, 8} == {case.num_streams for case in cases if case.tokens == 8192}
    assert {4, 8, 16} == {case.num_streams for case in cases if case.other_y}


def test_a_gpu_check_runs_its_cases_as_they_are(monkeypatch):
    seen = []

    def results(given, spec):
        seen.append((spec.mixer.kind, given["y"].dtype))
        return {"d_y": given["y"]}

    monkeypatch.setattr(gpu.check, "results", results)
    monkeypatch.setattr(gpu.check, "definition", lambda given, *_: {"d_y": given["y"].double() + 1e-3})
    monkeypatch.setattr(gpu.fold_check, "results", lambda case: {})
    monkeypatch.setattr(gpu.fold_check, "definition", lambda case: {})
    case = ("temper-cp", 3, 8, 5, {"mixer": {"name": "sinkhorn", "method": "newton"}})
    setting = gpu.Setting(torch.device("cpu"), (case, (*case[:4], {}, True)), ())
    found = gpu.report(1, setting)["right"]
    assert seen[::2] == [
        ("newton", torch.float32),
        ("newton", torch.bfloat16),
        ("sinkhorn", torch.bfloat16),
        ("sinkhorn", torch.float32),
    ]
    # What is rounded to bfloat16 may be off by more.
    assert [row["is_right"] for row in found] == [False, True, True, True]
    assert found[0]["mixer"]["method"] == "newton"


def test_counted_traffic_keeps_its_limits_and_is_what_the_docs_say():
    """Limits in units of one vector of width D a token, and in launches with folding; at N=8 as far above the floor."""
    found, skipped = count.rows(["temper-cp"], [4, 8], [4096])
    assert skipped == []
    ways = {(row["streams"], row["backend"]): row for row in found}
    for num_streams, alone, chained in ((4, 50, 46), (8, 50 * 69 / 37, 46 * 53 / 29)):
        assert ways[num_streams, "triton"]["units"] <= alone
        assert ways[num_streams, "triton, chained"]["units"] <= chained
        assert max(ways[num_streams, way]["launches"] for way in ("triton", "triton, chained")) <= 20
    assert ways[4, "fused"]["units"] > 300
    counted, _, estimated = count.tables(found).partition("Estimate, not a measurement")
    docs = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    lines = [line for line in (counted + estimated).splitlines() if "temper-cp" in line]
    assert len(lines) == len(found) + 2 * len(count.GPUS)
    assert [line for line in lines if line not in docs] == []


def test_what_cannot_be_counted_is_said(capsys):
    assert main(["bench", "--count", "--methods", "kromhc", "mhc-lite", "hc", "--streams", "4", "8"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "not counted" in line]
    assert len(lines) == 3
    assert lines[0].startswith("not counted: mhc-lite at N=8: birkhoff mixes all N! permutations")
    assert lines[1].startswith("not counted: hc at N=4: sites with tanh gates")
    assert main(["bench", "--count", "--methods", "hc", "--streams", "4"]) == 1
    assert "there is nothing to count: hc at N=4: sites with tanh gates" in capsys.readouterr().err
