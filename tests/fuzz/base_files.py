"""What cases are made from."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from pathlib import Path

from core_bundles import write_bundle
from studies import results, run_entry

from temper_lab.cli import main

# By its path: there are several of this name.
spec = importlib.util.spec_from_file_location("lab_conftest", Path(__file__).parents[1] / "lab" / "conftest.py")
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)


def make(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)
    texts = [" ".join(rng.choice(conftest.TEXT.split()) for _ in range(rng.randint(20, 60))) for _ in range(40)]
    for name in ("corpus", "lines", "shards"):
        (folder / name).mkdir()
    for index, text in enumerate(texts[:12]):
        (folder / "corpus" / f"{index:02d}.txt").write_text(text)
    for name, part in (("a", texts[:20]), ("b", texts[20:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / "lines" / f"{name}.jsonl").write_text(lines)
        pq.write_table(pa.table({"text": part}), folder / "shards" / f"{name}.parquet")
    for name in ("shard_00000.parquet", "shard_06542.parquet"):
        shutil.copy(folder / "shards" / "a.parquet", folder / "shards" / name)
    (folder / "tiny.toml").write_text(conftest.RECIPE.format(corpus=folder / "corpus"))
    steps = ["--train.steps", "2", "--train.val-every", "1", "--train.save-every", "1", "--train.sample-tokens", "0"]
    steps += ["--train.keep-best"]
    assert main(["train", "--recipe", str(folder / "tiny.toml"), "--out", str(folder / "run"), *steps]) == 0
    shutil.copytree(folder / "run" / "model", folder / "model")
    # A run that has not ended: its model is that of its newest checkpoint.
    shutil.copytree(folder / "run", folder / "checkpoints")
    shutil.rmtree(folder / "checkpoints" / "model")
    shutil.copytree(folder / "checkpoints", folder / "spread")
    _spread(folder / "spread" / "checkpoints" / "step-000002")
    words = ["compare", "--recipe", str(folder / "tiny.toml"), "--methods", "residual,temper-cp", "--streams", "2"]
    _study(folder / "study", words)
    write_bundle(folder / "bundle")
    shutil.make_archive(str(folder / "bundle"), "zip", folder / "bundle")
    _llama(folder / "llama", texts)
    shutil.copytree(conftest.__file__.replace("conftest.py", "fixtures/study"), folder / "done")
    shutil.copy(folder / "done" / "results.json", folder / "known.json")
    words = ["upcycle", "--model", str(folder / "llama"), "--streams", "2", "--out", str(folder / "upcycled")]
    assert main(words) == 0
    assert main(["export", "--model", str(folder / "model"), "--out", str(folder / "exported")]) == 0
    words = ["compress", "--model", str(folder / "model"), "--rank", "2", "--plain", "--out", str(folder / "small")]
    assert main([*words, "--corpus", str(folder / "corpus"), "--batches", "1"]) == 0
    _deepseek(folder / "deepseek", texts)
    (folder / "claims.toml").write_text(CLAIMS)
    (folder / "tiles.json").write_text(json.dumps(TILES))


CLAIMS = """
base = "tiny.toml"

[compare]
methods = ["residual", "temper-cp"]
streams = [2]
seeds = [0, 1]

[[compare.claims]]
name = "not-worse"
text = "CP is no worse than a residual."
kind = "not-worse"
methods = ["temper-cp"]
against = "residual"
streams = [2]
margin = 0.1
"""
TILES = {"tiles": {"sm_90": [{"streams": 2, "kernel": "write", "tile": [4, 256, 4, 3]}]}}


def _spread(checkpoint: Path) -> None:
    """Makes a checkpoint one of shards, all of them written by one process."""
    from temper_lab import io
    from temper_lab.train import shards
    from temper_lab.train.checkpoint import fingerprint

    tensors = {}
    for part in ("model", "optimizer"):
        path = checkpoint / f"{part}.safetensors"
        tensors |= {f"{part}.{name}": tensor for name, tensor in io.read_tensors(path).items()}
        path.unlink()
    file, about = "shard-00000.safetensors", {}
    for name, tensor in tensors.items():
        shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        about[name] = {"dtype": dtype, "shape": shape, "chunks": [[[0] * len(shape), shape, file]]}
    parts = {f"{name}@{','.join('0' * tensor.ndim)}": tensor for name, tensor in tensors.items()}
    io.write_tensors(checkpoint / file, parts)
    io.write_json(checkpoint / shards.INDEX, {"format": shards.FORMAT, "tensors": about})
    manifest = io.read_json(checkpoint / "manifest.json")
    names = ("state.json", shards.INDEX, file)
    manifest["files"] = {name: fingerprint(checkpoint / name) for name in names}
    io.write_json(checkpoint / "manifest.json", manifest)


def _deepseek(folder: Path, texts: list[str]) -> None:
    from test_deepseek import deepseek_v4
    from test_hugging_face import byte_level, fast

    from temper_lab.interop import deepseek

    model = deepseek_v4.tiny(400)
    deepseek.to_temper(model)
    deepseek.save(model, folder)
    fast(byte_level(texts), bos_token="<|endoftext|>").save_pretrained(folder)


def _study(folder: Path, words: list[str]) -> None:
    from temper_lab import recipe
    from temper_lab.study.grid import override, read_grid
    from temper_lab.study.spec import Study

    folder.mkdir()
    settings = recipe.load(words[2])
    grid = override(read_grid({}, settings, "x"), ["residual,temper-cp"], [2], [0, 1])
    Study("tiny", settings, grid, ("temper compare",)).write(folder)
    runs = [run_entry(method, streams=2, seed=seed) for method in ("residual", "mhc") for seed in (0, 1)]
    (folder / "results.json").write_text(json.dumps(results(runs)))


def _llama(folder: Path, texts: list[str]) -> None:
    import torch
    import transformers
    from test_hugging_face import byte_level, fast, llama

    torch.manual_seed(0)
    network = llama(400)
    sharded = folder.with_name("sharded")
    network.save_pretrained(folder)
    network.save_pretrained(sharded, max_shard_size="50KB")
    assert (sharded / "model.safetensors.index.json").is_file()
    for each in (folder, sharded):
        fast(byte_level(texts), bos_token="<|endoftext|>").save_pretrained(each)
    assert transformers.AutoTokenizer.from_pretrained(folder).bos_token_id is not None
