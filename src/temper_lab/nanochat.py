"""To and from `NanoChatForCausalLM` of transformers, which is this backbone with the residual preset."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from temper_lab.model import GPT, ModelConfig
from temper_lab.model.functional import EPS
from temper_lab.model.loss import CAP

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
    """Our state-dict keys and theirs."""
    blocks = {
        f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}"
        for layer in range(num_layers)
        for ours, theirs in INNER.items()
    }
    return {**OUTER, **blocks}


def to_nanochat(model: GPT, *, bos_token_id: int | None = None) -> tuple[NanoChatConfig, dict[str, Tensor]]:
    """The configuration and the state dict for `NanoChatForCausalLM`; the tensors are the model's own.

    Args:
        bos_token_id: the document delimiter, which also ends a text; their format wants to know it.
    """
    from transformers import NanoChatConfig

    config = model.config
    if not config.routing().is_residual:
        raise ValueError(
            f"the preset is {config.preset!r} with {model.num_streams} streams; nanochat holds the residual preset only"
        )
    theirs = NanoChatConfig(
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
    return theirs, {name: state[ours] for ours, name in names(config.num_layers).items()}


def from_nanochat(source: NanoChatForCausalLM | str | PathLike[str]) -> GPT:
    """Our model from theirs, or from a folder that `save_pretrained` wrote: a copy with the residual preset."""
    if isinstance(source, str | PathLike):
        from transformers import NanoChatForCausalLM

        source = NanoChatForCausalLM.from_pretrained(source, local_files_only=True, use_safetensors=True)
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
    model.load_state_dict({ours: state[theirs] for ours, theirs in mapping.items()})
    return model


def _config(theirs: Any) -> ModelConfig:
    """Our configuration from theirs, or a ValueError for what this backbone does not have."""
    heads = theirs.num_attention_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // heads
    config = ModelConfig(
        depth=theirs.num_hidden_layers,
        vocab_size=theirs.vocab_size,
        context=theirs.max_position_embeddings,
        head_dim=head_dim,
        rope_base=theirs.rope_parameters["rope_theta"],
    )
    if config.dim != theirs.hidden_size:
        config = config.with_(width=theirs.hidden_size)
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
        if getattr(theirs, name) != value:
            raise ValueError(f"the nanochat model has {name}={getattr(theirs, name)!r}; this backbone has {value!r}")
    if theirs.rope_parameters.get("rope_type", "default") != "default":
        raise ValueError(
            f"the nanochat model has rope_parameters={theirs.rope_parameters!r}; expected the default type"
        )
    return config
