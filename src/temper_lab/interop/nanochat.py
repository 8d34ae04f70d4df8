"""Conversion to and from `NanoChatForCausalLM` of transformers, which is this backbone with the residual preset."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from temper_lab.interop.hf_folder import read_hf
from temper_lab.model import GPT, ModelConfig
from temper_lab.model.functional import CAP, EPS

if TYPE_CHECKING:
    from transformers import NanoChatConfig, NanoChatForCausalLM

OUTER = {"embedding.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
INNER = {
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "mlp.up.weight": "mlp.fc1.weight",
    "mlp.down.weight": "mlp.fc2.weight",
}


def names(num_layers: int) -> dict[str, str]:
    """The state-dict keys of the lab's model -> those of nanochat."""
    blocks = {
        f"blocks.{layer}.{lab_name}": f"model.layers.{layer}.{hf_name}"
        for layer in range(num_layers)
        for lab_name, hf_name in INNER.items()
    }
    return {**OUTER, **blocks}


def to_nanochat(model: GPT, *, bos_token_id: int | None = None) -> tuple[NanoChatConfig, dict[str, Tensor]]:
    """The configuration and the state dict for `NanoChatForCausalLM`; the tensors are the model's own.

    Args:
        bos_token_id: the document delimiter, which also ends a text; their format requires it.
    """
    from transformers import NanoChatConfig

    config = model.config
    if not config.routing().is_residual:
        raise ValueError(
            f"the preset is {config.preset!r} with {model.num_streams} streams; nanochat holds the residual preset only"
        )
    hf_config = NanoChatConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=4 * config.dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        max_position_embeddings=config.context,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": float(config.rope_base)},
        final_logit_softcapping=CAP,
        bos_token_id=bos_token_id,
        eos_token_id=bos_token_id,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    state = model.state_dict()
    return hf_config, {hf_name: state[name] for name, hf_name in names(config.num_layers).items()}


def from_nanochat(source: NanoChatForCausalLM | str | PathLike[str]) -> GPT:
    """Converts a nanochat model, or a folder that `save_pretrained` wrote, to the lab's residual preset."""
    if isinstance(source, str | PathLike):
        from transformers import NanoChatForCausalLM

        found = read_hf(Path(source))
        if not isinstance(found, NanoChatForCausalLM):
            raise ValueError(f"{source} holds a {type(found).__name__}; expected a NanoChatForCausalLM")
        source = found
    config = _config(source.config)
    state = source.state_dict()
    mapping = names(config.num_layers)
    if missing := sorted(set(mapping.values()) - set(state)):
        raise ValueError(f"the nanochat state dict lacks {', '.join(missing[:4])}")
    if extra := sorted(set(state) - set(mapping.values())):
        raise ValueError(f"the nanochat state dict has {', '.join(extra[:4])}, for which this backbone has no place")
    like = state["lm_head.weight"]
    with torch.device("meta"):
        model = GPT(config).to(like.dtype)
    model.to_empty(device=like.device)
    model.load_state_dict({name: state[hf_name] for name, hf_name in mapping.items()})
    return model


def _config(hf_config: Any) -> ModelConfig:
    """The lab's configuration of a nanochat model, or a ValueError for a feature that this backbone lacks."""
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    config = ModelConfig(
        depth=hf_config.num_hidden_layers,
        vocab_size=hf_config.vocab_size,
        context=hf_config.max_position_embeddings,
        head_dim=head_dim,
        rope_base=hf_config.rope_parameters["rope_theta"],
    )
    if config.dim != hf_config.hidden_size:
        config = config.with_(width=hf_config.hidden_size)
    expected = {
        "intermediate_size": 4 * config.dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "hidden_act": "relu2",
        "rms_norm_eps": EPS,
        "final_logit_softcapping": CAP,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    for name, value in expected.items():
        if getattr(hf_config, name) != value:
            raise ValueError(f"the nanochat model has {name}={getattr(hf_config, name)!r}; this backbone has {value!r}")
    if hf_config.rope_parameters.get("rope_type", "default") != "default":
        raise ValueError(
            f"the nanochat model has rope_parameters={hf_config.rope_parameters!r}; expected the default type"
        )
    return config
