"""The hyper-connections of transformers' DeepSeek-V4 as ours, and back: the same logits either way.

A model with our sites in it is saved as a folder that looks like theirs, but for the names of two files: `temper.json`
says what the sites are, and the weights are in `temper.safetensors`, so that nobody reads them as DeepSeek's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from temper import HyperConnection, RouterConfig
from temper.convert import export_foreign, load_foreign
from temper.gates import with_vector_gates
from temper_lab.distributed import check_fit
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
        dtype: of the weights that it stands for, which is theirs again on the way back.
    """

    def __init__(self, site: HyperConnection, dtype: torch.dtype) -> None:
        super().__init__()
        self.site, self.dtype = site, dtype

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """post, their matrix A (ours transposed) and what the branch reads."""
        x, state = self.site.begin(hidden_streams)
        assert state.routing is not None
        return state.routing.post, state.routing.res.mT, x


def to_temper(model: PreTrainedModel) -> PreTrainedModel:
    """Replaces every hyper-connection of a DeepSeek-V4 model by one of ours, in place.

    A site is at `attn_hc.site` and `ffn_hc.site` of its layer; `temper.observe` and all else that works on sites finds
    it there. The head that sums the streams up at the end stays theirs: it only reads, where a site also mixes and
    writes. Parameters are new objects, so do this before you build the optimizer.
    """
    theirs = {name: module for name, module in model.named_modules() if type(module).__name__ == _THEIRS}
    if not theirs:
        raise ValueError(f"{type(model).__name__} has no {_THEIRS}; expected a DeepSeek-V4 model of transformers")
    size = {"num_streams": model.config.hc_mult, "dim": model.config.hidden_size}
    # All of them are built before one is attached: an error leaves the model as it was.
    ours = {}
    for name, module in theirs.items():
        site = load_foreign(SOURCE, module.state_dict(), **size, **_settings(model.config))
        site.requires_grad_(module.fn.requires_grad)
        ours[name] = Adapter(site, module.fn.dtype)
    return _replace(model, ours)


def to_deepseek(model: PreTrainedModel) -> PreTrainedModel:
    """The way back, in place: whatever our sites have become, where their module can hold it."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    adapters = {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}
    if not adapters:
        raise ValueError(f"{type(model).__name__} has no sites of `to_temper` to turn back")
    theirs = {}
    for name, adapter in adapters.items():
        state = export_foreign(SOURCE, adapter.site, **_settings(model.config))
        with torch.device("meta"):
            module = DeepseekV4HyperConnection(model.config)
        module.load_state_dict({key: value.to(adapter.dtype) for key, value in state.items()}, assign=True)
        theirs[name] = module.requires_grad_(any(parameter.requires_grad for parameter in adapter.parameters()))
    return _replace(model, theirs)


def save(
    model: PreTrainedModel, folder: str | Path, *, tokenizer: Any = None, files: Mapping[str, str] | None = None
) -> Path:
    """Writes a model that `to_temper` has changed into a new folder, whole or not at all.

    Args:
        tokenizer: one of transformers', to put beside it.
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
    """The model of a folder that `save` has written, with our sites in it."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    folder = Path(folder)
    about = read_json(folder / FILE_NAME)
    if about.get("format") != FORMAT or not isinstance(about.get("sites"), dict):
        raise ValueError(f"{folder / FILE_NAME} has format {about.get('format')!r}, expected {FORMAT!r} with sites")
    tensors = with_vector_gates(read_tensors(folder / WEIGHTS))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "num_hidden_layers", 0) > len(tensors):
        raise ValueError(f"{folder}: it has {config.num_hidden_layers} blocks and {len(tensors)} tensors")
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    try:
        with torch.device("meta"):
            adapters = {
                name: Adapter(HyperConnection(RouterConfig.from_dict(site["config"])), getattr(torch, site["dtype"]))
                for name, site in about["sites"].items()
            }
        _replace(model, adapters)
        check_fit(model.state_dict(), tensors)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: {error}") from error
    # As they are, whatever dtype the configuration would have given them.
    model.load_state_dict(tensors, assign=True)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


# By name: looking for it must not import transformers.
_THEIRS = "DeepseekV4HyperConnection"


def _settings(config: DeepseekV4Config) -> dict[str, Any]:
    """What their state dict does not say, as options of `temper.preset`."""
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
