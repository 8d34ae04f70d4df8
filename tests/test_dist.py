"""The source distribution and the wheel: they build, hold every file, and work in an environment with torch alone."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import temper

ROOT = Path(__file__).parents[1]
# The distributions are installed: nothing may come from the source tree.
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}

pytestmark = pytest.mark.slow


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=CLEAN, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder that `make dist` has filled, or one that is built here."""
    if "TEMPER_DIST" in os.environ:
        return ROOT / os.environ["TEMPER_DIST"]
    pytest.importorskip("build", reason="build is not installed (pip install build)")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """The programs of a fresh virtual environment with the wheel and what it requires."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "-c", ROOT / "constraints.txt", wheel)
    return folder / "bin"


def test_every_file_of_the_packages_is_in_both(built, wheel):
    tracked = run("git", "ls-files", "src", cwd=ROOT).split()
    (archive,) = built.glob("*.tar.gz")
    assert archive.name == f"temper_hc-{temper.__version__}.tar.gz"
    with zipfile.ZipFile(wheel) as opened:
        assert {f"src/{name}" for name in opened.namelist() if ".dist-info/" not in name} == set(tracked)
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {*tracked, "tests/conftest.py", "constraints.txt", "CHANGELOG.md", "docs/index.md"} <= names


def test_the_library_runs_with_torch_alone(clean, tmp_path):
    installed = run(clean / "python", "-m", "pip", "list")
    assert not re.search(r"^(rich|tyro|numpy|transformers) ", installed, re.MULTILINE)
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    located = f"{snippet}\nprint(temper.__file__, tuple(x.shape))"
    printed = run(clean / "python", "-I", "-c", located, cwd=tmp_path)
    assert "site-packages" in printed
    assert "(2, 16, 64)" in printed


def test_the_command_gives_its_version_and_says_what_else_to_install(clean, tmp_path):
    assert run(clean / "temper", "--version", cwd=tmp_path) == f"temper {temper.__version__}\n"
    done = subprocess.run([clean / "temper", "runs"], capture_output=True, text=True, env=CLEAN)
    assert done.returncode == 2
    assert "pip install 'temper-hc[lab]'" in done.stderr


def test_the_extras_resolve(clean, built):
    said = run(
        *(clean / "python", "-m", "pip", "install", "--dry-run", "--find-links", built),
        *("-c", ROOT / "constraints.txt", "temper-hc[lab,hf,tensorboard]"),
    )
    planned = said.split("Would install")[1].lower()
    assert all(f"{name}-" in planned for name in ("numpy", "rich", "tyro", "transformers", "tensorboard"))
