"""Hyper-connections by others, as they are installed: PyPI's `hyper-connections`."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor, nn

PACKAGE = "hyper-connections"
# Our name for each of its classes.
CLASSES = {"pypi-hc": "HyperConnections", "pypi-mhc": "ManifoldConstrainedHyperConnections"}


def find() -> tuple[str | None, dict[str, type[nn.Module]]]:
    """Its version, or None if it is not installed, and its classes by our names."""
    try:
        module = importlib.import_module(PACKAGE.replace("-", "_"))
        found = version(PACKAGE)
    except (ImportError, PackageNotFoundError):
        return None, {}
    return found, {name: getattr(module, cls) for name, cls in CLASSES.items() if hasattr(module, cls)}


class PeerSite(nn.Module):
    """One of their sites under the names of ours. Its streams are (B N, T, D)."""

    def __init__(self, name: str, num_streams: int, width: int, layer_index: int) -> None:
        super().__init__()
        self.site = find()[1][name](num_streams, dim=width, layer_index=layer_index)

    def begin(self, streams: Tensor) -> tuple[Tensor, Any]:
        return self.site(streams)

    def finish(self, add: Any, y: Tensor, *, in_place: bool = False) -> Tensor:
        return add(y)
