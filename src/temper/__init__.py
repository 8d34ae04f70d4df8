"""TEMPER: hyper-connections for PyTorch, with every generator, every mixer and any number of streams.

config = temper.preset("temper-tucker", num_streams=4, dim=768)
site = temper.HyperConnection(config, layer_index=0, branch=attention)
streams = temper.expand_streams(x, config.num_streams)
x = temper.reduce_streams(site(streams))
"""

from temper import convert
from temper.config import Choice, RouterConfig, count_parameters
from temper.connection import HyperConnection
from temper.cost import Cost, cost
from temper.diagnostics import observe
from temper.generators import Generator
from temper.mixers import Mixer
from temper.param_groups import param_groups
from temper.presets import PRESETS, preset
from temper.routing import Routing
from temper.streams import expand_streams, reduce_streams
from temper.wrap import wrap

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Choice",
    "Cost",
    "Generator",
    "HyperConnection",
    "Mixer",
    "RouterConfig",
    "Routing",
    "convert",
    "cost",
    "count_parameters",
    "expand_streams",
    "observe",
    "param_groups",
    "preset",
    "reduce_streams",
    "wrap",
]
