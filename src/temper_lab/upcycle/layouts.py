"""Where the blocks of transformers' models are, and how many residual adds each has."""

from __future__ import annotations

from typing import Any, NamedTuple

from temper.registry import unknown


class Layout(NamedTuple):
    """The names of the blocks, as `temper.wrap` takes them, and the residual adds of each."""

    blocks: str
    sites: int = 2


_LLAMA, _GPT2 = Layout("model.layers.*"), Layout("transformer.h.*")

# By `model_type`. A test holds every one to the logits of its original.
LAYOUTS = {
    **dict.fromkeys(("llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), _LLAMA),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "granite", "smollm3", "starcoder2"), _LLAMA),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "phi3", "nanochat"), _LLAMA),
    **dict.fromkeys(("gpt2", "gpt_neo"), _GPT2),
    # Attention and MLP side by side, added together.
    "gpt_neox": Layout("gpt_neox.layers.*", sites=1),
    "phi": Layout("model.layers.*", sites=1),
}


def layout_of(config: Any, blocks: str | None = None, sites: int | None = None) -> Layout:
    """The layout of a model of transformers, from the table or as it is given."""
    known = LAYOUTS.get(config.model_type)
    if blocks is None and known is None:
        raise ValueError(
            f"{unknown('architecture', config.model_type, LAYOUTS)} Another pre-norm model needs the names of its "
            'blocks and the residual adds of one: --blocks "model.layers.*" --sites 2, or in Python temper.wrap(model, '
            '"model.layers.*", preset=.., num_streams=.., sites=2) and then temper.convert.upcycle(model)'
        )
    default = known or Layout("")
    return Layout(default.blocks if blocks is None else blocks, default.sites if sites is None else sites)
