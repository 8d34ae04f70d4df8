"""Hyper-connections in torchtitan, without a fork: an override of its decoders, and a ModelSpec with an adapter.

    torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b \\
        --override.imports 'temper_lab.interop.torchtitan.hyper_connections={"preset": "temper-tucker"}'

The blocks of the model are replaced by subclasses of their own classes that route N streams. Between blocks, and so
between the stages of a pipeline, there is one tensor (B, T, N, D); the first block makes it, the last one reduces it.
Written for torchtitan 0.3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torchtitan.config.override import derive, override
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig, SpmdLayout

import temper
from temper.carrier import REDUCTIONS, SITES, Place, Site, Sites
from temper.config import RouterConfig
from temper.connection import State
from temper.registry import unknown

# How Hugging Face's decoders call the blocks.
HF_BLOCKS = "model.layers."
ParamInit = Mapping[str, Callable[[nn.Parameter], Any]]


@override(target=Decoder.Config, description="Residual connections become hyper-connections (temper)")
def hyper_connections(
    config: Any,
    *,
    preset: str = "temper-tucker",
    num_streams: int = 4,
    sites: int = 2,
    reduce: str = "sum",
    param_init: ParamInit | None = None,
    **overrides: Any,
) -> Any:
    """The configuration of a decoder whose blocks route N streams; it is changed in place.

    Args:
        config: of a torchtitan decoder with pre-norm blocks.
        preset: a name of `temper.PRESETS`, changed by `overrides` as in `temper.preset`.
        sites: how many residual adds one block has.
        reduce: how the last block reduces the streams, "sum" or "mean".
        param_init: initializers for parameters of the sites by their names, such as "res.gate"; all others start as
            the preset says.
    """
    if reduce not in REDUCTIONS:
        raise unknown("reduce", reduce, REDUCTIONS)
    if any(isinstance(layer, StreamsConfig) for layer in config.layers):
        raise ValueError("this decoder has hyper-connections already; list the override, or use the ModelSpec, once")
    routing = temper.preset(preset, num_streams=num_streams, dim=config.dim, **overrides)
    last = len(config.layers) - 1
    # In place, list and all: the trainer holds the configuration that it was given.
    config.layers[:] = [
        derive(
            layer,
            _block_class(type(layer)._owner).Config,
            streams=Streams(routing, sites, index, index == 0, reduce if index == last else None, param_init),
        )
        for index, layer in enumerate(config.layers)
    ]
    return config


def with_streams(spec: ModelSpec, **options: Any) -> ModelSpec:
    """A ModelSpec with hyper-connections whose state-dict adapter knows the sites.

    Args:
        options: of `hyper_connections`.
    """
    adapter = spec.state_dict_adapter
    return dataclasses.replace(
        spec,
        model=hyper_connections(spec.model, **options),
        state_dict_adapter=None if adapter is None else adapter_class(adapter),
    )


@dataclass(frozen=True)
class Streams:
    """The streams of one block.

    Args:
        routing: of every site.
        sites: their number.
        index: of the block among all blocks.
        first: whether the block is given x and expands it.
        reduce: how the last block reduces the streams; None for any other block.
        param_init: initializers for parameters of the sites.
    """

    routing: RouterConfig
    sites: int
    index: int
    first: bool
    reduce: str | None
    param_init: ParamInit | None = None


class StreamsConfig:
    """Marks the configurations of blocks that route streams."""

    __slots__ = ()
    streams: Streams


@functools.cache
def _block_class(plain: Any) -> Any:
    """The class of torchtitan blocks of class `plain` with hyper-connections, and its configuration."""

    class Block(plain):
        @dataclass(kw_only=True, slots=True)
        class Config(StreamsConfig, plain.Config):
            streams: Streams

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            streams = config.streams
            norm = config.attention_norm.sharding_config
            setattr(self, SITES, SiteModules(streams, None if norm is None else norm.state_shardings["weight"]))
            self.temper_place = Place(
                f"layers.{streams.index}",
                streams.sites,
                first=streams.first,
                reduce=streams.reduce,
                any_layout=True,
                argument=None,
            )

        @functools.wraps(plain.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            place = self.temper_place
            args, kwargs, uses = place.enter(getattr(self, SITES), args, kwargs)
            return place.leave(super().forward(*args, **kwargs), uses)

    Block.__name__ = Block.__qualname__ = f"{plain.__name__}WithStreams"
    return Block


@dataclass(frozen=True)
class LocalState:
    """The state of a site on one process, and how the streams are distributed."""

    state: State
    mesh: DeviceMesh
    placements: tuple[Placement, ...]


class SiteModules(Sites, Module):
    """The sites of one block, all of whose modules follow torchtitan's Module protocol.

    Args:
        layout: how the parameters lie on the meshes: as the weight of the block's norm, which also acts on every token
            by itself. None for a model that is not distributed.
    """

    def __init__(self, streams: Streams, layout: SpmdLayout | None) -> None:
        first = streams.index * streams.sites
        super().__init__([Site(streams.routing, layer_index=first + index) for index in range(streams.sites)])
        self._param_init = None if streams.param_init is None else dict(streams.param_init)
        self._layout = layout
        for module in self.modules():
            if not isinstance(module, Module):
                kind: Any = type(module)
                module.__class__ = _module_class(kind)
        unknown_names = (self._param_init or {}).keys() - dict(self[0].named_parameters()).keys()
        if unknown_names:
            raise ValueError(
                f"param_init names {sorted(unknown_names)}; a site has {sorted(dict(self[0].named_parameters()))}"
            )

    def forward(self, streams: Tensor, index: int) -> tuple[Tensor, Any]:
        """Begins a site; of distributed streams, each process routes its own tokens."""
        if not isinstance(streams, DTensor):
            return super().forward(streams, index)
        mesh, placements = streams.device_mesh, streams.placements
        whole = (streams.ndim - 2, streams.ndim - 1)
        if any(place.is_partial() or any(map(place.is_shard, whole)) for place in placements):
            raise ValueError(f"streams are distributed as {placements}; expected whole tokens on every process")
        # With some of the tokens a process has a part of the gradients. Operations on DTensors would add up the parts
        # of some gradients, and FSDP would do so again.
        parts = [Partial() if place.is_shard() else Replicate() for place in placements]
        site = self[index]
        tensors = {
            name: tensor.to_local(grad_placements=parts)
            for name, tensor in (*site.named_parameters(), *site.named_buffers())
            if isinstance(tensor, DTensor)
        }
        x, state = torch.func.functional_call(site, tensors, (streams.to_local(),))
        return DTensor.from_local(x, mesh, placements), LocalState(state, mesh, placements)

    def finish(self, state: Any, y: Tensor, index: int) -> Tensor:
        if not isinstance(state, LocalState):
            return super().finish(state, y, index)
        assert isinstance(y, DTensor)
        y = y.redistribute(placements=state.placements).to_local()
        streams = super().finish(state.state, y, index)
        return DTensor.from_local(streams, state.mesh, state.placements)

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Gives every parameter its initial value, which depends on the seed alone.

        So processes that hold shards of one parameter, and have drawn different numbers before, agree.
        """
        generator = torch.default_generator
        before = generator.get_state()
        try:
            for site in self:
                assert isinstance(site, Site)
                generator.manual_seed((torch.initial_seed() + 1_000_003 * (site.layer_index + 1)) % 2**63)
                site.reset_parameters()
        finally:
            generator.set_state(before)
        for name, init in (self._param_init or {}).items():
            for site in self:
                init(site.get_parameter(name))

    def parallelize(self, parallel_dims: Any) -> None:
        """Distributes the parameters; the streams keep the layout that they come with."""
        if self._layout is None:
            return
        for module in self.modules():
            names = [
                name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            ]
            if names:
                assert isinstance(module, Module)
                module._sharding_config = ShardingConfig(state_shardings=dict.fromkeys(names, self._layout))
                module._distribute_states(parallel_dims)


@functools.cache
def _module_class(plain: type[nn.Module]) -> Any:
    """A class of temper that also is a torchtitan Module."""
    return type(plain.__name__, (plain, Module), {"__module__": plain.__module__, "__doc__": plain.__doc__})


@functools.cache
def adapter_class(plain: Any) -> Any:
    """A state-dict adapter that hands the sites on under the names of a wrapped Hugging Face model."""

    class Adapter(plain):
        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            sites, rest = _split(state_dict)
            sites = {key.replace("layers.", HF_BLOCKS, 1): value for key, value in sites.items()}
            files = self.fqn_to_index_mapping
            if files:
                # The model that the index is of had no sites: they go where the rest of their block is.
                for key in sites:
                    block = key.split(f"{SITES}.")[0]
                    files.setdefault(key, next((file for name, file in files.items() if name.startswith(block)), 1))
            return super().to_hf(rest) | sites

        def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
            sites, rest = _split(hf_state_dict)
            return super().from_hf(rest) | {key.replace(HF_BLOCKS, "layers.", 1): sites[key] for key in sites}

    Adapter.__name__ = Adapter.__qualname__ = f"{plain.__name__}WithStreams"
    return Adapter


def _split(state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the sites, and all others."""
    sites = {key: value for key, value in state_dict.items() if f".{SITES}." in key}
    return sites, {key: value for key, value in state_dict.items() if key not in sites}


def configured(config: Any, *, routing_lr: float = 0.005, **options: Any) -> Any:
    """A Trainer.Config whose model has hyper-connections; their parameters get a learning rate without weight decay.

    Args:
        options: of `hyper_connections`.
    """
    config.model_spec = with_streams(config.model_spec, **options)
    groups = config.optimizer.param_groups
    # The first pattern that matches decides; everything else about the group is that of all other parameters.
    kwargs = {**groups[-1].optimizer_kwargs, "lr": routing_lr, "weight_decay": 0.0}
    routing = dataclasses.replace(groups[-1], pattern=rf"\.{SITES}\.", optimizer_name="AdamW", optimizer_kwargs=kwargs)
    config.optimizer.param_groups = [routing, *groups]
    return config


def llama3_debugmodel() -> Any:
    """torchtitan's configuration of this name, with hyper-connections."""
    from torchtitan.models.llama3 import config_registry

    return configured(config_registry.llama3_debugmodel())


def llama3_8b() -> Any:
    """torchtitan's configuration of this name, for 8 GPUs, with hyper-connections."""
    from torchtitan.models.llama3 import config_registry

    return configured(config_registry.llama3_8b())
