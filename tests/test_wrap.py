"""Hyper-connections on models that know nothing of them."""

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import temper

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import wrap_encoder
import wrap_nanogpt

ROUTED = [name for name in temper.PRESETS if name != "residual"]


def encoder(layers=3, **options):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True, **options}
    layer = nn.TransformerEncoderLayer(16, 4, 32, **options)
    return nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(16), enable_nested_tensor=False)


def by_hand(model, x, mask):
    """What wrapping means, spelled out with the public pieces."""
    first = model.layers[0].hyper_connections[0].config
    streams = temper.expand_streams(x, first.num_streams)
    for layer in model.layers:
        attend, feed = layer.hyper_connections
        streams = attend.decorate(lambda x, layer=layer: layer._sa_block(layer.norm1(x), mask, None, True))(streams)
        streams = feed.decorate(lambda x, layer=layer: layer._ff_block(layer.norm2(x)))(streams)
    return model.norm(temper.reduce_streams(streams))


@pytest.mark.parametrize("name", temper.PRESETS)
def test_wrapping_an_encoder_is_what_one_would_write_by_hand(name):
    model = temper.wrap(encoder(), "layers.*", preset=name, num_streams=4)
    x, mask = torch.randn(2, 7, 16), nn.Transformer.generate_square_subsequent_mask(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "hyper_connections" in key:
                parameter.normal_(0, 0.3)
    out = model(x, mask=mask, is_causal=True)
    torch.testing.assert_close(out, by_hand(model, x, mask), rtol=1e-6, atol=1e-6)
    out.sin().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize(("name", "num_streams"), [("residual", 4), ("mhc", 1), ("temper-tucker", 1)])
def test_one_stream_changes_nothing_at_all(name, num_streams):
    plain = encoder()
    wrapped = temper.wrap(copy.deepcopy(plain), "layers.*", preset=name, num_streams=num_streams)
    x = torch.randn(2, 7, 16)
    assert torch.equal(wrapped(x), plain(x))
    assert wrapped.state_dict().keys() == plain.state_dict().keys()


def test_old_names_stay_and_sites_are_numbered_through_the_model():
    plain = encoder()
    model = temper.wrap(copy.deepcopy(plain), "layers.*", preset="temper-cp", num_streams=4)
    assert plain.state_dict().keys() < model.state_dict().keys()
    sites = [site for site in model.modules() if isinstance(site, temper.HyperConnection)]
    assert [site.layer_index for site in sites] == [0, 1, 2, 3, 4, 5]


def test_copies_pickles_and_checkpoints():
    model = temper.wrap(encoder(), "layers.*", preset="temper-tucker", num_streams=4)
    x = torch.randn(2, 7, 16)
    expected = model(x)
    assert torch.equal(copy.deepcopy(model)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    other = temper.wrap(encoder(), "layers.*", preset="temper-tucker", num_streams=4)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), expected)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_compiles_without_a_graph_break():
    model = temper.wrap(encoder(2), "layers.*", preset="temper-cp", num_streams=4)
    x = torch.randn(2, 7, 16)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))


def test_activation_checkpointing():
    model = wrap_nanogpt.GPT()
    temper.wrap(model, "h.*", preset="temper-cp", num_streams=4)
    ids = torch.randint(65, (2, 9))
    expected = torch.autograd.grad(model(ids).sin().sum(), list(model.parameters()))
    blocks = list(model.h)

    def checkpointed(ids):
        x = model.wte(ids) + model.wpe.weight[: ids.shape[1]]
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return model.lm_head(model.ln_f(x))

    gradients = torch.autograd.grad(checkpointed(ids).sin().sum(), list(model.parameters()))
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_models_of_transformers(family):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    small |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    gpt2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    gpt2 |= {"bos_token_id": 0, "eos_token_id": 1}
    config, model_class, pattern = {
        "llama": (transformers.LlamaConfig(**small), transformers.LlamaForCausalLM, "model.layers.*"),
        "gpt2": (transformers.GPT2Config(**gpt2), transformers.GPT2LMHeadModel, "transformer.h.*"),
        "qwen3": (transformers.Qwen3Config(**small), transformers.Qwen3ForCausalLM, "model.layers.*"),
    }[family]
    model = model_class(config).eval()
    ids = torch.randint(3, 50, (2, 9))
    expected = model(ids).logits
    plain = temper.wrap(copy.deepcopy(model), pattern, preset="residual", num_streams=4)
    assert torch.equal(plain(ids).logits, expected)
    routed = temper.wrap(copy.deepcopy(model), pattern, preset="temper-cp", num_streams=4)
    assert not torch.equal(routed(ids).logits, expected)
    # The cache of keys and values knows nothing of streams: token by token gives the same.
    mask = torch.ones_like(ids)
    generated = routed.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    last = routed(generated[:, :-1]).logits[:, -1].argmax(-1)
    assert torch.equal(generated[:, -1], last)


@pytest.mark.parametrize("example", [wrap_encoder, wrap_nanogpt], ids=["encoder", "nanogpt"])
def test_the_examples_learn(example, capsys):
    first, last = example.main(steps=30)
    assert last < 0.75 * first
    assert "loss" in capsys.readouterr().out


def test_a_selector_function_and_an_explicit_width():
    model = encoder()
    temper.wrap(
        model, lambda name, child: isinstance(child, nn.TransformerEncoderLayer), preset="mhc", num_streams=2, dim=16
    )
    assert model(torch.randn(2, 7, 16)).shape == (2, 7, 16)


class Bare(nn.Module):
    """A block whose norm has no weight, with what happens to x left open."""

    def __init__(self, step):
        super().__init__()
        self.linear, self.step = nn.Linear(16, 16), step

    def forward(self, x):
        return self.step(self, x)


def bare(step, **options):
    model = nn.Sequential(Bare(step), Bare(step))
    return temper.wrap(model, "*", **{"preset": "temper-cp", "num_streams": 4, "dim": 16, "sites": 1, **options})


@pytest.mark.parametrize(
    "step",
    [
        lambda block, x: x + block.linear(x),
        lambda block, x: block.linear(x) + x,
        lambda block, x: torch.add(x, block.linear(x)),
        lambda block, x: x.add(block.linear(x)),
        lambda block, x: block.linear(x).add(x),
        lambda block, x: x.__iadd__(block.linear(x)),
        lambda block, x: x + block.linear(x * 1.0),
        lambda block, x: x + block.linear(2 * x[..., :] / 2 - 0.0),
        lambda block, x: x + block.linear(x.to(torch.float32).view(*x.shape)),
    ],
)
def test_every_way_to_write_a_residual_add(step):
    torch.manual_seed(0)
    model = bare(step)
    x = torch.randn(3, 16)
    streams = temper.expand_streams(x, 4)
    for block in model:
        streams = block.hyper_connections[0].decorate(block.linear)(streams)
    torch.testing.assert_close(model(x), temper.reduce_streams(streams))


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (lambda block, x: block.linear(x), {}, "0 does not end as a pre-norm block does: its output is not"),
        (lambda block, x: x, {}, "1 of its 1 sites were not written"),
        (lambda block, x: x + block.linear(x) + block.linear(x), {}, "more residual adds than `sites` says"),
        (lambda block, x: x + block.linear(x), {"sites": 2}, "1 of its 2 sites were not written"),
        (lambda block, x: x.add_(block.linear(x)), {}, r"changes its residual in place \(add_\)"),
    ],
)
def test_blocks_that_cannot_be_wrapped_say_why(step, options, message):
    with pytest.raises((TypeError, RuntimeError), match=message):
        bare(step, **options)(torch.randn(3, 16))


def test_something_between_the_blocks():
    model = bare(lambda block, x: x + block.linear(x))
    first, second = model
    with pytest.raises(TypeError, match="blocks must run in the order"):
        second(torch.randn(3, 16))
    with pytest.raises(RuntimeError, match="something between the blocks reads"):
        second(first(torch.randn(3, 16)) * 2)
    with pytest.raises(TypeError, match="given list"):
        first([1.0])


@pytest.mark.parametrize(
    ("selector", "options", "message"),
    [
        ("blocks.*", {}, r"'blocks\.\*' selects nothing in TransformerEncoder; its children are \['layers', 'norm'\]"),
        (lambda name, child: True, {}, "selects .* inside"),
        ("layers.*", {"preset": "mcc"}, "unknown preset"),
        ("layers.*", {"num_streams": 0}, "num_streams is 0"),
        ("layers.*", {"sites": 0}, "sites is 0"),
        ("layers.*", {"rnk": 2}, "unknown option"),
        ("layers.*.linear1", {}, "do not tell the width"),
    ],
)
def test_bad_arguments_leave_the_model_alone(selector, options, message):
    model = encoder()
    before = set(model.state_dict())
    with pytest.raises(ValueError, match=message):
        temper.wrap(model, selector, **{"preset": "temper-cp", "num_streams": 4, **options})
    assert set(model.state_dict()) == before
    assert not any(block._forward_pre_hooks for block in model.layers)


def test_wrapping_twice_and_wrong_types():
    model = temper.wrap(encoder(), "layers.*", preset="mhc", num_streams=2)
    with pytest.raises(ValueError, match=r"layers\.0 is wrapped already"):
        temper.wrap(model, "layers.*", preset="mhc", num_streams=2)
    with pytest.raises(TypeError, match="wants a module"):
        temper.wrap([], "layers.*", preset="mhc", num_streams=2)
    with pytest.raises(TypeError, match="selector must be"):
        temper.wrap(encoder(), 3, preset="mhc", num_streams=2)
