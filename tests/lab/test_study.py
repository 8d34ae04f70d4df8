"""Studies on paper: methods, grids, what is counted, and what is said beforehand."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import temper
from temper_lab import recipe
from temper_lab.cli import main
from temper_lab.cli.compare import _lasting
from temper_lab.data import DataFingerprint
from temper_lab.method import Method, parse_all
from temper_lab.model import GPT
from temper_lab.optim.optimizers import assign
from temper_lab.study import vary
from temper_lab.study.cost import counts_of, flops_of, groups_of
from temper_lab.study.environment import ExecutionOptions, num_cores
from temper_lab.study.grid import GridBlock, override, read_grid
from temper_lab.study.results import Results
from temper_lab.study.runner import Runner, Tail
from temper_lab.study.spec import Study
from temper_lab.study.vary import MACHINE
from temper_lab.train.plan import corpus_of

ROOT = Path(__file__).parents[2]
TABLE1 = ("residual", "mhc", "mhc-lite", "kromhc", "temper-cp", "temper-tucker")
# Runs, those of them that are skipped, and the methods in the order of the table.
STUDIES = {
    "demo": (5, 0, ("residual", "mhc", "kromhc", "temper-cp", "temper-tucker")),
    "study-cpu": (6 * 5 + 4 * 3 + 7 * 3 + 3 * 3 * 2, 0, None),
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
    for cell in study.cells:
        model = study.settings_of(cell).model
        config = temper.preset(cell.method.preset, num_streams=cell.num_streams, dim=model.dim, **cell.method.options)
        counts = counts_of(study, cell, model.vocab_size)
        assert counts.added == 2 * model.depth * temper.count_parameters(config)


def test_counts_are_those_of_the_models_that_are_trained(tmp_path):
    study = study_of("ablations-cpu")
    # One block and one N are enough: all are the same. A width of its own, as a study of depth has.
    study = replace(study, recipe=replace(study.recipe, model=study.recipe.model.with_(depth=1, head_dim=32, width=96)))
    for cell in (cell for cell in study.cells if cell.num_streams in (1, 4)):
        model = study.recipe_of(cell, tmp_path).model
        with torch.device("meta"):
            built = GPT(model)
        counts = counts_of(study, cell, model.vocab_size)
        assert counts.total == built.num_parameters()["total"]
        stored = sum(tensor.numel() for name, tensor in built.state_dict().items() if "_site." in name)
        assert counts.added + counts.frozen == stored
        assert flops_of(study, cell, model.vocab_size) == built.flops_per_token()


def test_table_1_to_the_parameter():
    counts = {}
    for name in ("table1-paper-n4", "table1-paper-n8"):
        study = study_of(name)
        counts[name] = [counts_of(study, cell, 32768).added for cell in study.cells]
    assert counts["table1-paper-n4"] == [0, 1_843_848, 2_433_864, 958_824, 186_312, 743_880]
    assert counts["table1-paper-n8"] == [0, 11_945_928, 5_948_900_808, 3_392_088, 376_008, 1_933_896]
    assert study_of("table1-paper-n8").recipe.train.steps == 7000


def test_the_study_of_the_results_page_is_the_recipe_that_was_trained():
    settings = recipe.load("study-cpu")
    assert (settings.train.steps, settings.train.batch_tokens, settings.data.corpus) == (2000, 1024, "sotu")
    assert (settings.model.depth, settings.model.dim, settings.optim.routing_lr) == (8, 96, 0.0125)
    assert settings.changes(replace(settings, train=replace(settings.train, threads=2)), MACHINE) == []
    # What is committed can be gone on from with --known.
    for name in ("study-cpu", "lr-routing"):
        data = Results.read(ROOT / "docs" / "results" / f"{name}.json").data
        assert data is not None, name
        assert data.changes(DataFingerprint.of(corpus_of(settings.data))) == [], name


def test_a_study_written_and_read_is_the_same(tmp_path):
    study = replace(study_of("ablations-cpu"), commands=("temper compare",))
    assert Study.read(tmp_path) is None
    study.write(tmp_path)
    assert Study.read(tmp_path) == study
    for damage, words in (("{", "not JSON"), ('{"format": "temper-study-1"}', "has no 'recipe'")):
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
    # One head with a part and options of its own.
    head = Method.parse("mhc:res=cp+rank=8+init_std=.02")
    assert head.options == {"res": {"name": "cp", "rank": 8, "init_std": 0.02}}
    config = head.config(4, 64)
    assert (config.pre.name, config.res.options["rank"]) == ("dense", 8)
    # From a complete configuration; what says the default is left out.
    complete = {key: config.to_dict()[key] for key in ("mixer", "pre", "res")}
    assert str(Method.of("mhc", complete)) == f"mhc:mixer=sinkhorn:pre=dense:{head.items[0][0]}={head.items[0][1]}"
    assert Method.of("mhc", {"res": None, "rank": (2, 12)}).options == {"rank": [2, 12], "res": None}
    for wrong in ("mhc:rank=", "mhc:rank=[2]", "mhc:res=cp+8", 'mhc:gain="none"'):
        with pytest.raises(ValueError, match="is not a value; expected 8"):
            Method.parse(wrong)


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
    assert block == GridBlock(parse_all(["residual,mhc,kromhc,temper-cp,temper-tucker"]), (4,), (0,))


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


VARIED = {"model.depth": [4, 2, 3], "optim.routing_lr": [0.1, 0.0125]}


def keys(cells):
    return [cell.key for cell in cells]


def test_a_value_that_the_recipe_has_is_no_other_run():
    settings = recipe.load("demo")
    grid = read_grid({"methods": ["residual", "mhc"], "grid": [{}, {"vary": VARIED}]}, settings, "x")
    study = Study("x", settings, grid)
    assert keys(study.cells) == [
        *("residual-n1-s0-depth2", "residual-n1-s0", "residual-n1-s0-depth4"),
        *("mhc-n4-s0-depth2", "mhc-n4-s0-depth2-routing_lr0.1", "mhc-n4-s0", "mhc-n4-s0-routing_lr0.1"),
        *("mhc-n4-s0-depth4", "mhc-n4-s0-depth4-routing_lr0.1"),
    ]
    assert study.axes == (("model.depth", (2, 3, 4)), ("optim.routing_lr", (0.0125, 0.1)))
    last = study.cells[-1]
    assert last.vary == (("model.depth", 4), ("optim.routing_lr", 0.1))
    assert settings.changes(study.settings_of(last)) == [
        "model.depth was 3, is 4",
        "optim.routing_lr was 0.0125, is 0.1",
    ]
    # A residual network has no routing to train, and no run is trained twice.
    assert study.value_of(study.cells[0], "optim.routing_lr") is None
    with torch.device("meta"):
        assert not assign(GPT(study.recipe_of(study.cells[0], Path("x")).model))["routing"]
    # What a step takes is measured with the recipe as it is; a learning rate does not change it.
    assert [(str(method), n) for method, n in groups_of(study)] == [("residual", 1), ("mhc", 4)]
    assert groups_of(replace(study, grid=override(study.grid, [], [], [], ["model.depth=2,4"]))) == []
    with torch.device("meta"):
        built = GPT(study.recipe_of(last, Path("x")).model)
    assert counts_of(study, last, settings.model.vocab_size).total == built.num_parameters()["total"]
    assert flops_of(study, last, settings.model.vocab_size) == built.flops_per_token()


def test_runs_are_trained_block_after_block_and_seed_by_seed(tmp_path):
    """A promise: whatever has finished when time runs out is comparable."""
    grid = [
        {"methods": ["residual", "mhc"], "streams": [4, 8], "seeds": [1, 0]},
        {"methods": ["kromhc"], "streams": [2], "seeds": [0]},
        {"methods": ["residual", "hc"], "streams": [4], "seeds": [0, 1], "vary": {"model.depth": [2, 3]}},
    ]
    settings = recipe.load("demo")
    study = Study("x", settings, read_grid({"grid": grid}, settings, "x"))
    expected = [
        *("residual-n1-s1", "mhc-n4-s1", "mhc-n8-s1", "residual-n1-s0", "mhc-n4-s0", "mhc-n8-s0", "kromhc-n2-s0"),
        *("residual-n1-s0-depth2", "hc-n4-s0-depth2", "hc-n4-s0"),
        *("residual-n1-s1-depth2", "hc-n4-s1-depth2", "hc-n4-s1"),
    ]
    assert keys(study.queue) == expected
    assert sorted(keys(study.cells)) == sorted(expected)
    assert [cell.method.preset for cell in study.cells] == sorted(
        (cell.method.preset for cell in study.queue), key=["residual", "mhc", "kromhc", "hc"].index
    )
    runner = Runner(study, tmp_path, jobs=1, threads=1, launch=["true"])
    assert keys(runner._waiting) == expected
    # What is added comes after what was there.
    assert keys(study.extended(override(grid=study.grid[:1], methods=["hc"], streams=[], seeds=[5]), "").queue) == [
        *expected,
        *("hc-n4-s5", "hc-n8-s5"),
    ]


@pytest.mark.parametrize(
    ("text", "values", "label"),
    [
        ("optim.matrix_lr=0.02,5e-2, 1", (0.02, 0.05, 1.0), "matrix_lr1"),
        ("optim.matrix-lr=0.10,0.1", (0.1,), "matrix_lr0.1"),
        ("train.steps=10,20", (10, 20), "steps20"),
        ("train.compile=false,true", (False, True), "compiletrue"),
        ("train.precision=auto,float64", ("auto", "float64"), "precisionfloat64"),
        ("optim.betas=[0.8,0.95],[0.9, 0.99]", ((0.8, 0.95), (0.9, 0.99)), "betas0.9x0.99"),
        ('train.start="a,b",../some/run', ("a,b", "../some/run"), "start.._some_run-291a2b"),
    ],
)
def test_values_are_of_the_type_of_their_field(text, values, label):
    ((name, found),) = vary.parse([text])
    assert name == text.partition("=")[0].replace("-", "_")
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]
    assert vary.suffix(((name, found[-1]),)) == f"-{label}"
    assert vary.read(vary.plain(((name, found),))) == ((name, found),)


def test_names_of_runs_stay_apart():
    settings = (("train.start", "a/b"), ("train.start", "a_b"), ("train.start", "a" * 80), ("train.start", "a" * 81))
    names = {vary.suffix((item,)) for item in settings}
    assert len(names) == 4
    assert max(map(len, names)) < 60
    both = Method.parse("mhc"), Method.parse("mhc")
    grid = (GridBlock(both, (4,), (0,), (("optim.clip", (1.0, 2.0)),)),)
    assert keys(Study("x", recipe.load("demo"), grid).cells) == ["mhc-n4-s0", "mhc-n4-s0-clip2"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["optim.matix_lr=1"], "unknown field of a recipe 'optim.matix_lr'. Did you mean 'optim.matrix_lr'"),
        (["matrix_lr=1"], "Did you mean 'optim.matrix_lr'"),
        (["optim.matrix_lr"], "is not FIELD=VALUE,VALUE, such as optim.matrix_lr=0.02,0.05"),
        (["optim.matrix_lr="], "'optim.matrix_lr=' has an empty value; expected values between commas, such as"),
        (["optim.matrix_lr=0.1,,0.2"], "'optim.matrix_lr=0.1,,0.2' has an empty value"),
        (["optim.betas=[0.8,0.95], "], "has an empty value"),
        (["model.depth=4.0"], "model.depth is 4.0; expected a whole number, such as 4"),
        (["optim.matrix_lr=fast"], "optim.matrix_lr is 'fast'; expected a number"),
        (["optim.matrix_lr=nan"], "expected a number"),
        (["train.steps=1.5"], "train.steps is '1.5'; expected a whole number"),
        (["train.steps=0"], "train.steps is 0; expected a whole number >= 1"),
        (["optim.momentum=2"], "momentum is 2.0; expected a number in [0, 1)"),
        (["train.batch_tokens=100"], "train.batch_tokens is 100; expected a multiple of model.context 128"),
        (["model.context=96", "train.steps=3"], "model.context = 96, train.steps = 3: train.batch_tokens is 2048"),
        (["optim.clip=1", "optim.clip=2"], "optim.clip twice"),
        (["train.seed=1"], "train.seed cannot be varied: every run has its own already; use --seeds"),
        (["model.preset=mhc"], "use --methods"),
        (["model.router={}"], "use --methods, such as temper-cp:rank=8"),
        (["model.routers={}"], "use --methods"),
        (["model.num_streams=2"], "use --streams"),
        (["train.threads=2"], "use --train.threads for all runs"),
        (["tokenizer.path=x"], "use --tokenizer.path for all runs"),
        (["train.device=cpu"], "use --train.device for all runs"),
        (["train.save_every=5,10"], "it changes what is recorded of a run, not what the run trains"),
        (["train.tensorboard=true"], "use --train.tensorboard for all runs"),
        (["data.corpus=x"], "all runs of a study share the data; for another value begin a study in another --out"),
        (["tokenizer.train_chars=9"], "share the tokenizer"),
        (["model.vocab_size=512"], "share the tokenizer"),
    ],
)
def test_what_cannot_be_varied_says_what_to_do_instead(options, words, capsys):
    assert set(vary.RECORDS) < set(recipe.field_types())
    given = [word for option in options for word in ("--vary", option)]
    assert main(["compare", "--recipe", "demo", "--dry-run", *given]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_axes_in_a_recipe(tmp_path):
    text = """base = "demo"
[compare]
methods = ["mhc"]
vary = { optim.clip = [1, 2.5] }
grid = [{}, { vary = {} }, { streams = [8], vary = { "train.steps" = [70], "optim.betas" = [[0.9, 0.99]] } }]
"""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    study = study_of(str(path))
    assert keys(study.queue) == ["mhc-n4-s0", "mhc-n4-s0-clip2.5", "mhc-n8-s0-steps70-betas0.9x0.99"]
    study.write(tmp_path)
    assert Study.read(tmp_path) == study
    # The command line replaces what all blocks vary.
    assert keys(replace(study, grid=override(study.grid, [], [], [], ["optim.clip=2"])).cells) == [
        "mhc-n4-s0-clip2",
        "mhc-n8-s0-clip2",
    ]
    for bad, words in (("3", "vary is 3; expected a table"), ('{ "optim.clip" = 2 }', "expected a list of values")):
        path.write_text(text.replace("{ optim.clip = [1, 2.5] }", bad))
        with pytest.raises(ValueError, match=words):
            study_of(path)


def test_a_study_of_before_there_were_axes(tmp_path):
    study = replace(study_of("demo"), commands=("first",))
    study.write(tmp_path)
    assert "vary" not in (tmp_path / "study.json").read_text()
    more = Study.read(tmp_path).extended(override(study.grid, ["mhc"], [], [], ["train.steps=70,140"]), "second")
    assert keys(more.queue)[-1] == "mhc-n4-s0-steps70"
    assert len(more.queue) == 6


def test_a_forecast_counts_every_run_at_its_own_size(capsys):
    axes = ["--vary", "model.depth=2,3", "--vary", "train.steps=70,140"]
    assert main(["compare", "--recipe", "demo", "--dry-run", "--methods", "mhc", *axes]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:6] == ["method", "N", "depth", "steps", "seeds", "added"]
    assert [line.split()[:6] for line in lines[1:5]] == [
        ["mhc", "4", depth, steps, "0", added]
        for depth, added in (("2", "51,308"), ("3", "115,362"))
        for steps in ("70", "140")
    ]
    assert lines[5].startswith("70 or 140 steps x 2,048 tokens each")


def test_jobs_and_threads():
    settings = recipe.load("demo")
    cores = num_cores()
    assert ExecutionOptions(threads=1).settled(settings, 100) == (cores, 1)
    assert ExecutionOptions(threads=1).settled(settings, 1) == (1, 1)
    assert ExecutionOptions(threads=2 * cores).settled(settings, 9) == (1, 2 * cores)
    assert ExecutionOptions(jobs=1).settled(settings, 9) == (1, cores)
    assert ExecutionOptions(jobs=3 * cores).settled(settings, 9) == (3 * cores, 1)
    assert ExecutionOptions(launch=("torchrun",)).settled(settings, 9) == (1, 0)


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--recipe", "table1-paper-n8", "--out", "study", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for text in ("11,945,928", "5,948,900,808", "skipped", "247,870,867 parameters per site", "5 runs", "on 4 A100"):
        assert text in out
    assert "corpus data/climbmix, which is not there yet: temper data download --shards K --folder data/climbmix" in out
    assert list(tmp_path.iterdir()) == []


def test_options_of_a_session_are_no_part_of_the_command():
    words = ["--recipe", "demo", "--jobs", "2", "--methods", "a", "b", "--no-cost", "--core=x", "--launch", "t -n 4"]
    assert _lasting([*words, "--max_per_task", "3", "--train.steps=5"]) == [
        *("--recipe", "demo", "--methods", "a", "b"),
        "--train.steps=5",
    ]


def test_a_tail_follows_a_file_that_is_replaced(tmp_path):
    path = tmp_path / "lines.jsonl"
    tail = Tail(path, ("step",))
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
