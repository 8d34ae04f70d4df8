"""Every method by name: one line each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from temper.config import HEADS, Choice, RouterConfig, option_defaults, takes_logits
from temper.generators import Generator
from temper.mixers import Mixer
from temper.registry import unknown

PRESETS: dict[str, dict[str, Any]] = {
    "residual": {"generator": None, "mixer": None},
    "hc": {
        "generator": "per-stream",
        "mixer": "unconstrained",
        "gates": "tanh",
        "norm": "per-stream",
        "gain": "feature",
    },
    "mhc": {"generator": "dense", "mixer": "sinkhorn"},
    "mhc-identity": {"generator": "dense", "mixer": "identity"},
    "mhc-lite": {"generator": "dense", "mixer": "birkhoff"},
    "kromhc": {"generator": "dense", "mixer": "kronecker"},
    "temper-cp": {"generator": "cp", "mixer": "sinkhorn"},
    "temper-tucker": {"generator": "tucker", "mixer": "sinkhorn"},
    "temper-tt": {"generator": "tt", "mixer": "sinkhorn"},
    "temper-tucker-frozen": {"generator": Choice("tucker", freeze_core=True), "mixer": "sinkhorn"},
    "temper-tucker-res": {"generator": "dense", "res": "tucker", "mixer": "sinkhorn"},
    "temper-cp-krom": {"generator": "cp", "mixer": "kronecker"},
    "temper-tucker-krom": {"generator": "tucker", "mixer": "kronecker"},
    "temper-slim": {"generator": "cp", "mixer": "kronecker", "gain": "none"},
}


def preset(name: str, *, num_streams: int, dim: int, **overrides: Any) -> RouterConfig:
    """The configuration of a method, with optional overrides.

    Args:
        name: one of `temper.PRESETS`.
        num_streams: N. A residual network has one stream, whatever N is asked for.
        dim: the width of each stream.
        overrides: fields of `RouterConfig` (`mixer="kronecker"`, `gain="none"`,
            `res=Choice("cp", rank=8)`), `generator=` for all three heads at once, or an option of a
            generator or mixer (`rank=8`, `init_std=0.02`, `freeze_core=True`, `iters=50`), which goes
            to every part that has it.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    known = [field.name for field in fields(RouterConfig)]
    values = {**PRESETS[name], **{key: value for key, value in overrides.items() if key in [*known, "generator"]}}
    options = {key: value for key, value in overrides.items() if key not in values}
    if "generator" in overrides:
        # All three heads at once, overriding the preset's choice for any of them.
        values = {key: value for key, value in values.items() if key not in HEADS or key in overrides}
    generator = values.pop("generator")
    parts = {head: values.pop(head, generator) for head in HEADS} | {"mixer": values.pop("mixer")}
    if all(part is None for part in parts.values()):
        if options:
            raise unknown(f"option of the preset {name}", next(iter(options)), known)
        # Validated as given, then set to one: the streams of a residual network would only be copies.
        RouterConfig(num_streams=num_streams, dim=dim, **values)
        return RouterConfig(num_streams=1, dim=dim, **values)
    if parts["mixer"] is not None and not takes_logits(parts["mixer"], num_streams):
        # Without logits, a generator that was not requested by name is dropped.
        parts["res"] = overrides.get("res")
    choices: dict[str, Any] = {key: Choice.of(part) for key, part in parts.items() if part is not None}
    for option, value in options.items():
        takers = {key for key, choice in choices.items() if option in option_defaults(_component(key, choice))}
        if not takers:
            every = {o for key, choice in choices.items() for o in option_defaults(_component(key, choice))}
            raise unknown(f"option of the preset {name}", option, [*known, "generator", *every])
        choices |= {key: choices[key].using(**{option: value}) for key in takers}
    return RouterConfig(num_streams=num_streams, dim=dim, **choices, **values)


def _component(part: str, choice: Choice) -> type[Generator] | type[Mixer]:
    return Mixer.named(choice.name) if part == "mixer" else Generator.named(choice.name)
