"""The cost of hyper-connections in time and memory, as ratios within one interleaved run."""

from temper_lab.bench.benchmark import bench
from temper_lab.bench.cases import PARTS, Setting

__all__ = ["PARTS", "Setting", "bench"]
