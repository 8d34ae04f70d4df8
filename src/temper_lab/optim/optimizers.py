"""All optimizers of a model as one: groups, learning rates, schedule, clipping, state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from temper.gates import with_vector_gates
from temper_lab.optim.groups import GROUPS, assign
from temper_lab.optim.muon import Muon, local

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimSettings:
    """The optimizer part of a recipe. Learning rates are for 2^19 tokens a step.

    Args:
        matrix_lr: Muon, for the matrices inside the blocks.
        embedding_lr, head_lr: AdamW, for a width of 768.
        routing_lr: AdamW, for everything of the hyper-connections.
        vector_lr: AdamW, for whatever else there is.
        momentum_warmup: over how many steps Muon's momentum goes from `momentum_start` to `momentum`.
        betas, eps: of AdamW.
        weight_decay: of matrices, embeddings and head; routing and vectors have none.
        warmdown: the fraction of steps, at the end, in which learning rates fall to 0.
        clip: the largest norm of all gradients together, 0 for any.
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
        # TOML and JSON have lists only.
        object.__setattr__(self, "betas", tuple(self.betas))
        for name, value in (("momentum", self.momentum), ("momentum_start", self.momentum_start), *_pairs(self.betas)):
            if not isinstance(value, int | float) or not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}; expected a number in [0, 1)")
        if isinstance(self.ns_steps, bool) or not isinstance(self.ns_steps, int) or self.ns_steps < 1:
            raise ValueError(f"ns_steps is {self.ns_steps!r}; expected a whole number >= 1")
        if not isinstance(self.warmdown, int | float) or not 0 <= self.warmdown <= 1:
            raise ValueError(f"warmdown is {self.warmdown!r}; expected a fraction of the steps, 0 to 1")

    def lr_factor(self, step_index: int, total_steps: int) -> float:
        """1 until the warmdown, then straight down to 0, which the step after the last one would have."""
        if self.warmdown == 0:
            return 1.0
        return min(1.0, (total_steps - step_index) / (self.warmdown * total_steps))

    def momentum_at(self, step_index: int) -> float:
        """Muon's momentum: a young mean should forget faster."""
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

    Build it when the model is where it will train: on its device, and sharded if it will be.
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
            # The fused kernel takes shards or plain tensors, and not both at once.
            for members in _partition(named.values())
        ]
        self.muon = Muon([muon], ns_steps=settings.ns_steps) if matrices else None
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in self.parameters.values())
        self.adam = torch.optim.AdamW(adam, betas=settings.betas, eps=settings.eps, fused=fused) if adam else None
        # From the first step on, so that every state dict is complete.
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
        heads: Sequence[str] = (),
    ) -> Optimizers:
        """The optimizers of a model.

        Args:
            batch_tokens: tokens of one step over all ranks and accumulated batches.
            width: of the model.
            embeddings, heads: patterns of names, see `groups.assign`.
        """
        for name, value in (("batch_tokens", batch_tokens), ("width", width)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number >= 1")
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
        """Clips, updates every parameter, drops the gradients; returns the norm that they had before clipping.

        A norm that is not finite raises FloatingPointError, and nothing has changed.
        """
        self.set_schedule(step_index, total_steps)
        norm = self.clip()
        for optimizer in (self.muon, self.adam):
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return norm

    def set_schedule(self, step_index: int, total_steps: int) -> None:
        """Learning rates and momentum of one step, which depend on nothing but its number."""
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
        """Scales all gradients so that their norm together is at most `settings.clip`; the norm before that."""
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
        """All state as whole tensors by name, such as `exp_avg.head.weight`, and a description for JSON.

        Sharded state is gathered, so every rank has to call this.
        """
        tensors = {}
        for name, parameter in self.parameters.items():
            for key, value in self._optimizer_of(name).state[parameter].items():
                tensors[f"{key}.{name}"] = value.full_tensor() if isinstance(value, DTensor) else value
        return tensors, {
            "groups": {group: list(members) for group, members in self.groups.items()},
            "lrs": self.lrs,
            "settings": asdict(self.settings) | {"betas": list(self.settings.betas)},
        }

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, or raises ValueError and changes nothing.

        Groups, names and shapes must be the same; settings may differ, they are the recipe's.
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
        # Older checkpoints hold the moments of a gate as scalars. AdamW's number of steps has always been one.
        counts = {key: value for key, value in tensors.items() if key.startswith("step.")}
        tensors = with_vector_gates(tensors) | counts
        problems += [f"missing {key}" for key in slots if key not in tensors]
        problems += [f"unexpected {key}" for key in tensors if key not in slots]
        for key in slots.keys() & tensors.keys():
            old, new = slots[key][2], tensors[key]
            if old.shape != new.shape or old.dtype != new.dtype:
                problems.append(f"{key} is {_kind(new)}, expected {_kind(old)}")
            elif not torch.isfinite(new).all():
                problems.append(f"{key} has values that are not finite")
        if problems:
            shown = "; ".join(sorted(problems)[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
            raise ValueError(f"this optimizer state does not fit the model: {shown}. Nothing was loaded.")
        for key, (_, _, value) in slots.items():
            whole = tensors[key].to(value.device)
            if isinstance(value, DTensor):
                # Every rank has read the whole tensor, so each cuts out its own part.
                whole = distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)
            local(value).copy_(local(whole))

    def _optimizer_of(self, name: str) -> torch.optim.Optimizer:
        optimizer = self.muon if name in self.groups.get("matrix", ()) else self.adam
        assert optimizer is not None
        return optimizer

    def _fresh_state(self, name: str) -> dict[str, Tensor]:
        parameter = self.parameters[name].detach()
        if name in self.groups.get("matrix", ()):
            return {"momentum": torch.zeros_like(parameter)}
        assert self.adam is not None
        # What AdamW makes for itself in its first step.
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if self.adam.defaults["fused"] else "cpu")
        return dict(zip(ADAM_STATE, (step, torch.zeros_like(parameter), torch.zeros_like(parameter)), strict=True))

    def _weight_decay(self, group: str) -> float:
        return self.settings.weight_decay if group in ("embedding", "head") else 0.0


def _partition(tensors: Any) -> list[list[Tensor]]:
    """Plain tensors and shards apart, whichever there are."""
    tensors = list(tensors)
    parts = ([tensor for tensor in tensors if isinstance(tensor, DTensor) is sharded] for sharded in (False, True))
    return [part for part in parts if part]


def _is_finite(grad: Tensor | None) -> bool:
    return grad is None or bool(torch.isfinite(local(grad)).all())


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
