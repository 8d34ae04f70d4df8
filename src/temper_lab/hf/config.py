"""A `ModelConfig` as transformers keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from transformers import PretrainedConfig

from temper_lab.model import ModelConfig


class TemperConfig(PretrainedConfig):
    """The fields of `ModelConfig` beside those that transformers has for every model.

    What transformers' own tools ask for by other names (`hidden_size`, `num_hidden_layers`, ..) follows from them.

    Args:
        bos_token_id: the document delimiter.
        eos_token_id: what ends a text, the same token as a rule.
        pad_token_id: what fills a batch up; any token will do, for padding is masked.
    """

    model_type = "temper"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {"num_hidden_layers": "depth", "max_position_embeddings": "context"}

    def __init__(
        self,
        depth: int = 12,
        vocab_size: int = 32_768,
        context: int = 2_048,
        head_dim: int = 128,
        preset: str = "residual",
        num_streams: int = 1,
        router: Mapping[str, Any] | None = None,
        rope_base: float = 10_000.0,
        checkpoint_blocks: bool = False,
        recompute: bool = False,
        routers: Mapping[str, Any] | None = None,
        width: int = 0,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        config = ModelConfig(
            depth=depth,
            vocab_size=vocab_size,
            context=context,
            head_dim=head_dim,
            preset=preset,
            num_streams=num_streams,
            router=router or {},
            rope_base=rope_base,
            checkpoint_blocks=checkpoint_blocks,
            recompute=recompute,
            routers=routers or {},
            width=width,
        )
        for name, value in config.to_dict().items():
            setattr(self, name, value)
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        super().__init__(**{"tie_word_embeddings": False, **kwargs})

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: `TemperForCausalLM.save_pretrained` writes the files that make a folder loadable."""

    @classmethod
    def of(cls, config: ModelConfig, **kwargs: Any) -> TemperConfig:
        """Theirs from ours."""
        return cls(**config.to_dict(), **kwargs)

    def model_config(self) -> ModelConfig:
        """Ours from theirs."""
        return ModelConfig(
            **{entry.name: getattr(self, entry.name) for entry in fields(ModelConfig) if hasattr(self, entry.name)}
        )

    @property
    def hidden_size(self) -> int:
        return self.model_config().dim

    @property
    def intermediate_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def num_attention_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def num_key_value_heads(self) -> int:
        return self.num_attention_heads
