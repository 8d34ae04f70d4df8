"""Tile sizes of each kernel, by target and number of streams.

The numbers come from compiling ahead of time, without a GPU: no spill, few registers, many bytes in flight.
`temper gpu-check --tune` measures others on a GPU and writes a file; the variable TEMPER_TILES names it. There is no
autotuning while training: it would time in the middle of a step and let sums depend on what was fastest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from temper.registry import check_int

VARIABLE, MAX_CHARS = "TEMPER_TILES", 1 << 20
# Targets that are compiled and checked; other GPUs use the nearest one that is not newer.
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
# Tiles for tests: a few tokens already fill several blocks.
SMALL = "small"


class Tile(NamedTuple):
    """Tokens and features of a block; warps and pipeline stages."""

    tokens: int
    features: int = 0
    warps: int = 4
    stages: int = 3


# By NP, the number of streams padded to a power of two.
_BY_STREAMS: dict[int, dict[str, Tile]] = {
    2: {
        "write_project": Tile(16, 32, 4, 2),
        "streams_write_backward": Tile(16, 32, 2, 1),
        "write": Tile(4, 256),
        "write_backward": Tile(4, 256),
        "read_backward": Tile(4, 256),
        "streams_backward": Tile(16, 64, 4, 1),
        "route": Tile(64),
        "route_backward": Tile(64),
    },
    4: {
        "write_project": Tile(16, 32, 4, 2),
        "streams_write_backward": Tile(16, 32, 4, 1),
        "write": Tile(4, 256),
        "write_backward": Tile(4, 128),
        "read_backward": Tile(4, 256),
        "streams_backward": Tile(16, 64, 4, 1),
        "route": Tile(32),
        "route_backward": Tile(16),
    },
    8: {
        "write_project": Tile(16, 16, 8, 1),
        "streams_write_backward": Tile(16, 16, 8, 1),
        "write": Tile(4, 256),
        "write_backward": Tile(4, 128),
        "read_backward": Tile(4, 256),
        "streams_backward": Tile(16, 32, 8, 1),
        "route": Tile(8),
        "route_backward": Tile(8),
    },
    16: {
        "write_project": Tile(16, 16, 16, 1),
        "streams_write_backward": Tile(16, 16, 16, 1),
        "write": Tile(4, 64),
        "write_backward": Tile(2, 128),
        "read_backward": Tile(4, 128),
        "streams_backward": Tile(16, 16, 8, 1),
        "route": Tile(8, 0, 8),
        "route_backward": Tile(4, 0, 8),
    },
}
_ALWAYS = {
    "read": Tile(4, 256),
    "project": Tile(64, 64),
    "maps_backward": Tile(64, 128),
    "heads_backward": Tile(32, 32),
    "split_maps": Tile(1024),
}
# Exceptions for single targets: by NP, or None for all.
_OTHERWISE: dict[str, dict[tuple[int | None, str], Tile]] = {
    "sm_80": {
        (None, "maps_backward"): Tile(64, 128, 8),
        (4, "streams_backward"): Tile(16, 64, 8, 1),
    },
    "sm_100": {
        (None, "project"): Tile(32, 64, 2),
        (8, "write_backward"): Tile(2, 128),
        (8, "write_project"): Tile(16, 16, 8, 1),
    },
}
# For float32 streams, by NP, or None for all. Elsewhere they take half as many features as bfloat16, which makes the
# same bytes.
_FLOAT32: dict[tuple[int | None, str], Tile] = {
    (None, "maps_backward"): Tile(64, 64, 8),
    (None, "project"): Tile(64, 32),
    (4, "write_project"): Tile(16, 16, 8, 2),
    (4, "streams_write_backward"): Tile(16, 16, 8, 1),
    (8, "streams_write_backward"): Tile(16, 16, 16, 1),
    (8, "read_backward"): Tile(2, 128),
    (8, "write_backward"): Tile(4, 32),
    (16, "write_backward"): Tile(1, 32),
}
# Chained kernels that do not fit with float32 streams, which take three products each; the two parts run instead.
_TOO_LARGE = {(8, "write_project"), (16, "write_project"), (16, "streams_write_backward")}
_SMALL = {
    "write_project": Tile(16, 32),
    "streams_write_backward": Tile(16, 32),
    "write": Tile(4, 32),
    "write_backward": Tile(4, 32),
    "read": Tile(4, 32),
    "read_backward": Tile(4, 32),
    "streams_backward": Tile(16, 32),
    "project": Tile(16, 32),
    "maps_backward": Tile(16, 32),
    "heads_backward": Tile(16, 16),
    "split_maps": Tile(64),
    "route": Tile(8),
    "route_backward": Tile(8),
}
NAMES = tuple(sorted(_SMALL))

# The target used without a GPU: sm_90 for counting and compiling, any for tests.
elsewhere = "sm_90"


# Replacements of the table set by `trying`.
_tried: dict[str, Tile] = {}


@contextmanager
def trying(name: str, instead: Tile) -> Iterator[None]:
    """Overrides the tile of one kernel, on every GPU and for every number of streams."""
    _tried[name] = instead
    try:
        yield
    finally:
        del _tried[name]


def tile(name: str, padded: int, target: str, wide_streams: bool = False) -> Tile:
    """The tile of a kernel.

    Args:
        padded: NP.
        wide_streams: streams of four bytes.
    """
    found = _tried.get(name) or _table(target).get((padded, name)) or _table(target).get((None, name))
    if found is None:
        raise KeyError(f"no tile for {name} with {padded} streams on {target}")
    if wide_streams and target != SMALL and name not in _tried:
        halved = found._replace(features=found.features // 2) if found.features > 16 else found
        found = _FLOAT32.get((padded, name)) or _FLOAT32.get((None, name), halved)
    return found


def check_file(device: torch.device) -> None:
    """Raises a ValueError if TEMPER_TILES is not a file of tiles."""
    _table(target_of(device))


def fits(name: str, padded: int, target: str, wide_streams: bool) -> bool:
    """Whether a chained kernel has enough registers."""
    return target == SMALL or not wide_streams or (padded, name) not in _TOO_LARGE


@cache
def _table(target: str) -> dict[tuple[int | None, str], Tile]:
    if target == SMALL:
        return {(None, name): value for name, value in _SMALL.items()}
    table: dict[tuple[int | None, str], Tile] = {(None, name): value for name, value in _ALWAYS.items()}
    table |= {(n, name): value for n, tiles in _BY_STREAMS.items() for name, value in tiles.items()}
    return table | _OTHERWISE.get(target, {}) | _from_file(os.environ.get(VARIABLE), target)


def _from_file(path: str | None, target: str) -> dict[tuple[int | None, str], Tile]:
    """Tiles that `temper gpu-check --tune` wrote for this target."""
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            # A file of --tune has a few kilobytes.
            written = json.loads(file.read(MAX_CHARS))
        entries = written["tiles"].get(target, [])
        return {(entry["streams"], _known(entry["kernel"])): _tile(entry["tile"]) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{VARIABLE} is {path!r}, which is no file of tiles ({error}); `temper gpu-check --tune` writes one"
        ) from error


def _known(name: str) -> str:
    if name not in NAMES:
        raise ValueError(f"there is no kernel {name!r}")
    return name


def _tile(numbers: list[int]) -> Tile:
    found = Tile(*(check_int("a tile", number, 0, 4096) for number in numbers))
    if any(number & (number - 1) for number in found[:3]):
        raise ValueError(f"the tile {numbers} is not made of powers of two")
    return found


def target_of(device: torch.device) -> str:
    """The entry of TARGETS for a device; `elsewhere` if it is not a GPU."""
    return _target(device)


# The effect of torch.compiler.assume_constant_result, without importing the compiler. A cached function itself would be
# traced in spite of it.
target_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _target(device: torch.device) -> str:
    if device.type != "cuda":
        return elsewhere
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    known = [target for target in TARGETS if target.startswith("sm_") and int(target[3:]) <= 10 * major + minor]
    return known[-1] if known else TARGETS[0]
