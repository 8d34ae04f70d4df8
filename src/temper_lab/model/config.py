"""What a model is built from: one dial, `depth`, and the routing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import temper
from temper.registry import unknown

WIDTH_PER_DEPTH = 64


@dataclass(frozen=True)
class ModelConfig:
    """The backbone and the routing around its branches.

    Args:
        depth: the number of blocks; the width follows from it.
        vocab_size: how many ids there are, special tokens included.
        context: the longest sequence, in tokens.
        head_dim: of every attention head; the width is a multiple of it.
        preset: a name of `temper.PRESETS`.
        num_streams: N. The residual preset has one stream, whatever N is asked for.
        router: overrides of the preset as `temper.preset` takes them, in the form that JSON and TOML hold.
        rope_base: of the rotary position embedding.
        checkpoint_blocks: keep only what enters a block for the backward pass and compute the rest
            again: less memory, a third more time, the same gradients.
        recompute: keep only some of the streams for the backward pass and mix the others again
            (`temper.recompute`): less memory, a little more time, the same gradients.
    """

    depth: int
    vocab_size: int
    context: int
    head_dim: int = 128
    preset: str = "residual"
    num_streams: int = 1
    router: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rope_base: float = 10_000.0
    checkpoint_blocks: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("depth", "vocab_size", "context", "head_dim", "num_streams"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number >= 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; expected an even number: positions rotate pairs")
        if isinstance(self.rope_base, bool) or not isinstance(self.rope_base, int | float) or self.rope_base <= 1:
            raise ValueError(f"rope_base is {self.rope_base!r}; expected a number > 1")
        for name in ("checkpoint_blocks", "recompute"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected true or false")
        if not isinstance(self.router, Mapping):
            raise ValueError(f"router is {self.router!r}; expected a mapping of overrides for temper.preset")
        object.__setattr__(self, "router", {key: _plain(value) for key, value in self.router.items()})
        try:
            self.routing()
        except TypeError as error:
            raise ValueError(f"router is {self.router!r}: {error}") from error

    @property
    def width(self) -> int:
        """D: 64 per block, rounded up to whole heads."""
        return -(-WIDTH_PER_DEPTH * self.depth // self.head_dim) * self.head_dim

    @property
    def num_heads(self) -> int:
        return self.width // self.head_dim

    @property
    def num_layers(self) -> int:
        return self.depth

    def routing(self) -> temper.RouterConfig:
        """The configuration of every site; its `num_streams` is the true N."""
        return temper.preset(self.preset, num_streams=self.num_streams, dim=self.width, **self.router)

    def with_(self, **changes: Any) -> ModelConfig:
        """The same model with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; `from_dict` reads them back."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        if not isinstance(values, Mapping):
            raise ValueError(f"a model configuration is a mapping, got {type(values).__name__}")
        known = [entry.name for entry in fields(cls)]
        for key in values:
            if key not in known:
                raise unknown("model option", key, known)
        if missing := [key for key in ("depth", "vocab_size", "context") if key not in values]:
            raise ValueError(f"the model configuration lacks {', '.join(missing)}")
        return cls(**values)


def _plain(value: Any) -> Any:
    """The value as JSON gives it back, so that a saved config equals the one that was saved."""
    if isinstance(value, temper.Choice):
        value = {"name": value.name, **value.options}
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
