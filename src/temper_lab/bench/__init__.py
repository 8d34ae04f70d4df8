"""What hyper-connections cost in time and memory, as ratios within one interleaved run."""

from temper_lab.bench.run import bench
from temper_lab.bench.setting import PARTS, Setting

__all__ = ["PARTS", "Setting", "bench"]
