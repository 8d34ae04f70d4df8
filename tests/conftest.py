"""Every test of the routing library runs on every backend."""

import ast
import contextlib
from pathlib import Path

import pytest

import temper

BACKENDS = ("naive", "fused", "cpu")
# What says something about the mathematics of a site, however it is computed.
EVERYWHERE = (
    "test_chain",
    "test_connection",
    "test_foreign",
    "test_grid",
    "test_mixers",
    "test_numerics",
    "test_observe",
    "test_wrap",
)


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.rpartition(".")[2] in EVERYWHERE:
        is_once = metafunc.definition.get_closest_marker("once") is not None
        metafunc.parametrize("backend_of_test", BACKENDS[:1] if is_once else BACKENDS, indirect=True)


# Autouse: pytest forgets a fixture that a test does not ask for, however often it is parametrised.
@pytest.fixture(autouse=True)
def backend_of_test(request):
    name = getattr(request, "param", None)
    with contextlib.nullcontext() if name is None else temper.use_backend(name):
        yield name


@pytest.fixture
def suites_of():
    """Finds the names of the parts that have a suite, in whichever test file it stands."""

    def names(base):
        trees = [ast.parse(path.read_text()) for path in Path(__file__).parent.glob("test_*.py")]
        classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        suites = [node for node in classes if base in map(ast.unparse, node.bases)]
        fields = [field for suite in suites for field in suite.body if isinstance(field, ast.Assign)]
        return {ast.literal_eval(field.value) for field in fields if ast.unparse(field.targets[0]) == "name"}

    return names
