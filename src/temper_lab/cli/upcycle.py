"""`temper upcycle`: more streams for a model that is trained already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from temper_lab.cli.tables import registry


def prepare(words: list[str]) -> tuple[Callable[..., None], dict[str, Any]]:
    """The command and what tyro has to know for it."""
    return upcycle, {"registry": registry()}


def upcycle(
    model: Path,
    streams: int,
    out: Path,
    preset: str = "temper-tucker",
    router: Mapping[str, Any] = {},
    blocks: str | None = None,
    sites: int | None = None,
    seed: int = 0,
) -> None:
    """Give a pretrained model several streams, with the outputs that it had.

        temper upcycle --model runs/plain --streams 4 --preset temper-tucker --out models/plain-n4
        temper upcycle --model models/SmolLM --streams 4 --preset temper-cp --out models/SmolLM-n4
        temper upcycle --model models/other --streams 2 --out models/other-n2 --blocks "decoder.layers.*" --sites 2
        temper upcycle --model runs/cp-n4 --streams 8 --preset temper-cp --out models/cp-n8

    The logits are compared before anything is written. From there it trains as any other: the streams differ and get
    different gradients from the first step on.

    A model of this lab with one stream becomes a model folder; one with N streams gets a multiple of them, and keeps
    its preset and its routing. A model of transformers becomes a folder for `temper_lab.upcycle.load`, which gives a
    model of transformers with sites in it; `temper eval` takes it too.

    Args:
        model: A model folder, the folder of a run, or a Hugging Face folder (a causal language model in safetensors).
        streams: How many streams the new model has.
        out: The folder to write, new or empty.
        preset: How they are routed; a name of `temper params`.
        router: Changes of the preset as JSON, such as '{"rank": 8}'.
        blocks: Names of the blocks of a Hugging Face model that is not known here; * is one part of a dotted name.
        sites: How many residual adds one of these blocks has.
        seed: Of the random factors; the same seed gives the same folder.
    """
    from temper_lab.progress import waiting
    from temper_lab.upcycle.folder import upcycle_folder

    with waiting(f"upcycling {model}"):
        done = upcycle_folder(
            model,
            out,
            preset=preset,
            num_streams=streams,
            router=router,
            layout={"blocks": blocks, "sites": sites},
            seed=seed,
        )
    print(f"{streams} streams of {preset} in {out}, {done.kind}")
    print(f"{done.added:,} parameters added, {done.parameters:,} now")
    print(f"largest difference of a logit {done.difference:.1e} (logits up to {done.largest:.3g})")
    if done.note:
        print(done.note)
