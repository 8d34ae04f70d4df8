"""The lab's models in transformers. Importing this registers them with its Auto classes.

import temper_lab.interop.hf
model = transformers.AutoModelForCausalLM.from_pretrained(folder)  # written by `temper export --to hf`
"""

try:
    import transformers
except ModuleNotFoundError as missing:
    if missing.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "temper_lab.interop.hf needs transformers: pip install 'temper-hc[lab,hf]'", name="transformers"
    ) from missing

from temper_lab.interop.hf.modeling import TemperConfig, TemperForCausalLM, fast_tokenizer

__all__ = ["TemperConfig", "TemperForCausalLM", "fast_tokenizer", "transformers"]

transformers.AutoConfig.register(TemperConfig.model_type, TemperConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(TemperConfig, TemperForCausalLM, exist_ok=True)
