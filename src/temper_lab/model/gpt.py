"""The model: embedding, blocks with a hyper-connection around each branch, head.

Letters: B batch, T token, S cached token, N stream, H head, D width or features of a head, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, MutableSequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import temper
from temper.connection import State, is_plain
from temper_lab.model.config import ModelConfig
from temper_lab.model.functional import (
    cap_logits,
    chunk_size,
    chunked_cross_entropy,
    rms_norm,
    rotate_and_norm,
    squared_relu_mlp,
)

if TYPE_CHECKING:
    from temper_lab.engine import KVCache
    from temper_lab.model.config import ModelConfig


class Attention(nn.Module):
    """Queries, keys and values, rotated and normed, through `scaled_dot_product_attention`.

    There are three projections instead of a fused one: they are as fast on a CPU, each is a matrix of its own for Muon,
    and the names match those of public checkpoints.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.query, self.key, self.value, self.out = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        query = rotate_and_norm(self.query(x).view(heads), *rotation)
        key = rotate_and_norm(self.key(x).view(heads), *rotation)
        value = self.value(x).view(heads)
        mask = None
        if cache is not None:
            key, value, mask = cache.append(self.layer, key, value)
        # The transposes are views of (B, T, H, D), which attention reads and writes strided.
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        is_causal = mask is None and query.shape[2] > 1
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Rotary(nn.Module):
    """The tables of the rotary position embedding, for every position of the context."""

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, head_dim: int, base: float) -> None:
        super().__init__()
        self.base = base
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(context, head_dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Writes the tables."""
        if self.cos.is_meta:
            return
        (context, head_dim), device = self.cos.shape, self.cos.device
        # In float32, because the public models of this family were trained with these angles.
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        position = torch.arange(context, dtype=torch.float32, device=device)
        angle = torch.outer(position, 1.0 / self.base**exponent)
        self.cos.copy_(torch.cat((angle.cos(), angle.cos()), dim=-1))
        self.sin.copy_(torch.cat((angle.sin(), -angle.sin()), dim=-1))

    def forward(self, positions: Tensor | int) -> tuple[Tensor, Tensor]:
        """cos and sin for a number of first positions, or for given positions (B, T): (..., T, 1, D)."""
        rows = slice(positions) if isinstance(positions, int) else positions
        return self.cos[rows].unsqueeze(-2), self.sin[rows].unsqueeze(-2)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # No checkpoint has these constants, so they are written again after every move (to_empty leaves garbage).
        super()._apply(fn, recurse)
        self.reset_parameters()
        return self


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
        state, y = self.between(*self.attention_site.begin(streams), rotation, cache)
        return self.mlp_site.finish(state, y, in_place=_in_place())

    def between(
        self, x: Tensor, state: State, rotation: tuple[Tensor, Tensor], cache: KVCache | None = None
    ) -> tuple[State, Tensor]:
        """Runs the block from the first site's read to the last branch's output."""
        y = self.attention_branch(x, rotation, cache)
        x, state = self.attention_site.finish_into(self.mlp_site, state, y, in_place=_in_place())
        return state, self.mlp_branch(x)

    def attention_branch(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        """The branch of the attention's site."""
        return self.attention(rms_norm(x), rotation, cache)

    def mlp_branch(self, x: Tensor) -> Tensor:
        """The branch of the MLP's site."""
        return self.mlp(rms_norm(x))

    def reset_parameters(self) -> None:
        """Sets the initial weights; the output matrices are zero, so that every branch outputs zero."""
        # A uniform distribution on +-s sqrt(3) has standard deviation s.
        bound = math.sqrt(3 / self.mlp.up.in_features)
        for linear in (self.attention.query, self.attention.key, self.attention.value, self.mlp.up):
            nn.init.uniform_(linear.weight, -bound, bound)
        for linear in (self.attention.out, self.mlp.down):
            nn.init.zeros_(linear.weight)


def _in_place() -> bool:
    """True without autograd: no other code holds the streams, so all sites can share one buffer."""
    return not torch.is_grad_enabled()


class GPT(nn.Module):
    """A transformer that predicts the next token, with any routing of `temper` in place of its residual additions.

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
        # Built on the meta device, so that only reset_parameters draws random numbers.
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
            self.rotary = Rotary(config.context, config.head_dim, config.rope_base)
            blocks = nn.ModuleList(Block(config, routings, layer) for layer in range(config.num_layers))
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        # A ModuleList does not know the class of its members.
        self.blocks = cast("MutableSequence[Block]", blocks)
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
        # The backbone comes before the routing, so that its values depend on the seed alone.
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
            cache: the cache of the preceding tokens, to which these are added.
        """
        x_BTD = self.features(ids_BT, cache)
        if targets_BT is None:
            return self.logits(x_BTD)
        return chunked_cross_entropy(x_BTD, self.head.weight, targets_BT, reduction=reduction)

    def loss(self, ids_BT: Tensor, targets_BT: Tensor, *, reduction: str = "mean") -> Tensor:
        """Cross entropy in nats, computed without holding all logits at once.

        Args:
            reduction: "mean", "sum", or "none" for the loss of every token (B, T).
        """
        # Through __call__, so that DDP and FSDP hooks run.
        return self(ids_BT, targets_BT=targets_BT, reduction=reduction)

    def features(self, ids_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """The normalized input of the head: (B, T) -> (B, T, D)."""
        self._check_ids(ids_BT)
        num_tokens = ids_BT.shape[1]
        rotation = self.rotary(num_tokens if cache is None else cache.begin(num_tokens))
        streams_BTND = temper.expand_streams(rms_norm(self.embedding(ids_BT)), self.num_streams)
        streams_BTND = self._run_blocks(streams_BTND, rotation, cache)
        if cache is not None:
            cache.finish(num_tokens)
        return rms_norm(temper.reduce_streams(streams_BTND))

    def _run_blocks(self, streams: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache | None) -> Tensor:
        if self.checkpoint_blocks and torch.is_grad_enabled() and (cache is None or not cache.remembers):
            for block in self.blocks:
                arguments = (streams, rotation, cache)
                streams = checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            return streams
        if not all(is_plain(block, Block) for block in self.blocks):
            # Sharded, compiled or hooked blocks have to be called as modules.
            for block in self.blocks:
                streams = block(streams, rotation, cache)
            return streams
        x, state = self.blocks[0].attention_site.begin(streams)
        for block, following in itertools.pairwise(self.blocks):
            state, y = block.between(x, state, rotation, cache)
            x, state = block.mlp_site.finish_into(following.attention_site, state, y, in_place=_in_place())
        last = self.blocks[-1]
        state, y = last.between(x, state, rotation, cache)
        return last.mlp_site.finish(state, y, in_place=_in_place())

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
        """FLOPs of a training step at the full context: 6 per linear weight, plus attention and routing."""
        config, counts = self.config, self.num_parameters()
        linear = counts["blocks"] + counts["head"]
        attention = 12 * config.dim * config.context * config.num_layers
        routed = (routing for routing in config.routings() if not routing.is_residual)
        routing = 3 * sum(temper.cost(routing, config.context).flops for routing in routed) // config.context
        return 6 * linear + attention + routing

    def memory_estimate(self, tokens: int, *, autocast: bool = False) -> dict[str, int]:
        """A rough estimate of the bytes that training takes, given the tokens of one forward pass.

        The optimizer is Muon for the block matrices (one number per weight) and AdamW for the rest (two).

        Args:
            autocast: branches save bfloat16; streams keep their dtype.
        """
        config, counts = self.config, self.num_parameters()
        weight, width = self.head.weight, config.dim
        size = weight.element_size()
        branch = min(size, torch.bfloat16.itemsize) if autocast else size
        # A block saves, per token: two normalized inputs, query, key, value, attention's output, and 4 D in the MLP.
        sites = [temper.cost(routing, tokens, dtype=weight.dtype).activation_bytes for routing in config.routings()]
        blocks = [
            tokens * 10 * width * branch + sum(sites[2 * layer : 2 * layer + 2]) for layer in range(config.num_layers)
        ]
        kept = sum(blocks)
        if self.checkpoint_blocks:
            kept = config.num_layers * tokens * self.num_streams * width * size + max(blocks)
        chunk = min(tokens, chunk_size(weight.device))
        # The rest: embedding, features and their gradient; a chunk's logits, their softmax and a scaled copy.
        edges = 4 * tokens * width * size + 3 * chunk * config.vocab_size * 4
        estimate = {
            "parameters": counts["total"] * size,
            "gradients": counts["total"] * size,
            "optimizer": (2 * counts["total"] - counts["blocks"]) * size,
            "activations": kept + edges,
        }
        return {**estimate, "total": sum(estimate.values())}
