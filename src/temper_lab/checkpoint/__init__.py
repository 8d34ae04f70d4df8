"""Checkpoints and model folders: safetensors and JSON, complete or absent, never pickle."""

from temper_lab.checkpoint.model_folder import ModelFolder, load_model, save_model
from temper_lab.checkpoint.rng import rng_state, set_rng_state
from temper_lab.checkpoint.runs import Checkpoint, latest, prune, save, verify

__all__ = [
    "Checkpoint",
    "ModelFolder",
    "latest",
    "load_model",
    "prune",
    "rng_state",
    "save",
    "save_model",
    "set_rng_state",
    "verify",
]
