"""Optimizers for the lab: Muon for block matrices, AdamW for the rest, routing in a group of its own."""

from temper_lab.optim.groups import GROUPS, assign
from temper_lab.optim.muon import Muon, orthogonalize
from temper_lab.optim.optimizers import Optimizers, OptimSettings

__all__ = ["GROUPS", "Muon", "OptimSettings", "Optimizers", "assign", "orthogonalize"]
