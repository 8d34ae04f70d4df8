"""One hyper-connection as a user meets it: three ways to call it, shapes, copies, checkpoints, bad input."""

import collections
import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import temper

PRESETS = list(temper.PRESETS)
ROUTED = [name for name in PRESETS if name != "residual"]


def randomized(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)
    return module


def site(name="temper-tucker", num_streams=4, dim=6, branch=None, **overrides):
    torch.manual_seed(0)
    config = temper.preset(name, num_streams=num_streams, dim=dim, **overrides)
    return randomized(temper.HyperConnection(config, layer_index=1, branch=branch))


@pytest.mark.parametrize("name", PRESETS)
def test_four_ways_to_the_same_streams(name):
    branch = nn.Linear(6, 6)
    hc = site(name, branch=branch)
    streams = torch.randn(2, 3, hc.config.num_streams, 6)
    wrapped = hc(streams)
    x, state = hc.begin(streams)
    by_hand = hc.finish(state, branch(x))
    decorated = hc.decorate(branch)(streams)
    routing = hc.route(streams)
    laid_open = hc.write(streams, branch(hc.read(streams, routing)), routing)
    assert torch.equal(wrapped, by_hand)
    assert torch.equal(wrapped, decorated)
    torch.testing.assert_close(wrapped, laid_open)


def test_the_backend_that_runs_is_the_one_that_is_tested(backend_of_test):
    """Parametrising by backend was once without effect, and nobody noticed."""
    _, state = site("temper-cp").begin(torch.randn(3, 4, 6))
    assert state.backend.name == backend_of_test


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(PRESETS),
    num_streams=st.integers(1, 6),
    dim=st.integers(1, 9),
    lead=st.lists(st.integers(0, 3), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    layer_index=st.integers(0, 20),
)
def test_any_shape_goes_through_and_back(name, num_streams, dim, lead, dtype, layer_index):
    config = temper.preset(name, num_streams=num_streams, dim=dim)
    hc = temper.HyperConnection(config, layer_index=layer_index)
    streams = torch.randn(*lead, config.num_streams, dim).to(dtype).requires_grad_()
    x, state = hc.begin(streams)
    out = hc.finish(state, x.tanh())
    assert (x.shape, x.dtype) == ((*lead, dim), dtype)
    assert (out.shape, out.dtype) == (streams.shape, dtype)
    out.float().square().sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(streams.grad).all()


def test_extra_arguments_and_outputs_pass_through():
    Out = collections.namedtuple("Out", "hidden cache")

    def branch(x, scale, *, kind, cache=None):
        y = x * scale
        return {"tensor": y, "tuple": (y, cache, 7), "list": [y, cache], "named": Out(y, cache)}[kind]

    hc = site(branch=branch)
    streams = torch.randn(3, 4, 6)
    plain = hc(streams, 2.0, kind="tensor")
    assert isinstance(hc(streams, 2.0, kind="tuple", cache="c"), tuple)
    assert hc(streams, 2.0, kind="tuple", cache="c")[1:] == ("c", 7)
    assert hc(streams, 2.0, kind="list", cache="c")[1] == "c"
    named = hc(streams, 2.0, kind="named", cache="c")
    assert isinstance(named, Out)
    assert named.cache == "c"
    for kind in ("tuple", "list", "named"):
        assert torch.equal(hc(streams, 2.0, kind=kind)[0], plain)


@pytest.mark.parametrize("out", [{}, (), (1, 2), None, "y"])
def test_a_branch_that_returns_something_else(out):
    hc = site(branch=lambda x: out)
    with pytest.raises(TypeError, match="the branch returned"):
        hc(torch.randn(3, 4, 6))


@pytest.mark.once
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_stream_is_the_plain_residual_bit_for_bit(name, dtype):
    torch.manual_seed(0)
    branch = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)).to(dtype)
    config = temper.preset(name, num_streams=1, dim=6)
    hc = temper.HyperConnection(config, layer_index=5, branch=branch)
    assert temper.count_parameters(config) == 0
    assert len(list(hc.parameters())) == len(list(branch.parameters()))
    x = torch.randn(2, 5, 6).to(dtype)
    x[0, 0] = -0.0
    out = temper.reduce_streams(hc(temper.expand_streams(x, config.num_streams)))
    expected = x + branch(x)
    assert out.dtype == expected.dtype
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_the_residual_preset_is_the_plain_residual_on_any_number_of_streams(num_streams):
    branch = nn.Linear(6, 6)
    config = temper.preset("residual", num_streams=num_streams, dim=6)
    assert config.num_streams == 1
    hc = temper.HyperConnection(config, branch=branch)
    x = torch.randn(2, 5, 6)
    assert torch.equal(temper.reduce_streams(hc(temper.expand_streams(x, config.num_streams))), x + branch(x))
    for stream in hc(temper.expand_streams(x, num_streams)).unbind(-2):
        assert torch.equal(stream, x + branch(x))


def test_expand_copies_and_reduce_sums():
    x = torch.randn(2, 5, 6)
    streams = temper.expand_streams(x, 4)
    assert streams.shape == (2, 5, 4, 6)
    assert streams.is_contiguous()
    for stream in streams.unbind(-2):
        assert torch.equal(stream, x)
    torch.testing.assert_close(temper.reduce_streams(streams), 4 * x)


@pytest.mark.once
@pytest.mark.parametrize("name", ROUTED)
def test_state_dict_keys_are_the_public_ones(name):
    hc = site(name)
    expected = {}
    for head in ("pre", "res", "post"):
        modes = hc.config.modes(head)
        expected |= {f"{head}.gate": (), f"{head}.bias": modes[1]}
    state = {key: tuple(value.shape) for key, value in hc.state_dict().items()}
    assert expected.items() <= state.items()
    assert {key.split(".")[0] for key in state} <= {"norm", "pre", "res", "post"}
    assert sum(p.numel() for p in hc.parameters()) == temper.count_parameters(hc.config)
    stored = sum(value.numel() for value in hc.state_dict().values())
    assert stored == temper.count_parameters(hc.config, include_frozen=True)


def test_the_keys_of_each_generator_and_gain():
    keys = set(site("mhc").state_dict())
    assert {"norm.weight", "pre.gate", "res.bias", "post.generator.weight"} <= keys
    assert "res.generator.factors.3" in site("temper-cp").state_dict()
    assert {"res.generator.core", "pre.generator.factors.2"} <= set(site("temper-tucker").state_dict())
    assert "res.generator.core" in site("temper-tucker-frozen").state_dict()
    assert "res.generator.cores.3" in site("temper-tt").state_dict()
    assert {"norm.stream", "norm.feature"} <= set(site("mhc", gain="rank-one").state_dict())
    assert not any(key.startswith("norm") for key in site("temper-slim").state_dict())


@pytest.mark.parametrize("name", PRESETS)
def test_deepcopy_pickle_and_state_dict_give_the_same_module(name):
    hc = site(name, branch=nn.Linear(6, 6))
    streams = torch.randn(2, 3, hc.config.num_streams, 6)
    expected = hc(streams)
    assert torch.equal(copy.deepcopy(hc)(streams), expected)
    assert torch.equal(pickle.loads(pickle.dumps(hc))(streams), expected)
    buffer = io.BytesIO()
    torch.save(hc.state_dict(), buffer)
    buffer.seek(0)
    other = temper.HyperConnection(hc.config, branch=nn.Linear(6, 6))
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(streams), expected)


@pytest.mark.once
@pytest.mark.parametrize("name", PRESETS)
def test_meta_then_to_empty_then_reset_is_like_building(name):
    config = temper.preset(name, num_streams=4, dim=6)
    with torch.device("meta"):
        hc = temper.HyperConnection(config, layer_index=6)
    hc = hc.to_empty(device="cpu")
    torch.manual_seed(1)
    hc.reset_parameters()
    torch.manual_seed(1)
    built = temper.HyperConnection(config, layer_index=6)
    for (key, one), other in zip(hc.state_dict().items(), built.state_dict().values(), strict=True):
        assert torch.equal(one, other), key
    streams = torch.randn(2, config.num_streams, 6)
    assert torch.equal(hc.route(streams).res, built.route(streams).res)


@pytest.mark.parametrize("name", ["mhc-lite", "kromhc"])
def test_meta_then_to_empty_then_a_checkpoint(name):
    hc = site(name)
    with torch.device("meta"):
        other = temper.HyperConnection(hc.config)
    other = other.to_empty(device="cpu")
    other.load_state_dict(hc.state_dict())
    streams = torch.randn(3, 4, 6)
    assert torch.equal(other.route(streams).res, hc.route(streams).res)


@pytest.mark.parametrize("name", PRESETS)
def test_runs_on_the_meta_device(name):
    config = temper.preset(name, num_streams=4, dim=6)
    with torch.device("meta"):
        hc = temper.HyperConnection(config, branch=nn.Linear(6, 6))
        out = hc(torch.empty(2, 3, config.num_streams, 6))
    assert out.is_meta
    assert out.shape == (2, 3, config.num_streams, 6)


# Every generator and every mixer once; compiling a cell of the grid takes seconds.
@pytest.mark.parametrize("name", ["residual", "hc", "mhc-lite", "kromhc", "temper-cp", "temper-tucker", "temper-tt"])
def test_compiles_without_a_graph_break(name):
    hc = site(name, branch=nn.Linear(6, 6))
    streams = torch.randn(2, 3, hc.config.num_streams, 6, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(hc, fullgraph=True, backend="aot_eager")
    out = compiled(streams)
    torch.testing.assert_close(out, hc(streams))
    (gradient,) = torch.autograd.grad(out.sin().sum(), streams)
    (expected,) = torch.autograd.grad(hc(streams).sin().sum(), streams)
    torch.testing.assert_close(gradient, expected)


def test_compiles_by_hand_and_with_tolerance():
    hc = site("mhc", tol=1e-3)

    def block(streams):
        x, state = hc.begin(streams)
        return hc.finish(state, x.tanh())

    streams = torch.randn(2, 3, 4, 6)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(streams), block(streams))


def test_a_state_dict_of_another_config_leaves_everything_as_it_was():
    hc = site("temper-cp")
    before = {key: value.clone() for key, value in hc.state_dict().items()}
    for other in (site("temper-tucker"), site("temper-cp", rank=3), site("temper-cp", num_streams=2)):
        with pytest.raises(ValueError, match=r"does not fit.*temper|does not fit this site \(num_streams=4"):
            hc.load_state_dict(other.state_dict())
    for key, value in hc.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_checkpoint_that_is_not_finite_is_refused(value):
    hc = site("temper-cp")
    state = {key: tensor.clone() for key, tensor in hc.state_dict().items()}
    state["res.generator.factors.1"][0, 0] = value
    with pytest.raises(ValueError, match=r"res\.generator\.factors\.1 has values that are not finite.*Nothing"):
        hc.load_state_dict(state)


def test_strict_errors_name_what_is_missing_and_what_is_too_much():
    hc = site("mhc")
    state = dict(hc.state_dict())
    state["pre.extra"] = state.pop("pre.gate")
    # torch's own callers catch RuntimeError.
    with pytest.raises(RuntimeError, match=r"missing pre\.gate; unexpected pre\.extra"):
        hc.load_state_dict(state)
    assert hc.load_state_dict(state, strict=False).missing_keys == ["pre.gate"]


def test_a_bad_site_inside_a_model_is_named():
    model = nn.ModuleDict({"first": site("mhc"), "second": site("mhc")})
    state = dict(model.state_dict())
    state["second.res.bias"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"does not fit second\..*res\.bias is \(3, 3\), expected \(4, 4\)"):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    ("streams", "error", "message"),
    [
        (torch.randn(2, 3, 6), ValueError, r"shape \(2, 3, 6\); expected \(\.\.\., 4, 6\)"),
        (torch.randn(2, 4, 5), ValueError, "num_streams=4 and dim=6"),
        (torch.randn(6), ValueError, "expected"),
        (torch.zeros(2, 4, 6, dtype=torch.int64), TypeError, "floating-point"),
        ([[1.0]], TypeError, "must be a tensor"),
        (None, TypeError, "must be a tensor"),
    ],
)
def test_wrong_streams(streams, error, message):
    hc = site("mhc", branch=nn.Identity())
    for entry in (hc, hc.begin, hc.route):
        with pytest.raises(error, match=message):
            entry(streams)


def test_wrong_branch_outputs_and_missing_branches():
    hc = site("mhc")
    streams = torch.randn(2, 4, 6)
    _, state = hc.begin(streams)
    for y in (torch.randn(2, 5), torch.randn(3, 6), torch.randn(2, 4, 6), None):
        with pytest.raises(ValueError, match=r"the branch output is .* expected \(2, 6\)"):
            hc.finish(state, y)
    with pytest.raises(ValueError, match="no branch"):
        hc(streams)
    with pytest.raises(TypeError, match="branch must be"):
        temper.HyperConnection(hc.config, branch=3)
    with pytest.raises(TypeError, match="RouterConfig"):
        temper.HyperConnection("mhc")
    for index in (-1, 1.5, True):
        with pytest.raises(ValueError, match="layer_index"):
            temper.HyperConnection(hc.config, layer_index=index)
    with pytest.raises(ValueError, match="num_streams"):
        temper.expand_streams(streams, 0)
    with pytest.raises(ValueError, match=r"\(\.\.\., N, D\)"):
        temper.reduce_streams(torch.randn(3))


@pytest.mark.parametrize("name", PRESETS)
def test_activation_checkpointing_gives_the_same_gradients(name):
    from torch.utils.checkpoint import checkpoint

    hc = site(name, branch=nn.Linear(6, 6))
    streams = torch.randn(2, 3, hc.config.num_streams, 6, requires_grad=True)
    inputs = (streams, *hc.parameters())
    plain = torch.autograd.grad(hc(streams).sin().sum(), inputs, allow_unused=True)
    saved = torch.autograd.grad(checkpoint(hc, streams, use_reentrant=False).sin().sum(), inputs, allow_unused=True)
    for one, other in zip(plain, saved, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
