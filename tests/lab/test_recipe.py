"""Recipes: all of them load, and a bad one says what is bad."""

import re
from importlib import resources

import pytest

from temper_lab import recipe
from temper_lab.cli import main
from temper_lab.optim.optimizers import GROUPS, OptimSettings
from temper_lab.recipe import Recipe
from temper_lab.study.grid import read_grid
from temper_lab.study.spec import Study
from temper_lab.train.plan import BatchPlan, plan_batch

BUILT_IN = (
    *("ablations-cpu", "ablations-paper", "cpu-base", "cpu-small", "cpu-smoke", "demo", "paper-n4", "paper-n8"),
    *("study-cpu", "table1-cpu", "table1-paper-n4", "table1-paper-n8"),
)


def test_the_built_in_recipes():
    assert tuple(recipe.names()) == BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_recipe_loads_is_commented_and_survives_a_round_trip(name):
    loaded = recipe.load(name)
    assert Recipe.from_dict(loaded.to_dict()) == loaded
    assert (resources.files("temper_lab") / "recipes" / f"{name}.toml").read_text().startswith("# ")


@pytest.mark.parametrize("name", ["cpu-base", "cpu-small", "cpu-smoke", "demo", "study-cpu"])
def test_the_comments_of_the_recipes_for_cpus_are_true(name):
    text = (resources.files("temper_lab") / "recipes" / f"{name}.toml").read_text()
    rates, defaults = recipe.load(name).optim, OptimSettings()
    factors = [getattr(rates, f"{group}_lr") / getattr(defaults, f"{group}_lr") for group in GROUPS]
    factor = 20 if "\n# Twenty times the defaults" in text else 10
    assert f"\n# {'Twenty' if factor == 20 else 'Ten'} times the defaults" in text
    assert "2.5 times for routing" in text
    assert dict(zip(GROUPS, factors, strict=True)) == pytest.approx(
        {"matrix": factor, "embedding": factor, "head": factor, "routing": 2.5, "vector": 1}
    )
    settings, section = recipe.load_study(name)
    if found := re.search(r"(\d+) runs", text):
        assert len(Study(name, settings, read_grid(section, settings, name)).cells) == int(found[1])


@pytest.mark.parametrize(
    ("name", "streams", "steps", "routing"), [("paper-n4", 4, 6000, 743_880), ("paper-n8", 8, 7000, 1_933_896)]
)
def test_the_recipes_of_the_paper_dry_run_on_the_meta_device(
    name, streams, steps, routing, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    loaded = recipe.load(name)
    model, train = loaded.model, loaded.train
    assert (model.depth, model.head_dim, model.context, model.vocab_size) == (12, 128, 2048, 32768)
    assert (model.num_streams, train.steps, train.batch_tokens) == (streams, steps, 524_288)
    assert main(["train", "--recipe", name, "--dry-run"]) == 0
    out = capsys.readouterr().out
    for text in (
        f"routing {routing:,}",
        "blocks 84,934,656",
        "FLOPs/token",
        "memory",
        "ETA",
        "4 processes",
        "not there yet",
    ):
        assert text in out
    assert list(tmp_path.iterdir()) == []


def test_every_field_can_be_overridden(capsys, tmp_path):
    options = ["--model.preset", "temper-tucker", "--model.num-streams", "8", "--model.router", '{"rank": [2, 3]}']
    options += ["--train.steps", "50", "--optim.betas", "0.7", "0.9", "--data.num-shards", "1", "--train.compile"]
    assert main(["train", "--recipe", "cpu-smoke", "--dry-run", *options]) == 0
    out = capsys.readouterr().out
    assert "temper-tucker:rank=2x3 on 8 streams" in out
    assert "50 steps x 2,048 = 102,400" in out


def test_a_number_of_processes_that_does_not_divide():
    smoke = recipe.load("cpu-smoke")
    assert plan_batch(smoke, 1) == BatchPlan(num_shards=1, grad_accum_steps=1, device_batch_size=16)
    assert plan_batch(smoke, 2) == BatchPlan(num_shards=2, grad_accum_steps=1, device_batch_size=8)
    assert plan_batch(recipe.load("paper-n4"), 2) == BatchPlan(num_shards=4, grad_accum_steps=4, device_batch_size=16)
    with pytest.raises(ValueError, match=r"for 3 shards expected a multiple of 384"):
        plan_batch(smoke, 3)
    with pytest.raises(ValueError, match=r"data.num_shards is 4; expected a multiple of the 3 processes"):
        plan_batch(recipe.load("paper-n4"), 3)
    copies = smoke.with_fields({"train.parallel": "fsdp", "train.replicas": 2})
    assert plan_batch(copies, 2) == plan_batch(smoke, 2)
    with pytest.raises(ValueError, match=r"train.replicas is 2; expected a divisor of the 1 processes"):
        plan_batch(copies, 1)
    with pytest.raises(ValueError, match=r"train.replicas is 2; expected 1 unless train.parallel is 'fsdp'"):
        smoke.with_fields({"train.replicas": 2})


GOOD = """[model]
depth = 1
vocab_size = 300
context = 32
head_dim = 32
[train]
steps = 2
batch_tokens = 64
device_batch_size = 2
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model\n", "not TOML"),
        (GOOD + "stepz = 3\n", r"unknown option of \[train\] 'stepz'. Did you mean 'steps'"),
        (GOOD + "[modle]\n", "unknown section 'modle'. Did you mean 'model'"),
        ("depth = 3\n", "unknown section 'depth'"),
        ("model = 3\n", r"\[model\] is 3; expected a section"),
        (GOOD.replace("steps = 2", "steps = '2'"), "train.steps is '2'; expected a whole number"),
        (GOOD.replace("steps = 2", "steps = true"), "train.steps is True; expected a whole number"),
        (GOOD.replace("steps = 2", "steps = 0"), "train.steps is 0; expected a whole number >= 1"),
        (GOOD.replace("steps = 2\n", ""), "train.steps must be set"),
        (
            GOOD.replace("batch_tokens = 64", "batch_tokens = 65"),
            "expected a multiple of model.context 32 = 32, such as 64",
        ),
        (GOOD + "prompts = 'one'\n", "train.prompts is 'one'; expected a list, each a string"),
        (GOOD + "parallel = 'dp'\n", "train.parallel is 'dp'; expected 'ddp' or 'fsdp'"),
        (GOOD + "[optim]\nbetas = [0.1]\n", "optim.betas .* expected a list of 2, each a number"),
        (GOOD + "[optim]\nclip = nan\n", "optim.clip is nan; expected a number"),
        (GOOD + "[optim]\nmomentum = 2\n", r"\[optim\] momentum is 2"),
        (GOOD + "[data]\nval_fraction = 2\n", "data.val_fraction is 2"),
        (GOOD.replace("depth = 1", "depth = 1\npreset = 'temper'"), "unknown preset 'temper'. Did you mean"),
        (GOOD.replace("depth = 1", "depth = 1\nrouter = 3"), "model.router is 3; expected a table"),
    ],
)
def test_a_bad_recipe_says_what_is_bad(text, words, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        recipe.load(path)
    assert str(caught.value).startswith(str(path))


def test_recipes_that_do_not_exist(tmp_path):
    with pytest.raises(ValueError, match=r"unknown recipe 'cpu-smok'. Did you mean 'cpu-smoke'"):
        recipe.load("cpu-smok")
    with pytest.raises(ValueError, match="no such file"):
        recipe.load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        recipe.load(tmp_path / "binary.toml")


def test_changes_are_named():
    first = recipe.load("cpu-smoke")
    values = first.to_dict()
    values["train"]["steps"] = 61
    assert first.changes(Recipe.from_dict(values)) == ["train.steps was 60, is 61"]
    assert first.changes(first) == []


def test_former_names_of_fields_are_read_with_a_notice(tmp_path, capsys):
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    new.write_text(f"{GOOD}[data]\nnum_shards = 2\n")
    old.write_text(f"{GOOD.replace('device_batch_size', 'rows')}[data]\nshares = 2\n")
    expected = recipe.load(new)
    assert (expected.data.num_shards, expected.train.device_batch_size) == (2, 2)
    assert capsys.readouterr().err == ""
    assert recipe.load(old) == expected
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"note: {old}: data.shares is now called data.num_shards",
        f"note: {old}: train.rows is now called train.device_batch_size",
    ]
    both = tmp_path / "both.toml"
    both.write_text(f"{GOOD}rows = 3\n")
    with pytest.raises(ValueError, match=r"has both train\.rows and train\.device_batch_size"):
        recipe.load(both)


@pytest.mark.parametrize("words", [["--train.rows", "2"], ["--train.rows=2"]])
def test_former_names_of_options_name_the_new_ones(words, tmp_path, capsys):
    assert main(["train", "--recipe", "cpu-smoke", "--out", str(tmp_path / "run"), *words]) == 2
    assert capsys.readouterr().err == "error: --train.rows is now called --train.device-batch-size\n"
