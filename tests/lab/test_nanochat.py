"""The residual preset is transformers' NanoChat, logit for logit, in both directions."""

import sys

import pytest
import torch

from temper_lab.interop.nanochat import from_nanochat, to_nanochat
from temper_lab.model import GPT, ModelConfig

transformers = pytest.importorskip("transformers")

CONFIG = ModelConfig(depth=2, vocab_size=83, context=48, head_dim=32, width=96)


def shaken(config: ModelConfig = CONFIG) -> GPT:
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ids_of(seed: int = 1) -> torch.Tensor:
    return torch.randint(83, (3, 48), generator=torch.Generator().manual_seed(seed))


def theirs_of(model: GPT):
    config, state = to_nanochat(model, bos_token_id=82)
    theirs = transformers.NanoChatForCausalLM(config)
    theirs.load_state_dict(state)
    return theirs.eval()


@torch.no_grad()
def test_logits_of_the_same_weights_are_the_same():
    model = shaken()
    logits = theirs_of(model)(ids_of()).logits
    assert logits.std() > 0.5
    torch.testing.assert_close(model(ids_of()), logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_model_of_theirs_comes_in():
    torch.manual_seed(4)
    config = transformers.NanoChatConfig(
        vocab_size=83,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=48,
        initializer_range=0.1,
    )
    theirs = transformers.NanoChatForCausalLM(config).eval()
    model = from_nanochat(theirs)
    assert (model.config.depth, model.config.head_dim, model.config.context, model.config.width) == (3, 32, 48, 0)
    torch.testing.assert_close(model(ids_of()), theirs(ids_of()).logits, rtol=0, atol=1e-5)
    # A copy: training one leaves the other alone.
    model.head.weight.zero_()
    assert theirs.lm_head.weight.any()


@torch.no_grad()
def test_there_and_back_through_a_folder(tmp_path):
    model = shaken()
    theirs_of(model).save_pretrained(tmp_path)
    back = from_nanochat(tmp_path)
    assert back.config == model.config
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(ids_of()), back(ids_of()))


@torch.no_grad()
def test_one_stream_of_any_preset_goes_out_but_more_do_not():
    one = shaken(CONFIG.with_(preset="mhc", num_streams=1))
    torch.testing.assert_close(one(ids_of()), theirs_of(one)(ids_of()).logits, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="'mhc' with 4 streams"):
        to_nanochat(GPT(CONFIG.with_(preset="mhc", num_streams=4)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 500}, "intermediate_size=500"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"head_dim": 48}, "width is 128; expected a multiple of head_dim 48"),
        ({"hidden_act": "silu"}, "hidden_act='silu'"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping=None"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ],
)
def test_what_this_backbone_is_not(changes, message):
    base = {
        "vocab_size": 83,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 48,
    }
    theirs = transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**{**base, **changes}))
    with pytest.raises(ValueError, match=message):
        from_nanochat(theirs)


def test_transformers_is_imported_only_when_needed():
    import subprocess

    code = "import sys, temper_lab.interop.nanochat, temper_lab.engine; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
