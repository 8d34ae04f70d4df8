"""Our model inside transformers: `from_pretrained`, `generate`, its caches and its trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from temper.pretrained import Loadable, write_stub
from temper_lab.hf.cache import Past
from temper_lab.hf.config import TemperConfig
from temper_lab.model import GPT

# The files that Auto classes are pointed to, what is in each, and for which Auto class.
STUBS = {"configuration_temper": "TemperConfig", "modeling_temper": "TemperForCausalLM"}
AUTOS = ("AutoConfig", "AutoModelForCausalLM")


class TemperForCausalLM(Loadable, PreTrainedModel, GenerationMixin):
    """`GPT` with transformers around it; its state-dict keys are those of `GPT` behind `model.`."""

    config_class = TemperConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ("Block",)
    _skip_keys_device_placement = ("past_key_values",)
    # Routing is computed in float32 whatever the model is loaded in, and its parameters are few.
    _keep_in_fp32_modules_strict = ("attention_site", "mlp_site")

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
            theirs = cls(TemperConfig.of(model.config, **kwargs))
        theirs.model = model
        return theirs.train(model.training)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **options: Any) -> Any:
        """As for any model, with two files that have the Auto classes find the installed package."""
        if is_main_process and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            for name, part in STUBS.items():
                write_stub(Path(save_directory), name, f"from temper_lab.hf import {part}", package="temper_lab")
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
        self._check(input_ids, kwargs)
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

    def _check(self, input_ids: Tensor | None, kwargs: dict[str, Any]) -> None:
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ValueError("this model reads input_ids; inputs_embeds have no place in it")
        for name in ("output_hidden_states", "output_attentions"):
            asked = kwargs.pop(name, None)
            if getattr(self.config, name) if asked is None else asked:
                raise ValueError(
                    f"{name} is not supported: between blocks there are {self.model.num_streams} streams, and "
                    "attention keeps no weights. temper.observe(model) shows what routing does."
                )

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether blocks are computed again in the backward pass; transformers sets it."""
        return self.model.checkpoint_blocks

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, is_on: bool) -> None:
        self.model.checkpoint_blocks = is_on

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """What transformers calls after building and after loading: writes all that was not loaded."""
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
