"""Hyper-connections on models that know nothing of them."""

import copy
import itertools
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


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    model = wrap_nanogpt.GPT()
    temper.wrap(model, "h.*", preset="temper-cp", num_streams=4)
    ids = torch.randint(65, (2, 9))
    model(ids).sin().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    blocks = list(model.h)

    def checkpointed(ids):
        x = model.wte(ids) + model.wpe.weight[: ids.shape[1]]
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return model.lm_head(model.ln_f(x))

    checkpointed(ids).sin().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


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
        lambda block, x: torch.add(x.contiguous(), 2 * block.linear(x), alpha=0.5),
        lambda block, x: x.add(2 * block.linear(x), alpha=0.5),
        lambda block, x: nn.functional.dropout(x.clone(), 0.0) + block.linear(x),
        lambda block, x: nn.functional.dropout(x, 0.5, False).to(block.linear.weight) + block.linear(x.float()),
        lambda block, x: (x.type_as(x) + block.linear(x)).to("cpu", torch.float32),
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
        (lambda block, x: 0.9 * x + block.linear(x), {}, "one of these: rmul, linear"),
        (lambda block, x: torch.add(block.linear(x), x, alpha=0.5), {}, "one of these: linear, add"),
        (lambda block, x: x, {}, "1 of its 1 sites were not written"),
        (lambda block, x: x + block.linear(x) + block.linear(x), {}, "more residual adds than `sites` says"),
        (lambda block, x: x + block.linear(x), {"sites": 2}, "1 of its 2 sites were not written"),
        (lambda block, x: x.add_(block.linear(x)), {}, r"changes its residual in place \(add_\)"),
    ],
)
def test_blocks_that_cannot_be_wrapped_say_why(step, options, message):
    with pytest.raises(ValueError, match=message):
        bare(step, **options)(torch.randn(3, 16))


@pytest.mark.once
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda block, x: block.linear(x), "it loses its residual in `linear`"),
        (lambda block, x: block.linear(x) + 0.9 * x, "it loses its residual in `mul`"),
        (lambda block, x: x - block.linear(x), "it loses its residual in `sub`"),
        (lambda block, x: nn.functional.dropout(x, 0.5, block.training) + block.linear(x), "residual in `dropout`"),
        (lambda block, x: torch.add(block.linear(x), x, alpha=0.5), "it loses its residual in `add`"),
        (
            lambda block, x: nn.functional.layer_norm(x + block.linear(x), (16,)),
            r"\(add, layer_norm\) after all .* as post-norm",
        ),
        (lambda block, x: torch.zeros(3, 16), "does not come from its residual at all"),
        (lambda block, x: (x + block.linear(x)).add_(1), "changes its residual in place"),
        (lambda block, x: [x + block.linear(x), x][1], "1 of its 1 sites were not written"),
        (lambda block, x: x + block.linear(x) if isinstance(x, torch.Tensor) else 1 / 0, "runs as it is, but not with"),
    ],
)
def test_a_trial_names_what_lost_the_residual_and_leaves_the_model_alone(step, message):
    model, x = nn.Sequential(Bare(step), Bare(step)), torch.randn(3, 16)
    before, hooks = set(model.state_dict()), [len(child._forward_hooks) for child in model.modules()]
    with pytest.raises(ValueError, match=message) as error:
        temper.wrap(model, "*", preset="temper-cp", num_streams=4, dim=16, sites=1, example=x)
    assert "as it was" in str(error.value)
    assert set(model.state_dict()) == before
    assert [len(child._forward_hooks) for child in model.modules()] == hooks


@pytest.mark.once
def test_a_trial_sees_the_order_of_the_blocks():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    class Between(nn.Sequential):
        def forward(self, x):
            return self[1](2 * self[0](x))

    def add(block, x):
        return x + block.linear(x)

    options = {"preset": "temper-cp", "num_streams": 4, "dim": 16, "sites": 1, "example": torch.randn(3, 16)}
    for kind, message in (
        (Twice, "something happens|ran more than once"),
        (Between, "something happens to the residual"),
    ):
        with pytest.raises(ValueError, match=message):
            temper.wrap(kind(Bare(add), Bare(add)), "*", **options)

    class First(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    with pytest.raises(ValueError, match="1 did not run"):
        temper.wrap(First(Bare(add), Bare(add)), "*", **options)


@pytest.mark.once
def test_a_trial_needs_inputs_that_the_model_takes():
    with pytest.raises(ValueError, match="does not run on `example`"):
        temper.wrap(encoder(), "layers.*", preset="temper-cp", num_streams=4, example={"y": 3})
    # Without any, the first forward pass checks.
    model = temper.wrap(encoder(norm_first=False), "layers.*", preset="temper-cp", num_streams=4)
    with pytest.raises(ValueError, match=r"post-norm.*temper\.unwrap"):
        model(torch.randn(2, 7, 16))
    x = torch.randn(2, 7, 16)
    assert torch.equal(temper.unwrap(model)(x), encoder(norm_first=False)(x))


@pytest.mark.once
def test_a_trial_on_real_tensors_where_fake_ones_cannot_run_the_model():
    def routed(block, x):
        """As mixtures of experts do, whose way depends on values."""
        chosen = block.linear if (block.linear(x) + torch.rand(1)).sum().item() > -1e9 else None
        block.calls += 1
        return chosen(x)

    def model(step):
        blocks = nn.Sequential(Bare(step), Bare(step))
        for block in blocks:
            block.register_buffer("calls", torch.zeros(()))
        return blocks

    options = {"preset": "temper-cp", "num_streams": 4, "dim": 16, "sites": 1, "example": torch.randn(3, 16)}
    good, bad = model(lambda block, x: x + routed(block, x)), model(lambda block, x: 2 * x + routed(block, x))
    with pytest.raises(ValueError, match=r"it loses its residual in `mul`.*as it was"):
        temper.wrap(bad, "*", **options)
    assert [type(block) for block in bad] == [Bare, Bare]
    states = []
    for example in (options["example"], None):
        torch.manual_seed(0)
        temper.wrap(copy.deepcopy(good), "*", **options | {"example": example})
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    temper.wrap(good, "*", **options)
    assert all(not block.calls for block in (*good, *bad))
    good(options["example"]).sum().backward()
    assert all(block.linear.weight.grad is not None for block in good)


@pytest.mark.once
def test_unwrapping_takes_everything_off():
    plain, x = encoder(), torch.randn(2, 7, 16)
    model = temper.wrap(copy.deepcopy(plain), "layers.*", preset="mhc", num_streams=2)
    weight = model.layers[0].linear1.weight
    model = temper.unwrap(model)
    assert model.layers[0].linear1.weight is weight
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(vars(one).keys() == vars(two).keys() for one, two in zip(model.modules(), plain.modules(), strict=True))
    assert torch.equal(model(x), plain(x))
    temper.wrap(model, "layers.*", preset="temper-cp", num_streams=4)
    for value, error in ((plain, ValueError), (3, TypeError)):
        with pytest.raises(error, match=r"nothing to take off|wants a module"):
            temper.unwrap(value)


@pytest.mark.once
def test_hooks_see_plain_tensors():
    model, x, seen = encoder(), torch.randn(2, 7, 16), []

    def register():
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda layer, args: seen.append(tuple(args[0].shape)))
            layer.register_forward_hook(lambda layer, args, output: seen.append((type(args[0]), tuple(output.shape))))

    # Whoever comes first.
    register()
    temper.wrap(model, "layers.*", preset="temper-cp", num_streams=4)
    register()
    model(x)
    shapes = [(2, 7, 16), (2, 7, 4, 16), (2, 7, 4, 16), (2, 7, 16)]
    expected = []
    for before, after in itertools.pairwise(shapes):
        expected += [before, before, (torch.Tensor, after), (torch.Tensor, after)]
    assert seen == expected


def _watch(model, seen):
    """Everything that can depend on the call of a site, each on one of three second sites, all undone by a call."""
    sites = [layer.hyper_connections for layer in model.layers]

    def note(module, args, *rest):
        if isinstance(module, temper.HyperConnection):
            seen.append(tuple(args[0].shape))

    def instead(streams):
        seen.append(tuple(streams.shape))
        return type(sites[0][1]).forward(sites[0][1], streams)

    def replace():
        sites[0][1].forward = instead
        return lambda: delattr(sites[0][1], "forward")

    class Sharded(type(sites[0][1])):
        def forward(self, streams):
            seen.append(tuple(streams.shape))
            return super().forward(streams)

    def shard():
        plain, sites[0][1].__class__ = type(sites[0][1]), Sharded
        return lambda: setattr(sites[0][1], "__class__", plain)

    yield "hook", lambda: sites[0][1].register_forward_hook(note).remove, 2
    yield "pre-hook", lambda: sites[0][1].register_forward_pre_hook(note).remove, 2
    yield "hook of the sites", lambda: sites[0].register_forward_pre_hook(note).remove, 2
    yield "global hook", lambda: nn.modules.module.register_module_forward_hook(note).remove, 0
    yield "replaced forward", replace, 2
    yield "another class", shard, 2


@pytest.mark.parametrize("preset", ["temper-cp", "hc"])
def test_the_sites_of_a_block_are_chained_unless_their_calls_matter(preset, monkeypatch):
    model, x = temper.wrap(encoder(), "layers.*", preset=preset, num_streams=4), torch.randn(2, 7, 16)
    chained, finish_into = [], temper.HyperConnection.finish_into
    spy = lambda site, *args: chained.append(site.layer_index) or finish_into(site, *args)  # noqa: E731
    monkeypatch.setattr(temper.HyperConnection, "finish_into", spy)

    def run():
        chained.clear()
        model.zero_grad()
        out = model(x)
        out.sin().sum().backward()
        return [out, *(parameter.grad for parameter in model.parameters())]

    expected = run()
    assert chained == [0, 2, 4]
    seen = []
    for name, watch, count in _watch(model, seen):
        undo = watch()
        seen.clear()
        got = run()
        undo()
        assert len(chained) == count, name
        # `naive` alone adds in another order.
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert set(seen) == ({(2, 7, 4, 16)} if name != "hook of the sites" else set()), name
    run()
    assert chained == [0, 2, 4]


@pytest.mark.once
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(16), nn.GroupNorm(4, 16), nn.InstanceNorm2d(16, affine=True)])
def test_channels_first_is_refused_unless_the_width_is_said(norm):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(16, 16, 1), norm

        def forward(self, x):
            return x + self.conv(self.norm(x))

    model, options = nn.Sequential(Block(), Block()), {"preset": "temper-cp", "num_streams": 4, "sites": 1}
    with pytest.raises(ValueError, match="channels-first"):
        temper.wrap(model, "*", **options)
    temper.wrap(model, "*", dim=16, **options)(torch.randn(2, 16, 16, 16))


@pytest.mark.once
def test_convolutions_are_refused_unless_something_tells_the_layout():
    class Block(nn.Module):
        def __init__(self, is_last):
            super().__init__()
            self.is_last, self.conv, self.norm = is_last, nn.Conv1d(16, 16, 3, padding=1), nn.LayerNorm(16)

        def forward(self, x):
            # Either x or what the convolution takes is transposed.
            return x + (self.conv(self.norm(x).mT).mT if self.is_last else self.conv(self.norm(x.mT).mT))

    options = {"preset": "temper-cp", "num_streams": 4, "sites": 1}
    square, wide = torch.randn(2, 16, 16), torch.randn(2, 9, 16)
    for is_last, example in ((False, None), (False, square), (True, None), (True, square)):
        model = nn.Sequential(Block(is_last))
        with pytest.raises(ValueError, match=r"Conv1d of 16 channels.*Give wrap dim=16"):
            temper.wrap(model, "*", example=example, **options)
        assert type(model[0]) is Block
    with pytest.raises(ValueError, match="whose last dimension is not the width 16"):
        temper.wrap(nn.Sequential(Block(False)), "*", example=wide.mT, **options)
    temper.wrap(nn.Sequential(Block(True)), "*", example=wide, **options)(square)
    temper.wrap(nn.Sequential(Block(True)), "*", dim=16, **options)(square)


@pytest.mark.once
def test_images_are_refused_unless_the_width_is_said():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x):
            return x + self.linear(self.norm(x))

    x, options = torch.randn(2, 5, 16, 16), {"preset": "temper-cp", "num_streams": 4, "sites": 1}
    with pytest.raises(ValueError, match=r"nothing tells which dimension.*dim=16"):
        temper.wrap(nn.Sequential(Block()), "*", **options)(x)
    temper.wrap(nn.Sequential(Block()), "*", dim=16, **options)(x)
    with pytest.raises(ValueError, match="last dimension is not the width 16"):
        temper.wrap(nn.Sequential(Block()), "*", **options)(torch.randn(2, 5, 4))


def test_a_residual_in_another_precision():
    def step(block, x):
        return x.to(torch.float32) + block.linear(x.to(block.linear.weight.dtype)).float()

    torch.manual_seed(0)
    plain = nn.Sequential(Bare(step), Bare(step)).bfloat16()
    x = torch.randn(3, 16).bfloat16()
    options = {"num_streams": 4, "dim": 16, "sites": 1, "example": x}
    residual = temper.wrap(copy.deepcopy(plain), "*", preset="residual", **options)
    assert torch.equal(residual(x), plain(x))
    assert residual(x).dtype == torch.float32
    assert temper.wrap(plain, "*", preset="temper-cp", **options)(x).dtype == torch.float32


@pytest.mark.once
@pytest.mark.parametrize("preset", ["temper-tucker", "mhc-lite", "hc"])
def test_half_precision_models_keep_float32_routing(preset):
    def routing(model):
        return {tensor.dtype for tensor in model.layers.get_submodule("0.hyper_connections").state_dict().values()}

    model = temper.wrap(encoder(), "layers.*", preset=preset, num_streams=4)
    before = copy.deepcopy(model.state_dict())
    for cast in (lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to("cpu", torch.bfloat16)):
        cast(model)
        assert routing(model) == {torch.float32}
        assert model.layers[0].linear1.weight.dtype != torch.float32
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if "hyper" in k)
    assert torch.isfinite(model(torch.randn(2, 7, 16).bfloat16())).all()
    assert routing(model.double()) == {torch.float64}
    assert routing(model.bfloat16()) == {torch.float32}
    for site in model.modules():
        if isinstance(site, temper.HyperConnection):
            site.keep_float32 = False
    assert routing(model.bfloat16()) == {torch.bfloat16}
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert routing(temper.wrap(encoder(), "layers.*", preset=preset, num_streams=4)) == {torch.float32}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.once
@pytest.mark.parametrize("preset", ["temper-tucker", "mhc-lite"])
def test_a_model_from_the_meta_device_starts_as_any_other(preset):
    with torch.device("meta"):
        model = temper.wrap(encoder(), "layers.*", preset=preset, num_streams=4)
    torch.manual_seed(3)
    draws = torch.rand(())
    torch.manual_seed(3)
    # Memory that nobody wrote is NaN here.
    torch.use_deterministic_algorithms(True)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    # Nobody else's random numbers were taken.
    assert torch.equal(torch.rand(()), draws)
    fresh = temper.wrap(encoder(), "layers.*", preset=preset, num_streams=4).state_dict()
    routing = {key: value for key, value in model.state_dict().items() if "hyper_connections" in key}
    for key, value in routing.items():
        assert torch.isfinite(value).all(), key
        if "factors" not in key and "core" not in key:
            assert torch.equal(value, fresh[key]), key
        else:
            torch.testing.assert_close(value.std(), fresh[key].std(), rtol=1, atol=0.1)
    drawn = [value for key, value in routing.items() if key.endswith("pre.generator.factors.1")]
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:])
    # What trainers call: every module that has parameters of its own can set them.
    for module in model.get_submodule("layers.0.hyper_connections").modules():
        if any(True for _ in module.parameters(recurse=False)) and not isinstance(module, nn.ParameterList):
            module.reset_parameters()


@pytest.mark.once
def test_the_trial_runs_where_the_parameters_are():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 16), *encoder().layers)
    model = temper.wrap(model, ["1", "2", "3"], preset="temper-tucker", num_streams=4)
    sites = model[1].hyper_connections
    assert all(parameter.is_meta for parameter in sites.parameters())
    model.to_empty(device="cpu")
    assert all(torch.isfinite(parameter).all() for parameter in sites.parameters())


@pytest.mark.once
def test_older_checkpoints_hold_gates_as_scalars():
    model = temper.wrap(encoder(), "layers.*", preset="temper-tucker", num_streams=4)
    state = {key: value.squeeze() if key.endswith("gate") else value for key, value in model.state_dict().items()}
    assert state["layers.0.hyper_connections.0.pre.gate"].shape == ()
    other = temper.wrap(encoder(), "layers.*", preset="temper-tucker", num_streams=4)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.load_state_dict(state)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in other.state_dict().items())
    site = copy.deepcopy(other.layers[0].hyper_connections[0])
    site.load_state_dict(
        {key: value.squeeze() if key.endswith("gate") else value for key, value in site.state_dict().items()}
    )
    assert state["layers.0.hyper_connections.0.pre.gate"].shape == ()


@pytest.mark.once
def test_a_sharded_model_is_not_wrapped():
    model = encoder()
    model.layers[0].linear1.weight.placements = ()
    with pytest.raises(ValueError, match=r"layers\.0 is sharded already: wrap the model first"):
        temper.wrap(model, "layers.*", preset="mhc", num_streams=2)


def test_something_between_the_blocks():
    model = bare(lambda block, x: x + block.linear(x))
    first, second = model
    with pytest.raises(ValueError, match="blocks must run in the order"):
        second(torch.randn(3, 16))
    with pytest.raises(ValueError, match="given list"):
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
