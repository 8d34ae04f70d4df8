"""All intermediate results of one site on given streams, in float64."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from temper.config import HEADS
from temper.connection import HyperConnection
from temper.router import Head

EPS = torch.finfo(torch.float64).eps


class View:
    """Everything between streams (..., N, D) and their routing.

    Args:
        site: in float64.
        hat: Hhat (..., N, D); size is ||H|| (...).
        dynamic: Z of each head, flat: (..., O).
        logits: a squash(Z) + b of each head, flat.
        weights: pre, res and post as `route` gives them, flat; res is the matrix (..., N, N).
        rounding: a bound on the rounding error of Z.
    """

    def __init__(self, site: HyperConnection, streams: Tensor) -> None:
        self.site, self.streams, self.size = site, streams, norm(streams, 2)
        gain = site.norm.gain()
        self.hat = streams * site.norm.rstd(streams) * (1 if gain is None else gain)
        self.dynamic, self.logits, self.rounding = {}, {}, {}
        for name in HEADS:
            head = self.head(name)
            in_map, out_map = head.generator.maps()
            self.dynamic[name] = self.hat.flatten(-2) @ in_map.flatten(1).T @ out_map.flatten(1)
            self.logits[name] = head.gate * site.gates.squash(self.dynamic[name]) + head.bias.flatten()
            # A sum of N D products loses at most N D units of their absolute values.
            self.rounding[name] = in_map.shape[1:].numel() * EPS * norm(self.hat, 2) * in_map.norm() * out_map.norm()
        pre, self.res, post = site.route(streams)
        self.weights = {"pre": pre, "res": self.res.flatten(-2), "post": post}

    def head(self, name: str) -> Head:
        head = getattr(self.site, name)
        assert isinstance(head, Head)
        return head


def res_logits(site: HyperConnection, streams: Tensor) -> Tensor:
    """The mixer's input at a site, in float64: (..., N, D) -> (..., *logit_shape)."""
    with torch.no_grad():
        return View(widened(site), streams.detach().double()).logits["res"].unflatten(-1, site.mixer.logit_shape)


def widened(site: HyperConnection) -> HyperConnection:
    """A copy in float64, without its branch and its observers."""
    return copy.deepcopy(site, {id(site.branch): None, id(site.observers): ()}).double()


def norm(tensor: Tensor, axes: int = 1) -> Tensor:
    """The Frobenius norm over the last one or two axes."""
    return torch.linalg.vector_norm(tensor, dim=tuple(range(-axes, 0)))
