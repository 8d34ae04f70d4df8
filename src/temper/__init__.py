"""TEMPER: hyper-connections for PyTorch, with every generator, every mixer and any number of streams.

config = temper.preset("temper-tucker", num_streams=4, dim=768)
site = temper.HyperConnection(config, layer_index=0, branch=attention)
streams = temper.expand_streams(x, config.num_streams)
x = temper.reduce_streams(site(streams))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from temper.config import PRESETS, Choice, Cost, RouterConfig, cost, count_parameters, preset
from temper.connection import HyperConnection
from temper.generators import Generator
from temper.mixers import Mixer
from temper.observe import observe
from temper.ops.backend import list_backends, use_backend
from temper.param_groups import param_groups
from temper.pretrained import load_pretrained
from temper.recompute import recompute
from temper.streams import Routing, expand_streams, reduce_streams
from temper.wrap import unwrap, wrap

if TYPE_CHECKING:
    from temper import convert, theory

__version__ = "0.1.0"

# Short aliases.
backend, backends = use_backend, list_backends

__all__ = [
    "PRESETS",
    "Choice",
    "Cost",
    "Generator",
    "HyperConnection",
    "Mixer",
    "RouterConfig",
    "Routing",
    "backend",
    "backends",
    "convert",
    "cost",
    "count_parameters",
    "expand_streams",
    "list_backends",
    "load_pretrained",
    "observe",
    "param_groups",
    "preset",
    "recompute",
    "reduce_streams",
    "theory",
    "unwrap",
    "use_backend",
    "wrap",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that training alone does not pay for them.
    if name in ("convert", "theory"):
        return importlib.import_module(f"temper.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
