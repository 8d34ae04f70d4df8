"""The model: embedding, blocks with a hyper-connection around each branch, head.

Letters: B batch, T token, N stream, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import temper
from temper_lab.model.attention import Attention, Rotary
from temper_lab.model.config import ModelConfig
from temper_lab.model.functional import rms_norm, squared_relu_mlp
from temper_lab.model.loss import cap_logits, chunk_size, chunked_cross_entropy

if TYPE_CHECKING:
    from temper_lab.engine import KVCache

EMBEDDING_STD, HEAD_STD = 1.0, 0.001


class MLP(nn.Module):
    """D -> 4 D -> D with a squared ReLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim, bias=False)
        self.down = nn.Linear(4 * config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return squared_relu_mlp(x, self.up.weight, self.down.weight)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and inside a hyper-connection."""

    def __init__(self, config: ModelConfig, routings: list[temper.RouterConfig], layer: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(config, layer), MLP(config)
        self.attention_site, self.mlp_site = (
            temper.HyperConnection(routings[site], layer_index=site) for site in (2 * layer, 2 * layer + 1)
        )

    def forward(self, streams: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        # Nobody but the model has its streams, so that without autograd one buffer is enough for all sites.
        in_place = not torch.is_grad_enabled()
        x, state = self.attention_site.begin(streams)
        streams = self.attention_site.finish(state, self.attend(x, rotation, cache), in_place=in_place)
        x, state = self.mlp_site.begin(streams)
        return self.mlp_site.finish(state, self.think(x), in_place=in_place)

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        """The branch of the attention's site."""
        return self.attention(rms_norm(x), rotation, cache)

    def think(self, x: Tensor) -> Tensor:
        """The branch of the MLP's site."""
        return self.mlp(rms_norm(x))

    def reset_parameters(self) -> None:
        """The branches start at nothing: their output matrices are zero."""
        # A uniform distribution of standard deviation s ends at +-s sqrt(3).
        bound = math.sqrt(3 / self.mlp.up.in_features)
        for linear in (self.attention.query, self.attention.key, self.attention.value, self.mlp.up):
            nn.init.uniform_(linear.weight, -bound, bound)
        for linear in (self.attention.out, self.mlp.down):
            nn.init.zeros_(linear.weight)


class GPT(nn.Module):
    """A transformer that predicts the next token, with any routing of `temper` in place of its residual adds.

    model = GPT(ModelConfig(depth=4, vocab_size=4096, context=256, preset="temper-tucker", num_streams=4))
    model.loss(ids_BT, targets_BT).backward()

    The same seed gives the same backbone, whatever the preset.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(f"expected a ModelConfig, got {type(config).__name__}")
        self.config = config
        self.checkpoint_blocks = config.checkpoint_blocks
        routings = config.routings()
        self.num_streams = config.routing().num_streams
        device = torch.get_default_device()
        # Built without memory, so that no random number is drawn but by reset_parameters.
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
            self.rotary = Rotary(config.context, config.head_dim, config.rope_base)
            self.blocks = nn.ModuleList(Block(config, routings, layer) for layer in range(config.num_layers))
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.recompute:
            temper.recompute(self)
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets every parameter to its initial value, as after building."""
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.head.weight, std=HEAD_STD)
        for block in self.blocks:
            block.reset_parameters()
        # The backbone before the routing: its values depend on the seed alone.
        for site in self.sites():
            site.reset_parameters()
        self.rotary.reset_parameters()

    def sites(self) -> list[temper.HyperConnection]:
        """The hyper-connections in the order in which they run."""
        return [site for block in self.blocks for site in (block.attention_site, block.mlp_site)]

    def forward(
        self,
        ids_BT: Tensor,
        cache: KVCache | None = None,
        *,
        targets_BT: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """The logits (B, T, V) in float32; with targets, the loss instead (see `loss`).

        Args:
            cache: what the model has read before these ids; they are added to it.
        """
        x_BTD = self.features(ids_BT, cache)
        if targets_BT is None:
            return self.logits(x_BTD)
        return chunked_cross_entropy(x_BTD, self.head.weight, targets_BT, reduction=reduction)

    def loss(self, ids_BT: Tensor, targets_BT: Tensor, *, reduction: str = "mean") -> Tensor:
        """Cross entropy in nats, without ever holding all logits.

        Args:
            reduction: "mean", "sum", or "none" for the loss of every token (B, T).
        """
        # Through __call__, so that what wraps a model for many devices sees it.
        return self(ids_BT, targets_BT=targets_BT, reduction=reduction)

    def features(self, ids_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """What the head reads: (B, T) -> (B, T, D), normed."""
        self._check_ids(ids_BT)
        num_tokens = ids_BT.shape[1]
        rotation = self.rotary(num_tokens if cache is None else cache.begin(num_tokens))
        streams_BTND = temper.expand_streams(rms_norm(self.embedding(ids_BT)), self.num_streams)
        twice = self.checkpoint_blocks and torch.is_grad_enabled() and (cache is None or not cache.remembers)
        for block in self.blocks:
            if twice:
                arguments = (streams_BTND, rotation, cache)
                streams_BTND = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                streams_BTND = block(streams_BTND, rotation, cache)
        if cache is not None:
            cache.finish(num_tokens)
        return rms_norm(temper.reduce_streams(streams_BTND))

    def logits(self, x: Tensor) -> Tensor:
        """The capped logits of features: (..., D) -> (..., V), in float32."""
        return cap_logits(self.head(x))

    def _check_ids(self, ids_BT: Tensor) -> None:
        if not isinstance(ids_BT, Tensor) or ids_BT.ndim != 2 or ids_BT.dtype not in (torch.int64, torch.int32):
            got = (tuple(ids_BT.shape), ids_BT.dtype) if isinstance(ids_BT, Tensor) else type(ids_BT).__name__
            raise ValueError(f"ids are {got}; expected whole numbers of shape (batch, tokens)")
        if not 1 <= ids_BT.shape[1] <= self.config.context:
            raise ValueError(f"got {ids_BT.shape[1]} tokens; this model reads 1 to {self.config.context} at a time")

    def num_parameters(self) -> dict[str, int]:
        """Trainable parameters by group, and their total."""
        counts = {
            "embedding": self.embedding.weight.numel(),
            "head": self.head.weight.numel(),
            "blocks": 12 * self.config.dim**2 * self.config.num_layers,
        }
        total = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        counts["routing"] = total - sum(counts.values())
        return {**counts, "total": total}

    def flops_per_token(self) -> int:
        """Of a training step at the full context: 6 per linear weight, attention, and the routing."""
        config, counts = self.config, self.num_parameters()
        linear = counts["blocks"] + counts["head"]
        attention = 12 * config.dim * config.context * config.num_layers
        routed = (routing for routing in config.routings() if not routing.is_residual)
        routing = 3 * sum(temper.cost(routing, config.context).flops for routing in routed) // config.context
        return 6 * linear + attention + routing

    def memory_estimate(self, tokens: int) -> dict[str, int]:
        """Bytes that training takes with so many tokens in one forward pass, roughly.

        The optimizer is Muon for the block matrices (one number per weight) and AdamW for the rest (two).
        """
        config, counts = self.config, self.num_parameters()
        weight, width = self.head.weight, config.dim
        size = weight.element_size()
        # Kept by a block, per token: two normed inputs, query, key, value, what attention gives, and 4 D in the MLP.
        sites = [temper.cost(routing, tokens, dtype=weight.dtype).activation_bytes for routing in config.routings()]
        blocks = [
            tokens * 10 * width * size + sum(sites[2 * layer : 2 * layer + 2]) for layer in range(config.num_layers)
        ]
        kept = sum(blocks)
        if self.checkpoint_blocks:
            kept = config.num_layers * tokens * self.num_streams * width * size + max(blocks)
        chunk = min(tokens, chunk_size(weight.device))
        # Embedding, features and their gradient; the logits of a chunk, their softmax and a scaled copy.
        edges = 4 * tokens * width * size + 3 * chunk * config.vocab_size * 4
        estimate = {
            "parameters": counts["total"] * size,
            "gradients": counts["total"] * size,
            "optimizer": (2 * counts["total"] - counts["blocks"]) * size,
            "activations": kept + edges,
        }
        return {**estimate, "total": sum(estimate.values())}
