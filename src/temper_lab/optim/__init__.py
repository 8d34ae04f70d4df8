"""Optimizers for the lab: Muon for block matrices, AdamW for the rest, routing in a group of its own."""

from temper_lab.optim.muon import Muon, orthogonalize
from temper_lab.optim.optimizers import GROUPS, Optimizers, OptimSettings, assign

__all__ = ["GROUPS", "Muon", "OptimSettings", "Optimizers", "assign", "orthogonalize"]
