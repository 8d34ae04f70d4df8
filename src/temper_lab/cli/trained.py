"""`temper sample`, `compress`, `export` and `upcycle`: commands that use or change a trained model."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

MAX_ROWS, MAX_TOKENS = 10_000, 1 << 24


def sample(
    model: Path,
    prompt: str = "",
    num: int = 1,
    max_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Generate text from a prompt.

        temper sample --model runs/smoke --prompt "The people"
        temper sample --model runs/smoke/model --prompt "My fellow citizens" --num 3 --top-p 0.9
        temper sample --model runs/smoke --temperature 0

    Args:
        model: A model folder, or the folder of a run: its final model, or that of its newest checkpoint.
        prompt: The text to continue; an empty prompt starts a document.
        num: The number of continuations.
        max_tokens: The most tokens to generate; a text also ends with its document or at the model's context.
        temperature: The sampling temperature; 0 always takes the most likely token.
        top_k: Sample from the k most likely tokens only.
        top_p: Sample from the most likely tokens that together have this probability.
        seed: The random seed; the same seed gives the same text.
        device: Where to compute.
        as_json: Print JSON.
    """
    for name, value, largest in (("num", num, MAX_ROWS), ("max-tokens", max_tokens, MAX_TOKENS)):
        if not 1 <= value <= largest:
            raise ValueError(f"--{name} is {value}; expected at least 1 and at most {largest:,}")
    from temper_lab.console import Bar, visible
    from temper_lab.engine import stream
    from temper_lab.train.model_dir import load

    network, tokenizer = load(model, device=device)
    ids = tokenizer.encode(prompt, bos=True)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": tokenizer.bos,
    }
    rows: list[list[int]] = [[] for _ in range(num)]
    with Bar("sampling", num * max_tokens) as bar:
        for count, (row, token) in enumerate(stream(network, [ids] * num, max_new_tokens=max_tokens, **settings), 1):
            rows[row].append(token)
            bar.update(count)
    if as_json:
        found = [{"text": prompt + tokenizer.decode(tokens), "tokens": tokens} for tokens in rows]
        print(json.dumps({"model": str(model), "prompt": prompt, "seed": seed, "samples": found}, indent=2))
        return
    for index, tokens in enumerate(rows):
        if index:
            print("-" * 8)
        text = prompt + tokenizer.decode(tokens)
        print(visible(text) if sys.stdout.isatty() else text)


def compress(
    model: Path,
    out: Path,
    to: Annotated[str, tyro.conf.arg(metavar="GENERATOR")] = "tucker",
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
    """Replace the generators of a trained model with low-rank ones, and report the loss.

        temper compress --model runs/mhc --to tucker:rank=2x12 --calibrate sotu --out models/small
        temper compress --model runs/mhc --to cp --error 0.05 --calibrate data/books --out models/close
        temper compress --model runs/mhc --to tt --params 100000 --finetune 50 --out models/budget
        temper compress --model models/deepseek-v4 --to tucker --rank 2x12 --out models/deepseek-v4-small

    Without --calibrate the weights are approximated. With it, the logits on that text are: this takes little time, adds
    no parameters, and loses far less. The result is an ordinary model folder: sample, evaluate, export or compress it
    again. Its compress.json has every number. Works on dense models (mhc, mhc-lite, kromhc) and on low-rank ones.

    Args:
        model: A model folder, the folder of a run, or a Hugging Face folder with a DeepseekV4ForCausalLM.
        out: The folder to write, which must be new or empty.
        to: The form of the new generators: tucker, cp, tt or another one with ranks, also with its rank (cp:rank=8).
        rank: The rank of every generator: 8, 2x12 (Tucker: streams x features; TT: bonds), or 0.1 for a fraction of the
            dense parameters.
        error: Instead of a rank, the largest relative error over all generators; each gets the rank that it needs.
        params: Instead of a rank, the number of parameters that all hyper-connections may have together.
        calibrate: The corpus whose training text the fit is weighted by: "sotu", a folder of parquet, txt, md or jsonl
            files, or one such file.
        calibrate_tokens: Tokens of that corpus to read.
        plain: The textbook decomposition (HOSVD, TT-SVD) instead of the best fit, for comparison.
        finetune: Steps to train the routing for afterwards, with one batch of --rows rows per step.
        finetune_all: Let --finetune train everything, not only the routing.
        corpus: The corpus to measure bits per byte on, and to finetune on without --calibrate; by default the corpus of
            --calibrate, or the one that the run was trained on.
        val_fraction: The share of documents that is validation text; by default as it was in training, or 0.05.
        batches: The most batches of validation text to read.
        rows: Rows per batch.
        context: Tokens per row; by default the model's context, at most 2,048 for a Hugging Face model.
        seed: The seed of the order of the training text.
        device: Where to compute; "auto" is the GPU if there is one.
        as_json: Write the report to this file too.
    """
    from temper_lab.compress import Settings
    from temper_lab.method import parse_rank

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
    from temper_lab.compress import show_report
    from temper_lab.console import console
    from temper_lab.io import atomic_write

    report = run(settings)
    if as_json is not None:
        as_json.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(as_json, json.dumps(report, indent=1) + "\n")
    show_report(report, console(160))
    print(f"model: {out}")


def export(
    model: Path,
    out: Path,
    to: Literal["hf", "nanochat"] = "hf",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Write a model and its tokenizer for transformers, into a new folder.

        temper export --model runs/smoke --to hf --out exported/smoke
        temper export --model runs/plain --to nanochat --out exported/plain

    A folder of `--to hf` is read by AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True), pipeline and
    lm_eval, wherever temper is installed. A folder of `--to nanochat` needs transformers alone, and can hold the
    residual preset only. Both have a model card (README.md) with method, parameters, bits per byte and how to load it.

    Args:
        model: A model folder, or the folder of a run: its final model, or that of its newest checkpoint.
        out: The folder to write, which must not exist.
        to: hf for any preset, nanochat for transformers' own NanoChatForCausalLM.
        as_json: Print JSON.
    """
    # Imported before a model is read: `hf` says what to install where transformers is missing.
    from temper_lab.interop import export as exporting
    from temper_lab.interop import hf
    from temper_lab.train.model_dir import load

    exporting.check_out(out)
    hf.transformers.utils.logging.disable_progress_bar()
    network, tokenizer = load(model)
    folder = exporting.export(network, tokenizer, out, to=to, score=exporting.score_of(model))
    count = network.num_parameters()["total"]
    if as_json:
        found = {"folder": str(folder), "format": to, "method": network.config.method, "parameters": count}
        print(json.dumps(found, indent=2))
        return
    print(f"{to}: {network.config.method} with {count:,} parameters in {folder}")


def upcycle(
    model: Path,
    num_streams: Annotated[int, tyro.conf.arg(name="streams")],
    out: Path,
    preset: Annotated[str, tyro.conf.arg(metavar="METHOD")] = "temper-tucker",
    router: Mapping[str, Any] = {},
    blocks: str | None = None,
    sites: int | None = None,
    seed: int = 0,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Give a pretrained model several streams without changing its outputs.

        temper upcycle --model runs/plain --streams 4 --preset temper-tucker --out models/plain-n4
        temper upcycle --model models/SmolLM --streams 4 --preset temper-cp --out models/SmolLM-n4
        temper upcycle --model models/other --streams 2 --out models/other-n2 --blocks "decoder.layers.*" --sites 2
        temper upcycle --model runs/cp-n4 --streams 8 --preset temper-cp --out models/cp-n8

    The logits are compared before anything is written. The result trains like any other model: its streams differ and
    get different gradients from the first step on.

    A model of this lab with one stream becomes a model folder; one with N streams grows to a multiple of N, and keeps
    its preset and its routing. A model of transformers becomes a folder that
    `temper_lab.interop.hf_folder.load_upcycled` and `temper eval` read.

    Args:
        model: A model folder, the folder of a run, or a Hugging Face folder (a causal language model in safetensors).
        num_streams: The number of streams of the new model.
        out: The folder to write, which must be new or empty.
        preset: The method: a preset listed by `temper params`, or one with overrides such as temper-cp:rank=8.
        router: Overrides of the preset as JSON, such as '{"rank": 8}'.
        blocks: The names of the blocks of a Hugging Face model whose architecture is not listed; * matches one part.
        sites: The number of residual additions in one of these blocks.
        seed: The seed of the random factors; the same seed gives the same folder.
        as_json: Print JSON.
    """
    from temper_lab.console import waiting
    from temper_lab.interop.upcycle import upcycle_folder
    from temper_lab.method import Method

    method = Method.parse(preset)
    router = {**router, **method.options}
    name = str(Method.of(method.preset, router))
    with waiting(f"upcycling {model}"):
        done = upcycle_folder(
            model,
            out,
            preset=method.preset,
            num_streams=num_streams,
            router=router,
            layout={"blocks": blocks, "sites": sites},
            seed=seed,
        )
    if as_json:
        found = {
            "folder": str(out),
            "method": str(Method.of(method.preset, router)),
            "streams": num_streams,
            "parameters": done.parameters,
        }
        found |= {"added": done.added, "largest_difference": done.difference, "largest_logit": done.largest}
        print(json.dumps(found | {"kind": done.kind, "note": done.note}, indent=2))
        return
    print(f"{num_streams} streams of {name} in {out}, {done.kind}")
    print(f"{done.added:,} parameters added, {done.parameters:,} now")
    print(f"largest difference of a logit {done.difference:.1e} (logits up to {done.largest:.3g})")
    if done.note:
        print(done.note)
