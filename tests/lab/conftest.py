"""A corpus and a recipe so small that a run takes a second."""

import random
from collections.abc import Iterator
from pathlib import Path

import browser as browsers
import pytest

TEXT = "the people of this union have seen peace and war with courage while congress made laws for all states"

RECIPE = """
[model]
depth = 1
head_dim = 32
context = 32
vocab_size = 320
preset = "temper-cp"
num_streams = 2

[data]
corpus = "{corpus}"
val_fraction = 0.1

[optim]
momentum_warmup = 4
matrix_lr = 0.5
embedding_lr = 3.0
head_lr = 0.1

[train]
steps = 12
batch_tokens = 256
device_batch_size = 4
val_every = 4
val_batches = 2
save_every = 3
sample_tokens = 4
prompts = ["the people"]
threads = 1
"""


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for index in range(40):
        words = (rng.choice(TEXT.split()) for _ in range(rng.randint(20, 200)))
        (folder / f"{index:02d}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="session")
def corpus_texts(corpus_folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(corpus_folder.iterdir())]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, corpus_folder: Path) -> Path:
    """The file of a tiny recipe."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE.format(corpus=corpus_folder))
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[browsers.Browser]:
    """One headless browser for all tests of pages."""
    session = browsers.start()
    yield session
    session.close()
