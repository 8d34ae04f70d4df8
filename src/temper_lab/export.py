"""A model and its tokenizer as a folder for transformers, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from temper.registry import unknown
from temper_lab.io import atomic_dir, check_finite
from temper_lab.model import GPT
from temper_lab.nanochat import to_nanochat
from temper_lab.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export(model: GPT, tokenizer: Tokenizer, out: str | Path, *, to: str = "hf") -> Path:
    """Writes weights, configuration, generation settings and tokenizer into a new folder.

    Args:
        to: "hf" for `temper_lab.hf.TemperForCausalLM`, which holds any preset, or "nanochat" for
            transformers' own `NanoChatForCausalLM`, which holds the residual preset.
    """
    out = Path(out).absolute()
    check_out(out)
    if to not in TARGETS:
        raise unknown("target of an export", to, TARGETS)
    from temper_lab.hf import fast_tokenizer

    check_finite(model.state_dict(), "the model")
    theirs, their_tokenizer = TARGETS[to](model, tokenizer), fast_tokenizer(tokenizer, context=model.config.context)
    # Whatever is not said in a batch is padding, and any token will do for that.
    theirs.generation_config.pad_token_id = tokenizer.bos
    with atomic_dir(out) as work:
        theirs.save_pretrained(work)
        their_tokenizer.save_pretrained(work)
    return out


def check_out(out: Path) -> None:
    """Raises ValueError for a folder that is taken."""
    if out.exists():
        raise ValueError(f"{out} exists; expected a new folder for the export")


def _temper(model: GPT, tokenizer: Tokenizer) -> PreTrainedModel:
    from temper_lab.hf import TemperForCausalLM

    return TemperForCausalLM.from_gpt(model, bos_token_id=tokenizer.bos, eos_token_id=tokenizer.bos)


def _nanochat(model: GPT, tokenizer: Tokenizer) -> PreTrainedModel:
    from transformers import NanoChatForCausalLM

    config, state = to_nanochat(model, bos_token_id=tokenizer.bos)
    theirs = NanoChatForCausalLM(config)
    theirs.load_state_dict(state, assign=True)
    return theirs


TARGETS: dict[str, Callable[[GPT, Tokenizer], PreTrainedModel]] = {"hf": _temper, "nanochat": _nanochat}
