"""Adds hyper-connections to an existing transformer without changing its code.

Inside a wrapped block x is a carrier of streams (`temper.carrier`); between blocks there are plain tensors.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from temper import pretrained
from temper.carrier import REDUCTIONS, SITES, Block, Place, Site, Sites, block_class, set_trial
from temper.config import RouterConfig
from temper.config import preset as make_preset
from temper.recompute import recompute as make_recompute
from temper.registry import check_int, unknown
from temper.trial import Trial

Selector = str | Sequence[str] | Callable[[str, nn.Module], bool]
Model = TypeVar("Model", bound=nn.Module)

# The attribute under which a module records what `wrap` did.
RECORDS = "_temper_wraps"


# Norms of these kinds expect channels in the second dimension.
CHANNELS_FIRST = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)
# Convolutions do, too, unless a block transposes around them.
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Record:
    """The record of one call of `wrap`, enough to repeat it.

    Args:
        blocks: their names, in order.
        selector: the pattern that chose them, if it was one.
    """

    blocks: tuple[str, ...]
    selector: str | None
    sites: int
    reduce: str
    preset: str


def wrap(
    module: Model,
    selector: Selector,
    *,
    preset: str,
    num_streams: int,
    dim: int | None = None,
    sites: int = 2,
    reduce: str = "sum",
    recompute: bool = False,
    example: Any = None,
    **overrides: Any,
) -> Model:
    """Puts hyper-connections on every residual add of the selected blocks, in place.

        model = temper.wrap(model, "blocks.*", preset="temper-tucker", num_streams=4)

    The first block copies its input to N streams, the last one sums them again; every block in between hands its
    streams (..., N, D) on. Existing parameters keep their names; each block gains `hyper_connections`, so wrap before
    you build the optimizer and before you shard. `temper.unwrap` takes all of it back.

    The model is first tried, on a copy that takes no memory for parameters, with inputs guessed from the configuration
    of a transformers model or from an `nn.Embedding`, or with `example`. If that fails, the error says why and the
    model stays as it was. Where no inputs can be guessed the first forward pass checks the same things; its error
    leaves the model wrapped.

    Args:
        module: a model with pre-norm residual blocks that run in the order in which they are registered.
        selector: which submodules are the blocks: a pattern of names such as "layers.*" (`*` stands for
            one part of a dotted name), a list of such patterns, or a function of (name, module).
        preset: a name of `temper.PRESETS`, changed by `overrides` as in `temper.preset`.
        dim: the width; found from the norms of the first block if left out. Giving it also asserts that the features
            are the last dimension of x, without which an x of four dimensions, blocks with batch or group norms, and
            blocks with convolutions that no trial has seen run on x of (batch, tokens, features) are rejected.
        sites: how many residual adds one block has.
        reduce: how the streams are combined after the last block: their "sum" (the paper's), or their "mean", which
            `temper.convert.upcycle` needs and sets by itself.
        recompute: save only some of the streams for the backward pass (`temper.recompute`).
        example: inputs to try the model with: a tensor, a tuple of arguments or a dict of keyword arguments.

    Returns:
        The same module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"wrap wants a module, got {type(module).__name__}")
    check_int("sites", sites, 1, expected="the number of residual adds in a block, at least 1")
    if reduce not in REDUCTIONS:
        raise unknown("reduce", reduce, REDUCTIONS)
    blocks = dict(_select(module, selector))
    for name, block in blocks.items():
        if hasattr(block, SITES):
            raise ValueError(f"{name} is wrapped already; temper.unwrap(model) takes its streams off")
        if "forward" in vars(block):
            raise ValueError(f"the forward of {name} was replaced (by accelerate's hooks?): wrap the model before that")
        if any(hasattr(parameter, "placements") for parameter in block.parameters()):
            raise ValueError(f"{name} is sharded already: wrap the model first, then shard it")
    width = _width(module, blocks) if dim is None else dim
    config = make_preset(preset, num_streams=num_streams, dim=width, **overrides)
    record = Record(tuple(blocks), selector if isinstance(selector, str) else None, sites, reduce, preset)
    parts = _build(record, [config] * (sites * len(blocks)))
    given = None
    for fake in (True, False):
        trial = Trial(module, example, fake=fake)
        if trial.copy is None:
            break
        _attach(trial.copy, record, parts, any_layout=dim is not None, on=trial.on_copy)
        if trial.run(record.blocks, set_trial) or trial.is_last:
            given = trial.given
            break
    if dim is None:
        _check_layout(blocks, width, given)
    _attach(module, record, parts, any_layout=dim is not None)
    pretrained.mark(module)
    return make_recompute(module) if recompute else module


def unwrap(module: Model) -> Model:
    """Takes the hyper-connections of `wrap` off a model, in place: its code runs as it did before.

    The parameters of the sites are discarded; all others stay the same objects.

    Returns:
        The same module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"unwrap wants a module, got {type(module).__name__}")
    blocks = [block for block in module.modules() if isinstance(block, Block)]
    if not blocks:
        raise ValueError(f"{type(module).__name__} is not wrapped: there is nothing to take off")
    if any(type(block) is not block_class(type(block).plain) for block in blocks):
        raise ValueError("the blocks are sharded (FSDP has made their classes its own): unwrap the model before that")
    for block in blocks:
        block.__class__ = type(block).plain
        del block.temper_place
        delattr(block, SITES)
    for child in module.modules():
        if hasattr(child, RECORDS):
            delattr(child, RECORDS)
    pretrained.unmark(module)
    return module


def records_of(module: nn.Module) -> list[tuple[Record, list[RouterConfig]]]:
    """The records of `wrap` on a module and its parts, with names relative to the module, and the site configs."""
    found = []
    for name, child in module.named_modules():
        for record in getattr(child, RECORDS, ()):
            prefix = f"{name}." if name else ""
            pattern = None if record.selector is None else prefix + record.selector
            record = replace(record, blocks=tuple(prefix + block for block in record.blocks), selector=pattern)
            configs = [
                site.config
                for block in record.blocks
                for site in module.get_submodule(f"{block}.{SITES}").modules()
                if isinstance(site, Site)
            ]
            found.append((record, configs))
    return found


def repeat(module: nn.Module, record: Record, configs: Sequence[RouterConfig]) -> None:
    """Wraps a module as another of its kind was wrapped, without a trial."""
    blocks = list(_select(module, record.blocks))
    if len(configs) != record.sites * len(blocks):
        raise ValueError(
            f"{len(configs)} sites are described; expected {record.sites} for each of {len(blocks)} blocks"
        )
    if record.reduce not in REDUCTIONS:
        raise unknown("reduce", record.reduce, REDUCTIONS)
    record = replace(record, blocks=tuple(name for name, _ in blocks))
    _attach(module, record, _build(record, configs), any_layout=True)


def reduce_by(module: nn.Module, reduce: str) -> None:
    """Changes how a wrapped model reduces its streams; without effect on a model that was not wrapped."""
    assert reduce in REDUCTIONS
    for block in module.modules():
        if isinstance(block, Block) and block.temper_place.reduce is not None:
            block.temper_place.reduce = reduce
        if hasattr(block, RECORDS):
            setattr(block, RECORDS, [replace(record, reduce=reduce) for record in getattr(block, RECORDS)])
    pretrained.mark(module)


def _build(record: Record, configs: Sequence[RouterConfig]) -> list[Sites]:
    """The sites of every block, built before anything is attached: an error leaves the model as it was."""
    numbered = iter(enumerate(configs))
    with _float32_default():
        return [
            Sites([Site(config, layer_index=index) for index, config in (next(numbered) for _ in range(record.sites))])
            for _ in record.blocks
        ]


def _attach(
    module: nn.Module,
    record: Record,
    parts: Sequence[Sites],
    *,
    any_layout: bool,
    on: Callable[[Sites], Sites] | None = None,
) -> None:
    last = len(record.blocks) - 1
    for index, (name, sites) in enumerate(zip(record.blocks, parts, strict=True)):
        block: Any = module.get_submodule(name)
        like = next(block.parameters(), None)
        # Before the trial's copy, which computes where the block's parameters are.
        if like is not None:
            sites.to(like.device)
        if on is not None:
            sites = on(sites)
        sites.train(block.training)
        setattr(block, SITES, sites)
        block.temper_place = Place(
            name,
            record.sites,
            first=index == 0,
            reduce=record.reduce if index == last else None,
            any_layout=any_layout,
            argument=_first_argument(block),
        )
        block.__class__ = block_class(type(block))
    setattr(module, RECORDS, [*getattr(module, RECORDS, ()), record])


@contextmanager
def _float32_default() -> Iterator[None]:
    """Routing is float32 whatever a model is built in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(before, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _first_argument(block: nn.Module) -> str | None:
    try:
        return next(iter(inspect.signature(block.forward).parameters), None)
    except (TypeError, ValueError):
        return None


def _select(module: nn.Module, selector: Selector) -> Iterator[tuple[str, nn.Module]]:
    """The selected blocks in order, checked: at least one, none inside another."""
    if callable(selector):
        chosen = [(name, child) for name, child in module.named_modules() if selector(name, child)]
        wanted = "the selector"
    elif isinstance(selector, str):
        chosen = [(name, child) for name, child in module.named_modules() if name and _matches(name, selector)]
        wanted = f"the pattern {selector!r}"
    elif isinstance(selector, Sequence) and all(isinstance(pattern, str) for pattern in selector):
        chosen = [
            (name, child)
            for name, child in module.named_modules()
            if name and any(_matches(name, pattern) for pattern in selector)
        ]
        wanted = f"the patterns {list(selector)}"
    else:
        raise TypeError(f"selector must be a pattern of names or a function, got {type(selector).__name__}")
    if not chosen:
        names = [name for name, _ in module.named_children()]
        raise ValueError(f"{wanted} selects nothing in {type(module).__name__}; its children are {names}")
    for outer, _ in chosen:
        for inner, _ in chosen:
            if inner.startswith(f"{outer}.") or (outer == "" and inner != ""):
                raise ValueError(f"{wanted} selects {inner!r} inside {outer!r}; select the blocks only")
    yield from chosen


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _check_layout(blocks: dict[str, nn.Module], width: int, given: torch.Size | None) -> None:
    """Raises ValueError for blocks whose x may have its channels first, as far as a trial's shape of x tells."""
    if given is not None and given[-1] == width and width not in given[1:-1]:
        return
    for name, block in blocks.items():
        found = next((child for child in block.modules() if isinstance(child, CONVOLUTIONS)), None)
        if found is not None and width in (found.in_channels, found.out_channels):
            raise ValueError(
                f"{name!r} has a {type(found).__name__} of {width} channels, as channels-first networks have, and "
                f"nothing tells whether the last dimension of x has the features. Give wrap dim={width} if it has, or "
                f"an example= whose other dimensions are not {width}; otherwise use HyperConnection by hand, around a "
                "permute"
            )


def _width(module: nn.Module, blocks: dict[str, nn.Module]) -> int:
    """The width of the residual stream, from the norms of the first block, or from a transformers configuration."""
    name, block = next(iter(blocks.items()))
    # A block's own norms act on its residual; deeper ones may be those of a head.
    for children in (block.children(), block.modules()):
        norms = [child for child in children if "norm" in type(child).__name__.lower()]
        for norm in norms:
            if isinstance(norm, CHANNELS_FIRST):
                raise ValueError(
                    f"{name!r} has a {type(norm).__name__}, as channels-first networks have: hyper-connections act on "
                    "the last dimension of x. Give wrap dim= if that is where the features are; otherwise use "
                    "HyperConnection by hand, around a permute"
                )
        weights = [getattr(norm, "weight", None) for norm in norms]
        widths = {weight.shape[0] for weight in weights if isinstance(weight, Tensor) and weight.ndim == 1}
        if len(widths) == 1:
            return widths.pop()
    config: Any = getattr(module, "config", None)
    known = getattr(config.get_text_config(), "hidden_size", None) if hasattr(config, "get_text_config") else None
    if isinstance(known, int):
        return known
    raise ValueError(f"the norms of {name!r} do not tell the width: give wrap dim=")
