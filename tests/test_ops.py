"""The operations of all kernels against the plain definition and autograd: values and every gradient."""

import itertools

import pytest
import torch

import cases
import temper
from temper.mixers import Mixer
from temper.ops import cpu, fused
from temper.ops.backend import BACKENDS
from temper.ops.cpu import operators
from temper.ops.plan import FoldedWeights

KERNELS = pytest.mark.parametrize("kernels", [cpu, fused], ids=["cpu", "fused"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
# In units of the largest entry. Newton stops at 1e-12 in float64; float32 has 24 bits and sums of a few thousand.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-6}
# Packs are of 8 and pairs of packs of 16, spans are of 128 and of 1024 features: on, below and above each.
DIMS = (1, 5, 7, 8, 17, 24, 130, 1030)
# Blocks are of 8 tokens and chunks of 256.
TOKENS = (0, 1, 7, 8, 9, 255, 256, 257, 600)
STREAMS = (2, 3, 4, 5, 6, 8, 16)
# Stopping at a tolerance, each token by itself, `fused` leaves to the others.
SERVED = [
    pytest.param(kernels, mixer, id=f"{kernels.name}, {mixer}")
    for kernels in (cpu, fused)
    for mixer in cases.MIXERS
    if kernels is cpu or "tol" not in mixer
]
EACH_SERVED = pytest.mark.parametrize(("kernels", "mixer"), SERVED)


def cells():
    """Every mixer at every N, the shapes by turns, so that each meets each dim and number of tokens."""
    dims, tokens = itertools.cycle(DIMS), itertools.cycle((1, 7, 8, 9, 257))
    for mixer, num_streams in itertools.product(cases.MIXERS, STREAMS):
        if mixer == "birkhoff" and num_streams > 6:
            continue
        generator = "dense" if num_streams % 2 else "cp"
        # 5! and 6! logits: a dense map of 1,030 features would only be slow.
        dim, most = next(dims), 24 if mixer == "birkhoff" else 1030
        for kernels in (cpu, fused) if "tol" not in mixer else (cpu,):
            yield kernels, mixer, num_streams, min(dim, most), next(tokens), generator


def assert_is_the_definition(kernels, case):
    assert kernels.refusal(case.spec, case.mixer, case.streams, True) is None
    results = cases.run(kernels, case)
    for name, value in results.items():
        like = case.y if name == "d_y" else case.streams if name in ("x", "next", "d_streams") else case.folded.bias
        assert value.dtype == like.dtype, name
    cases.assert_near(results, cases.expected(case), TOLERANCE[case.folded.bias.dtype])


@pytest.mark.parametrize(("kernels", "mixer", "num_streams", "dim", "tokens", "generator"), list(cells()))
def test_a_site_is_the_definition(kernels, mixer, num_streams, dim, tokens, generator):
    for dtype in (torch.float64, torch.float32):
        # In float32 a token near its tolerance may stop a round sooner or later: the mixer has a test of its own.
        if dtype == torch.float64 or "tol" not in mixer:
            case = cases.make(mixer, num_streams, dim, tokens, generator=generator, dtype=dtype)
            assert_is_the_definition(kernels, case)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("projected", [0, 10**9], ids=["matrix product", "kernel"])
def test_ragged_shapes(monkeypatch, dim, projected):
    monkeypatch.setattr(operators, "PROJECT_IN_KERNEL_BYTES", projected)
    for tokens, num_streams in zip(TOKENS, itertools.cycle((4, 3, 5)), strict=False):
        case = cases.make("kronecker", num_streams, dim, tokens, dtype=torch.float32)
        assert_is_the_definition(cpu, case)


@pytest.mark.parametrize("generator", ["cp", "dense", "tucker"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_both_ways_to_project_are_the_same(monkeypatch, generator, dtype):
    case = cases.make("sinkhorn", 4, 133, 300, generator=generator, dtype=dtype)
    results = []
    for projected in (0, 10**9):
        monkeypatch.setattr(operators, "PROJECT_IN_KERNEL_BYTES", projected)
        results.append(cases.run(cpu, case))
    # Rounded to bf16, the two may fall on either side of a tie: one step of 2^-8.
    tolerance = 2**-8 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    cases.assert_near(results[0], {name: value.double() for name, value in results[1].items()}, tolerance)


@KERNELS
@pytest.mark.parametrize("used", [("d_x",), ("grad",), ("d_weights",), ("grad", "d_x"), ("d_x", "d_weights")], ids=str)
@pytest.mark.parametrize("projected", [0, 10**9], ids=["matrix product", "kernel"])
def test_a_gradient_that_does_not_come_is_zero(kernels, used, projected, monkeypatch):
    monkeypatch.setattr(operators, "PROJECT_IN_KERNEL_BYTES", projected)
    case = cases.make("sinkhorn", 5, 19, 11)
    case = case.but(**{name: None for name in ("grad", "d_x", "d_weights") if name not in used})
    assert_is_the_definition(kernels, case)


@KERNELS
@pytest.mark.parametrize("watched", ["s", "y", "f", "b", "sy", "yf", "sfb", "yfb"])
@pytest.mark.parametrize("used", ["x", "next", "weights", "all"])
def test_autograd_may_ask_for_any_part(kernels, watched, used):
    """Any of streams, y, bias and the folded map without a gradient, any of the results unused."""
    case = cases.make("birkhoff", 3, 9, 10)
    outcomes = []
    for name in ("naive", kernels.name):
        leaves = {"s": case.streams, "y": case.y, "f": case.folded.in_map, "b": case.folded.bias}
        leaves = {key: leaf.clone().requires_grad_(key in watched) for key, leaf in leaves.items()}
        folded = FoldedWeights(leaves["f"], case.folded.out, leaves["b"])
        x, state = BACKENDS[name].open_site(leaves["s"], folded, case.spec, case.mixer, 0)
        outputs = {"x": x, "weights": state.weights, "next": BACKENDS[name].close_site(state, leaves["y"], False)}
        cotangents = {"x": case.d_x, "weights": case.d_weights, "next": case.grad}
        chosen = [key for key in outputs if used in (key, "all") and outputs[key].requires_grad]
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        gradients = [None] * len(wanted)
        if chosen:
            pairs = [outputs[key] for key in chosen], wanted, [cotangents[key] for key in chosen]
            gradients = torch.autograd.grad(*pairs, allow_unused=True)
        outcomes.append([torch.zeros_like(w) if g is None else g for w, g in zip(wanted, gradients, strict=True)])
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-10, atol=1e-11)


@KERNELS
@DTYPES
@pytest.mark.parametrize(
    "config", [{"pre_eps": 0.125}, {"norm_eps": 0.5}, {"norm_eps": 0.9, "norm_clamp": True}], ids=str
)
def test_guards(kernels, dtype, config):
    case = cases.make("guarded", 4, 6, 40, dtype=dtype, **config)
    mean = case.streams.double().square().mean((1, 2))
    assert (mean < 0.9).any()
    assert (mean > 0.9).any()
    assert_is_the_definition(kernels, case)


def bf16_steps(actual, wanted):
    """Steps of bf16 between a result and the wide one, rounded."""
    assert actual.dtype == torch.bfloat16
    rounded = wanted.bfloat16().double()
    _, exponent = torch.frexp(rounded)
    return ((actual.double() - rounded) / torch.ldexp(torch.ones_like(rounded), exponent - 8)).abs().max()


@KERNELS
@pytest.mark.parametrize("mixer", ["unconstrained", "sinkhorn", "guarded", "newton", "birkhoff", "kronecker"])
@pytest.mark.parametrize(("num_streams", "dim", "tokens"), [(4, 130, 257), (3, 7, 9), (5, 1030, 8)])
def test_bf16_streams_are_the_wide_result_rounded(kernels, mixer, num_streams, dim, tokens):
    case = cases.make(mixer, num_streams, dim, tokens, dtype=torch.bfloat16)
    results, wanted = cases.run(kernels, case), cases.expected(case)
    wide = case.but(**{name: getattr(case, name).float() for name in ("streams", "y", "grad", "d_x")})
    single = cases.run(kernels, wide)
    for name in ("x", "next"):
        assert bf16_steps(results[name], single[name]) <= 2
        # Against the exact result too, where entries are not the small difference of large ones.
        assert (
            bf16_steps(results[name], torch.where(wanted[name].abs() > 0.1, wanted[name], results[name].double())) <= 2
        )
    # What leaves in float32 has seen nothing rounded; d_y and d_streams are rounded once.
    for name, want in wanted.items():
        step = 2**-8 if name in ("x", "next", "d_y", "d_streams") else TOLERANCE[torch.float32]
        cases.assert_near({name: results[name]}, {name: want}, step)


OTHER = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float64),
    (torch.float64, torch.float32),
]


@KERNELS
@pytest.mark.parametrize(("dtype", "y_dtype"), OTHER, ids=str)
def test_a_branch_output_of_another_dtype(kernels, dtype, y_dtype):
    case = cases.make("sinkhorn", 3, 21, 17, dtype=dtype, y_dtype=y_dtype)
    results, wanted = cases.run(kernels, case), cases.expected(case)
    assert results["d_y"].dtype == y_dtype
    for name, want in wanted.items():
        stored = {"d_y": min(y_dtype, dtype, key=lambda kind: torch.finfo(kind).bits)}.get(name, dtype)
        # A float64 y may be rounded to bf16 before it is written to bf16 streams.
        coarse = torch.bfloat16 in (dtype, y_dtype) and name != "weights"
        step = (
            2**-7
            if coarse
            else 2 * torch.finfo(stored).eps
            if name == "d_y"
            else TOLERANCE[torch.promote_types(dtype, torch.float32)]
        )
        cases.assert_near({name: results[name]}, {name: want}, step)


def transposed(tensor):
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor


def sliced(tensor):
    return torch.cat([tensor, torch.full_like(tensor, torch.nan)], -1)[..., : tensor.shape[-1]]


def spread(tensor):
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]


@KERNELS
@pytest.mark.parametrize("layout", [transposed, sliced, spread])
# The larger one is so large that freed memory goes back to the system.
@pytest.mark.parametrize(("dim", "tokens"), [(5, 9), (64, 20_000)])
def test_tensors_of_any_layout(kernels, layout, dim, tokens):
    case = cases.make("unconstrained", 2, dim, tokens, dtype=torch.float32)
    wanted = cases.run(kernels, case)
    names = ("streams", "y", "grad", "d_x", "d_weights")
    folded = FoldedWeights(*map(layout, case.folded[:3]))
    gapped = case.but(folded=folded, **{name: layout(getattr(case, name)) for name in names})
    assert not any(getattr(gapped, name).is_contiguous() for name in names)
    cases.assert_near(cases.run(kernels, gapped), {k: v.double() for k, v in wanted.items()}, 1e-5)


@KERNELS
@pytest.mark.parametrize("tokens", [9, 20_000])
def test_gradients_without_memory_of_their_own(kernels, tokens):
    """What the sum of the next streams sends back is one number, expanded."""
    case = cases.make("unconstrained", 4, 32, tokens, dtype=torch.float32)
    ones = {name: torch.ones(()).expand_as(getattr(case, name)) for name in ("grad", "d_x", "d_weights")}
    dense = {name: value.contiguous() for name, value in ones.items()}
    got, want = cases.run(kernels, case.but(**ones)), cases.run(kernels, case.but(**dense))
    cases.assert_near(got, {name: value.double() for name, value in want.items()}, 2e-6)


@EACH_SERVED
@DTYPES
@pytest.mark.parametrize("num_streams", STREAMS)
def test_a_mixer_alone_is_its_definition(kernels, mixer, dtype, num_streams):
    options = dict(cases.MIXERS[mixer])
    # All permutations of at most six things.
    num_streams = min(num_streams, 6) if mixer == "birkhoff" else num_streams
    module = Mixer.named(options.pop("name"))(num_streams, **options)
    source = torch.Generator().manual_seed(num_streams)
    logits = 2 * torch.randn(41, *module.logit_shape, generator=source, dtype=torch.float64).to(dtype)
    grad = torch.randn(41, num_streams, num_streams, generator=source, dtype=torch.float64).to(dtype)
    leaf = logits.double().requires_grad_()
    wanted = module.mix(leaf)
    (d_wanted,) = torch.autograd.grad(wanted, leaf, grad.double())
    # Every other logit and gradient is somebody else's.
    res = kernels.mix(spread(logits), module)
    pulled = kernels.mix_backward(spread(logits), spread(res), spread(grad), module)
    if options.get("tol") and dtype == torch.float32:
        # A round more or less where a token is right at its tolerance.
        torch.testing.assert_close(res.double(), wanted, rtol=0, atol=2 * options["tol"])
    else:
        # The gradient of a limit is as steep as its slowest direction: logits of 2 N(0, 1) cost two digits.
        room = 100 if options.get("method") == "newton" else 1
        cases.assert_near(
            {"res": res, "d_logits": pulled}, {"res": wanted, "d_logits": d_wanted}, room * TOLERANCE[dtype]
        )


@EACH_SERVED
@DTYPES
def test_logits_of_any_size(kernels, mixer, dtype):
    """Some tokens far outside the range of exp, beside ordinary ones in the same block."""
    case = cases.make(mixer, 4, 9, 43, dtype=dtype)
    source = torch.Generator().manual_seed(1)
    sizes = torch.tensor([1.0, 1e2, 1e4])[torch.randint(3, (43,), generator=source)]
    shape = case.mixer.logit_shape
    logits = torch.randn(43, *shape, generator=source).to(dtype) * sizes.to(dtype).view(-1, *[1] * len(shape))
    res = kernels.mix(logits, case.mixer)
    grad = torch.randn(res.shape, generator=source).to(dtype)
    pulled = kernels.mix_backward(logits, res, grad, case.mixer)
    assert res.isfinite().all()
    assert pulled.isfinite().all()
    ordinary = sizes == 1
    cases.assert_near({"res": res[ordinary]}, {"res": kernels.mix(logits[ordinary], case.mixer).double()}, 1e-6)
    leaf = logits.double().requires_grad_()
    wanted = case.mixer.mix(leaf)
    if "newton" not in mixer and "tol" not in mixer:
        # float32 logits of 1e4 have steps of 1e-3, and twenty rounds carry them on.
        torch.testing.assert_close(
            res.double(), wanted.detach(), rtol=1e-2, atol=5e-3 if dtype == torch.float32 else 1e-9
        )


@EACH_SERVED
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_biases_of_any_size(kernels, mixer, size):
    case = cases.make(mixer, 4, 9, 13, dtype=torch.float32)
    case = case.but(folded=case.folded._replace(bias=size * case.folded.bias.sign()))
    for name, value in cases.run(kernels, case).items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize("mixer", ["sinkhorn", "sinkhorn, columns", "guarded", "birkhoff", "kronecker"])
@KERNELS
def test_a_logit_of_minus_infinity_is_a_weight_of_zero(kernels, mixer):
    options = dict(cases.MIXERS[mixer])
    module = Mixer.named(options.pop("name"))(4, **options)
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(19, *module.logit_shape, generator=source, dtype=torch.float64)
    logits[::3].flatten(1)[:, 1] = -torch.inf
    leaf = logits.clone().requires_grad_()
    wanted = module.mix(leaf)
    grad = torch.randn(wanted.shape, generator=source, dtype=torch.float64)
    (d_wanted,) = torch.autograd.grad(wanted, leaf, grad)
    assert wanted.isfinite().all()
    assert d_wanted.isfinite().all()
    res = kernels.mix(logits, module)
    pulled = kernels.mix_backward(logits, res, grad, module)
    torch.testing.assert_close((res, pulled), (wanted.detach(), d_wanted), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mixer", cases.MIXERS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_bad_token_is_bad_alone(dtype, mixer, value):
    """Eight tokens share a vector: bit for bit, seven must not notice what the eighth is."""
    clean = cases.make(mixer, 3, 18, 21, dtype=dtype)
    bad = clean.but(streams=clean.streams.clone())
    bad.streams[[3, 12, 20], 1, 5] = value
    others = torch.ones(21, dtype=torch.bool)
    others[[3, 12, 20]] = False
    good, spoilt = cases.run(cpu, clean), cases.run(cpu, bad)
    for name in ("x", "weights", "next", "d_y", "d_streams"):
        assert torch.equal(good[name][others], spoilt[name][others]), name
        assert good[name].isfinite().all()
    # Not hidden, either: a bad token must be seen.
    assert not spoilt["next"][~others].isfinite().all(-1).all(-1).any()


@pytest.mark.parametrize("mixer", cases.MIXERS)
def test_a_token_does_not_depend_on_its_neighbours(mixer):
    """Each with a size of logits of its own: some take the way of logarithms, some converge at once, some never."""
    case = cases.make(mixer, 4, 9, 24, dtype=torch.float32)
    case.folded.in_map[:] *= 10
    case.streams[5] *= 0
    together = cases.run(cpu, case)
    for t in (0, 5, 6, 23):
        alone = case.but(
            **{name: getattr(case, name)[t : t + 1] for name in ("streams", "y", "grad", "d_x", "d_weights")}
        )
        found = cases.run(cpu, alone)
        for name in ("x", "weights", "next", "d_y"):
            assert torch.equal(together[name][t], found[name][0]), (t, name)
        # Four tokens at a time or one: the compiler may round a product before a sum or not.
        one, other = together["d_streams"][t], found["d_streams"][0]
        torch.testing.assert_close(one, other, rtol=0, atol=4e-6 * other.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", [lambda tensor: tensor.clone(), transposed], ids=["dense", "transposed"])
def test_finishing_in_place_is_finishing(dtype, layout):
    case = cases.make("sinkhorn", 5, 19, 33, dtype=dtype)
    weights = cpu.begin(case.streams, case.folded, case.spec, case.mixer)[1].weights
    wanted = cpu.finish(case.streams, case.y, weights, case.spec)
    streams = layout(case.streams)
    result = cpu.finish(streams, case.y, weights, case.spec, in_place=True)
    assert result is streams
    assert torch.equal(streams, wanted)


def refusal(kernels, case, dtype=torch.float32, asked=False):
    return kernels.refusal(case.spec, case.mixer, case.streams.to(dtype), asked)


def test_kernels_say_what_they_do_not_serve():
    tol = cases.make("sinkhorn, tol")
    both = cases.make({"name": "sinkhorn", "tol": 1e-3, "eps": 1e-3})
    assert refusal(cpu, tol) is None
    assert "sinkhorn" in refusal(fused, tol)
    assert "sinkhorn" in refusal(cpu, both)
    plain = cases.make("sinkhorn")
    assert "float16" in refusal(cpu, plain, torch.float16)
    assert refusal(fused, plain, torch.float16) is None
    assert "float64" in refusal(cpu, plain, torch.float64)
    assert refusal(cpu, plain, torch.float64, asked=True) is None
    many = cases.make("sinkhorn", num_streams=cpu.MAX_STREAMS + 1, dim=1)
    assert "64" in refusal(cpu, many)
    hc = temper.HyperConnection(temper.preset("hc", num_streams=2, dim=3))
    for kernels in (cpu, fused):
        assert "tanh" in kernels.refusal(hc.spec, hc.mixer, torch.ones(1, 2, 3), True)


def test_the_most_streams_that_the_kernels_take():
    for mixer in ("sinkhorn", "newton", "guarded", "kronecker"):
        assert_is_the_definition(cpu, cases.make(mixer, cpu.MAX_STREAMS, 3, 9))
