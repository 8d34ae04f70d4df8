"""Files and folders: replaced in one step, read while they are replaced, and nobody else's touched."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import kills
import pytest
import torch

from temper_lab import io
from temper_lab.cli import main
from temper_lab.train import checkpoint, model_dir

CONFIG = {"depth": 2}
MODEL = {"weight": torch.arange(6.0).view(2, 3)}
HEX = "0123456789abcdef" * 2


@pytest.fixture(params=["exchange", "renames"])
def way(request, monkeypatch):
    """Both ways to replace a folder: by an exchange of names, and where the system has none."""
    if request.param == "renames":
        monkeypatch.setattr(io, "_exchange", lambda one, other: False)
    return request.param


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(folder: Path, number: int) -> None:
    files = {f"{name}.txt": str(number) for name in "abcdefgh"}
    model_dir.save_model(folder, {"number": number}, {"weight": torch.full((64,), float(number))}, files)


def look(folder: Path) -> set[float]:
    """The numbers that the files of a folder hold: one, unless it was seen in part."""

    def read(path: Path) -> set[float]:
        found = {float((path / f"{name}.txt").read_text()) for name in "abcdefgh"}
        loaded = model_dir.load_model(path)
        return found | {float(loaded.config["number"]), *loaded.tensors["weight"].tolist()}

    return io.read_dir(folder, read)


def test_a_reader_beside_a_writer_sees_the_old_folder_or_the_new_one(tmp_path, way):
    folder, stop, failed = tmp_path / "best", threading.Event(), []
    write(folder, 0)

    def save() -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                write(folder, number)
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=save)
    writer.start()
    end, seen = time.monotonic() + 2.0, []
    try:
        while time.monotonic() < end:
            seen.append(look(folder))
    finally:
        stop.set()
        writer.join()
    assert not failed
    assert len(seen) > 20
    assert all(len(numbers) == 1 for numbers in seen)
    values = [numbers.pop() for numbers in seen]
    assert values == sorted(values)
    assert len(set(values)) > 3
    assert names(tmp_path) == ["best"]


def test_reading_changes_nothing(tmp_path):
    write(tmp_path / "x", 1)
    for name in (".x.old", ".x.tmp-0123abcd", f".x.tmp-{HEX}", f".y.tmp-{HEX}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    assert model_dir.load_model(tmp_path / "x").config == {"number": 1}
    assert {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before
    # Neither do writers touch what is not a workspace, whatever its name.
    write(tmp_path / "x", 2)
    io.recover(tmp_path)
    for name in (".x.old", ".x.tmp-0123abcd", f".x.tmp-{HEX}", f".y.tmp-{HEX}"):
        assert (tmp_path / name / "thesis").read_text() == "mine"


DIE = """
import os, sys
from pathlib import Path
from temper_lab import io
io._exchange = lambda one, other: False
rename, calls = os.rename, []
def dying(one, other):
    calls.append(one)
    if len(calls) == 3:
        os._exit(9)
    rename(one, other)
os.rename = dying
with io.atomic_dir(Path(sys.argv[1]), is_ours=lambda folder: True) as work:
    (work / "file").write_text("new")
"""


def test_a_kill_between_two_renames_loses_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "file").write_text("old")
    done = subprocess.run([sys.executable, "-c", DIE, str(folder)], check=False)
    assert done.returncode == 9
    assert not folder.exists()
    # A reader finds it, and leaves it where it is.
    monkeypatch.setattr(io, "ATTEMPTS", 8)
    assert io.read_dir(folder, lambda path: (path / "file").read_text()) == "old"
    assert not folder.exists()
    io.recover(tmp_path)
    assert (folder / "file").read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_a_kill_while_the_mark_is_written_leaves_nothing_for_good(tmp_path):
    for name, mark in (("a", b""), ("b", io.MARK[:20]), ("c", io.MARK), ("d", b"mine"), ("e", io.MARK + b"x")):
        (tmp_path / f".{name}.tmp-{HEX}").mkdir()
        (tmp_path / f".{name}.tmp-{HEX}" / "lock").write_bytes(mark)
    io.recover(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [f".d.tmp-{HEX}", f".e.tmp-{HEX}"]


def test_the_workspace_of_a_living_writer_stays(tmp_path):
    with io.atomic_dir(tmp_path / "x") as work:
        (work / "file").write_text("new")
        io.recover(tmp_path)
        io.atomic_write(tmp_path / "y", "text")
        assert (work / "file").read_text() == "new"
    assert names(tmp_path) == ["x", "y"]


def test_a_folder_that_is_taken_is_not_replaced(tmp_path, way):
    (tmp_path / "x").mkdir()
    with io.atomic_dir(tmp_path / "x") as work:
        # Somebody was faster.
        (tmp_path / "x" / "thesis").write_text("mine")
        (work / "file").write_text("new")
        with pytest.raises(ValueError, match="not empty, so it is not replaced"):
            io._put(work.parent, tmp_path / "x", None)
        (tmp_path / "x" / "thesis").unlink()
    assert names(tmp_path / "x") == ["file"]


def test_links_are_replaced_and_never_followed(tmp_path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    run.mkdir()
    (victim / "file").write_text("mine")
    for name in ("run.json", "metrics.jsonl"):
        (run / name).symlink_to(victim / "file")
        io.atomic_write(run / name, "text")
        assert not (run / name).is_symlink()
    (run / "model").symlink_to(victim)
    with io.atomic_dir(run / "model") as work:
        (work / "file").write_text("new")
    assert (run / "model" / "file").read_text() == "new"
    (run / "lines").symlink_to(victim / "file")
    with pytest.raises(OSError, match="lines"):
        io.open_new(run / "lines")
    (run / ".lock").symlink_to(victim / "file")
    with pytest.raises(OSError, match=r"\.lock"), io.locked(run / ".lock"):
        pass
    assert (victim / "file").read_text() == "mine"


def test_devices_and_pipes_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "null").symlink_to(os.devnull)
    before = names(tmp_path)
    for name in before:
        with pytest.raises(OSError, match=rf"could not write .*{name}: it is a device or a pipe"):
            io.atomic_write(tmp_path / name, "text")
    with pytest.raises(IsADirectoryError), io.atomic_files(tmp_path / "file", tmp_path):
        pass
    assert names(tmp_path) == before
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_a_lock_is_seen_by_those_who_may_only_read(tmp_path):
    path = tmp_path / ".lock"
    assert not io.is_locked(path)
    assert not path.exists()
    with io.locked(path) as is_mine:
        assert is_mine
        path.chmod(0o444)
        assert io.is_locked(path)
        path.chmod(0o644)
        with io.locked(path) as again:
            assert not again
    assert not io.is_locked(path)


def test_the_same_tensors_are_the_same_bytes(tmp_path):
    table = torch.randn(3, 4)
    for index, tensors in enumerate((MODEL, {"a": table, "b": table, "c": table.T})):
        seen = set()
        for attempt in range(8):
            io.write_tensors(tmp_path / f"{index}-{attempt}", tensors)
            seen.add((tmp_path / f"{index}-{attempt}").read_bytes())
        assert len(seen) == 1
        assert io.read_tensors(tmp_path / f"{index}-0").keys() == tensors.keys()


def test_a_name_that_is_not_utf8(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    write(folder, 3)
    assert look(folder) == {3.0}
    checkpoint.save(folder / "run", 1, model=MODEL, optimizer={}, state={})
    assert checkpoint.latest(folder / "run")[0].model().keys() == MODEL.keys()


def _read_forever(folder, stop, results):
    torch.set_num_threads(1)
    count = failed = 0
    while not stop.is_set():
        if folder.is_dir():
            count += 1
            try:
                model_dir.load_model(folder).file()
            except Exception as error:
                failed += 1
                print(repr(error), file=sys.stderr)
    results.put((count, failed))


def test_training_goes_on_beside_a_reader_of_its_best_model(tiny, tmp_path):
    context = multiprocessing.get_context("fork")
    stop, results = context.Event(), context.Queue()
    out = tmp_path / "run"
    reader = context.Process(target=_read_forever, args=(out / "best", stop, results))
    reader.start()
    try:
        words = ["train", "--recipe", str(tiny), "--out", str(out), "--train.keep-best", "--train.val-every", "1"]
        assert main([*words, "--train.sample-tokens", "0"]) == 0
    finally:
        stop.set()
        count, failed = results.get(timeout=60)
        reader.join()
    assert count > 20
    assert failed == 0
    assert not [name for name in os.listdir(out) if ".tmp-" in name]


def test_a_study_removes_what_a_killed_writer_left_beside_its_tokenizer(tmp_path):
    from temper_lab.study.run import make_tokenizer

    def die_after_renaming() -> int:
        with io.atomic_file(tmp_path / "tokenizer" / "tokenizer.json") as part:
            part.write_text("{}")
            os.replace(part, tmp_path / "tokenizer" / "tokenizer.json")
            os._exit(9)

    assert kills.run(die_after_renaming, tmp_path)[0] == 9
    assert list(tmp_path.glob("tokenizer/.*.tmp-*"))
    make_tokenizer(None, tmp_path, None)
    assert os.listdir(tmp_path / "tokenizer") == ["tokenizer.json"]
