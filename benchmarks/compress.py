"""What a trained dense model loses when it is compressed: bits per byte against added parameters.

    python benchmarks/compress.py --models runs/mhc-n4-s0 runs/mhc-n4-s1 --corpus data/books --out results/compress.json
    python benchmarks/compress.py --out results/compress.json --plot compress.png      # draw again what is there

Every model is compressed to every form and rank, by the plain decomposition, by the best fit to the weights and by the
best fit to the logits on training text of the corpus. `--trained` names runs of models that were trained in a low-rank
form from the start, to stand beside them. A point that is in --out is not computed again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from temper.convert import compress, moments, sensitivities
from temper_lab.console import Bar, duration
from temper_lab.data import Loader, open_corpus, validation_batches
from temper_lab.eval import bits_per_byte
from temper_lab.io import atomic_write
from temper_lab.method import parse_rank
from temper_lab.model import GPT
from temper_lab.report.palette import GENERATORS, MARKERS, PLAIN, STYLES, TRAINED
from temper_lab.report.plots_mpl import check_target, save
from temper_lab.train.model_dir import load

RANKS = {
    "tucker": ["1x1", "2x2", "2x4", "2x12", "3x24", "4x48"],
    "cp": ["1", "2", "4", "8", "16"],
    "tt": ["1x1", "2x2", "3x4", "4x4"],
}
WAYS = ("plain", "weights", "calibrated")
DASHES = {"plain": ":", "weights": "--", "calibrated": "-"}
# Batches whose predictions are compared one by one with the dense model's.
COMPARED = 4

Point = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="*", default=[], help="folders of trained dense models, or of their runs")
    parser.add_argument("--trained", nargs="*", default=[], help="folders of models trained in a low-rank form")
    parser.add_argument("--corpus", default="sotu")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file with all points, new or to go on with")
    parser.add_argument("--plot", type=Path, help="draw a figure of all points there are")
    parser.add_argument("--ranks", nargs="*", help="only these, such as tucker:2x12 cp:4")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16_384, help="to calibrate on")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        check_target(arguments.plot)
    points: list[Point] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    named = arguments.ranks or [f"{form}:{rank}" for form, ranks in RANKS.items() for rank in ranks]
    wanted = [(*name.split(":"), way) for name in named for way in arguments.ways]
    setting = {"corpus": arguments.corpus, "batches": arguments.batches, "rows": arguments.rows}
    with Bar("points", len(arguments.models) * (1 + len(wanted)) + len(arguments.trained)) as bar:
        started = time.monotonic()
        new = 0
        for done, point in enumerate(_points(arguments, wanted, points, setting), 1):
            if point is not None:
                points.append(point)
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(arguments.out, json.dumps(points, indent=1) + "\n")
                new += 1
            rest = duration((time.monotonic() - started) / max(new, 1) * (bar.total - done))
            bar.update(done, f"{_words(point)} ETA {rest}", is_notable=point is not None)
    if arguments.plot is not None:
        draw(points, arguments.plot)
        print(f"figure: {arguments.plot}")


def _words(point: Point | None) -> str:
    if point is None:
        return "is there"
    return f"{point['model']} {point['form']} {point['rank'] or ''} {point['way']}: {point['bpb']:.5f}"


def _points(
    arguments: argparse.Namespace, wanted: list[tuple[str, ...]], points: list[Point], setting: dict[str, Any]
) -> Iterator[Point | None]:
    """Every point that is not there yet, None for one that is."""
    there = {(point["model"], point["form"], point["rank"], point["way"]) for point in points}
    for folder in arguments.models:
        missing = [key for key in (("dense", None, "dense"), *wanted) if (folder, *key) not in there]
        yield from [None] * (1 + len(wanted) - len(missing))
        if missing:
            study = _Study(folder, arguments)
            yield from ({"model": folder, **study.point(*key), **setting} for key in missing)
    for folder in arguments.trained:
        if (folder, "trained", None, "trained") in there:
            yield None
            continue
        study = _Study(folder, arguments)
        yield {
            "model": folder,
            **study.measure(study.model),
            "form": "trained",
            "rank": None,
            "way": "trained",
            **setting,
        }


class _Study:
    """One trained model, what it reads, and what its predictions are."""

    def __init__(self, folder: str, arguments: argparse.Namespace) -> None:
        self.model, tokenizer = load(folder)
        self.model.requires_grad_(False)
        context = self.model.config.context
        corpus = open_corpus(arguments.corpus)
        self.batches = validation_batches(corpus, tokenizer, arguments.rows, context, arguments.batches)
        self.token_bytes = tokenizer.token_bytes
        self.predictions = [_predict(self.model, ids) for ids, _ in self.batches[:COMPARED]]
        self._seen: Any = None
        self._calibration = (corpus, tokenizer, arguments.rows, context, arguments.tokens)

    def point(self, form: str, rank: str | None, way: str) -> Point:
        model = self.model
        if rank is not None:
            seen, minded = self._data() if way == "calibrated" else (None, None)
            options = {"rank": parse_rank(rank), "moments": seen, "sensitivities": minded, "plain": way == "plain"}
            model = compress(self.model, form, in_place=False, **options).model
        return {**self.measure(model), "form": form, "rank": rank, "way": way}

    def measure(self, model: GPT) -> Point:
        bpb = bits_per_byte(model, self.batches, self.token_bytes).bpb
        added = sum(parameter.numel() for site in model.sites() for parameter in site.parameters())
        return {"added": added, "bpb": bpb, "moved": self._moved(model)}

    def _data(self) -> Any:
        """What the sites see and what the loss minds, on training text."""
        if self._seen is None:
            corpus, tokenizer, rows, context, tokens = self._calibration
            count = -(-tokens // (rows * context))
            with Loader(corpus, tokenizer, split="train", rows=rows, context=context) as loader:
                batches = list(islice(loader, count))
            with torch.no_grad(), moments(self.model) as seen:
                for ids, _ in batches:
                    self.model.features(ids)
            rows_of = (row for ids, targets in batches for row in zip(ids.split(1), targets.split(1), strict=True))
            self._seen = seen, sensitivities(self.model, (self.model.loss(*row) for row in rows_of))
        return self._seen

    def _moved(self, model: GPT) -> float:
        """The divergence of the predictions from those of the dense model, in bits per byte: never below 0."""
        nats, num_bytes = 0.0, 0
        for (ids, targets), before in zip(self.batches, self.predictions, strict=False):
            after = _predict(model, ids)
            nats += (before.exp() * (before - after)).sum().item()
            num_bytes += int(self.token_bytes[targets].sum())
        return nats / math.log(2) / num_bytes


@torch.no_grad()
def _predict(model: GPT, ids: Tensor) -> Tensor:
    return model(ids).double().log_softmax(-1).float()


def _lost(points: list[Point]) -> list[Point]:
    """Every point with its bits per byte above those of its dense model; a trained one, of the one of its seed."""
    dense = {point["model"]: point["bpb"] for point in points if point["form"] == "dense"}
    by_seed = {_seed(model): bpb for model, bpb in dense.items()}
    found = []
    for point in points:
        base = dense.get(point["model"], by_seed.get(_seed(point["model"])))
        if base is not None:
            found.append({**point, "lost": point["bpb"] - base})
    return found


def _seed(model: str) -> str:
    return model.rpartition("-")[2]


def draw(points: list[Point], path: Path) -> None:
    """What is lost, and how far predictions have moved, against added parameters; means over models."""
    points = _lost(points)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for form, look in GENERATORS.items():
        for way, dash in DASHES.items():
            curve: dict[int, list[Point]] = {}
            for point in points:
                if (point["form"], point["way"]) == (form, way):
                    curve.setdefault(point["added"], []).append(point)
            if not curve:
                continue
            sizes = sorted(curve)
            for axes, number in ((left, "lost"), (right, "moved")):
                values = [statistics.fmean(point[number] for point in curve[size]) for size in sizes]
                shape = {"color": look.color, "marker": MARKERS[look.marker], "markersize": 4, "linewidth": 1.3}
                axes.plot(sizes, values, dash, label=f"{form}, {way}", **shape)
    for point in points:
        if point["form"] == "dense":
            left.axvline(point["added"], color=PLAIN.color, linewidth=0.8, zorder=0)
    left.axhline(0, color=STYLES["mhc"].color, linewidth=1, zorder=0, label="dense, as trained")
    for index, point in enumerate(point for point in points if point["form"] == "trained"):
        label = None if index else "low rank from the start"
        left.plot(point["added"], point["lost"], MARKERS[TRAINED.marker], color=TRAINED.color, label=label)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("added parameters")
        axes.grid(True, which="major", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("bits per byte more than the dense model")
    right.set_yscale("log")
    # Below is the rounding of the predictions.
    right.set_ylim(bottom=1e-8)
    right.set_ylabel("divergence from the dense model, bits per byte")
    right.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    if any(label for label in left.get_legend_handles_labels()[1]):
        extra = [(h, n) for h, n in zip(*left.get_legend_handles_labels(), strict=True) if "," not in n or "dense" in n]
        left.legend(*zip(*extra, strict=True), frameon=False, fontsize=8) if extra else None
    save(figure, path)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
