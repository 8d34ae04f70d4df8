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
from safetensors import SafetensorError, safe_open

import temper
from temper.carrier import SITES
from temper.pretrained import ENTRY
from temper_lab.io import FileError, brief, entry, read_json
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
    return read_json(folder / "config.json", allow_nan=True).get(ENTRY) is not None


def load(folder: str | Path, **options: Any) -> PreTrainedModel:
    """A model with several streams from a folder that `save_pretrained` has written; nothing is downloaded.

    Args:
        options: of `from_pretrained`, such as `dtype=torch.bfloat16`; the sites stay in float32.
    """
    folder = Path(folder)
    if not folder.is_dir() or not is_upcycled(folder):
        raise ValueError(f"{folder} holds no model with streams: expected a folder of `temper upcycle`")
    check_theirs(folder)
    with _quiet():
        try:
            found, told = temper.load_pretrained(
                folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
            )
        except ValueError as error:
            raise error if str(error).startswith(str(folder)) else FileError(f"{folder}: {error}") from error
        # Their loaders raise whatever they come across.
        except Exception as error:
            raise FileError(f"{folder}: not complete: {' '.join(str(error).split())[:300]}") from error
    _check_all_loaded(folder, told)
    return found


def read_hf(folder: Path, **options: Any) -> PreTrainedModel:
    """A causal language model of transformers without the streams that it may have.

    Nothing is downloaded, unpickled or run; weights that are missing, or have no place in the model, are a ValueError.
    """
    from transformers import AutoModelForCausalLM

    check_theirs(folder)
    with _quiet():
        try:
            found, told = AutoModelForCausalLM.from_pretrained(
                folder, **SAFELY, use_safetensors=True, output_loading_info=True, **options
            )
        # Their loaders raise whatever they come across.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise FileError(
                f"{folder}: not a causal language model in safetensors, or not complete: {reason}"
            ) from error
    _check_all_loaded(folder, told)
    return found


# No network, and no code that comes with the weights, whatever somebody answers on standard input.
SAFELY = {"local_files_only": True, "trust_remote_code": False}
# How transformers' configurations call the number of their blocks.
DEPTHS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"}


def check_theirs(folder: Path) -> None:
    """Raises ValueError for a folder that transformers should not even be asked to read."""
    config = read_json(folder / "config.json", allow_nan=True)
    if (folder / "model.safetensors.index.json").is_file():
        files = entry(read_json(folder / "model.safetensors.index.json"), "weight_map", dict, folder)
        if strange := [name for name in files.values() if not isinstance(name, str) or Path(name).name != name]:
            raise FileError(f"{folder}: its weights are in {brief(strange[0])}; expected files of this folder")
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileError(f"{folder}: no weights in safetensors there, which is all that is read here (nothing pickled)")
    num_tensors = sum(len(_names(path)) for path in paths)
    sections = [config, *(part for part in config.values() if isinstance(part, dict))]
    for name, depth in ((name, section[name]) for section in sections for name in DEPTHS & set(section)):
        # So many blocks would be built before anybody misses their weights.
        if isinstance(depth, int) and depth > num_tensors:
            raise FileError(f"{folder}: {name} is {depth}, and there are {num_tensors} tensors; weights are missing")


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path} is not a complete safetensors file: {error}") from error


def _check_all_loaded(folder: Path, told: Mapping[str, Any]) -> None:
    # The tensors of sites are put in their place afterwards, and old files hold a table that is computed now.
    unexpected = [
        name
        for name in told["unexpected_keys"]
        if f".{SITES}." not in name and not name.endswith("rotary_emb.inv_freq")
    ]
    problems = [
        f"{len(names)} {kind} ({', '.join(sorted(map(str, names))[:3])})"
        for kind, names in (
            ("missing", told["missing_keys"]),
            ("unexpected", unexpected),
            ("of another shape", told.get("mismatched_keys") or ()),
        )
        if names
    ]
    if problems:
        raise FileError(f"{folder}: these weights are not those of its config.json: {'; '.join(problems)}")


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
