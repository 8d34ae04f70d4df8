"""Every test of the routing library runs on every backend."""

import pytest

import temper

BACKENDS = ("naive", "fused", "cpu")
# What says something about the mathematics of a site, however it is computed.
EVERYWHERE = (
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
        metafunc.fixturenames.append("backend_of_test")
        is_once = metafunc.definition.get_closest_marker("once") is not None
        metafunc.parametrize("backend_of_test", BACKENDS[:1] if is_once else BACKENDS, indirect=True)


@pytest.fixture
def backend_of_test(request):
    with temper.backend(request.param):
        yield request.param
