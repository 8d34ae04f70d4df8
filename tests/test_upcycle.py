"""N streams that compute what one did, and k N that compute what N did, and that learn to differ."""

import copy
import math

import pytest
import torch
from torch import nn

import temper
from temper.gates import Gates

ROUTED = [name for name in temper.PRESETS if name != "residual"]
OTHERS = [("mhc", 2), ("temper-cp", 3), ("temper-tucker", 8), ("kromhc", 6), ("hc", 3), ("mhc-lite", 3)]


def encoder(dtype=torch.float64):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(16), enable_nested_tensor=False)
    with torch.no_grad():
        # Layers that differ, with branches as large as what they are added to.
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


def upcycled(model, name, num_streams, **options):
    temper.wrap(model, "layers.*", preset=name, num_streams=num_streams, **options)
    return temper.convert.upcycle(model.to(next(model.parameters()).dtype))


def sites_of(model):
    return [site for site in model.modules() if isinstance(site, temper.HyperConnection)]


@pytest.mark.parametrize(("name", "num_streams"), [*((name, 4) for name in ROUTED), *OTHERS])
def test_the_outputs_are_those_of_one_stream(name, num_streams):
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    plain = encoder()
    expected = plain(x)
    # The branches must matter, or nothing is shown.
    assert (plain.norm(x) - expected).abs().max() > 1
    model = upcycled(copy.deepcopy(plain), name, num_streams)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-10)
    model = upcycled(encoder(torch.float32), name, num_streams)
    torch.testing.assert_close(model(x.float()), expected.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"last": "columns"},
        {"method": "newton"},
        {"iters": 1},
        {"mixer": "unconstrained"},
        {"gain": "rank-one"},
        {"pre_eps": 1e-3},
        {"gates": "tanh"},
        {"freeze_core": True},
    ],
    ids=str,
)
def test_other_settings_start_exactly_too(options):
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    model = upcycled(encoder(), "temper-tucker", 4, **options)
    torch.testing.assert_close(model(x), encoder()(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("num_streams", [2, 3, 4, 8, 24])
def test_the_biases(num_streams):
    gates = Gates.named("sigmoid")()
    pre, post = gates.exact_bias(num_streams, 1)
    torch.testing.assert_close(gates.pre(pre), torch.full_like(pre, 1 / num_streams), rtol=1e-14, atol=0)
    assert gates.post(post).mean().item() == pytest.approx(1, abs=1e-14)
    # The marks of the usual start: two apart.
    assert (post[1] - post[0]).item() == pytest.approx(2)
    if num_streams == 2:
        torch.testing.assert_close(post, gates.initial_bias(2, 1)[1].double())
    with pytest.raises(ValueError, match=f"expected less than 1/{num_streams}"):
        Gates.named("sigmoid")(pre_eps=0.5).exact_bias(num_streams, 0)


@pytest.mark.parametrize("name", ROUTED)
def test_streams_get_different_gradients_at_once(name):
    model = upcycled(encoder(), name, 4)
    model(torch.randn(2, 7, 16, dtype=torch.float64)).sin().sum().backward()
    first, *between, _ = sites_of(model)
    for site in (first, *between):
        grad = site.post.bias.grad
        assert (grad.max() - grad.min()) > 1e-2 * grad.abs().max() > 0
    for site in between:
        last = list(site.post.generator.parameters())[-1]
        assert last.grad.abs().max() > 0
        # HC starts with copies, and what is read of a copy does not matter to a norm.
        for head in {"hc": ("res",), "mhc-identity": ("pre",)}.get(name, ("pre", "res")):
            grad = getattr(site, head).bias.grad
            assert (grad.max() - grad.min()) > 1e-2 * grad.abs().max() > 0


def test_even_copies_go_their_own_ways():
    # HC is the one that starts with copies.
    model = upcycled(encoder(torch.float32), "hc", 4)
    x, target = torch.randn(2, 7, 16), torch.randn(2, 7, 16)
    optimizer = torch.optim.AdamW(temper.param_groups(model, lr=1e-3))
    losses = []
    for _ in range(20):
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    with torch.no_grad(), temper.observe(model) as observation:
        model(x)
    assert observation.reports()[-1].stream_similarity < 0.995
    # Behind the last site there is only the mean, which every stream is an equal part of.
    biases = torch.stack([site.post.bias.detach() for site in sites_of(model)[:-1]])
    assert biases.std(dim=1).min() > 1e-3


def test_a_site_by_itself():
    config = temper.preset("mhc", num_streams=4, dim=6)
    site = temper.convert.upcycle(temper.HyperConnection(config, layer_index=6, branch=nn.Tanh()))
    streams = torch.randn(5, 4, 6)
    x = streams.mean(-2)
    torch.testing.assert_close(site(streams).mean(-2), x + x.tanh(), rtol=1e-6, atol=1e-6)
    assert site.post.bias.argmax() == 6 % 4


def test_whatever_was_there_is_overwritten_and_branches_are_not():
    model = encoder()
    before = copy.deepcopy(model.state_dict())
    temper.wrap(model, "layers.*", preset="temper-tt", num_streams=2)
    model.double()
    with torch.no_grad():
        for site in sites_of(model):
            for parameter in site.parameters():
                parameter.normal_()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(temper.convert.upcycle(model)(x), encoder()(x), rtol=0, atol=1e-10)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


def test_reducing_by_the_mean():
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    outputs = {}
    for reduce in ("sum", "mean"):
        torch.manual_seed(1)
        model = encoder()
        model.norm = None
        temper.wrap(model, "layers.*", preset="mhc", num_streams=4, reduce=reduce)
        outputs[reduce] = model.double()(x)
    torch.testing.assert_close(outputs["mean"], outputs["sum"] / 4)
    one = temper.wrap(encoder(), "layers.*", preset="mhc", num_streams=1, reduce="mean")
    assert torch.equal(one(x), encoder()(x))
    with pytest.raises(ValueError, match=r"'maen'.*mean"):
        temper.wrap(encoder(), "layers.*", preset="mhc", num_streams=4, reduce="maen")


def test_what_cannot_be_upcycled_says_why():
    with pytest.raises(TypeError, match="wants a module, got list"):
        temper.convert.upcycle([])
    with pytest.raises(ValueError, match=r"has no HyperConnection: temper\.wrap it"):
        temper.convert.upcycle(encoder())
    with pytest.raises(ValueError, match="plain residual sites only"):
        temper.convert.upcycle(temper.wrap(encoder(), "layers.*", preset="residual", num_streams=4))
    with torch.device("meta"):
        site = temper.HyperConnection(temper.preset("mhc", num_streams=4, dim=6))
    with pytest.raises(ValueError, match="meta device"):
        temper.convert.upcycle(site)
    guarded = temper.HyperConnection(temper.preset("mhc", num_streams=4, dim=6, eps=1e-2))
    before = copy.deepcopy(guarded.state_dict())
    with pytest.raises(ValueError, match="away from doubly stochastic"):
        temper.convert.upcycle(guarded)
    assert all(torch.equal(value, guarded.state_dict()[key]) for key, value in before.items())


class Normed(nn.Module):
    """A branch behind a norm without eps: what it is given may have any scale."""

    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return self.linear(x / x.norm(dim=-1, keepdim=True) * math.sqrt(x.shape[-1])).sin()


def trained(name, num_streams, **options):
    """A site with routing as large and as dependent on tokens as training may make it."""
    torch.manual_seed(0)
    config = temper.preset(name, num_streams=num_streams, dim=6, **options)
    site = temper.HyperConnection(config, layer_index=1, branch=Normed(6)).double()
    with torch.no_grad():
        for key, parameter in site.named_parameters():
            if "branch" not in key:
                parameter.add_(0.4 * torch.randn_like(parameter))
        site.res.bias.mul_(0.3)
    return site


@pytest.mark.parametrize(
    ("name", "num_streams", "larger", "options"),
    [
        *((name, 2, 4, {}) for name in ROUTED if name != "mhc-lite"),
        ("temper-tucker", 3, 9, {"gain": "rank-one"}),
        ("temper-cp", 3, 6, {"gain": "none"}),
        ("temper-cp", 3, 6, {"rank": 0.5, "iters": 2}),
        ("mhc", 2, 8, {"last": "columns"}),
        ("mhc", 4, 8, {"method": "newton"}),
        ("mhc", 3, 6, {"mixer": "unconstrained"}),
        ("kromhc", 4, 12, {}),
        ("temper-slim", 3, 9, {}),
    ],
)
def test_a_grown_site_does_to_copies_what_was_done_to_streams(name, num_streams, larger, options):
    site = trained(name, num_streams, **options)
    grown = temper.convert.grow(site, larger, spread=0.0)
    assert (grown.config.num_streams, grown.layer_index, grown.branch) == (larger, 1, site.branch)
    streams = torch.randn(5, num_streams, 6, dtype=torch.float64)
    copies = larger // num_streams
    expected = site(streams)
    torch.testing.assert_close(grown(streams.repeat(1, copies, 1)), expected.repeat(1, copies, 1), rtol=1e-9, atol=1e-9)
    # Copies keep to themselves: a stream comes from itself more than from its copies.
    res = grown.route(streams.repeat(1, copies, 1)).res
    own, other = res[:, :num_streams, :num_streams].sum(), res[:, :num_streams, num_streams : 2 * num_streams].sum()
    assert other < 0.5 * own or name == "hc" or options.get("mixer") == "unconstrained"


def test_copies_that_are_moved_apart_learn_apart():
    grads = {}
    for spread in (0.0, 2**-10):
        site = temper.convert.grow(trained("temper-cp", 2), 4, spread=spread)
        following = temper.convert.grow(trained("temper-cp", 2), 4, spread=spread)
        copies = torch.randn(5, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).repeat(1, 2, 1)
        out = following(site(copies))
        out.mean(-2).cos().sum().backward()
        grads[spread] = (following.pre.bias.grad, out.detach())
    equal, apart = grads[0.0][0], grads[2**-10][0]
    torch.testing.assert_close(equal[:2], equal[2:], rtol=1e-10, atol=1e-12)
    assert (apart[:2] - apart[2:]).abs().max() > 1e-4 * apart.abs().max()
    # Second order in what moves them.
    torch.testing.assert_close(grads[0.0][1].mean(-2), grads[2**-10][1].mean(-2), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "num_streams", "larger", "options", "message"),
    [
        ("mhc", 4, 6, {}, "num_streams is 6; 4 streams become 8, 12 or another multiple"),
        ("mhc", 4, 4, {}, "num_streams is 4"),
        ("mhc", 4, 2, {}, "num_streams is 2"),
        ("mhc", 4, 8.0, {}, r"num_streams is 8\.0"),
        ("mhc-lite", 2, 4, {}, "the birkhoff mixer does not grow"),
        ("kromhc", 3, 6, {}, "kronecker does not grow from 3 to 6 streams: .* 2 would come before 3"),
        ("mhc", 2, 4, {"eps": 1e-6}, "sinkhorn with eps=1e-06 does not grow"),
    ],
)
def test_what_does_not_grow_says_why(name, num_streams, larger, options, message):
    with pytest.raises(ValueError, match=message):
        temper.convert.grow(trained(name, num_streams, **options), larger)


def test_only_sites_grow():
    with pytest.raises(TypeError, match="wants a HyperConnection, got Linear"):
        temper.convert.grow(nn.Linear(2, 2), 4)
    with pytest.raises(ValueError, match="a plain residual has no routing to grow"):
        temper.convert.grow(temper.HyperConnection(temper.preset("residual", num_streams=1, dim=6)), 4)
