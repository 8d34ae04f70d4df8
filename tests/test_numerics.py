"""Precision, extreme values and the start of training: what the grid's well-behaved numbers do not show."""

import itertools
import math

import pytest
import torch
from torch import nn

import reference
import temper

HALVES = [torch.bfloat16, torch.float16]
MIXERS = sorted(temper.Mixer.members)
PRESETS = [name for name in sorted(temper.PRESETS) if name != "residual"]


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Branch(nn.Module):
    """Linear, tanh, linear; remembers the dtype it computed in."""

    def __init__(self, dim, seed=0):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        with torch.no_grad():
            for k, parameter in enumerate(self.parameters()):
                parameter.copy_(normal(*parameter.shape, seed=100 * seed + k) / math.sqrt(dim))

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        self.computed_in = y.dtype
        return y


def unit_normal_logits(num_streams, dim, mixer="sinkhorn"):
    """A site whose logits are unit normal: dense W of variance 1 / (N D) on normed streams, gates 1, biases 0."""
    hc = temper.HyperConnection(temper.preset("mhc", num_streams=num_streams, dim=dim, mixer=mixer), branch=Branch(dim))
    with torch.no_grad():
        for k, head in enumerate((hc.pre, hc.res, hc.post)):
            weight = head.generator.weight
            weight.copy_(normal(*weight.shape, seed=k) / math.sqrt(num_streams * dim))
            head.gate.fill_(1)
            head.bias.zero_()
    return hc


@pytest.mark.parametrize("num_streams", [2, 4, 8])
def test_routing_keeps_float32_under_bf16_autocast(num_streams):
    hc = unit_normal_logits(num_streams, 32)
    streams = normal(64, num_streams, 32, seed=7)
    plain = hc.route(streams)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = hc.route(streams)
        x, _ = hc.begin(streams)
        out = hc(streams)
    assert hc.branch.computed_in == torch.bfloat16
    for got, want in zip(routing, plain, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, want)
    assert plain.res.std() > 0.05
    assert (routing.res.sum(-1) - 1).abs().max() <= 1e-5
    exact = reference.reference_forward(hc.state_dict(), hc.config, streams, x)[1].res
    torch.testing.assert_close(routing.res.double(), exact, rtol=1e-5, atol=1e-6)
    # With two streams some tokens are 5e-4 from converged after 20 rounds, in exact arithmetic too.
    assert (routing.res.sum(-2) - 1).abs().max() <= (1e-3 if num_streams == 2 else 1e-5)
    assert x.dtype == out.dtype == torch.float32
    assert torch.equal(x, hc.begin(streams)[0])
    # With the y that bf16 gave, everything else is float32: a bf16 mix would be off by 1e-2.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = hc.branch(x)
    wanted = reference.reference_forward(hc.state_dict(), hc.config, streams, y)[2]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_gradients_of_an_autocast_forward_are_float32_gradients():
    hc = unit_normal_logits(4, 32)
    streams, y = normal(16, 4, 32, seed=7).requires_grad_(), normal(16, 32, seed=8)
    leaves = [streams, *(parameter for name, parameter in hc.named_parameters() if not name.startswith("branch."))]
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            x, state = hc.begin(streams)
            out = hc.finish(state, y)
        gradients.append(torch.autograd.grad((out * normal(*out.shape, seed=9)).sum() + x.pow(2).sum(), leaves))
    for plain, cast in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        assert torch.equal(plain, cast)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("cast_module", [False, True], ids=["float32 module", "module cast"])
def test_half_precision_streams(preset, dtype, cast_module):
    hc = temper.HyperConnection(temper.preset(preset, num_streams=4, dim=16), branch=Branch(16))
    hc.branch.to(dtype)
    if cast_module:
        hc.to(dtype)
    streams = normal(2, 6, 4, 16, seed=1).to(dtype).requires_grad_()
    out = hc(streams)
    assert out.dtype == dtype
    assert all(part.dtype == dtype for part in hc.route(streams))
    state = {key: tensor for key, tensor in hc.state_dict().items() if not key.startswith("branch.")}
    x, _ = hc.begin(streams)
    wanted = reference.reference_forward(state, hc.config, streams.detach(), hc.branch(x))[2]
    # Initial values: gates of 0.01, so a rounding of the last sum, of entries up to 8, is all that may be left.
    torch.testing.assert_close(out.double(), wanted, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    out.float().pow(2).mean().backward()
    assert streams.grad.dtype == dtype
    assert streams.grad.abs().max() > 0
    for name, parameter in hc.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("mixer", [mixer for mixer in MIXERS if mixer != "identity"])
@pytest.mark.parametrize("num_streams", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_logits_of_any_size_are_finite(mixer, num_streams, dtype, size):
    module = temper.Mixer.named(mixer)(num_streams).to(dtype)
    shape = module.logit_shape
    one_large = torch.zeros(math.prod(shape))
    one_large[-1] = 1
    logits = torch.stack(
        [
            *normal(20, *shape, seed=3).sign(),
            *normal(20, *shape, seed=4),
            torch.ones(shape),
            -torch.ones(shape),
            one_large.view(shape),
            -one_large.view(shape),
        ]
    )
    logits = (size * logits).to(dtype).requires_grad_()
    res = module(logits)
    assert res.isfinite().all()
    (res * normal(*res.shape, seed=5).to(dtype)).sum().backward()
    assert logits.grad.isfinite().all()
    if mixer == "unconstrained":
        assert torch.equal(res, logits)
    else:
        assert (res >= 0).all()
        # Rows are exact for every such mixer; float32 sums of at most four entries.
        assert (res.sum(-1) - 1).abs().max() <= 1e-5
        # Equal logits, however large, are equal weights.
        torch.testing.assert_close(res[40:42], torch.full_like(res[40:42], 1 / num_streams))


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_a_site_with_huge_biases_is_finite(mixer, size):
    hc = temper.HyperConnection(temper.preset("temper-cp", num_streams=4, dim=8, mixer=mixer), branch=Branch(8))
    with torch.no_grad():
        for k, head in enumerate((hc.pre, hc.res, hc.post)):
            head.bias.copy_(size * normal(*head.bias.shape, seed=k).sign())
    assert_finite(hc, normal(6, 4, 8, seed=1))


def assert_finite(hc, streams):
    streams = streams.requires_grad_()
    out = hc(streams)
    assert out.isfinite().all()
    assert all(part.isfinite().all() for part in hc.route(streams))
    # Cotangents of order one, whatever the size of the streams.
    (out * normal(*out.shape, seed=6).to(out.dtype)).sum().backward()
    for name, tensor in [("streams", streams), *hc.named_parameters()]:
        assert tensor.grad.isfinite().all(), name


@pytest.mark.parametrize("preset", ["hc", "mhc", "mhc-lite", "kromhc", "temper-cp", "temper-tucker", "temper-slim"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
# The squares of 1e4 and of 1e-4 are infinite and zero in fp16.
@pytest.mark.parametrize("scale", [1e4, 1e-4, 0.0])
def test_streams_of_any_scale_are_finite(preset, dtype, scale):
    hc = temper.HyperConnection(temper.preset(preset, num_streams=4, dim=8), branch=Branch(8))
    hc.branch.to(dtype)
    # Signs, so that a sum of four streams stays below the largest fp16.
    assert_finite(hc, (scale * normal(6, 4, 8, seed=1).sign()).to(dtype))


# Sites by what they mix with: presets, and the ways to stop that no preset has.
ALONE = {name: {"preset": name} for name in PRESETS} | {
    "tol": {"preset": "mhc", "iters": 30, "tol": 1e-3},
    "tol, eps": {"preset": "mhc", "iters": 30, "tol": 1e-2, "eps": 1e-3},
    "newton": {"preset": "mhc", "method": "newton"},
}


@pytest.mark.parametrize("name", ALONE)
def test_a_token_depends_on_that_token_alone(name):
    """Among ordinary tokens every extreme one: the ordinary get the same bits as without them."""
    options = dict(ALONE[name])
    config = temper.preset(options.pop("preset"), num_streams=4, dim=7, **options)
    hc, following = (spread(temper.HyperConnection(config, layer_index=index)) for index in range(2))
    ordinary, y = normal(19, 4, 7, seed=1), normal(19, 7, seed=2)
    for dtype in (torch.float32, torch.float64, *HALVES):
        limits = torch.finfo(dtype)
        extremes = [torch.inf, -torch.inf, torch.nan, limits.max, limits.tiny / 4, 0.0, 1e3]
        places = [0, 3, 8, 9, 11, 14, 18]
        mixed = ordinary.to(dtype, copy=True)
        for place, value in zip(places, extremes, strict=True):
            mixed[place] = mixed[place].sign() * value
        # One entry is enough.
        mixed[5, 1, 2] = torch.nan
        others = [t for t in range(19) if t not in (*places, 5)]
        results = []
        for tokens in (ordinary, mixed):
            streams, branch = (tensor.detach().to(dtype).requires_grad_() for tensor in (tokens, y))
            x, state = hc.begin(streams)
            chained, last = hc.finish_into(following, state, branch)
            outputs = (x, *state.routing, hc.finish(state, branch), chained, following.finish(last, branch))
            grads = [normal(*output.shape, seed=k).to(output.dtype) for k, output in enumerate(outputs)]
            results.append([*outputs, *torch.autograd.grad(outputs, [streams, branch], grads)])
        for k, (alone, among) in enumerate(zip(*results, strict=True)):
            assert alone.isfinite().all()
            assert torch.equal(alone[others], among[others]), (dtype, k)


def spread(hc):
    """Parameters that make logits of a few units, as after training."""
    with torch.no_grad():
        for seed, parameter in enumerate(hc.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=100 + seed))
    return hc


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("preset", ["hc", "mhc", "temper-cp"])
def test_routing_does_not_see_the_scale_of_the_streams(preset, dtype):
    """In half precision the squares of 1e4 are infinite and those of 2^-10 vanish: the norm must not use it."""
    hc = temper.HyperConnection(temper.preset(preset, num_streams=4, dim=8, norm_eps=1e-12))
    for k, head in enumerate((hc.pre, hc.res, hc.post)):
        nn.init.constant_(head.gate, 1.0)
        for parameter in head.generator.parameters():
            parameter.data.copy_(normal(*parameter.shape, seed=k) / 4)
    streams = normal(6, 4, 8, seed=1).sign().to(dtype)
    wanted = hc.route(streams)
    for scale in (2.0**-10, 2.0**13):
        for got, want in zip(hc.route(scale * streams), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def two_sites(preset, num_streams, dim=12):
    torch.manual_seed(num_streams)
    config = temper.preset(preset, num_streams=num_streams, dim=dim)
    return nn.ModuleList(
        temper.HyperConnection(config, layer_index=index, branch=Branch(dim, seed=index + 1)) for index in range(2)
    )


def forward(sites, x):
    streams = temper.expand_streams(x, sites[0].config.num_streams)
    for hc in sites:
        streams = hc(streams)
    return streams


TEMPER = pytest.mark.parametrize("preset", ["temper-cp", "temper-tucker"])
EACH_N = pytest.mark.parametrize("num_streams", [2, 4, 8])


@TEMPER
@EACH_N
def test_at_the_start_every_parameter_learns_but_the_first_res(preset, num_streams):
    """The first site mixes N copies of one vector: rows that sum to 1 leave them alone, whatever res is."""
    sites = two_sites(preset, num_streams).double()
    streams = forward(sites, normal(5, 12, seed=1).double())
    (streams - normal(*streams.shape, seed=2).double()).pow(2).mean().backward()
    for name, parameter in sites.named_parameters():
        largest = parameter.grad.abs().max()
        if name.startswith("0.res."):
            assert largest < 1e-14, name
        else:
            # The smallest true gradient is a product of gates of 0.01 and of exp(-8).
            assert largest > 1e-10, name


@TEMPER
@EACH_N
def test_a_loss_on_the_reduced_streams_reaches_every_read_and_write(preset, num_streams):
    """The sum over streams does not see a doubly stochastic res, so here the last res is left out as well."""
    sites = two_sites(preset, num_streams)
    reduced = temper.reduce_streams(forward(sites, normal(5, 12, seed=1)))
    (reduced - normal(*reduced.shape, seed=2)).pow(2).mean().backward()
    for name, parameter in sites.named_parameters():
        if ".res." not in name:
            assert parameter.grad.abs().max() > 1e-8, name


@TEMPER
@EACH_N
def test_after_two_steps_no_two_streams_are_alike(preset, num_streams):
    sites = two_sites(preset, num_streams)
    optimizer = torch.optim.AdamW(sites.parameters(), lr=5e-3)
    x, target = normal(5, 12, seed=1), normal(5, 12, seed=2)
    for _ in range(2):
        optimizer.zero_grad()
        (temper.reduce_streams(forward(sites, x)) - target).pow(2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        streams = forward(sites, x)
    assert streams.isfinite().all()
    for m, n in itertools.combinations(range(num_streams), 2):
        difference = (streams[:, m] - streams[:, n]).abs().max() / streams.abs().max()
        assert difference > 1e-5, (m, n)


def built(config, layer_index=0):
    return temper.HyperConnection(config, layer_index=layer_index)


def built_on_meta(config, layer_index=0):
    with torch.device("meta"):
        hc = temper.HyperConnection(config, layer_index=layer_index)
    hc.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in hc.state_dict().values():
            tensor.fill_(math.nan)
    hc.reset_parameters()
    return hc


BUILDS = pytest.mark.parametrize("build", [built, built_on_meta])


@pytest.mark.once
@BUILDS
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "hc"])
@pytest.mark.parametrize(("num_streams", "layer_index"), [(2, 0), (4, 7), (3, 5)])
def test_initial_gates_gain_and_biases_of_reading_and_writing(build, preset, num_streams, layer_index):
    hc = build(temper.preset(preset, num_streams=num_streams, dim=5), layer_index)
    state = hc.state_dict()
    bias = torch.full((num_streams,), -1.0)
    bias[layer_index % num_streams] = 1.0
    for head in hc.config.heads:
        assert torch.equal(state[f"{head}.gate"], torch.tensor([0.01]))
    assert torch.equal(state["pre.bias"], bias)
    assert torch.equal(state["post.bias"], bias)
    if preset != "temper-slim":
        assert torch.equal(state["norm.weight"], torch.ones(num_streams, 5))


@pytest.mark.once
@BUILDS
@pytest.mark.parametrize("gain", ["full", "rank-one", "feature", "none"])
def test_every_gain_starts_at_one(build, gain):
    state = build(temper.preset("mhc", num_streams=3, dim=5, gain=gain)).state_dict()
    gains = {key: tensor for key, tensor in state.items() if key.startswith("norm.")}
    shapes = {"full": [(3, 5)], "rank-one": [(3,), (5,)], "feature": [(5,)], "none": []}[gain]
    assert sorted(tuple(tensor.shape) for tensor in gains.values()) == sorted(shapes)
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in gains.values())


def initial_res_bias(mixer, num_streams):
    if mixer == "sinkhorn":
        return torch.full((num_streams, num_streams), -8.0).fill_diagonal_(0)
    if mixer == "unconstrained":
        return torch.eye(num_streams)
    sizes = [num_streams] if mixer == "birkhoff" else reference.prime_factors(num_streams)
    return torch.tensor(
        [
            0.0 if permutation == tuple(range(size)) else -8.0
            for size in sizes
            for permutation in itertools.permutations(range(size))
        ]
    )


@pytest.mark.once
@BUILDS
@pytest.mark.parametrize("mixer", ["sinkhorn", "birkhoff", "kronecker", "unconstrained"])
@pytest.mark.parametrize("num_streams", [2, 3, 4, 6])
def test_initial_bias_of_every_mixer(build, mixer, num_streams):
    hc = build(temper.preset("temper-cp", num_streams=num_streams, dim=5, mixer=mixer), layer_index=1)
    assert torch.equal(hc.state_dict()["res.bias"], initial_res_bias(mixer, num_streams))
    res = hc.mixer(hc.res.bias)
    # One logit of 0 among others of -8: what is off the identity is of the order of N! exp(-8).
    assert (res - torch.eye(num_streams)).abs().max() < 1.1 * math.factorial(num_streams) * math.exp(-8)


@BUILDS
@pytest.mark.parametrize("layer_index", [0, 5])
def test_initial_values_of_hc(build, layer_index):
    state = build(temper.preset("hc", num_streams=4, dim=5), layer_index).state_dict()
    one_hot = torch.zeros(4)
    one_hot[layer_index % 4] = 1
    wanted = {
        "norm.weight": torch.ones(5),
        "pre.bias": one_hot,
        "res.bias": torch.eye(4),
        "post.bias": torch.ones(4),
        "pre.generator.weight": torch.zeros(5),
        "res.generator.weight": torch.zeros(5, 4),
        "post.generator.weight": torch.zeros(5),
        **{f"{head}.gate": torch.tensor([0.01]) for head in reference.HEADS},
    }
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(state[key], value), key


@pytest.mark.once
@BUILDS
@pytest.mark.parametrize("preset", ["mhc", "mhc-lite", "kromhc"])
def test_dense_weights_start_at_zero(build, preset):
    state = build(temper.preset(preset, num_streams=3, dim=5)).state_dict()
    for head in reference.HEADS:
        weight = state[f"{head}.generator.weight"]
        assert torch.equal(weight, torch.zeros_like(weight))


DEVIATIONS = [
    ("temper-cp", {}, 2**-0.5),
    ("temper-cp", {"rank": 5}, 5**-0.5),
    ("temper-cp-krom", {}, 2**-0.5),
    ("temper-tucker", {}, 12**-0.5),
    ("temper-tucker", {"rank": (3, 2)}, 3**-0.5),
    ("temper-tucker-frozen", {}, 12**-0.5),
    ("temper-tt", {}, 4**-0.5),
    ("temper-tt", {"rank": (4, 2)}, 4**-0.5),
    ("temper-cp", {"init_std": 0.02}, 0.02),
    ("temper-tucker", {"init_std": 0.02}, 0.02),
    ("temper-tt", {"init_std": 0.02}, 0.02),
    ("mhc", {"init_std": 0.02}, 0.02),
]


@pytest.mark.once
@BUILDS
@pytest.mark.parametrize(("preset", "overrides", "std"), DEVIATIONS)
def test_factors_start_normal_with_the_deviation_of_their_rank(build, preset, overrides, std):
    torch.manual_seed(0)
    config = temper.preset(preset, num_streams=4, dim=100, **overrides)
    states = [build(config).state_dict() for _ in range(10)]
    keys = [key for key in states[0] if ".generator." in key]
    assert keys
    for key in keys:
        values = torch.stack([state[key] for state in states]).flatten().double() / std
        # Five deviations of each estimate, over ten sites; a variance in place of a deviation is far outside.
        margin = 5 / math.sqrt(values.numel())
        assert abs(values.mean()) < margin, key
        assert abs(values.std() - 1) < margin / math.sqrt(2), key
        # 68.3% of a normal lies within one deviation; 57.7% of a uniform does.
        assert abs((values.abs() < 1).double().mean() - 0.6827) < 0.466 * margin, key
