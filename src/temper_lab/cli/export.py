"""`temper export`: a model for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def export(model: Path, out: Path, to: Literal["hf", "nanochat"] = "hf") -> None:
    """Write a model and its tokenizer for transformers, into a new folder.

        temper export --model runs/smoke --to hf --out exported/smoke
        temper export --model runs/plain --to nanochat --out exported/plain

    AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True), pipeline and lm_eval read what `--to hf` wrote,
    wherever temper is installed. What `--to nanochat` wrote, transformers reads by itself; it holds the residual preset
    only. The folder has a model card (README.md) with method, parameters, bits per byte and how to load it.

    Args:
        model: A model folder, or the folder of a run: its final model, or that of its newest checkpoint.
        out: The folder to write, which must not exist.
        to: hf for any preset, nanochat for transformers' own NanoChatForCausalLM.
    """
    # Before a model is read: where transformers is missing, `hf` says what to install.
    from temper_lab import export as exporting
    from temper_lab import hf
    from temper_lab.load import load

    exporting.check_out(out)
    hf.transformers.utils.logging.disable_progress_bar()
    network, tokenizer = load(model)
    folder = exporting.export(network, tokenizer, out, to=to, score=exporting.score_of(model))
    print(f"{to}: {network.config.preset} with {network.num_parameters()['total']:,} parameters in {folder}")
