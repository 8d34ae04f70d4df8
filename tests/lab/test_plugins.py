"""Parts of a package outside the tree reach the command line: by `--import`, or by an entry point."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from temper_lab import plugins
from temper_lab.cli import main

ROOT = Path(__file__).parents[2]
METHOD = "mhc:generator=lowrank:mixer=softmax:rank=2"

TRAIN = """
import sys
from temper_lab.cli import main
ours = ["--import", "my_parts.lowrank", "--import=my_parts.softmax"]
small = ["--train.steps", "4", "--train.val-every", "0", "--train.save-every", "2"]
for words in (
    ["train", *ours, "--recipe", sys.argv[1], "--out", "run", "--model", sys.argv[2], *small],
    ["train", *ours, "--out", "run", "--resume"],
    ["sample", *ours, "--model", "run", "--max-tokens", "2"],
    ["params", *ours, "--methods", sys.argv[2], "--streams", "4"],
    ["compress", *ours, "--model", "run", "--to", "lowrank:rank=1", "--out", "small", "--batches", "1"],
    ["export", *ours, "--model", "run", "--out", "exported"],
    ["runs", "."],
):
    print(f"== {words[0]}")
    assert main(words) == 0, words
"""

# Without the parts, and then as an installed package has them.
READ = """
import sys
from temper_lab.cli import main
for words in (
    ["sample", "--model", "run"],
    ["sample", "--model", "run/model"],
    ["train", "--out", "run", "--resume"],
    ["eval", "bpb", "--model", "exported"],
):
    assert main(words) == 1, words
assert not [name for name in sys.modules if name.startswith("my_parts")]
sys.path.append(sys.argv[1])
assert main(["sample", "--model", "run", "--max-tokens", "2"]) == 0
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder with the package that the two documents write."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "my_parts").mkdir()
    for page, name in (("generator", "lowrank"), ("mixer", "softmax")):
        text = (ROOT / f"docs/adding-a-{page}.md").read_text()
        (folder / "my_parts" / f"{name}.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    return folder


def run(script, folder, *arguments):
    # The folder one works in is not on the path of a console script.
    command = [sys.executable, "-P", "-c", script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def trained(outside, tiny):
    done = run(TRAIN, outside, tiny, METHOD)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_package_outside_the_tree_trains(trained, outside):
    told = dict(part.split("\n", 1) for part in trained.split("== ")[1:])
    # What was built, not the preset that it began with.
    assert METHOD in told["params"]
    assert METHOD in told["runs"]
    about = json.loads((outside / "run/run.json").read_text())
    assert about["method"] == METHOD
    assert about["imports"] == ["my_parts.lowrank", "my_parts.softmax"]
    for folder in ("run/model", "small", "exported"):
        config = json.loads((outside / folder / "config.json").read_text())
        assert config["imports"] == about["imports"]
    assert "import my_parts.lowrank\nimport my_parts.softmax\n" in (outside / "exported/README.md").read_text()


def test_a_folder_imports_nothing_and_says_what_it_needs(trained, outside, tmp_path):
    info = tmp_path / "my_parts-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-parts\nVersion: 1\n")
    points = "lowrank = my_parts.lowrank\nsoftmax = my_parts.softmax\nbroken = my_parts.none\n"
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{points}")
    (tmp_path / "my_parts").symlink_to(outside / "my_parts")
    done = run(READ, outside, tmp_path)
    assert done.returncode == 0, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(errors) == 4
    for line in errors:
        assert "unknown mixer 'softmax'" in line or "unknown generator 'lowrank'" in line
        assert line.endswith("(it was built with --import my_parts.lowrank --import my_parts.softmax)")
    assert "warning: the entry point broken of temper.parts failed: ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--import", "no_such_parts"], "--import: there is no module 'no_such_parts', installed or in "),
        (["--import", "parts/mine.py"], "--import is 'parts/mine.py'; expected the name of a module"),
        (["--import"], "--import is ''; expected the name of a module"),
        (["--import", "broken_parts"], "--import broken_parts failed: RuntimeError: no luck"),
        (["--import", "script"], "--import script failed: SystemExit: 3"),
        (["--methods", "mhc:mixer=sofmax"], "(parts of your own package need --import MODULE)"),
    ],
)
def test_what_is_wrong_with_an_import_is_said_in_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_parts.py").write_text("raise RuntimeError('no luck')")
    (tmp_path / "script.py").write_text("raise SystemExit(3)")
    path = [*sys.path]
    assert main(["params", *words]) == 1
    assert message in capsys.readouterr().err
    assert sys.path == path


def test_the_option_parser_advises_an_import_too(tiny, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--recipe", str(tiny), "--out", str(tmp_path / "run"), "--model.router", '{"mixer": "sofmax"}'])
    assert "--import" in capsys.readouterr().err
    assert not plugins.UnknownPartError.advice


def test_what_a_file_says_of_imports_is_only_repeated():
    for strange in (None, 3, ["x; rm -rf /"], [3], ["a" * 200], {"os": 1}):
        with pytest.raises(ValueError, match="unknown mixer") as raised, plugins.recorded(strange):
            plugins.Mixer.named("sofmax")
        assert "--import" not in str(raised.value)
