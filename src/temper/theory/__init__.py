"""The paper's theory as numbers: rank and null space, the logit and block bounds, Lipschitz constants."""

from temper.theory.depth import Depth, Step, through_depth
from temper.theory.deviation import Deviation, deviation
from temper.theory.gap import Gap
from temper.theory.rank import (
    Spectrum,
    compression_spectrum,
    null_direction,
    null_project,
    routing_spectrum,
    site_spectrum,
    visible_basis,
)
from temper.theory.smoothness import local_lipschitz, sinkhorn_lipschitz
from temper.theory.view import res_logits

__all__ = [
    "Depth",
    "Deviation",
    "Gap",
    "Spectrum",
    "Step",
    "compression_spectrum",
    "deviation",
    "local_lipschitz",
    "null_direction",
    "null_project",
    "res_logits",
    "routing_spectrum",
    "sinkhorn_lipschitz",
    "site_spectrum",
    "through_depth",
    "visible_basis",
]
