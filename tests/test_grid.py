"""Every generator x mixer x N against the float64 reference: values and gradients, whichever way a site is called."""

import itertools

import pytest
import torch
from torch import nn

import reference
import temper

D = 5
STREAMS = (1, 2, 3, 4, 6, 8, 16)
GENERATORS = sorted(temper.Generator.members)
MIXERS = sorted(temper.Mixer.members)
# float64 everywhere: what is left is the order of summation.
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def logit_shape(mixer, num_streams):
    known = reference.logit_shape(mixer, num_streams)
    return temper.Mixer.named(mixer).logit_shape_for(num_streams) if known is None else known


def must_raise(generator, mixer, num_streams):
    """Whether the mixer refuses this N, or the generator the mixer's logits."""
    return temper.Mixer.named(mixer).refusal(num_streams) is not None or refuses(generator, mixer, num_streams)


def refuses(generator, mixer, num_streams):
    shape = logit_shape(mixer, num_streams)
    if shape == (0,):
        return False
    try:
        temper.Generator.named(generator).check_modes((num_streams, D), shape)
    except ValueError:
        return True
    return False


GRID = list(itertools.product(GENERATORS, MIXERS, STREAMS))
WORKING = [case for case in GRID if not must_raise(*case)]
BUILT = [case for case in WORKING if case[2] > 1]


def normal(*shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randomize(module):
    """Values far from the initial ones, so that every part of the mathematics shows."""
    with torch.no_grad():
        for seed, (name, tensor) in enumerate(module.state_dict(keep_vars=True).items()):
            values = normal(*tensor.shape, seed=1000 + seed)
            if name.endswith("gate"):
                values = 0.7 + 0.2 * values
            elif name.startswith("norm."):
                values = 1 + 0.3 * values
            elif "bias" not in name:
                values = 0.5 * values
            tensor.copy_(values)
    return module


class Branch(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return torch.tanh(self.linear(x)) + 0.1 * x


def site(config, dtype=torch.float64, branch=None):
    return randomize(temper.HyperConnection(config, layer_index=1, branch=branch).to(dtype))


def expected_of(hc, streams, y):
    """The reference on the site's own parameters, so that its gradients are gradients of those."""
    unknown = {
        head: getattr(hc, head).generator.to_dense()
        for head in hc.config.heads
        if getattr(hc.config, head).name not in reference.WEIGHTS
    }
    state = {key: tensor for key, tensor in hc.state_dict(keep_vars=True).items() if not key.startswith("branch.")}
    return reference.reference_forward(state, hc.config, streams, y, weights=unknown, mix=hc.mixer)


def gradients(outputs, leaves):
    """Of one random linear functional of all outputs."""
    cotangents = [normal(*output.shape, seed=10 + k).to(output.dtype) for k, output in enumerate(outputs)]
    return torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)


def assert_all_close(actual, expected, names, **tolerance):
    assert len(actual) == len(expected) == len(names)
    for got, want, name in zip(actual, expected, names, strict=True):
        torch.testing.assert_close(got, want.to(got.dtype), msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def laid_open(hc, streams, y):
    routing = hc.route(streams)
    return hc.read(streams, routing), *routing, hc.write(streams, y, routing)


def paired(hc, streams, y):
    x, state = hc.begin(streams)
    return x, hc.finish(state, y)


CALLS = {"route": (laid_open, ("x", "pre", "res", "post", "streams")), "begin": (paired, ("x", "streams"))}


def assert_matches_reference(hc, streams, y, *, forward=EXACT, backward=EXACT):
    """Outputs and the gradients in streams, y and every parameter, for both ways of calling."""
    x, routing, out = expected_of(hc, streams, y)
    expected = {"x": x, **routing._asdict(), "streams": out}
    parameters = dict(hc.named_parameters())
    leaves = [streams, y, *parameters.values()]
    for call, names in CALLS.values():
        wanted = [expected[name] for name in names]
        outputs = call(hc, streams, y)
        assert all(output.dtype == streams.dtype for output in outputs)
        assert_all_close(outputs, wanted, names, **forward)
        names = [f"gradient of {name}" for name in ("streams", "y", *parameters)]
        assert_all_close(gradients(outputs, leaves), gradients(wanted, leaves), names, **backward)


def inputs(num_streams, dim=D, leading=(2, 3), dtype=torch.float64):
    streams = normal(*leading, num_streams, dim, seed=1).to(dtype).requires_grad_()
    y = normal(*leading, dim, seed=2).to(dtype).requires_grad_()
    return streams, y


@pytest.mark.parametrize(("generator", "mixer", "num_streams"), BUILT)
def test_a_cell_of_the_grid_is_the_reference(generator, mixer, num_streams):
    hc = site(temper.preset("mhc", num_streams=num_streams, dim=D, generator=generator, mixer=mixer))
    assert_matches_reference(hc, *inputs(num_streams))


@pytest.mark.parametrize(("generator", "mixer", "num_streams"), BUILT)
def test_a_branch_inside_a_cell_of_the_grid(generator, mixer, num_streams):
    config = temper.preset("mhc", num_streams=num_streams, dim=D, generator=generator, mixer=mixer)
    hc = site(config, branch=Branch(D))
    streams, _ = inputs(num_streams)
    leaves = [streams, *hc.parameters()]
    out = hc(streams)
    _, _, wanted = expected_of(hc, streams, hc.branch)
    torch.testing.assert_close(out, wanted, **EXACT)
    names = ["streams", *dict(hc.named_parameters())]
    assert_all_close(gradients([out], leaves), gradients([wanted], leaves), names, **EXACT)


@pytest.mark.once
@pytest.mark.parametrize(("generator", "mixer", "num_streams"), [case for case in GRID if must_raise(*case)])
def test_an_impossible_cell_of_the_grid_is_a_value_error(generator, mixer, num_streams):
    with pytest.raises(ValueError, match=f"{generator}|{mixer}"):
        temper.HyperConnection(
            temper.preset("mhc", num_streams=num_streams, dim=D, generator=generator, mixer=mixer), layer_index=0
        )


@pytest.mark.once
@pytest.mark.parametrize(("generator", "mixer", "num_streams"), [case for case in WORKING if case[2] == 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_stream_is_the_plain_residual_bit_for_bit(generator, mixer, num_streams, dtype):
    config = temper.preset("mhc", num_streams=num_streams, dim=D, generator=generator, mixer=mixer)
    assert temper.count_parameters(config) == 0
    assert_plain_residual(config, dtype)


@pytest.mark.once
@pytest.mark.parametrize("num_streams", [1, 2, 4])
def test_the_residual_preset_is_the_plain_residual_bit_for_bit(num_streams):
    config = temper.preset("residual", num_streams=num_streams, dim=D)
    assert config.num_streams == 1
    assert_plain_residual(config, torch.float32)


def assert_plain_residual(config, dtype):
    branch = randomize(Branch(D)).to(dtype)
    hc = temper.HyperConnection(config, branch=branch).to(dtype)
    assert all(name.startswith("branch.") for name in hc.state_dict())
    streams, _ = inputs(1, dtype=dtype)
    plain = streams[..., 0, :]
    wanted = (plain + branch(plain)).unsqueeze(-2)
    leaves = [streams, *branch.parameters()]
    # Autograd adds the two paths in an order of its own; in bf16 that moves a gradient by a few ulps of one.
    tolerance = {"rtol": 0.016, "atol": 0.02} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    x, state = hc.begin(streams)
    routing = hc.route(streams)
    x_open = hc.read(streams, routing)
    for out in (hc(streams), hc.finish(state, branch(x)), hc.write(streams, branch(x_open), routing)):
        assert torch.equal(out, wanted)
        for got, want in zip(gradients([out], leaves), gradients([wanted], leaves), strict=True):
            torch.testing.assert_close(got, want, **tolerance)


RANKS = {
    "dense": [{}],
    "per-stream": [{}],
    "cp": [{"rank": 1}, {"rank": 3}],
    "tucker": [{"rank": 1}, {"rank": (1, 3)}, {"rank": (1, 3), "freeze_core": True}],
    "tt": [{"rank": 1}, {"rank": (1, 1)}],
}
# Ranks that only modes of at least 3 allow; a CP rank may be larger than every mode.
WIDE_RANKS = {"cp": [{"rank": 7}], "tucker": [{"rank": (2, 3)}], "tt": [{"rank": 2}, {"rank": (2, 3)}]}
GENERATOR_CASES = [
    (generator, num_streams, out_modes, options)
    for generator in GENERATORS
    for num_streams in STREAMS
    for out_modes in [(num_streams,), (num_streams, num_streams)]
    for options in [*RANKS.get(generator, [{}]), *(WIDE_RANKS.get(generator, []) if num_streams > 2 else [])]
]


@pytest.mark.once
@pytest.mark.parametrize(("generator", "num_streams", "out_modes", "options"), GENERATOR_CASES, ids=str)
def test_a_generator_is_its_dense_tensor(generator, num_streams, out_modes, options):
    module = randomize(temper.Generator.named(generator)((num_streams, D), out_modes, **options).double())
    in_map, out_map = module.maps()
    assert in_map.shape[1:] == (num_streams, D)
    assert out_map.shape[1:] == out_modes
    weight = torch.einsum("rnd,r...->nd...", in_map, out_map)
    if generator in reference.WEIGHTS:
        wanted = reference.WEIGHTS[generator](module.state_dict(keep_vars=True), num_streams, out_modes)
    else:
        wanted = module.to_dense()
    assert wanted.shape == (num_streams, D, *out_modes)
    leaves = list(module.parameters())
    names = [name for name, _ in module.named_parameters()]
    for dense in (weight, module.to_dense()):
        torch.testing.assert_close(dense, wanted, **EXACT)
        assert_all_close(gradients([dense], leaves), gradients([wanted], leaves), names, **EXACT)


MIXER_OPTIONS = {
    "sinkhorn": [
        {},
        {"iters": 1},
        {"iters": 3, "last": "columns"},
        {"last": "columns"},
        {"iters": 2, "eps": 1e-2},
        {"last": "columns", "eps": 1e-3},
        {"iters": 50, "tol": 1e-2},
        {"last": "columns", "tol": 1e-4},
        {"iters": 5, "tol": 1e-3, "eps": 1e-6},
        {"iters": 5, "tol": 0.2, "eps": 1e-2},
        {"method": "newton"},
        {"method": "newton", "last": "columns"},
    ]
}
MIXER_CASES = [
    (mixer, num_streams, options)
    for mixer in MIXERS
    for num_streams in STREAMS
    if temper.Mixer.named(mixer).refusal(num_streams) is None
    for options in MIXER_OPTIONS.get(mixer, [{}])
]


@pytest.mark.parametrize(("mixer", "num_streams", "options"), MIXER_CASES, ids=str)
def test_a_mixer_is_its_definition(mixer, num_streams, options):
    module = temper.Mixer.named(mixer)(num_streams, **options).double()
    shape = logit_shape(mixer, num_streams)
    assert module.logit_shape == shape
    logits = (2 * normal(4, *shape, seed=3)).requires_grad_()
    res = module(logits)
    assert res.shape == (4, num_streams, num_streams)
    if mixer not in reference.MIXERS:
        pytest.skip(f"the reference does not know {mixer}")
    wanted = reference.MIXERS[mixer](logits, num_streams, **options)
    torch.testing.assert_close(res, wanted, **EXACT)
    torch.testing.assert_close(gradients([res], [logits]), gradients([wanted], [logits]), **EXACT)


@pytest.mark.parametrize("gain", ["full", "rank-one", "feature", "none"])
@pytest.mark.parametrize("norm", ["flat", "per-stream"])
@pytest.mark.parametrize("num_streams", [2, 3, 4])
def test_every_gain_and_norm(gain, norm, num_streams):
    hc = site(temper.preset("temper-cp", num_streams=num_streams, dim=7, gain=gain, norm=norm))
    assert_matches_reference(hc, *inputs(num_streams, dim=7))


@pytest.mark.parametrize("gates", ["sigmoid", "tanh"])
@pytest.mark.parametrize("num_streams", [2, 3])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"pre_eps": 0.125},
        {"norm_eps": 0.5},
        {"norm_eps": 1.0, "norm_clamp": True},
        {"norm_eps": 0.5, "norm_outside": True},
    ],
    ids=str,
)
def test_gates_and_guards(gates, num_streams, overrides):
    config = temper.preset("mhc", num_streams=num_streams, dim=D, gates=gates, mixer="unconstrained", **overrides)
    assert_matches_reference(site(config), *inputs(num_streams))


@pytest.mark.parametrize(
    "options",
    [{"iters": 3}, {"last": "columns"}, {"iters": 40, "tol": 1e-3}, {"eps": 1e-3}, {"eps": 0.4, "clamp": True}],
)
def test_sinkhorn_options_reach_the_mixer_of_a_site(options):
    config = temper.preset("mhc", num_streams=4, dim=D, **options)
    assert config == temper.preset("mhc", num_streams=4, dim=D, mixer={"name": "sinkhorn", **options})
    assert_matches_reference(site(config), *inputs(4))


@pytest.mark.parametrize("num_streams", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_identity_mixer_adds_what_is_written_and_nothing_else(num_streams, dtype):
    hc = site(temper.preset("mhc-identity", num_streams=num_streams, dim=D), dtype)
    streams, y = inputs(num_streams, dtype=dtype)
    assert torch.equal(hc.route(streams).res, torch.eye(num_streams, dtype=dtype).expand(2, 3, -1, -1))
    post = hc.route_wide(streams).post.unsqueeze(-1)
    out = hc.finish(hc.begin(streams)[1], y)
    wide = streams.to(post.dtype) + post * y.to(post.dtype).unsqueeze(-2)
    # One product and one sum: at most one rounding is left to choice.
    torch.testing.assert_close(out, wide.to(dtype), rtol=torch.finfo(dtype).eps, atol=torch.finfo(post.dtype).eps)
    # Through the streams alone a gradient comes back as it came, to all of them.
    grad = normal(*out.shape, seed=3).to(dtype)
    with torch.no_grad():
        for head in () if num_streams == 1 else (hc.pre, hc.post):
            head.generator.zero_output()
    out = hc.finish(hc.begin(streams)[1], y)
    assert torch.equal(torch.autograd.grad(out, streams, grad)[0], grad)


PRESETS = [name for name in sorted(temper.PRESETS) if name != "residual"]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("num_streams", [2, 4])
def test_every_preset(preset, num_streams):
    assert_matches_reference(site(temper.preset(preset, num_streams=num_streams, dim=7)), *inputs(num_streams, dim=7))


@pytest.mark.parametrize("res", [temper.Choice("cp", rank=3), temper.Choice("tt", rank=(2, 3, 2)), "dense"])
def test_each_head_has_a_generator_of_its_own(res):
    config = temper.preset("mhc", num_streams=3, dim=D, pre=temper.Choice("tucker", rank=(2, 3)), res=res)
    assert_matches_reference(site(config), *inputs(3))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("num_streams", [2, 4])
def test_float32(preset, num_streams):
    hc = site(temper.preset(preset, num_streams=num_streams, dim=7), dtype=torch.float32)
    assert_matches_reference(
        hc,
        *inputs(num_streams, dim=7, dtype=torch.float32),
        forward={"rtol": 1e-5, "atol": 5e-6},
        # Twenty rounds of Sinkhorn backwards, summed over tokens; entries are of order one to ten.
        backward={"rtol": 1e-4, "atol": 5e-5},
    )


def test_float64_streams_stay_float64_with_float32_parameters():
    hc = site(temper.preset("temper-tucker", num_streams=4, dim=7), dtype=torch.float32)
    # Gradients of float32 parameters come back rounded to float32.
    assert_matches_reference(hc, *inputs(4, dim=7), backward={"rtol": 1e-6, "atol": 1e-6})


def bf16_ulps(actual, expected):
    """How many bf16 steps (2^-7 of the power of two below) lie between a bf16 result and the float64 one, rounded."""
    assert actual.dtype == torch.bfloat16
    rounded = expected.bfloat16().double()
    _, exponent = torch.frexp(rounded)
    return ((actual.double() - rounded) / torch.ldexp(torch.ones_like(rounded), exponent - 8)).abs().max().item()


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("num_streams", [2, 4])
def test_bf16_streams_are_the_float64_result_rounded(preset, num_streams, parameters):
    hc = site(temper.preset(preset, num_streams=num_streams, dim=7), dtype=parameters)
    streams, y = inputs(num_streams, dim=7, leading=(5,), dtype=torch.bfloat16)
    x, routing, out = expected_of(hc, streams, y)
    routed = hc.route(streams)
    for got, want in zip(routed, routing, strict=True):
        assert bf16_ulps(got, want) <= 2
    got_x, state = hc.begin(streams)
    assert bf16_ulps(got_x, x) <= 2
    assert bf16_ulps(hc.finish(state, y), out) <= 2
    # Laid open, the weights themselves are rounded: the products are then those of the rounded weights.
    wide = [part.double() for part in routed]
    H = streams.double()
    assert bf16_ulps(hc.read(streams, routed), torch.einsum("tn,tnd->td", wide[0], H)) <= 2
    written = torch.einsum("tmn,tnd->tmd", wide[1], H) + torch.einsum("tm,td->tmd", wide[2], y.double())
    assert bf16_ulps(hc.write(streams, y, routed), written) <= 2


def transposed(streams, y):
    return streams.mT.contiguous().mT, y.mT.contiguous().mT


def strided(streams, y):
    return torch.stack([streams, -streams], -1).flatten(-2)[..., ::2], torch.cat([y, -y], 1)[:, : y.shape[1]]


def token_major(streams, y):
    return streams.transpose(0, 1).contiguous().transpose(0, 1), y.transpose(0, 1).contiguous().transpose(0, 1)


def stream_strided(streams, y):
    return torch.cat([streams, -streams], -2)[..., : streams.shape[-2], :], y


@pytest.mark.parametrize("layout", [transposed, strided, token_major, stream_strided])
@pytest.mark.parametrize("preset", ["hc", "mhc", "kromhc", "temper-tucker"])
def test_streams_of_any_layout(layout, preset):
    streams, y = (tensor.detach() for tensor in inputs(3, leading=(2, 4)))
    views = layout(streams, y)
    assert torch.equal(views[0], streams)
    assert torch.equal(views[1], y)
    assert not views[0].is_contiguous()
    hc = site(temper.preset(preset, num_streams=3, dim=D))
    assert_matches_reference(hc, *(view.requires_grad_() for view in views))


def test_streams_that_are_one_expanded_tensor():
    hc = site(temper.preset("mhc", num_streams=4, dim=D))
    x, y = inputs(4)[1].detach().requires_grad_(), normal(2, 3, D, seed=5)
    got = paired(hc, x.unsqueeze(-2).expand(2, 3, 4, D), y)
    want = expected_of(hc, x.unsqueeze(-2).expand(2, 3, 4, D), y)
    torch.testing.assert_close(got, (want[0], want[2]), **EXACT)
    torch.testing.assert_close(gradients(got, [x]), gradients([want[0], want[2]], [x]), **EXACT)


@pytest.mark.parametrize("preset", ["hc", "mhc", "mhc-lite", "kromhc", "temper-cp"])
@pytest.mark.parametrize("leading", [(), (4,), (2, 1, 3)], ids=str)
def test_any_number_of_leading_dimensions(preset, leading):
    hc = site(temper.preset(preset, num_streams=3, dim=D))
    assert_matches_reference(hc, *inputs(3, leading=leading))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=str)
def test_an_empty_batch(preset, leading):
    hc = site(temper.preset(preset, num_streams=2, dim=D))
    streams, y = inputs(2, leading=leading)
    leaves = [streams, y, *hc.parameters()]
    for call, names in CALLS.values():
        outputs = call(hc, streams, y)
        assert len(outputs) == len(names)
        assert outputs[0].shape == (*leading, D)
        assert outputs[-1].shape == streams.shape
        for leaf, grad in zip(leaves, gradients(outputs, leaves), strict=True):
            assert torch.equal(grad, torch.zeros_like(leaf))


class Paired(nn.Module):
    def __init__(self, hc):
        super().__init__()
        self.hc = hc

    def forward(self, streams, y):
        return paired(self.hc, streams, y)


def gradcheck_site(config):
    hc = site(config)
    streams, y = inputs(config.num_streams, dim=config.dim, leading=(2,))
    names = [f"hc.{name}" for name, _ in hc.named_parameters()]

    def function(streams, y, *values):
        return torch.func.functional_call(Paired(hc), dict(zip(names, values, strict=True)), (streams, y))

    parameters = [parameter.detach().clone().requires_grad_() for parameter in hc.parameters()]
    # Along random directions; every single entry is compared with the reference above.
    assert torch.autograd.gradcheck(function, (streams, y, *parameters), fast_mode=True)


@pytest.mark.parametrize("generator", GENERATORS)
def test_gradcheck_of_every_generator(generator):
    gradcheck_site(temper.preset("mhc", num_streams=2, dim=3, generator=generator, iters=3))


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("num_streams", [2, 3])
def test_gradcheck_of_every_mixer(mixer, num_streams):
    gradcheck_site(temper.preset("temper-cp", num_streams=num_streams, dim=3, mixer=mixer))
    module = temper.Mixer.named(mixer)(num_streams).double()
    assert torch.autograd.gradcheck(module, (normal(2, *module.logit_shape, seed=6).requires_grad_(),))
