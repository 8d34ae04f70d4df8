"""One process or many: the process group, the parallel model, and communication between ranks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from temper.gates import with_vector_gates
from temper_lab.model import GPT
from temper_lab.optim.muon import local, shard_like

T = TypeVar("T")
# Long enough for rank 0 to train a tokenizer while the others wait.
TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """The sum of every value over all processes."""
        if self.size == 1:
            return list(values)
        # The tensor has to be on the model's device for nccl.
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, value: T) -> list[T]:
        """The value of every process, in the order of their ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def on_rank0(self, action: Callable[[], T]) -> T:
        """The result of an action that rank 0 alone runs, on every process; if it fails there, it fails everywhere."""
        if self.size == 1:
            return action()
        outcome: list[Any] = [None, None]
        error: BaseException | None = None
        if self.is_rank0:
            try:
                outcome[1] = action()
            except BaseException as raised:
                error, outcome[0] = raised, str(raised) or type(raised).__name__
        dist.broadcast_object_list(outcome, src=0, device=self.device)
        if error is not None:
            raise error
        if outcome[0] is not None:
            # Rank 0 says why; the others leave without repeating it.
            raise SystemExit(1)
        return outcome[1]


@contextmanager
def process_group(device: str = "auto") -> Iterator[World]:
    """The process group that torchrun describes in the environment, or a world of one."""
    rank, size, place = (int(os.environ.get(key, default)) for key, default in _ENVIRONMENT)
    where = device_of(device, place)
    if size == 1:
        yield World(0, 1, where)
        return
    # A later import of this module would keep the group alive: gloo's threads would outlive `destroy_process_group` and
    # abort a process that has finished.
    from torch import _dynamo  # noqa: F401

    store, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    # torchrun keeps its store when it restarts the processes of a node, and in it the addresses of dead processes. Each
    # node counts its own restarts.
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    # Python's own reference has to be the last: it releases the GIL while gloo's threads are joined, and
    # one of them may be waiting for the lock to let go of the tensors of the last exchange. DDP's would wait forever.
    group = dist.group.WORLD
    try:
        yield World(rank, size, where)
    finally:
        dist.destroy_process_group()
        del group


_ENVIRONMENT = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def device_of(name: str | torch.device, place: int = 0) -> torch.device:
    """The device of a name, or a ValueError if it is not available."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"the device is {name!r}; expected auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the device is {str(name)!r}; expected auto, cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("the device is 'cuda', and torch sees no GPU here")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ValueError(f"the device is {str(name)!r}, and torch sees {torch.cuda.device_count()} GPUs here")
        device = torch.device("cuda", place if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


class ParallelModel:
    """A model as all processes train it together: alone, copied (DDP) or sharded (FSDP2).

    Args:
        model: the same on every process.
        parallel: "ddp" or "fsdp". One process has the whole model either way.
        replicas: with "fsdp", how many copies of the model there are, each sharded over its part of the processes.
        compile: through `torch.compile`.
    """

    def __init__(
        self, model: GPT, world: World, *, parallel: str = "ddp", replicas: int = 1, compile: bool = False
    ) -> None:
        self.plain = model
        self.world = world
        self.is_sharded = parallel == "fsdp" and world.size > 1
        # Compiled in place, so that no parameter changes its name.
        if compile:
            for part in model.blocks if self.is_sharded else [model]:
                part.compile()
        self.module: nn.Module = model
        if self.is_sharded:
            self._shard(replicas)
        elif world.size > 1:
            devices = [world.device] if world.device.type == "cuda" else None
            ddp = nn.parallel.DistributedDataParallel
            # The only buffers are constant tables, so they are not broadcast; the option has had two names.
            known = inspect.signature(ddp).parameters
            quiet = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            options: dict[str, Any] = {quiet: False}
            self.module = ddp(model, device_ids=devices, gradient_as_bucket_view=True, **options)

    def _shard(self, replicas: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        kind, size = self.world.device.type, self.world.size
        if replicas > 1:
            # Of two dimensions, FSDP2 copies along the first and shards along the second.
            names = ("replicate", "shard")
            mesh = init_device_mesh(kind, (replicas, size // replicas), mesh_dim_names=names)
        else:
            mesh = init_device_mesh(kind, (size,))
        for block in self.plain.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.plain, mesh=mesh)

    def close(self) -> None:
        """Drops DDP, which holds on to the other processes; to be called before the process group ends."""
        self.module = self.plain

    def micro_batch(self, *, is_last: bool) -> Any:
        """The context of one forward and backward pass; DDP reduces gradients in the last of a step only."""
        if isinstance(self.module, nn.parallel.DistributedDataParallel) and not is_last:
            return self.module.no_sync()
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        """The model by the names of the plain one, sharded if it is."""
        return self.plain.state_dict()

    def gather(self) -> dict[str, Tensor]:
        """The whole model on the first process, nothing on the others. Sharded, every process has to call this."""
        whole = {}
        for name, value in self.plain.state_dict().items():
            # One tensor at a time is more than a shard, so that nobody needs memory for the whole model but the first.
            tensor = value.full_tensor().cpu() if isinstance(value, DTensor) else value
            if self.world.is_rank0:
                whole[name] = tensor
        return whole

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over a model, whole or sharded as this one, or raises ValueError."""
        mine, state = self.plain.state_dict(), with_vector_gates(state)
        check_fit(mine, state)
        for name, value in mine.items():
            local(value).copy_(shard_like(state[name].to(value.device), value))

    @contextmanager
    def alone(self) -> Iterator[GPT | None]:
        """The full model for rank 0 to generate with, None on the others."""
        if not self.is_sharded:
            yield self.plain if self.world.is_rank0 else None
            return
        state = self.gather()
        if not self.world.is_rank0:
            yield None
            return
        with torch.device("meta"):
            model = GPT(self.plain.config).to(self.plain.head.weight.dtype)
        model.to_empty(device=self.world.device)
        model.load_state_dict(state)
        yield model


def check_fit(mine: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless names, shapes and kinds of dtype are the same."""
    problems = [f"{name} is missing" for name in mine if name not in given]
    problems += [f"{name} is unexpected" for name in given if name not in mine]
    problems += [
        f"{name} has shape {tuple(given[name].shape)}, expected {tuple(value.shape)}"
        for name, value in mine.items()
        if name in given and given[name].shape != value.shape
    ]
    problems += [
        f"{name} holds {given[name].dtype}, expected {value.dtype}"
        for name, value in mine.items()
        if name in given and given[name].is_floating_point() != value.is_floating_point()
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(f"these weights are of another model: {'; '.join(problems[:4])}{more}")


def precision(name: str, device: torch.device) -> tuple[torch.dtype, Callable[[], AbstractContextManager[Any]]]:
    """The dtype of the weights, and the context that forward passes run in."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    if name == "bfloat16":
        return torch.float32, lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return getattr(torch, name), nullcontext
