"""The precision of a site: float32, or float64 for float64 streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING = nullcontext()


def widen(streams: Tensor) -> Tensor:
    """The streams in the precision of routing and mixing: float32, or float64 if they are."""
    return streams.to(torch.promote_types(streams.dtype, torch.float32))


def no_autocast(streams: Tensor) -> AbstractContextManager[Any]:
    """Autocast off on the device of the streams: routing and mixing are not for half precision."""
    device = streams.device.type
    # Skip the availability check on CPU, where call overhead matters.
    available = device == "cpu" or torch.amp.is_autocast_available(device)
    if not available or not torch.is_autocast_enabled(device):
        return _NOTHING
    return torch.autocast(device, enabled=False)
