"""One hyper-connection: read the streams, run the branch, mix and write."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from temper.config import RouterConfig
from temper.ops import naive
from temper.ops.backend import choose
from temper.ops.plan import State
from temper.router import Router
from temper.streams import Routing, no_autocast, widen

__all__ = ["HyperConnection", "State"]

Branch = Callable[..., Any]


class HyperConnection(Router):
    """A residual connection with N streams around a branch f: R^D -> R^D.

        x = sum_n pre[n] H[n],   H'[m] = sum_n res[m, n] H[n] + post[m] f(x)

    Three ways to use one, all the same mathematics:

        hc = HyperConnection(config, branch=f);   streams = hc(streams, mask=mask)
        hc = HyperConnection(config);             x, state = hc.begin(streams); streams = hc.finish(state, f(x))
        hc = HyperConnection(config);             f = hc.decorate(f); streams = f(streams, mask=mask)

    With one stream, or the `residual` preset, it is `x + f(x)` bit for bit and has no parameters.

    Args:
        config: from `temper.preset`.
        layer_index: which site of the network this is (2l for attention, 2l + 1 for the MLP of block l).
        branch: a module or function; its own pre-norm is inside it. What it takes after x, and what
            it returns after y in a tuple or list, passes through unchanged.
    """

    def __init__(self, config: RouterConfig, *, layer_index: int = 0, branch: Branch | None = None) -> None:
        super().__init__(config, layer_index=layer_index)
        if branch is not None and not callable(branch):
            raise TypeError(f"branch must be a module or a function, got {type(branch).__name__}")
        self.branch = branch
        # Save the streams of one site in `recompute` for the backward pass, and recompute the rest; 0 saves all.
        self.recompute = 0
        # Called with (site, streams, routing) for every forward; see `temper.observe`.
        self.observers: tuple[Callable[[HyperConnection, Tensor, Routing], None], ...] = ()

    def begin(self, streams: Tensor) -> tuple[Tensor, State]:
        """The branch input and what `finish` needs: (..., N, D) -> (..., D), state."""
        self.check_streams(streams)
        if self.spec is None:
            self._observe(streams, None)
            return streams.select(-2, 0).contiguous(), State(streams, streams.dtype)
        x, state = self._open(streams, self.recompute)
        if self.observers:
            self._observe(streams, state.routing)
        return x, state

    def finish(self, state: State, y: Tensor, *, in_place: bool = False) -> Tensor:
        """The next streams from the branch output: state, (..., D) -> (..., N, D).

        Args:
            in_place: the streams that `begin` was given may be overwritten with the next ones; for
                inference, where autograd is off and nobody looks at them again.
        """
        streams, backend = state.streams, state.backend
        _check_output(streams, y)
        _check_in_place(in_place)
        if backend is None:
            return streams.add_(y.unsqueeze(-2)) if in_place else streams + y.unsqueeze(-2)
        with no_autocast(streams):
            return backend.close_site(state, y, in_place)

    def finish_into(
        self, following: HyperConnection, state: State, y: Tensor, *, in_place: bool = False
    ) -> tuple[Tensor, State]:
        """`finish` here and `begin` at the site that follows: the same, with one pass over the streams fewer.

            x, state = first.begin(streams)
            x, state = first.finish_into(second, state, attention(x))
            streams = second.finish(state, mlp(x))

        Sites that cannot be chained (different numbers of streams, residual sites, different backends) run one after
        the other.

        Args:
            in_place: as for `finish`; the streams that `begin` or `finish_into` made may be overwritten too.
        """
        if not following.can_follow(state):
            return following.begin(self.finish(state, y, in_place=in_place))
        streams, backend, spec = state.streams, state.backend, following.spec
        assert backend is not None
        assert spec is not None
        _check_output(streams, y)
        _check_in_place(in_place)
        with no_autocast(streams):
            weights = following._weights_for(backend, state.dtype)
            x, state = backend.close_and_open(state, y, weights, spec, following.mixer, following.recompute, in_place)
        if following.observers:
            following._observe(state.streams, state.routing)
        return x, state

    def can_follow(self, state: State) -> bool:
        """Whether `finish_into` chains this site to the one that left the state."""
        streams, spec = state.streams, self.spec
        if state.backend is None or spec is None or streams.dtype != state.dtype:
            return False
        is_as_large = streams.shape[-2:] == (spec.num_streams, spec.dim)
        return is_as_large and choose(streams, spec, self.mixer) is state.backend

    def read(self, streams: Tensor, routing: Routing) -> Tensor:
        """x = sum_n pre[n] H[n]: (..., N, D) -> (..., D)."""
        self.check_streams(streams)
        with no_autocast(streams):
            return naive.read(widen(streams), routing.pre).to(streams.dtype)

    def write(self, streams: Tensor, y: Tensor, routing: Routing) -> Tensor:
        """H'[m] = sum_n res[m, n] H[n] + post[m] y: (..., N, D), (..., D) -> (..., N, D)."""
        self.check_streams(streams)
        _check_output(streams, y)
        with no_autocast(streams):
            return naive.write(widen(streams), y, routing.res, routing.post).to(streams.dtype)

    def forward(self, streams: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The next streams; where the branch returns more than y, the same structure with streams in its place."""
        if self.branch is None:
            raise ValueError("this HyperConnection has no branch: give it one, or use begin and finish")
        return self._around(self.branch, streams, *args, **kwargs)

    def decorate(self, branch: Branch) -> Branch:
        """Turns a function of x into a function of streams."""

        @functools.wraps(branch)
        def routed(streams: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._around(branch, streams, *args, **kwargs)

        return routed

    def _around(self, branch: Branch, streams: Tensor, *args: Any, **kwargs: Any) -> Any:
        x, state = self.begin(streams)
        out = branch(x, *args, **kwargs)
        if isinstance(out, Tensor):
            return self.finish(state, out)
        if not isinstance(out, tuple | list) or not out or not isinstance(out[0], Tensor):
            raise TypeError(
                f"the branch returned {type(out).__name__}; expected a tensor, or a tuple or list that begins with one"
            )
        rest = [self.finish(state, out[0]), *out[1:]]
        # A named tuple takes its fields one by one.
        return type(out)(*rest) if hasattr(out, "_fields") else type(out)(rest)

    def _observe(self, streams: Tensor, routing: Routing | None) -> None:
        for observer in self.observers:
            observer(self, streams, self.route_wide(streams) if routing is None else routing)


# Each holds the hooks of one kind.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of a module only runs the forward method of this class.

    It does more if somebody hooked the module, compiled it, replaced its forward method or, as FSDP does, its class.
    """
    own = vars(module)
    if type(module) is not kind or "forward" in own or own.get("_compiled_call_impl") is not None:
        return False
    return not any(own[name] or getattr(torch_modules, f"_global{name}") for name in _HOOKS)


def _check_in_place(in_place: bool) -> None:
    if in_place and torch.is_grad_enabled():
        raise ValueError("in_place is for inference: use it inside torch.no_grad() or torch.inference_mode()")


def _check_output(streams: Tensor, y: Tensor) -> None:
    expected = streams.shape[:-2] + streams.shape[-1:]
    if not isinstance(y, Tensor) or y.shape != expected:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"the branch output is {got}; expected {tuple(expected)}, the shape of what it was given")
