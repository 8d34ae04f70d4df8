"""A few hundred cases of the fuzzer, all that it has ever found, and parsers on whatever hypothesis thinks of."""

from __future__ import annotations

import contextlib
import random
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutate import mutated

import fuzz
from temper_lab import io
from temper_lab.recipe import Recipe
from temper_lab.tokenizer import Tokenizer
from temper_lab.train import run_dir, shards

CASES, SEED = 204, 16
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    fuzz.prepare()
    return fuzz.make_base(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", range(len(fuzz.TARGETS) + len(fuzz.COMMANDS)))
def test_nothing_but_a_line_and_an_exit_code(kind, base):
    every = len(fuzz.TARGETS) + len(fuzz.COMMANDS)
    # Drawing takes seconds.
    is_report = "report" in (fuzz.TARGETS[kind][2] if kind < len(fuzz.TARGETS) else fuzz.COMMANDS[kind - every][0])
    for number in range(kind, every if is_report else CASES, every):
        found, said = fuzz.problems_of(fuzz.case_of(base, SEED, number), base)
        assert not found, f"case {number}: {'; '.join(found)}\n{said}"


@pytest.mark.parametrize("path", sorted(fuzz.CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_before(path, base):
    found, said = fuzz.problems_of(fuzz.Case.from_json(path.read_text()), base)
    assert not found, f"{'; '.join(found)}\n{said}"


def _spin(root: Path) -> int:
    while True:
        pass


def _fill(root: Path) -> int:
    bytearray(fuzz.MAX_MEMORY).find(b"x")
    return 0


def _break_off(root: Path) -> int:
    (root / "out.json").write_text('{"a": ')
    return 0


def _leave_part(root: Path) -> int:
    (root / "out.json").write_text("{}")
    print("error: the second file cannot be written")
    return 1


def _touch(root: Path) -> int:
    (root / "tiny.toml").write_text("")
    return 0


def _traceback(root: Path) -> int:
    raise KeyError("x")


def _lines(root: Path) -> int:
    print("error: one\nerror: two")
    return 1


FAULTS = {
    _traceback: "traceback",
    _lines: "2 lines of errors",
    _spin: "hang",
    _fill: "GB",
    _break_off: "half-written",
    _leave_part: "half-written",
    _touch: "changed",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_fuzzer_sees_a_fault(fault, tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text("# theirs")
    monkeypatch.setattr(fuzz, "_main", lambda words: fault(Path.cwd()))
    if fault is _spin:
        monkeypatch.setattr(fuzz, "CPU_SECONDS", 1)
    if fault is _fill:
        # What this process has already counts too.
        used = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        monkeypatch.setattr(fuzz, "MAX_MEMORY", used + (64 << 20))
    found, _ = fuzz.problems_of(fuzz.Case("planted", ["sample"], ("tiny.toml",), {}, ("out.json",)), tmp_path)
    assert any(FAULTS[fault] in line for line in found), found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@QUICK
@given(content=st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "replace")))
def test_readers_raise_file_errors_alone(content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    for read in (io.read_json, io.read_yaml, io.read_tensors, run_dir.read_log, Tokenizer.load):
        with contextlib.suppress(io.FileError):
            read(path)
    with contextlib.suppress(io.FileError):
        io.parse_toml(content.decode("utf-8", "replace"), path)


@QUICK
@given(value=JSON)
def test_values_of_any_shape_are_a_recipe_or_a_value_error(value):
    for given_value in (
        value,
        {"model": value},
        {"train": {"steps": value}},
        {"model": {"depth": value, "router": value}},
    ):
        with pytest.raises(ValueError, match=r".+"):
            Recipe.from_dict(given_value)
    io.brief(value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_index_of_shards_is_read_or_a_file_error(tmp_path):
    """Only processes that share a model write one, which is too slow for a case of the fuzzer."""
    chunks = [[[0, 0], [2, 3], "shard-00000.safetensors"], [[2, 0], [3, 3], "shard-00000.safetensors"]]
    tensors = {"model.w": {"dtype": "float32", "shape": [5, 3], "chunks": chunks}}
    index = io.dumps("the index", {"format": shards.FORMAT, "tensors": tensors}).encode()
    parts = {"model.w@0,0": torch.ones(2, 3), "model.w@2,0": torch.ones(3, 3)}
    io.write_tensors(tmp_path / "shard-00000.safetensors", parts)
    (tmp_path / shards.INDEX).write_bytes(index)
    assert torch.equal(shards.read(tmp_path, "model")["w"], torch.ones(5, 3))
    for number in range(300):
        (tmp_path / shards.INDEX).write_bytes(mutated(index, ".json", random.Random(number)))
        with contextlib.suppress(io.FileError):
            shards.read(tmp_path, "model")


def test_a_case_is_decided_by_its_number(base):
    for number in (0, 17, 40):
        first, second = (fuzz.case_of(base, 3, number) for _ in range(2))
        assert first == second == fuzz.Case.from_json(first.to_json())
    assert mutated(b"{}", ".json", random.Random(1)) == mutated(b"{}", ".json", random.Random(1))
