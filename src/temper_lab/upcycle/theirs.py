"""Models of transformers with several streams, and folders of them.

Such a folder is what `save_pretrained` writes: the tensors of the sites are among the others, and `config.json` has an
entry "temper" that says where they belong. So the checkpoints of any trainer are complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import temper
from temper.pretrained import ENTRY
from temper_lab.checkpoint.files import read_json
from temper_lab.upcycle.layouts import layout_of
from temper_lab.upcycle.ours import check_streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel


def upcycle_hf(
    model: PreTrainedModel,
    *,
    preset: str,
    num_streams: int,
    router: Mapping[str, Any] | None = None,
    blocks: str | None = None,
    sites: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Gives a causal language model of transformers N streams, in place, with the same logits.

    It trains, generates and is saved as before; `load` reads what `save_pretrained` has written.

    Args:
        preset: how the streams are routed.
        router: changes of the preset, as for `temper.preset`.
        blocks: the names of its blocks (`temper.wrap`), for an architecture that is not in the table of layouts.
        sites: the residual adds of one block.
        seed: of the generators' random factors.
    """
    if getattr(model.config, ENTRY, None) is not None:
        raise ValueError("the model has streams already; expected one as transformers has it")
    check_streams(preset, num_streams)
    layout = layout_of(model.config, blocks, sites)
    dim = model.config.get_text_config().hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options: dict[str, Any] = {"preset": preset, "num_streams": num_streams, "dim": dim, "sites": layout.sites}
        temper.wrap(model, layout.blocks, **options, reduce="mean", **(router or {}))
        temper.convert.upcycle(model)
    return model


def is_upcycled(folder: Path) -> bool:
    """Whether a folder of transformers says that its model has streams."""
    return read_json(folder / "config.json").get(ENTRY) is not None


def load(folder: str | Path, **options: Any) -> PreTrainedModel:
    """A model with several streams from a folder that `save_pretrained` has written; nothing is downloaded.

    Args:
        options: of `from_pretrained`, such as `dtype=torch.bfloat16`; the sites stay in float32.
    """
    folder = Path(folder)
    if not folder.is_dir() or not is_upcycled(folder):
        raise ValueError(f"{folder} holds no model with streams: expected a folder of `temper upcycle`")
    with _quiet():
        try:
            return temper.load_pretrained(folder, local_files_only=True, use_safetensors=True, **options)
        except ValueError as error:
            raise error if str(error).startswith(str(folder)) else ValueError(f"{folder}: {error}") from error
        # Their loaders raise whatever they come across.
        except Exception as error:
            raise ValueError(f"{folder}: not complete: {' '.join(str(error).split())[:300]}") from error


def read_hf(folder: Path, **options: Any) -> PreTrainedModel:
    """A causal language model of transformers without the streams that it may have; nothing is downloaded."""
    from transformers import AutoModelForCausalLM

    with _quiet():
        try:
            found = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True, **options)
        # Their loaders raise whatever they come across.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{folder}: not a causal language model in safetensors, or not complete: {reason}"
            ) from error
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of the tensors it has no place for: those are the sites."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
