"""What every mixer is: logits in, an N x N mixing matrix out."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from temper.registry import Registered


class Mixer(Registered, nn.Module, family="mixer"):
    """Turns logits of shape (..., *logit_shape) into `res` of shape (..., N, N).

    Orientation: row m of `res` says where output stream m comes from (`temper.routing`).
    A new mixer is a subclass in a file of its own: which logits it needs (`logit_shape_for`), where
    they start (`initial_bias`) and what they become (`forward`). See docs/adding-a-mixer.md.
    """

    # Whether rows and columns of res sum to one: "exactly", "rows" (columns as it converges), or "no".
    doubly_stochastic: ClassVar[str] = "no"

    def __init__(self, num_streams: int) -> None:
        super().__init__()
        if isinstance(num_streams, bool) or not isinstance(num_streams, int) or num_streams < 1:
            raise ValueError(f"num_streams is {num_streams!r}; expected a whole number >= 1")
        reason = self.refusal(num_streams)
        if reason:
            raise ValueError(reason)
        self.num_streams = num_streams
        self.logit_shape = self.logit_shape_for(num_streams)

    @classmethod
    def logit_shape_for(cls, num_streams: int) -> tuple[int, ...]:
        """The output modes that a generator must have, without building anything."""
        raise NotImplementedError

    @classmethod
    def refusal(cls, num_streams: int) -> str | None:
        """Why this mixer will not be built for so many streams, or None if it will."""
        return None

    @classmethod
    def flops(cls, num_streams: int, **options: Any) -> int:
        """FLOPs per token from logits to res, a multiply and add counted as two, an exp as one."""
        return 0

    @classmethod
    def saved(cls, num_streams: int, **options: Any) -> int:
        """Numbers per token that autograd keeps between logits and res."""
        return 0

    def initial_bias(self) -> Tensor:
        """The bias, of shape logit_shape, at which res is (nearly) the identity."""
        raise NotImplementedError

    def forward(self, logits: Tensor) -> Tensor:
        raise NotImplementedError
