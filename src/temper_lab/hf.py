"""The former name of `temper_lab.interop.hf`: the Python files in folders exported before the move import it."""

from temper_lab.interop.hf import TemperConfig, TemperForCausalLM, fast_tokenizer

__all__ = ["TemperConfig", "TemperForCausalLM", "fast_tokenizer"]
