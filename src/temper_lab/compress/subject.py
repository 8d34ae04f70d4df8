"""The models that can be compressed: those of this lab, and DeepSeek-V4 of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from temper_lab.checkpoint import save_model
from temper_lab.eval.models import MAX_CONTEXT, is_theirs
from temper_lab.load import load
from temper_lab.model import GPT
from temper_lab.tokenizer import FILE_NAME, Tokenizer

Branch = Callable[[Tensor], Tensor]


class Subject(Protocol):
    """What compressing asks of a model.

    Args:
        network: the module whose sites are replaced.
        losses: as `bits_per_byte` calls it.
        tokenizer: with `bos`, `encode_batch` and `token_bytes`.
        limit: tokens that it reads at most.
        context: tokens that it reads unless asked otherwise.
        width: of the residual stream.
    """

    network: nn.Module
    losses: Any
    tokenizer: Any
    limit: int
    context: int
    width: int

    def read(self, ids_BT: Tensor) -> None:
        """A forward pass, for those who watch."""

    def branches(self, num_tokens: int) -> dict[str, Branch]:
        """What each site goes around, by the name of the site, for rows of so many tokens; as far as it is known."""

    def write(self, out: Path, files: Mapping[str, str]) -> None:
        """The folder of the compressed model, with other files in it, whole or not at all."""


class Ours:
    """A model of this lab."""

    def __init__(self, network: GPT, tokenizer: Tokenizer) -> None:
        self.network = self.losses = network
        self.tokenizer = tokenizer
        self.limit = self.context = network.config.context
        self.width = network.config.dim

    def read(self, ids_BT: Tensor) -> None:
        self.network.features(ids_BT)

    def branches(self, num_tokens: int) -> dict[str, Branch]:
        rotation = self.network.rotary(num_tokens)
        found: dict[str, Branch] = {}
        for index, block in enumerate(self.network.blocks):
            found[f"blocks.{index}.attention_site"] = partial(block.attend, rotation=rotation)
            found[f"blocks.{index}.mlp_site"] = block.think
        return found

    def write(self, out: Path, files: Mapping[str, str]) -> None:
        network = self.network
        network.config = network.config.with_routings([site.config for site in network.sites()])
        tensors = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
        save_model(out, network.config.to_dict(), tensors, {FILE_NAME: self.tokenizer.to_json(), **files})


class DeepSeek:
    """A `DeepseekV4ForCausalLM` with our sites in place of its own."""

    def __init__(self, path: Path, device: torch.device) -> None:
        from temper_lab import deepseek
        from temper_lab.eval.hugging_face import ByteTokenizer, TokenLosses, limit_of, load_theirs

        network, tokenizer = load_theirs(path, device=device)
        if network.config.model_type != deepseek.SOURCE:
            raise ValueError(
                f"{path} is a {type(network).__name__}; of transformers' models, DeepSeek-V4 has hyper-connections to "
                "compress. A model exported from this lab is compressed before it is exported."
            )
        if not (path / deepseek.FILE_NAME).is_file():
            deepseek.to_temper(network)
        self.network, self._backend = network, tokenizer.backend
        self.losses, self.tokenizer = TokenLosses(network, tokenizer.num_ids), ByteTokenizer(tokenizer)
        self.limit = limit_of(network)
        self.context = min(self.limit, MAX_CONTEXT)
        self.width = network.config.hidden_size

    def read(self, ids_BT: Tensor) -> None:
        self.network.model(input_ids=ids_BT % self.tokenizer.num_ids, use_cache=False)

    def branches(self, num_tokens: int) -> dict[str, Branch]:
        # Masks, caches and experts stand between a site and its branch; routing is compared without them.
        return {}

    def write(self, out: Path, files: Mapping[str, str]) -> None:
        from temper_lab import deepseek

        deepseek.save(self.network, out, tokenizer=self._backend, files=files)


def open_subject(path: Path, device: torch.device) -> Subject:
    """A model folder, the folder of a run, or a Hugging Face folder of a DeepSeek-V4."""
    return DeepSeek(path, device) if is_theirs(path) else Ours(*load(path, device=device))
