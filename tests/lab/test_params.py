"""`temper params` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import temper
from temper_lab.cli import main

TABLE = {
    "residual": {"4": (0, 0), "8": (0, 0)},
    "mhc": {"4": (76_827, 1_843_848), "8": (497_747, 11_945_928)},
    "mhc-lite": {"4": (101_411, 2_433_864), "8": (247_870_867, 5_948_900_808)},
    "kromhc": {"4": (39_951, 958_824), "8": (141_337, 3_392_088)},
    "temper-cp": {"4": (7_763, 186_312), "8": (15_667, 376_008)},
    "temper-tucker": {"4": (30_995, 743_880), "8": (80_579, 1_933_896)},
}


def test_the_command_prints_the_table_of_the_paper_as_json():
    command = [str(Path(sys.executable).parent / "temper"), "params"]
    arguments = ["--streams", "4", "8", "--dim", "768", "--sites", "24", "--json"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout)
    assert set(counts) == set(temper.PRESETS)
    for name, rows in TABLE.items():
        assert counts[name] == {n: {"per_site": one, "total": all_} for n, (one, all_) in rows.items()}
    assert counts["temper-tucker-frozen"]["4"] == {
        "per_site": 30_803,
        "total": 739_272,
        "stored_per_site": 30_995,
        "stored_total": 743_880,
    }


def test_the_table(capsys):
    assert main(["params", "--streams", "4", "--ranks", "8", "2x48"]) == 0
    out = capsys.readouterr().out
    for text in ("743,880", "10.1%", "temper-cp:rank=8", "temper-tucker:rank=2x48", "30,995 per site with its frozen"):
        assert text in out


def test_methods_in_the_notation_of_compare(capsys):
    method = "mhc:gain=rank-one:generator=cp:mixer=kronecker:rank=2"
    assert main(["params", "--streams", "4", "--methods", method]) == 0
    # Where there is no terminal, no name or number is cut short.
    row = next(line for line in capsys.readouterr().out.splitlines() if method in line)
    options = {"generator": "cp", "mixer": "kronecker", "rank": 2, "gain": "rank-one"}
    config = temper.preset("mhc", num_streams=4, dim=768, **options)
    assert f"{temper.count_parameters(config):,}" in row
    assert row.split()[3:6:2] == ["cp", "kronecker"]
    assert "\N{HORIZONTAL ELLIPSIS}" not in row


def test_a_rank_that_fits_some_numbers_of_streams_only(capsys):
    assert main(["params", "--streams", "2", "4", "--dim", "16", "--ranks", "3x8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["temper-tucker:rank=3x8"]
    assert rows["2"] is None
    assert rows["4"]["per_site"] > 0
    assert main(["params", "--streams", "2", "4", "--dim", "16", "--ranks", "3x8"]) == 0
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_figure_lands_whole(tmp_path, capsys, suffix):
    target = tmp_path / "new" / f"parameters.{suffix}"
    assert main(["params", "--plot", str(target)]) == 0
    assert target.stat().st_size > 5_000
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert str(target) in capsys.readouterr().out
    if suffix == "svg":
        text = target.read_text()
        assert all(f">{name}<" in text for name in temper.PRESETS if name != "residual")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--streams", "0"], "--streams has 0; expected 1 to"),
        (["--dim", "0"], "--dim has 0; expected 1 to"),
        (["--sites", "0"], "--sites is 0"),
        (["--ranks", "two"], "the rank is 'two'; expected a number like 8"),
        (["--ranks", "0.5"], "rank '0.5' is neither a CP rank like 8 nor a Tucker rank like 2x12"),
        (["--ranks", "9x9"], "temper-tucker:rank=9x9 fits none of N = 2, 4, 8 at D = 768: "),
        (["--methods", "mhc:generator=pc"], "unknown generator 'pc'. Did you mean 'cp'"),
        (["--plot", "figure.gif"], "ends in .png, .svg, .pdf"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments, message, capsys):
    assert main(["params", "--streams", "2", "4", "8", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.out == ""


def test_help_teaches(capsys):
    assert main(["params", "--help"]) == 0
    assert "temper params --streams 4 8 --json" in capsys.readouterr().out


def test_without_the_lab_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["params"]) == 2
    assert "pip install 'temper-hc[lab]'" in capsys.readouterr().err
