"""Every generator x mixer x N against the float64 reference: values and gradients, whichever way a site is called."""

import itertools
import math

import pytest
import reference
import torch
from torch import nn

import temper

D = 5
STREAMS = (1, 2, 3, 4, 6, 8)
GENERATORS = sorted(temper.Generator.members)
MIXERS = sorted(temper.Mixer.members)
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def logit_shape(mixer, num_streams):
    known = reference.logit_shape(mixer, num_streams)
    return temper.Mixer.named(mixer).logit_shape_for(num_streams) if known is None else known


def must_raise(generator, mixer, num_streams):
    """Birkhoff stops at N = 6; one number per stream cannot be anything but N numbers."""
    refused = mixer == "birkhoff" and num_streams > 6
    return refused or (generator == "per-stream" and logit_shape(mixer, num_streams)[-1] != num_streams)


GRID = list(itertools.product(GENERATORS, MIXERS, STREAMS))
WORKING = [case for case in GRID if not must_raise(*case)]
BUILT = [case for case in WORKING if case[2] > 1]


def randomize(module, seed=0):
    """Values far from the initial ones, so that every part of the mathematics shows."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith("permutations") or not name.split(".")[-1].isidentifier() and "generator" not in name:
                continue
            values = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
            if name.endswith("gate"):
                values = 0.7 + 0.2 * values
            elif name.startswith("norm."):
                values = 1 + 0.3 * values
            elif "generator" in name:
                values = 0.5 * values
            tensor.copy_(values)
    return module
