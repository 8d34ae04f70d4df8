"""The hyper-connections of transformers' DeepSeek-V4 as sites of temper, and back: the same logits either way.

A model with sites is saved as a folder of transformers except for two files: `temper.json` describes the sites, and the
weights are in `temper.safetensors`, so that they are not mistaken for DeepSeek's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from temper import HyperConnection, RouterConfig
from temper.convert import export_foreign, load_foreign
from temper.gates import with_vector_gates
from temper_lab.distributed import check_fit
from temper_lab.interop.hf_folder import check_config
from temper_lab.io import (
    atomic_dir,
    check_finite,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)

if TYPE_CHECKING:
    from transformers import DeepseekV4Config, PreTrainedModel

SOURCE = "deepseek_v4"
FORMAT = "temper-deepseek-1"
FILE_NAME, WEIGHTS = "temper.json", "temper.safetensors"


class Adapter(nn.Module):
    """One of our sites where DeepSeek-V4 calls one of its own.

    Args:
        dtype: the dtype of the weights that the site replaces, and of those that replace it on the way back.
    """

    def __init__(self, site: HyperConnection, dtype: torch.dtype) -> None:
        super().__init__()
        self.site, self.dtype = site, dtype

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """post, the matrix A of DeepSeek-V4 (res transposed) and the input of the branch."""
        x, state = self.site.begin(hidden_streams)
        assert state.routing is not None
        return state.routing.post, state.routing.res.mT, x


def to_temper(model: PreTrainedModel) -> PreTrainedModel:
    """Replaces every hyper-connection of a DeepSeek-V4 model by a site of temper, in place.

    A layer has its sites at `attn_hc.site` and `ffn_hc.site`, where `temper.observe` and everything else that works on
    sites finds them. The head that sums the streams at the end stays as it is: it only reads, where a site also mixes
    and writes. Parameters are new objects, so do this before you build the optimizer.
    """
    replaced = {name: module for name, module in model.named_modules() if type(module).__name__ == _CLASS_NAME}
    if not replaced:
        raise ValueError(f"{type(model).__name__} has no {_CLASS_NAME}; expected a DeepSeek-V4 model of transformers")
    size = {"num_streams": model.config.hc_mult, "dim": model.config.hidden_size}
    # All are built before the first is attached, so that an error leaves the model unchanged.
    adapters: dict[str, nn.Module] = {}
    for name, module in replaced.items():
        site = load_foreign(SOURCE, module.state_dict(), **size, **_settings(model.config))
        site.requires_grad_(module.fn.requires_grad)
        adapters[name] = Adapter(site, module.fn.dtype)
    return _replace(model, adapters)


def to_deepseek(model: PreTrainedModel) -> PreTrainedModel:
    """Reverses `to_temper`, in place: sites become hyper-connections of DeepSeek-V4 where those can represent them."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    adapters = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    if not adapters:
        raise ValueError(f"{type(model).__name__} has no sites of `to_temper` to turn back")
    modules: dict[str, nn.Module] = {}
    for name, adapter in adapters.items():
        state = export_foreign(SOURCE, adapter.site, **_settings(model.config))
        with torch.device("meta"):
            module = DeepseekV4HyperConnection(cast("DeepseekV4Config", model.config))
        module.load_state_dict({key: value.to(adapter.dtype) for key, value in state.items()}, assign=True)
        modules[name] = module.requires_grad_(any(parameter.requires_grad for parameter in adapter.parameters()))
    return _replace(model, modules)


def save(
    model: PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, files: Mapping[str, str] | None = None
) -> Path:
    """Writes a model that `to_temper` has changed into a new folder, atomically.

    Args:
        tokenizer: a tokenizer of transformers to save with it.
        files: other files by name.
    """
    folder = Path(folder).absolute()
    sites = {
        name: {"config": module.site.config.to_dict(), "dtype": str(module.dtype).removeprefix("torch.")}
        for name, module in model.named_modules()
        if isinstance(module, Adapter)
    }
    if not sites:
        raise ValueError(f"{type(model).__name__} has no sites of `to_temper`; save_pretrained writes it as it is")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; expected a new folder")
    tensors = model.state_dict()
    check_finite(tensors, "the model")
    with atomic_dir(folder) as work:
        model.config.save_pretrained(work)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(work)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)
        for name, text in (files or {}).items():
            (work / name).write_text(text, encoding="utf-8")
        write_tensors(work / WEIGHTS, tensors)
        write_json(work / FILE_NAME, {"format": FORMAT, "sites": sites})
    return folder


def load(folder: str | Path) -> PreTrainedModel:
    """Loads a model from a folder that `save` has written, with our sites in it."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = Path(folder)
    about = read_json(folder / FILE_NAME)
    if about.get("format") != FORMAT or not isinstance(about.get("sites"), dict):
        raise ValueError(f"{folder / FILE_NAME} has format {about.get('format')!r}, expected {FORMAT!r} with sites")
    tensors = with_vector_gates(read_tensors(folder / WEIGHTS))
    check_config(folder, len(tensors))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    try:
        with torch.device("meta"):
            adapters: dict[str, nn.Module] = {
                name: Adapter(HyperConnection(RouterConfig.from_dict(site["config"])), getattr(torch, site["dtype"]))
                for name, site in about["sites"].items()
            }
        _replace(model, adapters)
        check_fit(model.state_dict(), tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: {error}") from error
    # Kept in their stored dtype, whatever the configuration says.
    model.load_state_dict(tensors, assign=True)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


# Compared by name, because the test must not import transformers.
_CLASS_NAME = "DeepseekV4HyperConnection"


def _settings(config: Any) -> dict[str, Any]:
    """The settings that their state dict does not have, as options of `temper.preset`."""
    return {
        "norm_eps": config.rms_norm_eps,
        "eps": config.hc_eps,
        "pre_eps": config.hc_eps,
        "iters": config.hc_sinkhorn_iters,
    }


def _replace(model: PreTrainedModel, modules: dict[str, nn.Module]) -> PreTrainedModel:
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module.train(model.training))
    return model
