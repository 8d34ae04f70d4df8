"""Muon for block matrices and AdamW for the rest: which parameter goes where, learning rates and schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import temper
from temper.gates import with_vector_gates
from temper.param_groups import plain_name
from temper.registry import check_int
from temper_lab.optim.muon import Muon, local, shard_like

GROUPS = ("matrix", "embedding", "head", "routing", "vector")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile; checkpoints must not depend on the names that they add."""
    while isinstance(model, nn.parallel.DistributedDataParallel | torch._dynamo.OptimizedModule):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    return model


def assign(
    model: nn.Module, *, embeddings: Sequence[str] = (), heads: Sequence[str] | None = None
) -> dict[str, dict[str, nn.Parameter]]:
    """Every trainable parameter by name, in the group of `GROUPS` where `temper.param_groups` has it.

    Args:
        embeddings, heads: patterns of names that decide instead.
    """
    model = unwrapped(model)
    found = temper.param_groups(model, embeddings=embeddings, heads=heads)
    group_of = {id(parameter): group["name"] for group in found for parameter in group["params"]}
    groups: dict[str, dict[str, nn.Parameter]] = {name: {} for name in GROUPS}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[group_of[id(parameter)]][plain_name(name)] = parameter
    return groups


ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimSettings:
    """The optimizer part of a recipe. Learning rates are for 2^19 tokens a step.

    Args:
        matrix_lr: the learning rate of Muon, for the matrices inside the blocks.
        embedding_lr, head_lr: the learning rates of AdamW for embedding and head, at a width of 768.
        routing_lr: the learning rate of AdamW for all routing parameters.
        vector_lr: the learning rate of AdamW for all other parameters.
        momentum_warmup: the steps over which Muon's momentum rises from `momentum_start` to `momentum`.
        betas, eps: the betas and the epsilon of AdamW.
        weight_decay: the weight decay of matrices, embeddings and head; routing and vectors have none.
        warmdown: the fraction of steps, at the end, over which learning rates fall to 0.
        clip: the largest norm of all gradients together; 0 does not clip.
    """

    matrix_lr: float = 0.02
    embedding_lr: float = 0.3
    head_lr: float = 0.004
    routing_lr: float = 0.005
    vector_lr: float = 0.005
    momentum: float = 0.95
    momentum_start: float = 0.85
    momentum_warmup: int = 300
    ns_steps: int = 5
    betas: tuple[float, float] = (0.8, 0.95)
    eps: float = 1e-10
    weight_decay: float = 0.0
    warmdown: float = 0.4
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in (*(f"{group}_lr" for group in GROUPS), "momentum_warmup", "eps", "weight_decay", "clip"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; expected a finite number >= 0")
        if len(self.betas) != 2:
            raise ValueError(f"betas is {self.betas!r}; expected two numbers in [0, 1)")
        # TOML and JSON give lists, not tuples.
        object.__setattr__(self, "betas", tuple(self.betas))
        for name, value in (("momentum", self.momentum), ("momentum_start", self.momentum_start), *_pairs(self.betas)):
            if not isinstance(value, int | float) or not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}; expected a number in [0, 1)")
        check_int("ns_steps", self.ns_steps, 1)
        if not isinstance(self.warmdown, int | float) or not 0 <= self.warmdown <= 1:
            raise ValueError(f"warmdown is {self.warmdown!r}; expected a fraction of the steps, 0 to 1")

    def lr_factor(self, step_index: int, total_steps: int) -> float:
        """The factor of the learning rates: 1 until the warmdown, then linear to 0 one step after the last."""
        if self.warmdown == 0:
            return 1.0
        return min(1.0, (total_steps - step_index) / (self.warmdown * total_steps))

    def momentum_at(self, step_index: int) -> float:
        """Muon's momentum at a step; it is lower at first, so that a young mean forgets faster."""
        done = min(1.0, step_index / self.momentum_warmup) if self.momentum_warmup else 1.0
        return (1 - done) * self.momentum_start + done * self.momentum


def _pairs(betas: Sequence[float]) -> list[tuple[str, float]]:
    return [(f"betas[{index}]", value) for index, value in enumerate(betas)]


class Optimizers:
    """Muon for the matrices and AdamW for the rest, with a schedule.

        optimizers = Optimizers.build(model, OptimSettings(), batch_tokens=4096, width=256)
        for index in range(total_steps):
            loss(model).backward()
            norm = optimizers.step(index, total_steps)

    Build it after the model is on its device, and sharded if it will be.
    """

    def __init__(
        self, groups: Mapping[str, Mapping[str, nn.Parameter]], settings: OptimSettings, lrs: Mapping[str, float]
    ) -> None:
        self.settings = settings
        self.groups = {group: dict(members) for group, members in groups.items() if members}
        self.lrs = {group: lrs[group] for group in self.groups}
        self.parameters = {name: parameter for members in self.groups.values() for name, parameter in members.items()}
        if not self.parameters:
            raise ValueError("the model has no trainable parameters")
        matrices = self.groups.get("matrix", {})
        muon = {"name": "matrix", "params": list(matrices.values()), "weight_decay": settings.weight_decay}
        adam = [
            {"name": group, "params": members, "weight_decay": self._weight_decay(group)}
            for group, named in self.groups.items()
            if group != "matrix"
            # The fused kernel takes shards or plain tensors, but not both at once.
            for members in _partition(named.values())
        ]
        self.muon = Muon([muon], ns_steps=settings.ns_steps) if matrices else None
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in self.parameters.values())
        self.adam = torch.optim.AdamW(adam, betas=settings.betas, eps=settings.eps, fused=fused) if adam else None
        # Initialized before the first step, so that every state dict is complete.
        for name, parameter in self.parameters.items():
            self._optimizer_of(name).state[parameter] = self._fresh_state(name)

    @classmethod
    def build(
        cls,
        model: nn.Module,
        settings: OptimSettings | None = None,
        *,
        batch_tokens: int,
        width: int,
        embeddings: Sequence[str] = (),
        heads: Sequence[str] | None = None,
    ) -> Optimizers:
        """The optimizers of a model.

        Args:
            batch_tokens: the tokens of one step, over all ranks and micro-batches.
            width: the width of the model.
            embeddings, heads: patterns of names, see `assign`.
        """
        for name, value in (("batch_tokens", batch_tokens), ("width", width)):
            check_int(name, value, 1)
        settings = settings or OptimSettings()
        batch_scale = math.sqrt(batch_tokens / 2**19)
        width_scale = math.sqrt(768 / width)
        lrs = {
            group: getattr(settings, f"{group}_lr")
            * batch_scale
            * (width_scale if group in ("embedding", "head") else 1)
            for group in GROUPS
        }
        return cls(assign(model, embeddings=embeddings, heads=heads), settings, lrs)

    def step(self, step_index: int, total_steps: int) -> float:
        """Clips, updates every parameter and drops the gradients; returns the gradient norm before clipping.

        A norm that is not finite raises FloatingPointError and changes nothing.
        """
        self.set_schedule(step_index, total_steps)
        norm = self.clip()
        for optimizer in (self.muon, self.adam):
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return norm

    def set_schedule(self, step_index: int, total_steps: int) -> None:
        """Sets the learning rates and the momentum of a step, which depend on its number alone."""
        if not 0 <= step_index < total_steps:
            raise ValueError(f"step {step_index} is not one of {total_steps} steps (0 to {total_steps - 1})")
        factor = self.settings.lr_factor(step_index, total_steps)
        for optimizer in (self.muon, self.adam):
            for group in optimizer.param_groups if optimizer is not None else ():
                group["lr"] = self.lrs[group["name"]] * factor
        if self.muon is not None:
            self.muon.param_groups[0]["momentum"] = self.settings.momentum_at(step_index)

    @torch.no_grad()
    def clip(self) -> float:
        """Scales all gradients so that their joint norm is at most `settings.clip`; returns the norm before that."""
        grads = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norms = [torch.nn.utils.get_total_norm(part) for part in _partition(grads)]
        norm = math.hypot(*(float(part.full_tensor() if isinstance(part, DTensor) else part) for part in norms))
        if not math.isfinite(norm):
            bad = [name for name, parameter in self.parameters.items() if not _is_finite(parameter.grad)]
            raise FloatingPointError(
                f"the gradient norm is {norm}: {len(bad)} gradients are not finite ({', '.join(bad[:3])})"
            )
        if self.settings.clip and norm > self.settings.clip:
            torch._foreach_mul_([local(grad) for grad in grads], self.settings.clip / norm)
        return norm

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All state by name, such as `exp_avg.head.weight`, sharded like the parameters, and a description for JSON."""
        tensors = {
            f"{key}.{name}": value
            for name, parameter in self.parameters.items()
            for key, value in self._optimizer_of(name).state[parameter].items()
        }
        return tensors, {
            "groups": {group: list(members) for group, members in self.groups.items()},
            "lrs": self.lrs,
            "settings": asdict(self.settings) | {"betas": list(self.settings.betas)},
        }

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, whole or sharded as this one, or raises ValueError and changes nothing.

        Groups, names and shapes must be the same; settings come from the recipe and may differ.
        """
        problems = []
        groups = description.get("groups")
        if not isinstance(groups, Mapping):
            raise ValueError("this is not the state of these optimizers: its description has no groups")
        for group in GROUPS:
            mine, theirs = set(self.groups.get(group, ())), set(groups.get(group, ()))
            problems += [f"{name} is not in the saved group {group}" for name in sorted(mine - theirs)]
            problems += [f"{name} is in the saved group {group}" for name in sorted(theirs - mine)]
        slots = {
            f"{key}.{name}": (name, key, value)
            for name, parameter in self.parameters.items()
            for key, value in self._optimizer_of(name).state[parameter].items()
        }
        # Older checkpoints have the moments of a gate as scalars. AdamW's step count has always been a scalar.
        counts = {key: value for key, value in tensors.items() if key.startswith("step.")}
        tensors = with_vector_gates(tensors) | counts
        problems += [f"missing {key}" for key in slots if key not in tensors]
        problems += [f"unexpected {key}" for key in tensors if key not in slots]
        for key in slots.keys() & tensors.keys():
            old, new = slots[key][2], tensors[key]
            if old.shape != new.shape or old.dtype != new.dtype:
                problems.append(f"{key} is {_kind(new)}, expected {_kind(old)}")
            elif not torch.isfinite(local(new)).all():
                problems.append(f"{key} has values that are not finite")
        if problems:
            shown = "; ".join(sorted(problems)[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
            raise ValueError(f"this optimizer state does not fit the model: {shown}. Nothing was loaded.")
        for key, (_, _, value) in slots.items():
            local(value).copy_(shard_like(tensors[key].to(value.device), value))

    def _optimizer_of(self, name: str) -> torch.optim.Optimizer:
        optimizer = self.muon if name in self.groups.get("matrix", ()) else self.adam
        assert optimizer is not None
        return optimizer

    def _fresh_state(self, name: str) -> dict[str, Tensor]:
        parameter = self.parameters[name].detach()
        if name in self.groups.get("matrix", ()):
            return {"momentum": torch.zeros_like(parameter)}
        assert self.adam is not None
        # The state that AdamW would create in its first step.
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if self.adam.defaults["fused"] else "cpu")
        return dict(zip(ADAM_STATE, (step, torch.zeros_like(parameter), torch.zeros_like(parameter)), strict=True))

    def _weight_decay(self, group: str) -> float:
        return self.settings.weight_decay if group in ("embedding", "head") else 0.0


def _partition(tensors: Any) -> list[list[Tensor]]:
    """Splits tensors into plain ones and shards, without empty lists."""
    tensors = list(tensors)
    parts = ([tensor for tensor in tensors if isinstance(tensor, DTensor) is sharded] for sharded in (False, True))
    return [part for part in parts if part]


def _is_finite(grad: Tensor | None) -> bool:
    return grad is None or bool(torch.isfinite(local(grad)).all())


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
