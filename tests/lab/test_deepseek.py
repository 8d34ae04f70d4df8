"""DeepSeek-V4 of transformers with our sites in it: the same logits, gradients and text, and the same weights back."""

import sys
from pathlib import Path

import pytest
import torch

import temper
from temper_lab.interop.deepseek import Adapter, to_deepseek, to_temper

pytest.importorskip("transformers.models.deepseek_v4")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import deepseek_v4

IDS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))


def adapters(model) -> dict[str, Adapter]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


def test_the_example(capsys):
    assert 0 < deepseek_v4.main() < 1e-5
    out = capsys.readouterr().out
    assert "6 hyper-connections swapped; parameters before 83,835, after 83,835" in out
    assert "every weight as it was" in out


def test_gradients_and_text_are_the_same_too():
    model = deepseek_v4.tiny()

    def run():
        model.zero_grad()
        out = model(IDS, labels=IDS)
        out.loss.backward()
        text = model.generate(IDS[:, :9], max_new_tokens=8, do_sample=False, pad_token_id=0)
        return out.logits.detach(), model.model.embed_tokens.weight.grad.clone(), text

    theirs, ours = run(), (to_temper(model), run())[1]
    assert len(adapters(model)) == 6
    assert not any(adapter.site.training for adapter in adapters(model).values())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert torch.equal(ours[2], theirs[2])
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "attn_hc.site.res" in name)


@pytest.mark.parametrize("changes", [{"hc_sinkhorn_iters": 2}, {"hc_eps": 1e-2}, {"rms_norm_eps": 0.5}], ids=str)
@torch.no_grad()
def test_settings_that_no_weight_tells(changes):
    theirs = deepseek_v4.tiny()
    config = theirs.config
    for key, value in changes.items():
        setattr(config, key, value)
    usual, state = theirs(IDS).logits, theirs.state_dict()
    theirs = type(theirs)(config).eval()
    theirs.load_state_dict(state)
    expected = theirs(IDS).logits
    # They matter here, or this would test nothing.
    assert (expected - usual).abs().max() > 1e-3
    torch.testing.assert_close(to_temper(theirs)(IDS).logits, expected, rtol=0, atol=1e-5)
    to_deepseek(theirs)
    assert torch.equal(theirs(IDS).logits, expected)


@torch.no_grad()
def test_half_precision_and_frozen_weights_stay_what_they_are():
    model = deepseek_v4.tiny().to(torch.bfloat16).requires_grad_(False).train()
    expected, state = model(IDS).logits, {key: value.clone() for key, value in model.state_dict().items()}
    to_temper(model)
    assert all(not parameter.requires_grad for parameter in model.parameters())
    assert all(adapter.training and adapter.site.training for adapter in adapters(model).values())
    # Both widen the same numbers and round once; a last bit may fall either way.
    assert (model(IDS).logits - expected).abs().max() < 0.02 * expected.abs().max()
    to_deepseek(model)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(not parameter.requires_grad for parameter in model.parameters())


@torch.no_grad()
def test_a_compact_site_goes_back_as_the_dense_one_it_stands_for():
    model = to_temper(deepseek_v4.tiny())
    config = temper.preset("temper-cp", num_streams=4, dim=32, gain="none", eps=1e-6, pre_eps=1e-6)
    for index, adapter in enumerate(adapters(model).values()):
        adapter.site = temper.HyperConnection(config, layer_index=index)
    compact, count = model(IDS).logits, deepseek_v4.num_parameters(model)
    to_deepseek(model)
    assert deepseek_v4.num_parameters(model) == 83_835 > count
    torch.testing.assert_close(model(IDS).logits, compact, rtol=0, atol=1e-5)


def test_what_cannot_be_swapped_stays_as_it_is():
    model = deepseek_v4.tiny()
    with pytest.raises(ValueError, match="no sites of `to_temper`"):
        to_deepseek(model)
    with pytest.raises(ValueError, match="Linear has no DeepseekV4HyperConnection"):
        to_temper(torch.nn.Linear(2, 2))
    with torch.no_grad():
        model.model.layers[2].ffn_hc.base[0] = torch.nan
    with pytest.raises(ValueError, match="base has values that are not finite"):
        to_temper(model)
    assert not adapters(model)
    with torch.no_grad():
        model.model.layers[2].ffn_hc.base[0] = 0.0
    to_temper(model)
    last = list(adapters(model).values())[-1]
    last.site = temper.HyperConnection(temper.preset("kromhc", num_streams=4, dim=32))
    with pytest.raises(ValueError, match="cannot hold this site: mixer"):
        to_deepseek(model)
    assert len(adapters(model)) == 6
