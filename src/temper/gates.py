"""Gates: from logits to read and write weights, and the initial biases."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from temper.registry import Registered


class Gates(Registered, ABC, family="gates"):
    """The gates of a site: `squash` acts on the generators' output, `pre` and `post` on the logits."""

    # Whether these are the gates that the fast implementations compute: no squash, then sigmoids.
    fast: ClassVar[bool] = False
    # The greatest slope of pre, and of post, in their logits; that of `squash` is one.
    slopes: ClassVar[tuple[float, float]]

    def __init__(self, pre_eps: float = 0.0) -> None:
        # DeepSeek-V4 adds a small number to every read weight.
        self.pre_eps = pre_eps

    def squash(self, dynamic: Tensor) -> Tensor:
        """The nonlinearity applied to the token-dependent part before the gate scales it."""
        return dynamic

    @abstractmethod
    def pre(self, logits: Tensor) -> Tensor: ...

    @abstractmethod
    def post(self, logits: Tensor) -> Tensor: ...

    @abstractmethod
    def most_written(self, gate: Tensor, bias: Tensor) -> Tensor:
        """An upper bound on ||post||_2 over all tokens, given the gate and the bias (N) of post."""

    @abstractmethod
    def initial_bias(self, num_streams: int, index: int) -> tuple[Tensor, Tensor]:
        """The biases of pre and post for a site that starts on stream `index`."""

    @abstractmethod
    def exact_bias(self, num_streams: int, index: int) -> tuple[Tensor, Tensor]:
        """Biases, in float64, at which a site reads the mean of the streams and adds f(x) to it.

        If the generators output zero and mixing preserves the mean, N streams then compute what one did (docs/math.md,
        Upcycling). Stream `index` is still written, or read, differently from the others.
        """


class Sigmoid(Gates, name="sigmoid"):
    """pre = sigmoid(logits) + pre_eps, post = 2 sigmoid(logits): the form of mHC and of the paper."""

    fast = True
    slopes = (0.25, 0.5)

    def pre(self, logits: Tensor) -> Tensor:
        pre = logits.sigmoid()
        return pre + self.pre_eps if self.pre_eps else pre

    def post(self, logits: Tensor) -> Tensor:
        return 2 * logits.sigmoid()

    def most_written(self, gate: Tensor, bias: Tensor) -> Tensor:
        return 2 * torch.ones_like(bias).norm()

    def initial_bias(self, num_streams: int, index: int) -> tuple[Tensor, Tensor]:
        bias = torch.full((num_streams,), -1.0)
        bias[index] = 1.0
        return bias, bias.clone()

    def exact_bias(self, num_streams: int, index: int) -> tuple[Tensor, Tensor]:
        read = 1 / num_streams - self.pre_eps
        if read <= 0:
            raise ValueError(
                f"pre_eps is {self.pre_eps}: {num_streams} streams, each read with more than that, cannot be read as "
                f"their mean; expected less than 1/{num_streams}"
            )
        pre = torch.full((num_streams,), math.log(read / (1 - read)), dtype=torch.float64)
        # The values of `initial_bias`, shifted until the N writes have mean 1.
        shift = math.asinh((1 - 2 / num_streams) * math.sinh(1))
        post = torch.full((num_streams,), shift - 1, dtype=torch.float64)
        post[index] = shift + 1
        return pre, post


class Tanh(Gates, name="tanh"):
    """gate * tanh(Z) + bias and nothing after it, for pre, res and post: the form of the original HC."""

    slopes = (1.0, 1.0)

    def squash(self, dynamic: Tensor) -> Tensor:
        return dynamic.tanh()

    def pre(self, logits: Tensor) -> Tensor:
        return logits + self.pre_eps if self.pre_eps else logits

    def post(self, logits: Tensor) -> Tensor:
        return logits

    def most_written(self, gate: Tensor, bias: Tensor) -> Tensor:
        return (gate.abs() + bias.abs()).norm()

    def initial_bias(self, num_streams: int, index: int) -> tuple[Tensor, Tensor]:
        pre = torch.zeros(num_streams)
        pre[index] = 1.0
        return pre, torch.ones(num_streams)

    def exact_bias(self, num_streams: int, index: int) -> tuple[Tensor, Tensor]:
        # HC's own start is exact: the streams are copies, one of which is read.
        pre, post = (bias.double() for bias in self.initial_bias(num_streams, index))
        return pre - self.pre_eps, post


def with_vector_gates(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in which the gates of sites have the shape (1,): older checkpoints hold them as scalars."""
    endings = tuple(f"{head}.gate" for head in ("pre", "res", "post"))
    return {
        key: value.reshape(1) if key.endswith(endings) and isinstance(value, Tensor) and value.ndim == 0 else value
        for key, value in state_dict.items()
    }
