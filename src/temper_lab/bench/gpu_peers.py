"""Other packages' kernels for mHC, called as they document it, to be timed beside ours where they are installed.

None of them has been run here on a GPU. Whatever goes wrong with one is recorded in its row and ends nothing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# A whole site around the branch f(x) = x + y: the next streams from streams and y.
Site = Callable[[Tensor, Tensor], Tensor]


class Peer(NamedTuple):
    """Another package.

    Args:
        package: the name it is installed by.
        module: what is imported of it.
        site: a site from that module, the number of streams, the width and the device.
        features_first: whether its streams are (T, D, N) instead of (T, N, D).
    """

    package: str
    module: str
    site: Callable[[Any, int, int, torch.device], Site]
    features_first: bool


class _Branch(nn.Module):
    y: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.y


def _liger(module: Any, num_streams: int, dim: int, device: torch.device) -> Site:
    branch = _Branch()
    layer = module.LigerMHC(branch, hc=num_streams, c=dim, phi_dtype=torch.bfloat16).to(device)

    def run(streams: Tensor, y: Tensor) -> Tensor:
        branch.y = y
        result: Tensor = layer(streams)
        return result

    return run


def _transformer_engine(module: Any, num_streams: int, dim: int, device: torch.device) -> Site:
    n, logits = num_streams, num_streams**2 + 2 * num_streams

    def weight(*shape: int, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return (scale * torch.randn(shape, device=device)).to(dtype).requires_grad_()

    phi = weight(logits, n * dim, scale=0.02, dtype=torch.bfloat16)
    alpha, beta = weight(3, scale=1.0), weight(1, logits, scale=0.1)

    def call(name: str, *args: Any) -> Any:
        function = getattr(module, name)
        # Some versions take n, some read it from the shapes.
        return function(*args, **({"n": n} if "n" in inspect.signature(function).parameters else {}))

    def run(streams: Tensor, y: Tensor) -> Tensor:
        x, tokens = streams.unsqueeze(1), len(streams)
        projected, squares = call("mhc_fused_projection", streams.reshape(tokens, dim * n), phi)
        pre, post, res = call("mhc_fused_scale", projected, alpha, beta, squares)
        mixed = call("mhc_fused_sinkhorn", res.reshape(tokens, 1, n, n))
        read = call("mhc_fused_aggregate", x, pre.reshape(tokens, 1, n))
        branch = read + y.unsqueeze(1)
        out: Tensor = call("mhc_fused_expand_combine", branch, None, post.reshape(tokens, 1, n), x, mixed)
        return out.squeeze(1)

    return run


PEERS = (
    Peer("liger-kernel", "liger_kernel.transformers.mhc", _liger, False),
    Peer("transformer-engine", "transformer_engine.pytorch.triton.mhc", _transformer_engine, True),
)


def steps(streams: Tensor, y: Tensor, grad: Tensor) -> dict[str, Callable[[], None] | str]:
    """Forward and backward of a site by package, for those that are installed; or what is wrong with it."""
    found: dict[str, Callable[[], None] | str] = {}
    for peer in PEERS:
        try:
            step = _step(peer, streams, y, grad)
        except Exception as error:  # foreign code may fail in any way, and our report should go on
            found[peer.package] = f"{type(error).__name__}: {error}"[:500]
        else:
            if step is not None:
                found[peer.package] = step
    return found


def _step(peer: Peer, streams: Tensor, y: Tensor, grad: Tensor) -> Callable[[], None] | None:
    try:
        module = importlib.import_module(peer.module)
    except ModuleNotFoundError as error:
        if error.name == peer.module.split(".")[0]:
            return None
        raise
    if peer.features_first:
        streams, grad = streams.mT.contiguous(), grad.mT.contiguous()
    with torch.enable_grad():
        site = peer.site(module, streams.shape[2 if peer.features_first else 1], y.shape[1], streams.device)
        leaf = streams.detach().requires_grad_()

    def step() -> None:
        leaf.grad = None
        with torch.enable_grad():
            site(leaf, y).backward(grad)

    step()
    if leaf.grad is None or not leaf.grad.isfinite().all():
        raise ValueError("the gradient of the streams is not finite")
    return step
