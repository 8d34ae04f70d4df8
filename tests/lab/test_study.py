"""Studies on paper: methods, grids, what is counted, and what is said beforehand."""

from dataclasses import replace

import pytest
import torch

import temper
from temper_lab import recipe
from temper_lab.cli import main
from temper_lab.cli.compare import _lasting
from temper_lab.compare.counts import counts_of, flops_of
from temper_lab.compare.method import Method, parse_all
from temper_lab.compare.progress import Tail
from temper_lab.compare.session import Session, num_cores
from temper_lab.compare.study import MACHINE, Block, Study, override, read_grid
from temper_lab.model import GPT

TABLE1 = ("residual", "mhc", "mhc-lite", "kromhc", "temper-cp", "temper-tucker")
# Runs, those of them that are skipped, and the methods in the order of the table.
STUDIES = {
    "demo": (5, 0, ("residual", "mhc", "kromhc", "temper-cp", "temper-tucker")),
    "study-cpu": (13 * 3 + 4 * 2, 0, None),
    "table1-cpu": (11 * 3, 3, TABLE1),
    "table1-paper-n4": (6, 0, TABLE1),
    "table1-paper-n8": (6, 1, TABLE1),
    "ablations-cpu": (1 + 6 * 2 + 4 + 3 * 4, 0, None),
    "ablations-paper": (1 + 6 * 2 + 4 + 3 * 4, 0, None),
}


def study_of(name):
    settings, section = recipe.load_study(name)
    return Study(name, settings, read_grid(section, settings, name))


def test_the_built_in_studies_are_those_with_a_grid():
    assert {name for name in recipe.names() if recipe.load_study(name)[1]} == set(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_expands_to_runs_that_count_what_the_library_counts(name):
    study = study_of(name)
    num_runs, num_skipped, methods = STUDIES[name]
    assert len({cell.key for cell in study.cells}) == len(study.cells) == num_runs
    assert sum(study.refusal(cell) is not None for cell in study.cells) == num_skipped
    if methods is not None:
        assert tuple(map(str, study.methods)) == methods
    model = study.recipe.model
    for cell in study.cells:
        config = temper.preset(cell.method.preset, num_streams=cell.streams, dim=model.width, **cell.method.options)
        counts = counts_of(study, cell, model.vocab_size)
        assert counts["added"] == 2 * model.depth * temper.count_parameters(config)


def test_counts_are_those_of_the_models_that_are_trained(tmp_path):
    study = study_of("ablations-cpu")
    # One block and one N are enough: all are the same.
    study = replace(study, recipe=replace(study.recipe, model=study.recipe.model.with_(depth=1)))
    for cell in (cell for cell in study.cells if cell.streams in (1, 4)):
        model = study.recipe_of(cell, tmp_path).model
        with torch.device("meta"):
            built = GPT(model)
        counts = counts_of(study, cell, model.vocab_size)
        assert counts["total"] == built.num_parameters()["total"]
        stored = sum(tensor.numel() for name, tensor in built.state_dict().items() if "_site." in name)
        assert counts["added"] + counts["frozen"] == stored
        assert flops_of(study, cell, model.vocab_size) == built.flops_per_token()


def test_table_1_to_the_parameter():
    counts = {}
    for name in ("table1-paper-n4", "table1-paper-n8"):
        study = study_of(name)
        counts[name] = [counts_of(study, cell, 32768)["added"] for cell in study.cells]
    assert counts["table1-paper-n4"] == [0, 1_843_848, 2_433_864, 958_824, 186_312, 743_880]
    assert counts["table1-paper-n8"] == [0, 11_945_928, 5_948_900_808, 3_392_088, 376_008, 1_933_896]
    assert study_of("table1-paper-n8").recipe.train.steps == 7000


def test_the_study_of_the_results_page_is_the_recipe_that_was_trained():
    settings = recipe.load("study-cpu")
    assert (settings.train.steps, settings.train.save_every, settings.data.corpus) == (160, 0, "data/books")
    assert settings.changes(replace(settings, train=replace(settings.train, threads=2)), MACHINE) == []


def test_a_study_written_and_read_is_the_same(tmp_path):
    study = replace(study_of("ablations-cpu"), commands=("temper compare",))
    assert Study.read(tmp_path) is None
    study.write(tmp_path)
    assert Study.read(tmp_path) == study
    for damage, words in (("{", "not JSON"), ('{"format": "temper-study-1"}', "not complete")):
        (tmp_path / "study.json").write_text(damage)
        with pytest.raises(ValueError, match=words):
            Study.read(tmp_path)


def test_methods_as_people_write_them():
    written = "temper-cp:rank=8 temper-tucker:rank=2x12:gain=none mhc:method=newton:iters=50 temper-cp:rank=0.1"
    parsed = [Method.parse(text) for text in written.split()]
    assert [method.options for method in parsed] == [
        {"rank": 8},
        {"gain": "none", "rank": [2, 12]},
        {"iters": 50, "method": "newton"},
        {"rank": 0.1},
    ]
    assert [method.label for method in parsed][:3] == [
        "temper-cp-rank8",
        "temper-tucker-gainnone-rank2x12",
        "mhc-iters50-methodnewton",
    ]
    # One spelling, whatever the order and the zeros.
    assert Method.parse("mhc:iters=50:method=newton") == parsed[2]
    assert Method.parse("temper-cp:rank=0.10") == parsed[3]
    assert all(Method.parse(str(method)) == method for method in parsed)
    assert parse_all(["mhc,hc", "mhc", " kromhc , "]) == parse_all(["mhc", "hc", "kromhc"])
    assert Method.parse("temper-tucker:freeze_core=true").options == {"freeze_core": True}


def test_a_study_grows_and_keeps_what_it_has():
    study = replace(study_of("demo"), commands=("first",))
    assert study.extended(study.grid, "again") is study
    more = study.extended(override(study.grid, ["mhc", "temper-tt"], [], [0, 1]), "second")
    assert more.commands == ("first", "second")
    assert set(study.cells) < set(more.cells)
    assert [cell.key for cell in more.cells if cell not in study.cells] == [
        "mhc-n4-s1",
        "temper-tt-n4-s0",
        "temper-tt-n4-s1",
    ]
    # The residual preset has one stream: another N is no other run.
    assert study.extended(override(study.grid, ["residual"], [8], []), "third") is study
    with pytest.raises(ValueError, match=r"model.router is .*such as temper-cp:rank=8"):
        replace(study, recipe=replace(study.recipe, model=study.recipe.model.with_(preset="mhc", router={"iters": 3})))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"method": ["mhc"]}, "unknown option of .compare. 'method'. Did you mean 'methods'"),
        ({"methods": "mhc"}, "methods is 'mhc'; expected a list"),
        ({"methods": [3]}, "expected a list of strings"),
        ({"methods": ["mch"]}, "unknown method 'mch'"),
        ({"streams": []}, "streams has nothing"),
        ({"streams": [4, 1]}, "streams has 1; expected whole numbers >= 2"),
        ({"seeds": [0.5]}, "seeds has 0.5"),
        ({"grid": {}}, "grid is {}; expected a list of tables"),
        ({"grid": [{"seed": [0]}]}, "unknown option of a table of grid 'seed'"),
    ],
)
def test_a_bad_section_says_what_is_bad(section, words):
    with pytest.raises(ValueError, match=words) as caught:
        read_grid(section, recipe.load("demo"), "mine.toml")
    assert str(caught.value).startswith("mine.toml: [compare] ")


def test_what_a_recipe_leaves_open():
    (block,) = read_grid({}, recipe.load("cpu-smoke"), "cpu-smoke")
    assert block == Block(parse_all(["residual,mhc,kromhc,temper-cp,temper-tucker"]), (4,), (0,))


def test_a_base_is_overridden_and_its_study_left_behind(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "demo"\n[train]\nsteps = 7\n')
    (tmp_path / "more.toml").write_text('base = "mine.toml"\n[data]\ncorpus = "x"\n[compare]\nseeds = [3]\n')
    settings, section = recipe.load_study(tmp_path / "more.toml")
    assert recipe.load("demo").changes(settings) == ["train.steps was 140, is 7", "data.corpus was 'sotu', is 'x'"]
    assert section == {"seeds": [3]}
    assert recipe.load_study(tmp_path / "mine.toml")[1] == {}
    (tmp_path / "loop.toml").write_text('base = "loop.toml"\n')
    for text, words in (
        ('base = "loop.toml"\n', "its own base"),
        ("base = 3\n", "base is 3; expected the name of a recipe"),
        ('base = "none.toml"\n', "no such file"),
        ("compare = 3\n", r"\[compare\] is 3; expected a section"),
    ):
        (tmp_path / "loop.toml").write_text(text)
        with pytest.raises(ValueError, match=words):
            recipe.load_study(tmp_path / "loop.toml")


def test_jobs_and_threads():
    settings = recipe.load("demo")
    cores = num_cores()
    assert Session(threads=1).settled(settings, 100) == (cores, 1)
    assert Session(threads=1).settled(settings, 1) == (1, 1)
    assert Session(threads=2 * cores).settled(settings, 9) == (1, 2 * cores)
    assert Session(jobs=1).settled(settings, 9) == (1, cores)
    assert Session(jobs=3 * cores).settled(settings, 9) == (3 * cores, 1)
    assert Session(launch=("torchrun",)).settled(settings, 9) == (1, 0)


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--recipe", "table1-paper-n8", "--out", "study", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for text in ("11,945,928", "5,948,900,808", "skipped", "247,870,867 parameters per site", "5 runs", "on 4 A100"):
        assert text in out
    assert list(tmp_path.iterdir()) == []


def test_options_of_a_session_are_no_part_of_the_command():
    words = ["--recipe", "demo", "--jobs", "2", "--methods", "a", "b", "--no-cost", "--core=x", "--launch", "t -n 4"]
    assert _lasting([*words, "--max_per_task", "3", "--train.steps=5"]) == [
        *("--recipe", "demo", "--methods", "a", "b"),
        "--train.steps=5",
    ]


def test_a_tail_follows_a_file_that_is_replaced(tmp_path):
    path = tmp_path / "lines.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [line["step"] for line in tail.read()] == [1, 2]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert [line["step"] for line in tail.read()] == [3]
    assert tail.read() == []
    (tmp_path / "new").write_text('{"step": 1}\n')
    (tmp_path / "new").replace(path)
    assert [line["step"] for line in tail.read()] == [1]
