"""Folders of transformers: recognizing them, checking them before they are read, and loading their models.

Nothing is downloaded, unpickled or run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

import temper
from temper.carrier import SITES
from temper.pretrained import ENTRY
from temper_lab.io import FileError, brief, check_finite, entry, read_json
from temper_lab.train.model_dir import FORMAT
from temper_lab.train.run_dir import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

# No network, and no code that comes with the weights, whatever is typed on standard input.
SAFELY = {"local_files_only": True, "trust_remote_code": False}
# The names that configurations of transformers use for the number of blocks.
DEPTHS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"}
# Entries that name code, which may come from a repository.
BY_CODE = {"attn_implementation", "experts_implementation"}
BY_CODE |= {f"_{name}" for name in BY_CODE} | {f"_{name}_internal" for name in BY_CODE}
IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")


def is_hf_folder(path: Path) -> bool:
    """True if a path is a folder of transformers, and not a run or a model folder of this lab."""
    if RunFolder(path).is_run:
        return False
    try:
        config = read_json(path / "config.json", allow_nan=True)
        return "model_type" in config and config.get("format") != FORMAT
    except ValueError:
        return False


def is_upcycled(folder: Path) -> bool:
    """True if the configuration in a folder of transformers says that its model has streams."""
    return read_json(folder / "config.json", allow_nan=True).get(ENTRY) is not None


def load_upcycled(folder: str | Path, **options: Any) -> PreTrainedModel:
    """Loads a model with several streams from a folder that `save_pretrained` has written; nothing is downloaded.

    Args:
        options: options of `from_pretrained`, such as `dtype=torch.bfloat16`; the sites stay in float32.
    """
    folder = Path(folder)
    if not folder.is_dir() or not is_upcycled(folder):
        raise ValueError(f"{folder} holds no model with streams: expected a folder of `temper upcycle`")
    check_hf_folder(folder)
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
    _check_loaded(folder, found, told)
    return found


def read_hf(folder: Path, **options: Any) -> PreTrainedModel:
    """Loads a causal language model of transformers, without streams.

    Nothing is downloaded, unpickled or run; missing and unexpected weights raise ValueError.
    """
    from transformers import AutoModelForCausalLM

    check_hf_folder(folder)
    with _quiet():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, **SAFELY, use_safetensors=True, output_loading_info=True, **options
            )
            found, told = loaded
        # Their loaders raise whatever they come across.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise FileError(
                f"{folder}: not a causal language model in safetensors, or not complete: {reason}"
            ) from error
    _check_loaded(folder, found, told)
    return found


def check_hf_folder(folder: Path) -> None:
    """Raises ValueError for a folder that transformers must not read."""
    if (folder / "model.safetensors.index.json").is_file():
        files = entry(read_json(folder / "model.safetensors.index.json"), "weight_map", dict, folder)
        if strange := [name for name in files.values() if not _is_shard(name)]:
            raise FileError(f"{folder}: its weights are in {brief(strange[0])}; expected safetensors of this folder")
    if any(name == "quantization_config" for name, _ in _entries(read_json(folder / "config.json", allow_nan=True))):
        raise FileError(f"{folder}: its weights are quantized (quantization_config), which is not read here")
    if (folder / "adapter_config.json").exists():
        raise FileError(f"{folder} is an adapter of another model, which is not read here; merge it into that model")
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileError(f"{folder}: no weights in safetensors there, which is all that is read here (nothing pickled)")
    check_config(folder, sum(len(_dtypes(path)) for path in paths))


def check_config(folder: Path, num_tensors: int) -> None:
    """Raises ValueError for a configuration that refers to code, or has more blocks than tensors."""
    for name, value in _entries(read_json(folder / "config.json", allow_nan=True)):
        if name in BY_CODE and value not in IMPLEMENTATIONS:
            raise FileError(
                f"{folder}: {name} is {brief(value)}, which can fetch code from elsewhere and is not read here; "
                "without this entry of config.json, transformers computes the model itself"
            )
        # All of these blocks would be built before their missing weights are noticed.
        if name in DEPTHS and isinstance(value, int) and value > num_tensors:
            raise FileError(f"{folder}: {name} is {value}, and there are {num_tensors} tensors; weights are missing")


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of a configuration and of its sub-configurations."""
    for name, value in config.items():
        yield name, value
        if isinstance(value, Mapping):
            yield from _entries(value)


def _is_shard(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _dtypes(path: Path) -> dict[str, str]:
    """The tensors of a file with their safetensors dtypes."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path} is not a complete safetensors file: {error}") from error


def _check_loaded(folder: Path, model: PreTrainedModel, told: Mapping[str, Any]) -> None:
    """Raises ValueError unless every weight of a model was loaded from the folder."""
    # Tensors of sites are loaded afterwards, and old files have a table that is now computed.
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
    weights = dict(model.named_parameters())
    for path in sorted(folder.glob("*.safetensors")):
        for name, dtype in _dtypes(path).items():
            # Names may lack the model's own prefix. Tables and masks, which are no weights, may be of any type.
            is_weight = name in weights or f"{model.base_model_prefix}.{name}" in weights
            if is_weight and not dtype.startswith(("F", "BF")):
                raise FileError(f"{path}: {name} is of type {dtype}; weights are floating-point numbers")
    check_finite(weights, folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' report of unexpected tensors, which are those of the sites."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
