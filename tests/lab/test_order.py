"""The order of text: batches as mixed as independent draws, every piece once an epoch, no drift."""

import hashlib
import itertools
import json
import random
from collections import Counter
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from temper_lab.data import Loader, open_corpus, validation_batches
from temper_lab.data import reader as reader_module
from temper_lab.data.loader import expected_distinct, measure_mixing
from temper_lab.data.packing import Builder, Packer, permutation
from temper_lab.data.reader import ORDER_VERSION, Reader, Stream
from temper_lab.tokenizer import Tokenizer

CONTEXT, ROWS = 16, 8
WORDS = ["the", "state", "of", "union", "is", "strong", "and", "our", "people", "are", "free", "to", "build", "better"]
# The whole corpus at once, or windows of a third of it.
WAYS = {"memory": {}, "windows": {"in_memory_bytes": 0, "shuffle_bytes": 60_000}}


def documents():
    """500 documents of about 16 pieces; the later, the fewer words they use and the easier they are to predict."""
    rng = random.Random(0)
    for number in range(500):
        words = WORDS[: len(WORDS) - number // 40]
        yield f"{number}: " + "\n\n".join(" ".join(rng.choices(words, k=8)) for _ in range(rng.randint(2, 12)))


def one_file(folder):
    # One book: its texts of 250 characters are what counts as a document.
    path = folder / "book.txt"
    path.write_text("\n\n".join(documents()))
    return open_corpus(path, max_chars=250)


def many_files(folder):
    for number, text in enumerate(documents()):
        (folder / f"{number:03d}.md").write_text(text)
    return open_corpus(folder, max_chars=150)


def jsonl(folder):
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    return open_corpus(folder)


def shards(folder):
    # The first shard has one large row group, the second many small ones.
    texts = list(documents())
    for number, (part, size) in enumerate(((texts[:300], 1000), (texts[300:], 7), (texts[:20], 1000))):
        pq.write_table(pa.table({"text": part}), folder / f"shard_{number:05d}.parquet", row_group_size=size)
    return open_corpus(folder)


CORPORA = {maker.__name__: maker for maker in (one_file, many_files, jsonl, shards)}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(documents(), 290)


@pytest.fixture(scope="module", params=CORPORA)
def corpus(request, tmp_path_factory):
    return CORPORA[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    return WAYS[request.param]


def streams(corpus, tokenizer, way, world=1, **options):
    options = {"max_ids": CONTEXT + 1, **way, **options}
    return [
        Stream(Reader(corpus, tokenizer, "train", rank=rank, world=world, **options), CONTEXT + 1)
        for rank in range(world)
    ]


def epoch_of(stream, epoch=0, length=CONTEXT + 1):
    """The rows of one epoch, or what is left of it: lists of (piece as a tuple of ids, its document)."""
    rows = []
    while stream.place.epoch == epoch:
        window, row = next(stream)
        members = window.members(row)
        joined = list(itertools.chain.from_iterable(pieces[index].tolist() for pieces, index in members))
        assert window.ids(row).tolist() == joined[:length]
        rows.append([(tuple(pieces[index].tolist()), int(pieces.documents[index])) for pieces, index in members])
    return rows


def all_pieces(corpus, tokenizer):
    """What an epoch has to hold, cut from the texts in the plainest way."""
    found = Counter()
    for text in corpus.texts("train"):
        ids = tokenizer.encode(text)
        found.update((tokenizer.bos, *ids[at : at + CONTEXT]) for at in range(0, len(ids), CONTEXT))
    return found


@pytest.mark.parametrize("world", [1, 2, 4], ids="shares={}".format)
def test_batches_are_mixed_and_an_epoch_holds_every_piece_once(corpus, tokenizer, way, world):
    total = all_pieces(corpus, tokenizer)
    found = Counter()
    for stream in streams(corpus, tokenizer, way, world):
        rows = epoch_of(stream)
        per_document = Counter(document for row in rows for _, document in row)
        weights = np.array(list(per_document.values()), dtype=float)
        batches = [list(itertools.chain(*rows[at : at + ROWS])) for at in range(0, len(rows) - ROWS, ROWS)]
        distinct = [len({document for _, document in batch}) for batch in batches]
        independent = [expected_distinct(weights, len(batch)) for batch in batches]
        assert np.mean(distinct) == pytest.approx(np.mean(independent), rel=0.03)
        # No stretch of batches is worse than the others.
        stretches = np.array_split(np.array(distinct) / independent, 4)
        assert min(map(np.mean, stretches)) > 0.95
        found += Counter(piece for row in rows for piece, _ in row)
        # What fills no row any more is the beginning of the next epoch.
        assert len(stream.place.carried) <= CONTEXT
        left = Reader(corpus, tokenizer, "train", max_ids=CONTEXT + 1, in_memory_bytes=0).recall(stream.place.carried)
        found += Counter(tuple(left[index].tolist()) for index in range(len(left)))
    assert found == total


def test_shares_are_the_same_in_every_epoch(corpus, tokenizer, way):
    """So that ranks stay disjoint when one is an epoch ahead of another."""
    for stream in streams(corpus, tokenizer, way, 2):
        first, second = ([piece for row in epoch_of(stream, epoch) for piece, _ in row] for epoch in (0, 1))
        assert first != second
        # But for the few pieces that are carried over the end of an epoch.
        assert (Counter(first) - Counter(second)).total() + (Counter(second) - Counter(first)).total() <= 2 * CONTEXT


def test_seeds_and_epochs_deal_differently(tmp_path, tokenizer):
    corpus = jsonl(tmp_path)
    shares = [streams(corpus, tokenizer, {}, 2, seed=seed)[0] for seed in (0, 1)]
    held = [{piece for row in epoch_of(stream) for piece, _ in row} for stream in shares]
    assert len(held[0] & held[1]) < 0.7 * len(held[0])
    reader = Reader(corpus, tokenizer, "train", **WAYS["windows"])
    windows = [set(reader.window(epoch, 0)) for epoch in (0, 1)]
    assert 0.1 < len(windows[0] & windows[1]) / len(windows[0]) < 0.6


def test_packing_leaves_the_order_alone(tmp_path, tokenizer, way):
    """Ends of documents, which share rows, come as early as the rest, and beside ends of any other documents."""
    corpus = many_files(tmp_path)
    [stream] = streams(corpus, tokenizer, way)
    rows = epoch_of(stream)
    is_shared = np.array([len(row) > 1 for row in rows], dtype=float)
    assert 0.05 < is_shared.mean() < 0.5
    thirds = [part.mean() / is_shared.mean() for part in np.array_split(is_shared, 3)]
    assert max(map(abs, np.subtract(thirds, 1))) < 0.25
    position = positions(corpus)
    distances = [abs(position[row[0][1]] - position[row[1][1]]) for row in rows if len(row) > 1]
    assert np.mean(distances) == pytest.approx(1 / 3, rel=0.15)
    # In the next epoch, beside others again.
    shared, again = ({frozenset(row) for row in rows if len(row) > 1} for rows in (rows, epoch_of(stream, 1)))
    assert len(shared & again) < 0.2 * len(shared)


def positions(corpus):
    """Where every document is in the files, from 0 to 1."""
    numbers = [document for group in corpus.groups("train") for document, _ in corpus.documents("train", group)]
    return {document: at / len(numbers) for at, document in enumerate(numbers)}


def bigram_losses(tokenizer, rows):
    """The mean nats of a bigram model of all rows, row by row."""
    counts = np.ones((tokenizer.vocab_size, tokenizer.vocab_size))
    pairs = [list(itertools.chain.from_iterable(itertools.pairwise(piece) for piece, _ in row)) for row in rows]
    np.add.at(counts, tuple(np.array(list(itertools.chain(*pairs))).T), 1)
    nats = -np.log(counts / counts.sum(axis=1, keepdims=True))
    return np.array([np.mean([nats[pair] for pair in row]) for row in pairs])


@pytest.mark.parametrize("name", ["many_files", "shards"])
def test_a_bigram_model_sees_no_drift(name, tokenizer, way, tmp_path):
    corpus = CORPORA[name](tmp_path)
    [stream] = streams(corpus, tokenizer, way)
    rows = epoch_of(stream)
    losses = bigram_losses(tokenizer, rows)
    # Ten stretches of an epoch, beside ten stretches of the documents in order.
    drift = np.ptp([part.mean() for part in np.array_split(losses, 10)])
    position = positions(corpus)
    in_order = losses[np.argsort([position[row[0][1]] for row in rows], kind="stable")]
    assert np.ptp([part.mean() for part in np.array_split(in_order, 10)]) > 0.4
    assert drift < 0.1
    batches = losses[: len(losses) // ROWS * ROWS].reshape(-1, ROWS).mean(axis=1)
    assert abs(np.corrcoef(batches[1:], batches[:-1])[0, 1]) < 4 / np.sqrt(len(batches))


def test_whole_documents_are_mixed_too(tmp_path, tokenizer, way, monkeypatch):
    """The packing of the public recipe, which crops."""
    corpus = shards(tmp_path)
    [stream] = streams(corpus, tokenizer, way, max_ids=None)
    rows = epoch_of(stream)
    counts = Counter(document for row in rows for _, document in row)
    assert set(counts.values()) == {1}
    assert len(counts) >= 500 - CONTEXT
    position = positions(corpus)
    # Every row is the beginning of one document. The packer crops short ones first: rows in its order get longer.
    for values in ([position[document] for [(_, document)] in rows], [len(piece) for [(piece, _)] in rows]):
        drift = np.ptp([part.mean() for part in np.array_split(np.array(values), 5)])
        assert drift < 0.5 * np.std(values)
    # Documents share a row with any others, not with those that are in the buffer because they are near in the files.
    monkeypatch.setattr(reader_module, "Packer", partial(Packer, buffer_size=20))
    length = 4 * CONTEXT + 1
    rows = epoch_of(Stream(Reader(corpus, tokenizer, "train", max_ids=None, **way), length), length=length)
    distances = [abs(position[row[0][1]] - position[row[1][1]]) for row in rows if len(row) > 1]
    assert len(distances) > 100
    assert np.mean(distances) == pytest.approx(1 / 3, rel=0.15)


def test_all_shares_of_a_process_tokenize_once(tmp_path, tokenizer, monkeypatch):
    corpus = many_files(tmp_path)
    num_chars = []
    encode = Tokenizer.encode_batch
    monkeypatch.setattr(
        Tokenizer, "encode_batch", lambda self, texts: num_chars.append(sum(map(len, texts))) or encode(self, texts)
    )
    for rank in range(4):
        with Loader(corpus, tokenizer, split="train", rows=ROWS, context=CONTEXT, rank=rank, world=4) as loader:
            while loader.epoch < 2:
                next(loader)
    assert sum(num_chars) == sum(map(len, corpus.texts("train")))


def test_validation_is_drawn_from_the_whole_split(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    corpus = open_corpus(tmp_path, val_fraction=0.3)
    few, many = (validation_batches(corpus, tokenizer, ROWS, CONTEXT, num) for num in (6, 60))
    assert (len(few), len(many)) == (6, 60)
    # The first batches are the same however many there are.
    assert all(torch.equal(left[0], right[0]) for left, right in zip(few, many, strict=False))
    numbers = [int(text.split(":")[0]) for text in corpus.texts("val")]
    found = " ".join(tokenizer.decode(row) for inputs, _ in few for row in inputs)
    starts = [number for number in numbers if f"{number}: " in found]
    assert max(starts) - min(starts) > 300


def test_mixing_is_measured(tmp_path, tokenizer):
    corpus = many_files(tmp_path)
    [stream], [again] = streams(corpus, tokenizer, {}), streams(corpus, tokenizer, {})
    rows = epoch_of(again)
    weights = Counter(document for row in rows for _, document in row).values()
    mixing = measure_mixing(stream, ROWS, 20, weights)
    batches = [list(itertools.chain(*rows[at : at + ROWS])) for at in range(0, 20 * ROWS, ROWS)]
    assert mixing.num_batches == 20
    assert mixing.documents == np.mean([len({document for _, document in batch}) for batch in batches])
    assert mixing.documents == pytest.approx(mixing.independent, rel=0.03)
    # At most an epoch.
    [stream] = streams(corpus, tokenizer, {})
    assert measure_mixing(stream, ROWS, 10**6, weights).num_batches == -(-len(rows) // ROWS)


def test_expected_distinct():
    rng = np.random.default_rng(0)
    weights = np.array([1, 1, 2, 5, 9.0])
    draws = rng.choice(5, p=weights / weights.sum(), size=(20_000, 4))
    assert expected_distinct(weights, 4) == pytest.approx(np.mean([len(set(row)) for row in draws.tolist()]), rel=0.01)
    assert expected_distinct(np.ones(1), 3) == 1


def test_the_order_of_this_version(tmp_path, tokenizer):
    # Where this fails, the batches of all runs are others: raise ORDER_VERSION, and write the new hash here.
    corpus, settings = jsonl(tmp_path), {"split": "train", "rows": ROWS, "context": CONTEXT, "seed": 1}
    digest = hashlib.blake2b(digest_size=8)
    for way in ({"world": 2}, {"in_memory_mb": 0, "shuffle_mb": 0.06, "cut_long": False}):
        with Loader(corpus, tokenizer, **settings, **way) as loader:
            for inputs, _ in itertools.islice(loader, 100):
                digest.update(inputs.numpy().tobytes())
    for inputs, _ in validation_batches(corpus, tokenizer, ROWS, CONTEXT, 4):
        digest.update(inputs.numpy().tobytes())
    assert (ORDER_VERSION, digest.hexdigest()) == (2, "53dd60949df09d93")


def test_permutations_are_the_same_everywhere():
    # Part of the format: a change here changes the batches of every run.
    assert permutation(10, 0, 1, "rows").tolist() == [5, 8, 1, 9, 0, 2, 6, 7, 3, 4]
    assert permutation(0, 1).tolist() == []
    orders = np.stack([permutation(8, seed) for seed in range(4000)])
    assert (np.sort(orders, axis=1) == np.arange(8)).all()
    # Every number is everywhere equally often: 500 times, give or take 21.
    counts = np.stack([(orders == number).sum(axis=0) for number in range(8)])
    assert np.abs(counts - 500).max() < 100


def test_ids_take_two_bytes_if_they_fit():
    builder = Builder(bos=9, max_ids=3)
    builder.add(0, 0, 7, [1, 2, 3])
    assert builder.build().ids.dtype == np.uint16
    builder = Builder(bos=9, max_ids=3)
    builder.add(0, 0, 7, [1, 2, 3])
    builder.add(0, 4, 8, [70_000])
    pieces = builder.build()
    assert pieces.ids.dtype == np.uint32
    assert [pieces[index].tolist() for index in range(3)] == [[9, 1, 2], [9, 3], [9, 70_000]]
    assert pieces.keys.tolist() == [[0, 0, 0], [0, 0, 1], [0, 4, 0]]
    assert pieces.documents.tolist() == [7, 7, 8]
