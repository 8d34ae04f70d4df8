"""Weights of other hyper-connection implementations: loading them and writing them.

Their matrix A is applied transposed, H'[t] = sum_s A[s, t] H[s], so our res[t, s] is their A[s, t].
Letters: N streams, D features, c = N * D, s and t source and destination stream as they name them.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from temper.config import HEADS, RouterConfig, preset
from temper.connection import HyperConnection
from temper.registry import Registered

# Our weights in plain form: dense (N, D, *out_modes) tensors, biases, gates and the gain, by state-dict name.
Weights = dict[str, Tensor]


def load_foreign(
    source: str, state_dict: Mapping[str, Tensor], *, num_streams: int, dim: int, **overrides: Any
) -> HyperConnection:
    """A hyper-connection equivalent to another implementation's module with these weights.

    Args:
        source: "hyper_conn.mhc", "hyper_conn.mhc_lite", "hyper_conn.kromhc", "deepseek_v4", "megatron.mhc" or
            "megatron.mhc_guarded".
        state_dict: of one of their hyper-connection modules; keys below `branch.` are ignored.
        overrides: non-default settings that their state dict does not hold, as
            options of `temper.preset`: `iters=10`, or DeepSeek's `eps=1e-5, pre_eps=1e-5`.
    """
    foreign = Foreign.named(source)
    # Checks both numbers first: the implementations below divide by them.
    RouterConfig(num_streams=num_streams, dim=dim)
    config = foreign.config(num_streams, dim, overrides)
    external = _checked(foreign, state_dict, num_streams, dim)
    own = foreign.to_temper(external, num_streams, dim)
    with torch.device("meta"):
        site = HyperConnection(config)
    first = next(iter(external.values()))
    site = site.to(first.dtype).to_empty(device=first.device)
    site.load_state_dict(own)
    return site


def export_foreign(target: str, site: HyperConnection, **overrides: Any) -> Weights:
    """The state dict with which another implementation's module computes what `site` computes.

    Any generator is written as the dense tensor it represents. A site that computes something their module
    has no setting for (another mixer, another guard against zero) is a ValueError that says what differs.

    Args:
        overrides: as for `load_foreign`, the settings of the module that will hold the weights.
    """
    foreign = Foreign.named(target)
    if not isinstance(site, HyperConnection):
        raise TypeError(f"export_foreign wants a HyperConnection, got {type(site).__name__}")
    config = site.config
    if config.is_residual:
        raise ValueError("a plain residual has no weights to export")
    expected = foreign.config(config.num_streams, config.dim, overrides)
    given, wanted = config.to_dict(), expected.to_dict()
    skipped = {*HEADS, "gain"}
    different = [
        f"{key} is {given[key]}, theirs {wanted[key]}"
        for key in given
        if key not in skipped and given[key] != wanted[key]
    ]
    if different:
        raise ValueError(
            f"{target} cannot hold this site: {'; '.join(different)}. Build it with these settings "
            "(temper.preset takes them as overrides), or name theirs if they are not the usual ones."
        )
    weights: Weights = {}
    with torch.no_grad():
        for name in HEADS:
            head = getattr(site, name)
            weights |= {f"{name}.gate": head.gate, f"{name}.bias": head.bias}
            weights[f"{name}.generator.weight"] = head.generator.to_dense()
        gain = site.norm.gain()
        weights["norm.weight"] = (
            torch.ones_like(weights["pre.generator.weight"][..., 0])
            if gain is None
            else gain.expand(config.num_streams, config.dim)
        )
        external = foreign.to_foreign(weights, config.num_streams, config.dim)
    return {key: tensor.detach().clone().contiguous() for key, tensor in external.items()}


class Foreign(Registered, ABC, family="foreign source"):
    """One other implementation: its settings and state-dict layout."""

    @classmethod
    @abstractmethod
    def config(cls, num_streams: int, dim: int, overrides: dict[str, Any]) -> RouterConfig:
        """The equivalent configuration of this library."""

    @classmethod
    @abstractmethod
    def shapes(cls, num_streams: int, dim: int) -> dict[str, tuple[int, ...]]:
        """Their keys and shapes; () also takes any shape with one entry."""

    @classmethod
    @abstractmethod
    def to_temper(cls, external: Weights, num_streams: int, dim: int) -> Weights: ...

    @classmethod
    @abstractmethod
    def to_foreign(cls, own: Weights, num_streams: int, dim: int) -> Weights: ...


class HyperConn(Foreign):
    """The base of the three modules of the KromHC and mHC-lite repositories: norm, scales and post."""

    preset: str

    @classmethod
    def config(cls, num_streams: int, dim: int, overrides: dict[str, Any]) -> RouterConfig:
        # x / max(||x||, 1e-12) * sqrt(c), said of the mean square.
        norm = {"norm_eps": 1e-24 / (num_streams * dim), "norm_clamp": True}
        return _routed(cls.name, cls.preset, num_streams, dim, norm | overrides)

    @classmethod
    def shapes(cls, num_streams: int, dim: int) -> dict[str, tuple[int, ...]]:
        width = num_streams * dim
        logits = cls.num_logits(num_streams)
        return {
            "norm.gamma": (width,),
            "pre_branch_scale": (),
            "residual_scale": (),
            "h_post_scale": (),
            "static_alpha": (num_streams + logits,),
            "dynamic_alpha_fn": (width, num_streams + logits),
            "static_beta": (num_streams,),
            "dynamic_beta_fn": (width, num_streams),
        }

    @classmethod
    @abstractmethod
    def num_logits(cls, num_streams: int) -> int: ...

    @classmethod
    @abstractmethod
    def split(cls, alpha: Tensor, num_streams: int) -> tuple[Tensor, Tensor]:
        """Their (..., pre and res) columns as our pre (..., N) and res (..., *logit_shape)."""

    @classmethod
    @abstractmethod
    def join(cls, pre: Tensor, res: Tensor, num_streams: int) -> Tensor:
        """The inverse of `split`."""

    @classmethod
    def to_temper(cls, external: Weights, num_streams: int, dim: int) -> Weights:
        modes = (num_streams, dim)
        pre, res = cls.split(external["dynamic_alpha_fn"].unflatten(0, modes), num_streams)
        pre_bias, res_bias = cls.split(external["static_alpha"].flatten(), num_streams)
        return {
            "norm.weight": 1 + external["norm.gamma"].view(modes),
            "pre.gate": external["pre_branch_scale"].view(1),
            "pre.bias": pre_bias,
            "pre.generator.weight": pre,
            "res.gate": external["residual_scale"].view(1),
            "res.bias": res_bias,
            "res.generator.weight": res,
            "post.gate": external["h_post_scale"].view(1),
            "post.bias": external["static_beta"],
            "post.generator.weight": external["dynamic_beta_fn"].unflatten(0, modes),
        }

    @classmethod
    def to_foreign(cls, own: Weights, num_streams: int, dim: int) -> Weights:
        alpha = cls.join(own["pre.generator.weight"], own["res.generator.weight"], num_streams)
        static = cls.join(own["pre.bias"], own["res.bias"], num_streams)
        return {
            "norm.gamma": (own["norm.weight"] - 1).flatten(),
            "pre_branch_scale": own["pre.gate"],
            "residual_scale": own["res.gate"],
            "h_post_scale": own["post.gate"].view(()),
            "static_alpha": static.view(cls.shapes(num_streams, dim)["static_alpha"]),
            "dynamic_alpha_fn": alpha.flatten(0, 1),
            "static_beta": own["post.bias"],
            "dynamic_beta_fn": own["post.generator.weight"].flatten(0, 1),
        }


class MHC(HyperConn, name="hyper_conn.mhc"):
    """alpha[s, (pre, res over t)]; Sinkhorn over s, then over t: our rows first, our columns last."""

    preset = "mhc"

    @classmethod
    def config(cls, num_streams: int, dim: int, overrides: dict[str, Any]) -> RouterConfig:
        return super().config(num_streams, dim, {"last": "columns"} | overrides)

    @classmethod
    def shapes(cls, num_streams: int, dim: int) -> dict[str, tuple[int, ...]]:
        return super().shapes(num_streams, dim) | {"static_alpha": (num_streams, 1 + num_streams)}

    @classmethod
    def num_logits(cls, num_streams: int) -> int:
        return num_streams**2

    @classmethod
    def split(cls, alpha: Tensor, num_streams: int) -> tuple[Tensor, Tensor]:
        alpha = alpha.unflatten(-1, (num_streams, 1 + num_streams))
        return alpha[..., 0], alpha[..., 1:].transpose(-2, -1)

    @classmethod
    def join(cls, pre: Tensor, res: Tensor, num_streams: int) -> Tensor:
        return torch.cat([pre.unsqueeze(-1), res.transpose(-2, -1)], dim=-1).flatten(-2)


class MHCLite(HyperConn, name="hyper_conn.mhc_lite"):
    """alpha = (pre, one logit per permutation); a transposed permutation is its inverse."""

    preset = "mhc-lite"

    @classmethod
    def num_logits(cls, num_streams: int) -> int:
        return math.factorial(num_streams)

    @classmethod
    def split(cls, alpha: Tensor, num_streams: int) -> tuple[Tensor, Tensor]:
        return alpha[..., :num_streams], alpha[..., num_streams:][..., _inverses(num_streams)]

    @classmethod
    def join(cls, pre: Tensor, res: Tensor, num_streams: int) -> Tensor:
        return torch.cat([pre, res[..., _inverses(num_streams)]], dim=-1)


class KromHC(HyperConn, name="hyper_conn.kromhc"):
    """alpha = (pre, identity and swap of each factor), the leftmost factor first; here it is the last."""

    preset = "kromhc"

    @classmethod
    def config(cls, num_streams: int, dim: int, overrides: dict[str, Any]) -> RouterConfig:
        if isinstance(num_streams, int) and num_streams & (num_streams - 1):
            raise ValueError(f"num_streams is {num_streams}; {cls.name} exists for powers of two only")
        return super().config(num_streams, dim, overrides)

    @classmethod
    def num_logits(cls, num_streams: int) -> int:
        return 2 * (num_streams.bit_length() - 1)

    @classmethod
    def split(cls, alpha: Tensor, num_streams: int) -> tuple[Tensor, Tensor]:
        return alpha[..., :num_streams], _reverse_pairs(alpha[..., num_streams:])

    @classmethod
    def join(cls, pre: Tensor, res: Tensor, num_streams: int) -> Tensor:
        return torch.cat([pre, _reverse_pairs(res)], dim=-1)


class DeepseekV4(Foreign, name="deepseek_v4"):
    """transformers' DeepseekV4HyperConnection: rows pre, post, comb[s, t]; no gain; 1e-6 in many places."""

    @classmethod
    def config(cls, num_streams: int, dim: int, overrides: dict[str, Any]) -> RouterConfig:
        guards = {"gain": "none", "norm_eps": 1e-6, "eps": 1e-6, "pre_eps": 1e-6}
        return _routed(cls.name, "mhc", num_streams, dim, guards | overrides)

    @classmethod
    def shapes(cls, num_streams: int, dim: int) -> dict[str, tuple[int, ...]]:
        rows = num_streams * (2 + num_streams)
        return {"fn": (rows, num_streams * dim), "base": (rows,), "scale": (3,)}

    @classmethod
    def to_temper(cls, external: Weights, num_streams: int, dim: int) -> Weights:
        own: Weights = {}
        sizes = [num_streams, num_streams, num_streams**2]
        parts = zip(external["fn"].split(sizes), external["base"].split(sizes), external["scale"], strict=True)
        for name, (rows, bias, scale) in zip(("pre", "post", "res"), parts, strict=True):
            weight = rows.T.unflatten(0, (num_streams, dim))
            if name == "res":
                weight = weight.unflatten(-1, (num_streams, num_streams)).transpose(-2, -1)
                bias = bias.view(num_streams, num_streams).T
            own |= {f"{name}.gate": scale.view(1), f"{name}.bias": bias, f"{name}.generator.weight": weight}
        return own

    @classmethod
    def to_foreign(cls, own: Weights, num_streams: int, dim: int) -> Weights:
        fn, base = [], []
        for name in ("pre", "post", "res"):
            weight, bias = own[f"{name}.generator.weight"], own[f"{name}.bias"]
            if name == "res":
                weight, bias = weight.transpose(-2, -1), bias.T
            # Their module has no gain: fold it into the weights that follow.
            fn.append((weight.flatten(2) * own["norm.weight"].unsqueeze(-1)).flatten(0, 1).T)
            base.append(bias.flatten())
        gates = [own[f"{name}.gate"] for name in ("pre", "post", "res")]
        return {"fn": torch.cat(fn), "base": torch.cat(base), "scale": torch.cat(gates)}


class Megatron(Foreign, name="megatron.mhc"):
    """Megatron-Core's HyperConnectionModule of August 2026: rows pre, post, res[m, n]; no gain; guards by clamping."""

    @classmethod
    def config(cls, num_streams: int, dim: int, overrides: dict[str, Any]) -> RouterConfig:
        guards = {"gain": "none", "norm_eps": 1e-6, "norm_outside": True, "eps": 1e-6, "clamp": True}
        return _routed(cls.name, "mhc", num_streams, dim, guards | {"last": "columns"} | overrides)

    @classmethod
    def shapes(cls, num_streams: int, dim: int) -> dict[str, tuple[int, ...]]:
        rows = num_streams * (2 + num_streams)
        gates = {f"alpha_{name}": (1,) for name in ("pre", "post", "res")}
        return {"mapping_proj.weight": (rows, num_streams * dim), "bias": (rows,), **gates}

    @classmethod
    def to_temper(cls, external: Weights, num_streams: int, dim: int) -> Weights:
        own: Weights = {}
        sizes = [num_streams, num_streams, num_streams**2]
        parts = zip(external["mapping_proj.weight"].split(sizes), external["bias"].split(sizes), strict=True)
        for name, (rows, bias) in zip(("pre", "post", "res"), parts, strict=True):
            out = (num_streams, num_streams) if name == "res" else (num_streams,)
            own[f"{name}.gate"] = external[f"alpha_{name}"]
            own[f"{name}.bias"] = bias.view(out)
            own[f"{name}.generator.weight"] = rows.T.unflatten(0, (num_streams, dim)).unflatten(-1, out)
        return own

    @classmethod
    def to_foreign(cls, own: Weights, num_streams: int, dim: int) -> Weights:
        rows, bias = [], []
        for name in ("pre", "post", "res"):
            # They have no gain: it goes into the weights that follow it.
            weight = own[f"{name}.generator.weight"].flatten(2) * own["norm.weight"].unsqueeze(-1)
            rows.append(weight.flatten(0, 1).T)
            bias.append(own[f"{name}.bias"].flatten())
        gates = {f"alpha_{name}": own[f"{name}.gate"] for name in ("pre", "post", "res")}
        return {"mapping_proj.weight": torch.cat(rows), "bias": torch.cat(bias), **gates}


class MegatronGuarded(Megatron, name="megatron.mhc_guarded"):
    """Megatron-Core's module since it follows DeepSeek-V4: res[s, t], softmax + 1e-6, and 1e-6 on every read weight."""

    @classmethod
    def config(cls, num_streams: int, dim: int, overrides: dict[str, Any]) -> RouterConfig:
        guards = {"gain": "none", "norm_eps": 1e-6, "norm_outside": True, "eps": 1e-6, "pre_eps": 1e-6}
        return _routed(cls.name, "mhc", num_streams, dim, guards | overrides)

    @classmethod
    def to_temper(cls, external: Weights, num_streams: int, dim: int) -> Weights:
        return _turned(super().to_temper(external, num_streams, dim))

    @classmethod
    def to_foreign(cls, own: Weights, num_streams: int, dim: int) -> Weights:
        return super().to_foreign(_turned(own), num_streams, dim)


def _turned(weights: Weights) -> Weights:
    """The same weights with the logits of res transposed."""
    return weights | {key: weights[key].transpose(-2, -1) for key in ("res.bias", "res.generator.weight")}


def _routed(source: str, name: str, num_streams: int, dim: int, settings: dict[str, Any]) -> RouterConfig:
    config = preset(name, num_streams=num_streams, dim=dim, **settings)
    if config.is_residual:
        raise ValueError(
            f"num_streams is {num_streams}; one stream is the plain residual here, while {source} "
            "still scales it. Two or more streams convert."
        )
    return config


def _checked(foreign: type[Foreign], state_dict: Mapping[str, Tensor], num_streams: int, dim: int) -> Weights:
    """Their tensors in one dtype; raises ValueError with every mismatch of keys, shapes and dtypes."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a mapping of names to tensors, got {type(state_dict).__name__}")
    if strange := [key for key in state_dict if not isinstance(key, str)]:
        raise ValueError(f"a key of state_dict is {strange[0]!r}; expected names")
    given = {key: value for key, value in state_dict.items() if not key.startswith("branch.")}
    shapes = foreign.shapes(num_streams, dim)
    problems = [f"missing {key} {shape}" for key, shape in shapes.items() if key not in given]
    problems += [f"unexpected {key}" for key in given if key not in shapes]
    for key, shape in shapes.items():
        value = given.get(key)
        if value is None:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            problems.append(f"{key} is not a floating-point tensor")
        elif value.numel() != 1 if shape == () else tuple(value.shape) != shape:
            problems.append(f"{key} is {tuple(value.shape)}, expected {shape}")
        elif not torch.isfinite(value).all():
            problems.append(f"{key} has values that are not finite")
    if problems:
        raise ValueError(
            f"these are not the weights of {foreign.name} with num_streams={num_streams} and dim={dim}: "
            f"{'; '.join(problems)}"
        )
    dtype = torch.float32
    for key in shapes:
        dtype = torch.promote_types(dtype, given[key].dtype)
    return {key: given[key].detach().to(dtype).view(shape) for key, shape in shapes.items()}


def _inverses(num_streams: int) -> list[int]:
    """The index of every permutation's inverse, in the order of `itertools.permutations`."""
    order = list(itertools.permutations(range(num_streams)))
    index = {permutation: k for k, permutation in enumerate(order)}
    return [index[tuple(sorted(range(num_streams), key=permutation.__getitem__))] for permutation in order]


def _reverse_pairs(logits: Tensor) -> Tensor:
    return logits.unflatten(-1, (-1, 2)).flip(-2).flatten(-2)
