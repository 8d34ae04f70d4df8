"""Models so small that a browser reads a text with thirty of them in a second."""

import torch

from temper_lab.model import GPT, ModelConfig
from temper_lab.tokenizer import Tokenizer
from temper_lab.train.model_dir import save_model

TEXT = "the people of this union have seen peace and war with courage"


def tokenizer_of(texts):
    return Tokenizer.train(texts, 330)


def small_model(tokenizer, preset="temper-cp", num_streams=4, *, depth=1, context=48, **router):
    """Nothing at its initial value, so that every part has a say."""
    torch.manual_seed(0)
    config = ModelConfig(
        depth=depth,
        vocab_size=tokenizer.vocab_size,
        context=context,
        head_dim=16,
        width=48,
        preset=preset,
        num_streams=num_streams,
        router=router,
    )
    model = GPT(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_site" not in name:
                parameter.normal_(0, 0.08)
            elif name.endswith("gate"):
                parameter.fill_(0.4)
            elif name.endswith("bias"):
                parameter.normal_(0, 1)
            elif "norm" in name:
                parameter.normal_(1, 0.3)
            elif "weight" in name:
                parameter.normal_(0, 0.1)
    return model.eval()


def saved(model, tokenizer, folder):
    """A model folder."""
    return save_model(folder, model.config.to_dict(), model.state_dict(), {"tokenizer.json": tokenizer.to_json()})
