"""From a folder with one stream to a folder with several, checked and written whole.

Letters: B batch, T token, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from temper.carrier import WrapError
from temper_lab import checkpoint
from temper_lab.eval.models import is_theirs
from temper_lab.io import atomic_dir, check_finite, entry, read_json
from temper_lab.load import load as load_ours
from temper_lab.model import GPT
from temper_lab.tokenizer import FILE_NAME, Tokenizer
from temper_lab.upcycle.ours import check_streams, grow_gpt, upcycle_gpt
from temper_lab.upcycle.theirs import is_upcycled, read_hf, upcycle_hf

# What a tokenizer of transformers consists of.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
TOKENIZER_FILES += ("chat_template*",)


class Upcycled(NamedTuple):
    """What was done: the largest difference of a logit on a few tokens, and the largest logit."""

    kind: str
    parameters: int
    added: int
    difference: float
    largest: float
    note: str = ""


def upcycle_folder(
    source: Path, out: Path, *, preset: str, num_streams: int, layout: Mapping[str, Any], **options: Any
) -> Upcycled:
    """Reads, upcycles, compares the logits and writes; nothing is written if they are not the same.

    Args:
        source: a model folder or a run of this lab, or a folder of transformers.
        out: a folder that does not exist or is empty.
        layout: `blocks` and `sites` for a model of transformers; None where the table knows them.
        options: `router` and `seed`.
    """
    check_streams(preset, num_streams)
    check_out(out)
    options = {"preset": preset, "num_streams": num_streams, **options}
    if not is_theirs(source):
        if given := [f"--{name}" for name, value in layout.items() if value is not None]:
            raise ValueError(f"{' and '.join(given)} describe a model of transformers, and {source} is one of this lab")
        return _ours(*load_ours(source), out, options)
    # Where transformers is missing, it says what to install.
    from temper_lab import hf

    if is_upcycled(source):
        raise ValueError(f"{source} has streams already; upcycle the model that it was made from")
    kind = entry(read_json(source / "config.json", allow_nan=True), "model_type", str, source / "config.json")
    if kind == "temper":
        raise ValueError(
            f"{source} is an export of a model of this lab; upcycle the model folder that it was made from"
        )
    hf.transformers.utils.logging.disable_progress_bar()
    note = ""
    if kind == "nanochat":
        try:
            model, tokenizer = _from_nanochat(source)
        except ValueError as reason:
            note = f"it stays a model of transformers: {reason}"
        else:
            return _ours(model, tokenizer, out, options)
    return _theirs(source, out, options | layout)._replace(note=note)


def check_out(out: Path) -> None:
    """Raises ValueError for a folder that is taken."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; expected a new folder")


def _ours(model: GPT, tokenizer: Tokenizer, out: Path, options: dict[str, Any]) -> Upcycled:
    config = model.config
    if config.routing().is_residual:
        grown = upcycle_gpt(model, **options)
    elif options["preset"] != config.preset or options.get("router"):
        raise ValueError(
            f"the model has {model.num_streams} streams of {config.preset} already; expected --preset {config.preset} "
            f"without --router and --streams {2 * model.num_streams} or another multiple, which keeps its routing"
        )
    else:
        grown = grow_gpt(model, options["num_streams"])
    ids_BT = _probe(config.vocab_size, config.context)
    with torch.no_grad():
        difference, largest = _compare(model(ids_BT), grown(ids_BT))
    files = {FILE_NAME: tokenizer.to_json()}
    checkpoint.save_model(out, grown.config.to_dict(), grown.state_dict(), files)
    return Upcycled("a model folder", _count(grown), _count(grown) - _count(model), difference, largest)


def _from_nanochat(source: Path) -> tuple[GPT, Tokenizer]:
    from temper_lab.nanochat import from_nanochat

    # What puts a BOS before texts in transformers is in the way of ours, which is asked for one.
    content = read_json(source / FILE_NAME, allow_nan=True) if (source / FILE_NAME).is_file() else {}
    tokenizer = Tokenizer.from_json(json.dumps({**content, "post_processor": None}), source / FILE_NAME)
    model = from_nanochat(source)
    if model.config.vocab_size != tokenizer.vocab_size:
        raise ValueError(f"the model has {model.config.vocab_size} tokens and its tokenizer {tokenizer.vocab_size}")
    return model.eval(), tokenizer


@torch.no_grad()
def _theirs(source: Path, out: Path, options: dict[str, Any]) -> Upcycled:
    model = read_hf(source).eval()
    before = _count(model)
    config = model.config.get_text_config()
    ids_BT = _probe(config.vocab_size, getattr(config, "max_position_embeddings", None) or 32)
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    try:
        upcycle_hf(model, **options)
        again_BTV = model(input_ids=ids_BT, use_cache=False).logits
    except WrapError as error:
        raise ValueError(f"the blocks are not what --blocks and --sites say: {error}") from error
    difference, largest = _compare(logits_BTV, again_BTV)
    check_finite(model.state_dict(), "the model")
    with atomic_dir(out.absolute()) as work:
        model.save_pretrained(work)
        for pattern in TOKENIZER_FILES:
            for path in source.glob(pattern):
                shutil.copyfile(path, work / path.name)
    return Upcycled("a folder for temper_lab.upcycle.load", _count(model), _count(model) - before, difference, largest)


def _probe(vocab_size: int, limit: int) -> Tensor:
    """A few tokens, the same every time."""
    return torch.randint(vocab_size, (2, min(32, limit)), generator=torch.Generator().manual_seed(0))


def _compare(before_BTV: Tensor, after_BTV: Tensor) -> tuple[float, float]:
    """The largest difference of a logit and the largest logit, or a ValueError if that is more than rounding."""
    difference = float((after_BTV.double() - before_BTV.double()).abs().max())
    largest = float(before_BTV.abs().max())
    # Rounding grows with depth; what is wrong is wrong by as much as the logits are. Growing is exact to 1e-5 only.
    limit = largest * min(0.25, max(1e-5, 4096 * torch.finfo(before_BTV.dtype).eps))
    if not difference <= limit:
        raise ValueError(
            f"the logits changed by {difference:.1e} (they are up to {largest:.1e}), which is more than rounding "
            f"({limit:.1e}): the blocks do more to their input than to add to it. Nothing was written."
        )
    return difference, largest


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
