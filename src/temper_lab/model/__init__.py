"""The backbone: a plain pre-norm transformer whose two residual additions per block are hyper-connections."""

from temper_lab.model.config import ModelConfig
from temper_lab.model.gpt import GPT

__all__ = ["GPT", "ModelConfig"]
