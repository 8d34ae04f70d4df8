"""The lab's model inside transformers: configuration, cache, `from_pretrained`, `generate`, its trainer and tokenizer.

Letters: B batch, T new token, S cached token, H head, D features of a head.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from temper.pretrained import Loadable, write_stub
from temper_lab import plugins
from temper_lab.model import GPT, ModelConfig
from temper_lab.tokenizer import BOS, Tokenizer


class Past:
    """One forward pass in transformers' terms; the methods are those of `temper_lab.engine.KVCache`.

    Args:
        cache: what was read before, in any of transformers' caches; None to remember nothing.
        mask: 1 for tokens and 0 for padding, on either side, (B, past + T); or a mask (B, 1, T, S) as
            `scaled_dot_product_attention` takes it.
        positions: of the new tokens, (B or 1, T); counted along the mask if left out.
        context: how many positions the model knows.
    """

    def __init__(
        self,
        cache: Cache | None,
        mask: Tensor | None,
        positions: Tensor | None,
        *,
        context: int,
        device: torch.device,
    ) -> None:
        self.cache, self.mask, self.positions = cache, mask, positions
        self.context, self.device = context, device
        self.seen = 0 if cache is None else int(cache.get_seq_length())
        self._made: Tensor | None = None

    @property
    def remembers(self) -> bool:
        return self.cache is not None

    def begin(self, num_tokens: int) -> Tensor:
        """The positions of the new tokens (B or 1, T), checked."""
        end = self.seen + num_tokens
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.seen, end, device=self.device)[None]
        if self.mask is not None and self.mask.ndim == 2:
            if self.mask.shape[1] != end:
                raise ValueError(
                    f"attention_mask has {self.mask.shape[1]} columns; expected {end}: {self.seen} for the cache "
                    f"and {num_tokens} for input_ids"
                )
            if self.mask.all():
                self.mask = None
            elif self.positions is None:
                positions = (self.mask.long().cumsum(-1) - 1).clamp_min(0)[:, self.seen :]
        elif self.mask is not None and self.mask.ndim != 4:
            raise ValueError(f"attention_mask has shape {tuple(self.mask.shape)}; expected (batch, tokens)")
        # A GPU is asked only where a position may lie outside: it would have to wait every time.
        if end > self.context and positions.max() >= self.context:
            raise ValueError(
                f"the text reaches position {int(positions.max())}; this model knows {self.context}. "
                "Shorten the prompt or lower max_new_tokens."
            )
        return positions

    def append(self, layer: int, key_BTHD: Tensor, value_BTHD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores a layer's new keys and values; gives all there are, and the mask if one is needed."""
        num_tokens = key_BTHD.shape[1]
        if self.cache is not None:
            heads_first = key_BTHD.transpose(1, 2), value_BTHD.transpose(1, 2)
            key_BTHD, value_BTHD = (part.transpose(1, 2) for part in self.cache.update(*heads_first, layer))
        # The same for every layer; made when the first one has told how many slots this cache has.
        if layer == 0:
            self._made = self._attention_mask(num_tokens, key_BTHD.shape[1])
        return key_BTHD, value_BTHD, self._made

    def finish(self, num_tokens: int) -> None:
        """Nothing: transformers' caches count for themselves."""

    def _attention_mask(self, num_tokens: int, num_slots: int) -> Tensor | None:
        if self.mask is not None and self.mask.ndim == 4:
            return self.mask
        if self.mask is None and num_slots == self.seen + num_tokens and (self.seen == 0 or num_tokens == 1):
            return None
        slots = torch.arange(num_slots, device=self.device)
        own = slots[self.seen : self.seen + num_tokens, None]
        mask_BTS = (slots <= own)[None]
        if self.mask is not None:
            is_token_BS = F.pad(self.mask.bool(), (0, num_slots - self.mask.shape[1]))
            # Padding sees itself: a softmax over nothing would be NaN, and NaN times zero is NaN again.
            mask_BTS = (mask_BTS & is_token_BS[:, None]) | (slots == own)
        return mask_BTS[:, None]


class TemperConfig(PretrainedConfig):
    """The fields of `ModelConfig` beside those that transformers has for every model.

    What transformers' own tools ask for by other names (`hidden_size`, `num_hidden_layers`, ..) follows from them.

    Args:
        bos_token_id: the document delimiter.
        eos_token_id: what ends a text, the same token as a rule.
        pad_token_id: what fills a batch up; any token will do, for padding is masked.
        imports: the modules of other packages that the model's parts come from; they are named, never imported.
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
        imports: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        with plugins.recorded(imports):
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
        if imports:
            self.imports = imports
        self.use_cache = use_cache
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        super().__init__(**{"tie_word_embeddings": False, **kwargs})

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: `TemperForCausalLM.save_pretrained` writes the files that make a folder loadable."""

    @classmethod
    def of(cls, config: ModelConfig, **kwargs: Any) -> TemperConfig:
        """The configuration for transformers of a lab model's."""
        return cls(**config.to_dict(), imports=plugins.modules_of(config.to_dict()), **kwargs)

    def model_config(self) -> ModelConfig:
        """The lab's configuration of this one."""
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


# The files that Auto classes are pointed to, what is in each, and for which Auto class.
STUBS = {"configuration_temper": "TemperConfig", "modeling_temper": "TemperForCausalLM"}
AUTOS = ("AutoConfig", "AutoModelForCausalLM")


class TemperForCausalLM(Loadable, PreTrainedModel, GenerationMixin):
    """`GPT` with transformers around it; its state-dict keys are those of `GPT` behind `model.`."""

    config_class = TemperConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - transformers declares a list
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # Routing is computed in float32 whatever the model is loaded in, and its parameters are few.
    _keep_in_fp32_modules_strict = ["attention_site", "mlp_site"]  # noqa: RUF012

    def __init__(self, config: TemperConfig) -> None:
        super().__init__(config)
        device = torch.get_default_device()
        # Without memory first, so that the only random numbers are those that `initialize_weights` draws.
        with torch.device("meta"):
            self.model = GPT(config.model_config())
        if device.type != "meta":
            self.model.to_empty(device=device)
        self.post_init()

    @classmethod
    def from_gpt(cls, model: GPT, **kwargs: Any) -> TemperForCausalLM:
        """A model of the lab in transformers' clothes; the tensors are its own.

        Args:
            kwargs: of `TemperConfig` beside the fields of the model, such as `bos_token_id`.
        """
        with torch.device("meta"):
            wrapped = cls(TemperConfig.of(model.config, **kwargs))
        wrapped.model = model
        return wrapped.train(model.training)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **options: Any) -> Any:
        """As for any model, with two files that have the Auto classes find the installed package."""
        if is_main_process and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            for name, part in STUBS.items():
                line = f"from temper_lab.interop.hf import {part}"
                write_stub(Path(save_directory), name, line, package="temper_lab")
        self.config.auto_map = {auto: f"{name}.{part}" for (name, part), auto in zip(STUBS.items(), AUTOS, strict=True)}
        return super().save_pretrained(save_directory, is_main_process, *args, **options)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """The logits, and the loss of every label but -100 against the tokens before it.

        Args:
            attention_mask: 1 for tokens and 0 for padding, on either side; with a cache, of its tokens too.
            past_key_values: any cache of transformers; a `DynamicCache` is made where one is asked for.
            use_cache: the config decides if left out, and never in training.
            logits_to_keep: of the last so many tokens only, or of those at these places; 0 for all.
            kwargs: for the loss; `num_items_in_batch` from the trainer.
        """
        input_ids = self._checked(input_ids, kwargs)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and self.training:
            use_cache = False
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        inputs = (past_key_values, attention_mask, position_ids)
        past = Past(*inputs, context=self.config.context, device=input_ids.device)
        x_BTD = self.model.features(input_ids, None if all(part is None for part in inputs) else past)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BTV = self.model.logits(x_BTD[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=past_key_values)

    def _checked(self, input_ids: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
        """The ids, after a check that nothing is asked for that this model does not have."""
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ValueError("this model reads input_ids; inputs_embeds have no place in it")
        for name in ("output_hidden_states", "output_attentions"):
            asked = kwargs.pop(name, None)
            if getattr(self.config, name) if asked is None else asked:
                raise ValueError(
                    f"{name} is not supported: between blocks there are {self.model.num_streams} streams, and "
                    "attention keeps no weights. temper.observe(model) shows what routing does."
                )
        return input_ids

    @property
    def gradient_checkpointing(self) -> bool:
        """True if blocks are recomputed in the backward pass; transformers sets it."""
        return self.model.checkpoint_blocks

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, is_on: bool) -> None:
        self.model.checkpoint_blocks = is_on

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initializes all that was not loaded; transformers calls it after building and after loading."""
        for module in self.modules():
            # Rotary tables and permutations are in no checkpoint; a module writes them anew after a move.
            if (constant := next(module.buffers(recurse=False), None)) is not None:
                module.to(constant.device)
        tensors = self.model.state_dict(keep_vars=True).values()
        loaded = [tensor for tensor in tensors if getattr(tensor, "_is_hf_initialized", False)]
        if len(loaded) == len(tensors):
            return
        kept = [tensor.clone() for tensor in loaded]
        self.model.reset_parameters()
        for tensor, value in zip(loaded, kept, strict=True):
            tensor.copy_(value)

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: a module by itself does not know how it starts, `initialize_weights` does."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.head = value


def fast_tokenizer(tokenizer: Tokenizer, *, context: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with the same ids.

    `tokenizer(text)` begins with BOS, as every text that the model has read; `add_special_tokens=False` leaves it
    out. BOS also ends a text and fills a batch up, on the left. In a text, "<|bos|>" is seven characters.

    Args:
        context: the longest text the model reads, in tokens.
    """
    backend = Backend.from_str(tokenizer.to_json())
    backend.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, tokenizer.bos)]
    )
    limit = {} if context is None else {"model_max_length": context}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=BOS,
        pad_token=BOS,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **limit,
    )
