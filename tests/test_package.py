"""The package as it is installed: what importing it costs, who imports whom, which names are public."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import temper
from temper_lab.cli import COMMANDS

SOURCE = Path(temper.__file__).parents[1]

PUBLIC = {
    "PRESETS",
    "Choice",
    "Cost",
    "Generator",
    "HyperConnection",
    "Mixer",
    "RouterConfig",
    "Routing",
    "backend",
    "backends",
    "convert",
    "cost",
    "count_parameters",
    "expand_streams",
    "list_backends",
    "load_pretrained",
    "observe",
    "param_groups",
    "preset",
    "recompute",
    "reduce_streams",
    "theory",
    "unwrap",
    "use_backend",
    "wrap",
}

CONVERT = {
    "Compressed",
    "HeadReport",
    "Moment",
    "compress",
    "export_foreign",
    "factorize",
    "grow",
    "load_foreign",
    "moments",
    "ranks_for",
    "relative_error",
    "sensitivities",
    "upcycle",
}


def python(code, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_the_public_names():
    assert set(temper.__all__) == PUBLIC
    assert set(temper.convert.__all__) == CONVERT
    assert all(hasattr(temper, name) for name in PUBLIC)
    # Functions, though modules have these names too; and the shorter names.
    assert all(callable(function) for function in (temper.cost, temper.observe, temper.recompute, temper.wrap))
    assert (temper.backend, temper.backends) == (temper.use_backend, temper.list_backends)
    with pytest.raises(AttributeError, match="no attribute 'observ'"):
        _ = temper.observ


def test_importing_temper_imports_torch_and_nothing_else():
    code = """
import json, sys, torch
before = set(sys.modules)
import temper
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""
    allowed = set(sys.stdlib_module_names) | {"temper", "torch"}
    assert set(json.loads(python(code))) <= allowed


def test_importing_temper_takes_less_than_50_ms_beyond_torch(tmp_path):
    # As installed: compiled once, whatever this environment says of bytecode.
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    code = """
import time, torch
start = time.process_time()
import temper
print(time.process_time() - start)
"""
    # The least of several, in processor time: what it costs, not what else the machine was doing.
    assert min(float(python(code, **compiled)) for _ in range(5)) < 0.050


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


@pytest.mark.parametrize("path", sorted((SOURCE / "temper").rglob("*.py")), ids=lambda path: path.name)
def test_temper_imports_only_itself_torch_and_the_standard_library(path):
    allowed = {"temper", "torch", *sys.stdlib_module_names}
    if "testing" in path.parts:
        allowed.add("pytest")
    # GPU users' torch brings triton, and the models of transformers bring safetensors; neither is imported before.
    if "gpu" in path.parts:
        allowed.add("triton")
    if path.name == "pretrained.py":
        allowed.add("safetensors")
    assert {name.split(".")[0] for name in imported(path)} <= allowed


def test_operations_and_generators_know_nothing_of_what_is_above_them():
    layers = {
        "decompose": {"decompose", "registry"},
        # Generators and mixers say how the native kernels know them.
        "generators": {"decompose", "generators", "ops", "registry"},
        "mixers": {"mixers", "ops", "registry"},
        # Operations run mixers and ask them what they can do; `naive` computes every kind of gate.
        "ops": {"gates", "mixers", "ops", "registry", "streams"},
    }
    for package, allowed in layers.items():
        for path in (SOURCE / "temper" / package).rglob("*.py"):
            own = {name.split(".")[1] for name in imported(path) if name.startswith("temper.")}
            assert own <= allowed, path


def test_every_module_says_what_it_is():
    for path in SOURCE.rglob("temper*/**/*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_a_module_name_occurs_once_in_the_lab():
    lab = SOURCE / "temper_lab"
    paths = [path for path in lab.rglob("*.py") if not path.name.startswith("__")]
    rooms = [path.stem for path in paths if path.parent.name != "cli"]
    assert sorted(rooms) == sorted(set(rooms))
    # A file of cli/ is named by its command, which may have the name of what it runs.
    commands = {module.rpartition(".")[2] for _, module in COMMANDS.values()}
    assert {path.stem for path in paths if path.parent.name == "cli"} & set(rooms) <= commands


def test_the_wheel_will_hold_every_file_that_is_not_python():
    packages = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for package, patterns in packages.items():
        folder = SOURCE / package
        held = {path for pattern in patterns for path in folder.glob(pattern)}
        assert all(any(folder.glob(pattern)) for pattern in patterns), "a pattern without a file"
        others = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
        assert others <= held, others - held
