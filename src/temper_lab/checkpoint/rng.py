"""The state of every random number generator as JSON, so that a resumed run draws the same numbers."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rng_state() -> dict[str, Any]:
    """The generators of this process: python, numpy if it is in use, torch, and CUDA if it is in use."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss], "torch": _encode(torch.get_rng_state())}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tolist(), *rest]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [_encode(part) for part in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts every generator back. CUDA's are left out on a machine without it."""
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(_decode(state["torch"]))
        if "numpy" in state:
            import numpy

            numpy.random.set_state(tuple(state["numpy"]))
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state_all([_decode(part) for part in state["cuda"]])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, AttributeError, IndexError) as error:
        raise ValueError(f"this is not the state of random number generators: {error!r}") from error


def _encode(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _decode(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
