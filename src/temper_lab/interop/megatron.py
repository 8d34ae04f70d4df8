"""A hyper-connection for a Megatron-Core ModuleSpec, in the place of its own `HyperConnectionModule`.

    ModuleSpec(module=MegatronConnection, params={"preset": "temper-tucker"})

Streams are [s, b, n*C], stream by stream, as in Megatron-Core. Nothing here imports Megatron: its TransformerConfig is
only asked for a few fields. Letters: s tokens, b sequences, n streams, C width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import temper
from temper.convert import load_foreign
from temper.convert.foreign import Foreign
from temper.registry import unknown
from temper.streams import Routing

# The spellings of two Megatron versions.
NUM_STREAMS = ("mhc_num_residual_streams", "num_residual_streams")
SOURCES = ("megatron.mhc", "megatron.mhc_guarded")


class MegatronConnection(nn.Module):
    """One hyper-connection with the constructor and the methods that Megatron's transformer layer uses.

    Without a preset it computes what Megatron's own module computes, and a state dict of that module loads into it;
    `temper.convert.export_foreign(source, module.site, iters=config.mhc_sinkhorn_iterations)` is the way back.

    Args:
        config: a TransformerConfig, or anything with `hidden_size`, the number of streams, `mhc_sinkhorn_iterations`,
            `mhc_init_gating_factor` and `sequence_parallel`.
        layer_number: which site of the network this is.
        preset: a name of `temper.PRESETS` instead of Megatron's own arithmetic.
        source: which arithmetic is Megatron's own: "megatron.mhc" (August 2026), or "megatron.mhc_guarded" for later
            versions, which follow DeepSeek-V4.
        return_residual: return the streams as well, for versions whose layers expect four results.
        overrides: options of `temper.preset`.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        preset: str | None = None,
        source: str = "megatron.mhc",
        return_residual: bool = False,
        **overrides: Any,
    ) -> None:
        super().__init__()
        self.config, self.layer_number = config, layer_number
        self.n = next((getattr(config, name) for name in NUM_STREAMS if hasattr(config, name)), None)
        if self.n is None:
            raise ValueError(f"the config has neither {' nor '.join(NUM_STREAMS)}; expected the number of streams")
        self.hidden_size: int = config.hidden_size
        self.source = source if preset is None else None
        self.return_residual = return_residual
        if source not in SOURCES:
            raise unknown("source", source, SOURCES)
        if preset is None:
            self._overrides = {"iters": config.mhc_sinkhorn_iterations} | overrides
            routing = Foreign.named(source).config(self.n, self.hidden_size, self._overrides)
        else:
            routing = temper.preset(preset, num_streams=self.n, dim=self.hidden_size, **overrides)
        self.site = temper.HyperConnection(routing, layer_index=layer_number)
        if preset is None:
            with torch.no_grad():
                for head in (self.site.pre, self.site.res, self.site.post):
                    head.gate.fill_(config.mhc_init_gating_factor)
        if getattr(config, "sequence_parallel", False):
            # Megatron sums the gradients of such parameters over the tensor-parallel group.
            for parameter in self.site.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(
        self, hidden_states: Tensor, mhc_recompute_manager: Any = None, output_slot: Any = None, mhc_state: Any = None
    ) -> tuple[Tensor, ...]:
        """The input of the layer [s, b, C], the mixing matrix [s, b, n, n] and the write weights [s, b, n].

        Row m of the mixing matrix says where output stream m comes from, whichever version's arithmetic this is.
        """
        _refuse(mhc_recompute_manager, output_slot)
        if mhc_state is not None:
            raise ValueError("MegatronConnection has no single-pass mode: leave mhc_single_pass off")
        streams = self._streams(hidden_states)
        routing = self.site.route(streams)
        found = (self.site.read(streams, routing), routing.res, routing.post)
        return (*found, hidden_states) if self.return_residual else found

    def fused_h_res_h_post_bda(
        self,
        h_res: Tensor,
        original_residual: Tensor,
        h_post: Tensor,
        layer_output_with_bias: tuple[Tensor, Tensor | None],
        dropout_prob: float,
        training: bool,
        fused: bool,
        manager: Any = None,
    ) -> Tensor:
        """The next streams [s, b, n*C]: H_res H + dropout(H_post (y + bias))."""
        _refuse(manager)
        streams = self._streams(original_residual)
        y, bias = layer_output_with_bias
        if bias is not None:
            y = y + bias
        # The read weights are not asked for again.
        routing = Routing(h_post, h_res, h_post)
        if not training or dropout_prob == 0:
            return self.site.write(streams, y, routing).flatten(-2)
        mixed = self.site.write(streams, torch.zeros_like(y), routing)
        written = (h_post.unsqueeze(-1) * y.unsqueeze(-2)).to(mixed.dtype)
        return (mixed + nn.functional.dropout(written, dropout_prob)).flatten(-2)

    @staticmethod
    def input_expand(x: Tensor, n: int) -> Tensor:
        """n copies of [s, b, C]: [s, b, n*C]."""
        return temper.expand_streams(x, n).flatten(-2)

    @staticmethod
    def output_contract(x: Tensor, n: int) -> Tensor:
        """The mean of n streams [s, b, n*C]: [s, b, C]."""
        return x.unflatten(-1, (n, -1)).mean(-2)

    def _streams(self, hidden_states: Tensor) -> Tensor:
        assert self.n is not None
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.n * self.hidden_size:
            raise ValueError(
                f"hidden states are {tuple(hidden_states.shape)}; expected [s, b, n*C] with n = {self.n} streams and "
                f"C = {self.hidden_size}"
            )
        return hidden_states.unflatten(-1, (self.n, self.hidden_size))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Children load after this.
        if self.source is not None and f"{prefix}mapping_proj.weight" in state_dict:
            assert self.n is not None
            names = Foreign.named(self.source).shapes(self.n, self.hidden_size)
            theirs = {name: state_dict.pop(prefix + name) for name in names if prefix + name in state_dict}
            ours = load_foreign(
                self.source, theirs, num_streams=self.n, dim=self.hidden_size, **self._overrides
            ).state_dict()
            state_dict |= {f"{prefix}site.{name}": tensor for name, tensor in ours.items()}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _refuse(*managers: Any) -> None:
    if any(manager is not None for manager in managers):
        raise ValueError(
            'MegatronConnection does not take part in Megatron\'s selective recomputation: leave "mhc" out of '
            "recompute_modules"
        )
