"""A trial forward pass of a wrapped model, to find out whether its blocks can be wrapped.

A copy of the model runs with guessed or given inputs: on fake tensors, or, where those cannot run it (some kernels of
mixtures of experts), on a few real tokens with the parameters of the model itself. Blocks and carriers report to the
trial what they do (see `temper.wrap`), and a torch-function mode sees everything else, so that an error can name the
operation in which the residual was lost.
"""

from __future__ import annotations

import copy
import heapq
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

# Tokens of a guessed input: a number that is no width and hardly any number of streams.
TOKENS = 7
# Modules of a branch: a path through one of these is not the residual path.
BRANCH = ("linear", "matmul", "bmm", "mm", "conv", "attention", "softmax", "embedding", "einsum", "addmm", "baddbmm")


class Trial:
    """The model under trial.

    Args:
        module: stays untouched.
        example: its inputs; guessed if None.
        fake: on fake tensors, without memory; otherwise on real ones, whose parameters are shared with the module.

    Attributes:
        is_last: whether no other trial could tell more.
        given: the shape of x in the first block, once it has run.
    """

    def __init__(self, module: nn.Module, example: Any = None, *, fake: bool = True) -> None:
        self.is_given = example is not None
        self.is_last = not fake or any(parameter.is_meta for parameter in module.parameters())
        self.copy: nn.Module | None = None
        self.given: torch.Size | None = None
        inputs = _inputs_of(example) if self.is_given else guess(module)
        if inputs is None:
            return
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        try:
            self.copy = self.on_copy(module)
            with self._mode or nullcontext():
                self._inputs = tree_map(self._of_trial, inputs)
        # A model that cannot be copied to fake tensors cannot be tried.
        except Exception:
            self.copy = None
        self._blocks: list[str] = []
        self._ways: dict[int, tuple[str, list[int]]] = {}
        self._alive: list[Any] = []
        self._reads: set[int] = set()
        self._entered: list[str] = []
        self._handed: tuple[str, Tensor] | None = None

    def on_copy(self, module: Any) -> Any:
        """A copy of a module whose parameters and buffers are those of a trial."""
        memo: dict[int, Any] = {id(buffer): self._of_trial(buffer) for buffer in module.buffers()}
        for parameter in module.parameters():
            memo[id(parameter)] = parameter if self._mode is None else self._of_trial(parameter)
        return copy.deepcopy(module, memo)

    def _of_trial(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.clone() if self._mode is None else self._mode.from_tensor(value)

    def run(self, blocks: Iterable[str], watch: Callable[[Trial | None], None]) -> bool:
        """Runs the copy and returns whether it could; raises ValueError if its blocks cannot be wrapped.

        Args:
            blocks: the names of the blocks that must run, once each and in this order.
            watch: makes blocks and carriers report here until it is called with None.
        """
        from temper.carrier import WrapError

        assert self.copy is not None
        self._blocks = list(blocks)
        try:
            # In training more can go wrong (dropout); some models cannot be tried in it (layers dropped at random), and
            # real ones would change (running means).
            for training in (False,) if self._mode is None else (True, False):
                self._ways, self._alive, self._reads, self._entered, self._handed = {}, [], set(), [], None
                watch(self)
                try:
                    self._forward(training)
                except Exception as error:
                    if isinstance(error, WrapError):
                        raise WrapError(f"{error}. The model is as it was") from None
                    watch(None)
                    if not self._plain_runs(training):
                        failed = error
                        continue
                    raise WrapError(
                        f"the model runs as it is, but not with streams ({type(error).__name__}: {_short(error)}): "
                        f"{self._whereabouts()}. The model is as it was"
                    ) from error
                self._check_order()
                return True
            if self.is_given and self.is_last and not _is_limit(failed):
                raise WrapError(
                    f"the model does not run on `example` ({type(failed).__name__}: {_short(failed)}). It is as it was"
                ) from failed
            return False
        finally:
            watch(None)
            # Drops the fake tensors and recorded operations: the error may live long.
            self.copy, self._ways, self._alive = None, {}, []

    def _forward(self, training: bool) -> None:
        from temper.ops.backend import use_backend

        args, kwargs = self._inputs
        assert self.copy is not None
        untouched = torch.random.fork_rng(devices=[])
        with torch.no_grad(), untouched, self._mode or nullcontext(), use_backend("naive"), _Watch(self), _quiet():
            self.copy.train(training)(*args, **kwargs)

    def _plain_runs(self, training: bool) -> bool:
        """Whether the model without streams accepts these inputs."""
        from temper.wrap import unwrap

        assert self.copy is not None
        before = self.copy
        try:
            self.copy = unwrap(copy.deepcopy(before, {id(t): t for t in [*before.parameters(), *before.buffers()]}))
            self._forward(training)
        except Exception:
            return False
        finally:
            self.copy = before
        return True

    def _whereabouts(self) -> str:
        """The origin of an error that this package did not raise."""
        if self._handed is not None and self._entered[-1] == self._handed[0] != self._blocks[-1]:
            return (
                f"something happens to the residual after {self._handed[0]}, before the next block; blocks must run "
                "one after the other, with nothing between them"
            )
        return "its blocks may ask for a tensor where a wrapped block has streams"

    # Reports from wrapped blocks and carriers.

    def enter(self, block: str, x: Any) -> None:
        """A block begins with x."""
        from temper.carrier import WrapError

        if block not in self._blocks:
            # The block belongs to a stack that was wrapped earlier.
            return
        if self._handed is not None and x is not self._handed[1]:
            raise WrapError(
                f"something happens to the residual between {self._handed[0]} and {block}: blocks must run one after "
                "the other, in the order in which they are registered, with nothing between them"
            )
        if not self._entered and isinstance(x, Tensor):
            self.given = x.shape
        self._entered.append(block)

    def leave(self, block: str, x: Tensor) -> None:
        """A block ends with x."""
        if block in self._blocks:
            self._handed = (block, x)
        self._alive.append(x)

    def saw_read(self, x: Tensor) -> None:
        """x is what a site reads."""
        self._reads.add(id(x))
        self._alive.append(x)

    def saw(self, name: str, given: Iterable[Any], made: Any) -> None:
        """An operation has computed outputs from inputs."""
        sources = [id(value) for value in given]
        for value in tree_iter(made):
            if isinstance(value, Tensor) and id(value) not in self._ways and id(value) not in sources:
                self._ways[id(value)] = (name, sources)
                self._alive.append(value)

    def lost(self, output: Any) -> str:
        """The reason why the output of a block is no longer its residual."""
        by_hand = "need HyperConnection by hand"
        if not isinstance(output, Tensor):
            return f"it returns {type(output).__name__}; expected x first, alone or in a tuple"
        name = self._way_back(output)
        if name is None:
            return f"its output does not come from its residual at all; blocks without x + branch(norm(x)) {by_hand}"
        if "norm" in name:
            return f"it norms its residual ({name}), its output is not x + branch(norm(x)). Post-norm blocks {by_hand}"
        return (
            f"it loses its residual in `{name}`, which has to reach the end of a block by x + branch(norm(x)) alone. "
            f"Blocks that scale, gate or reshape their residual {by_hand}"
        )

    def _way_back(self, output: Tensor) -> str | None:
        """The first operation on the shortest way from what a site has read to the output."""
        heap: list[tuple[int, int, int, str | None]] = [(0, 0, id(output), None)]
        done: set[int] = set()
        while heap:
            cost, _, node, name = heapq.heappop(heap)
            if node in self._reads and name is not None:
                return name
            if node in done or node not in self._ways:
                continue
            done.add(node)
            name, sources = self._ways[node]
            step = 20 if any(part in name for part in BRANCH) else 2 if "norm" in name else 1
            for source in sources:
                heapq.heappush(heap, (cost + step, len(done), source, name))
        return None

    def _check_order(self) -> None:
        from temper.carrier import WrapError

        blocks = self._blocks
        if self._entered == blocks:
            return
        never = [block for block in blocks if block not in self._entered]
        twice = [block for block in blocks if self._entered.count(block) > 1]
        reason = (
            f"{', '.join(never[:3])} did not run"
            if never
            else f"{', '.join(twice[:3])} ran more than once"
            if twice
            else f"they ran in the order {', '.join(self._entered[:4])}, .."
        )
        raise WrapError(
            f"{reason} in one forward pass; expected every selected block once, in the order in which they are "
            "registered. Select the blocks of one stack at a time. The model is as it was"
        )


class _Watch(TorchFunctionMode):
    """Reports every operation to a trial."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        self._trial = trial

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from temper.carrier import Carrier

        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = [
            value._read if isinstance(value, Carrier) else value
            for value in tree_iter((args, kwargs))
            if isinstance(value, Tensor) or (isinstance(value, Carrier) and value._begun)
        ]
        self._trial.saw(getattr(func, "__name__", str(func)).strip("_"), given, made)
        return made


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's logs of operations unsupported on fake tensors: the caller handles the error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def guess(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Guessed inputs of a model; None if there is nothing to go by."""
    config = getattr(module, "config", None)
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    ids = torch.zeros(2, TOKENS, dtype=torch.int64, device=device)
    if hasattr(module, "main_input_name") and hasattr(config, "to_dict"):
        known = set(inspect.signature(module.forward).parameters)
        found = {name: value for name, value in _of_config(config, ids).items() if name in known}
        return ((), found) if module.main_input_name in found else None
    if any(isinstance(child, nn.Embedding) for child in module.modules()):
        return (ids,), {}
    return None


def _of_config(config: Any, ids: Tensor) -> dict[str, Tensor]:
    """The inputs of transformers models, with sizes from a configuration."""
    found = {"input_ids": ids, "decoder_input_ids": ids}
    vision, text = getattr(config, "vision_config", config), config.get_text_config()
    size = getattr(vision, "image_size", None)
    if size is not None:
        height, width = size if isinstance(size, list | tuple) else (size, size)
        found["pixel_values"] = ids.new_zeros(2, getattr(vision, "num_channels", 3), height, width, dtype=torch.float32)
    elif getattr(vision, "num_channels", None) is not None:
        found["pixel_values"] = ids.new_zeros(2, vision.num_channels, 64, 64, dtype=torch.float32)
    bins, places = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if bins is not None and places is not None:
        found["input_features"] = ids.new_zeros(2, bins, 2 * places, dtype=torch.float32)
    elif bins is not None and getattr(config, "max_length", None):
        found["input_values"] = ids.new_zeros(2, config.max_length, bins, dtype=torch.float32)
    elif hasattr(config, "conv_stride"):
        found["input_values"] = ids.new_zeros(2, 4000, dtype=torch.float32)
    if getattr(text, "is_encoder_decoder", False) is False and not hasattr(config, "decoder_start_token_id"):
        found.pop("decoder_input_ids", None)
    return found


def _inputs_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _is_limit(error: BaseException) -> bool:
    """Whether an error comes from fake tensors rather than from the model."""
    return type(error).__module__.startswith(("torch._subclasses", "torch.fx"))
