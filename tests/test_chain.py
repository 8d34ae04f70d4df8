"""`finish` of one site and `begin` of the next as one operation: it does what the two do."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cases
import temper
from temper.ops import cpu, fused
from test_grid import BUILT, EXACT, assert_all_close, expected_of, gradients, inputs, normal, site
from test_ops import TOLERANCE

KERNELS = pytest.mark.parametrize("kernels", [cpu, fused], ids=["cpu", "fused"])
# In bfloat16 one rounding of what is stored in it.
TOLERANCES = TOLERANCE | {torch.bfloat16: 2**-8}


def served(mixer, num_streams, kernels):
    """Stopping at a tolerance, each token by itself, `fused` leaves to the others."""
    return not (mixer == "birkhoff" and num_streams > 6) and not (kernels is fused and "tol" in mixer)


GRID = list(itertools.product(cases.MIXERS, (2, 3, 4, 6, 8, 16)))


def cells():
    """Every mixer with both kernels and every N with both; generators, features and tokens by turns."""
    shapes = itertools.cycle([(1, 9, "cp"), (5, 1, "dense"), (17, 8, "tt"), (24, 25, "cp"), (130, 7, "tucker")])
    for k, (mixer, num_streams) in enumerate(GRID):
        kernels = (cpu, fused)[(k + k // 6) % 2]
        if served(mixer, num_streams, kernels) and not (mixer == "birkhoff" and num_streams == 6):
            yield kernels, mixer, num_streams, *next(shapes)


def assert_chains(kernels, mixer, num_streams, dim, tokens, generator):
    for dtype, tolerance in TOLERANCES.items():
        # In less than float64 a token near its tolerance may stop a round sooner or later.
        if "tol" not in mixer or dtype == torch.float64:
            case = cases.make(mixer, num_streams, dim, tokens, generator=generator, dtype=dtype)
            cases.assert_near(cases.run_chained(kernels, case), cases.expected_chained(case), tolerance)


@pytest.mark.once
@pytest.mark.parametrize(("kernels", "mixer", "num_streams", "dim", "tokens", "generator"), list(cells()))
def test_the_chained_operation_is_the_definition(kernels, mixer, num_streams, dim, tokens, generator):
    assert_chains(kernels, mixer, num_streams, dim, tokens, generator)


@pytest.mark.once
def test_rows_longer_than_a_span_of_the_first_cache():
    assert_chains(cpu, "sinkhorn", 16, 300, 9, "cp")


@pytest.mark.slow
@pytest.mark.once
@KERNELS
@pytest.mark.parametrize("generator", ["cp", "tucker", "tt", "dense"])
@pytest.mark.parametrize(("mixer", "num_streams"), GRID)
def test_the_whole_grid_of_the_chained_operation(kernels, mixer, num_streams, generator):
    if served(mixer, num_streams, kernels):
        assert_chains(kernels, mixer, num_streams, 24, 9, generator)


def changes(dtype=torch.float32):
    """Sites with something unusual about them."""
    case = cases.make("sinkhorn", 3, 21, 19, dtype=dtype)
    for names in (("grad",), ("d_x",), ("d_weights",), ("grad", "d_x"), ("d_x", "d_weights"), ("grad", "d_weights")):
        yield case.but(**dict.fromkeys(names))
    yield case.but(grad=torch.ones((), dtype=dtype).expand_as(case.grad), d_x=case.d_x.T.contiguous().T)
    yield case.but(y=torch.stack([case.y, case.y], -1)[..., 0])
    yield case.but(y=case.y.to(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16))
    yield case.but(**{key: getattr(case, key)[:0] for key in ("streams", "y", "grad", "d_x", "d_weights")})
    # A map so large that torch multiplies by it, and one thread's share of tokens and some more.
    yield cases.make("kronecker", 8, 384, 9, generator="dense", dtype=dtype)
    yield cases.make("newton", 4, 40, 600, dtype=dtype)


@pytest.mark.once
@KERNELS
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_chained_operation_is_the_two_bit_for_bit(kernels, dtype):
    for case in changes(dtype):
        got, want = cases.run_chained(kernels, case), cases.run_one_by_one(kernels, case)
        again = cases.run_chained(kernels, case)
        for name, value in want.items():
            assert got[name].dtype == value.dtype, name
            assert torch.equal(got[name], value), name
            assert torch.equal(got[name], again[name]), name


@pytest.mark.once
@KERNELS
def test_a_chained_token_depends_on_that_token_alone(kernels):
    case = cases.make("sinkhorn", 4, 33, 21, dtype=torch.float32)
    others = case.but(**{key: getattr(case, key).clone() for key in ("streams", "y", "grad", "d_x", "d_weights")})
    for key in ("streams", "y", "grad", "d_x", "d_weights"):
        getattr(others, key)[1:] *= -3
    got, want = cases.run_chained(kernels, others), cases.run_chained(kernels, case)
    for name in ("next", "x", "weights", "d_next", "d_y", "d_weights"):
        assert torch.equal(got[name][0], want[name][0]), name
        assert not torch.equal(got[name][1:], want[name][1:]), name


@pytest.mark.once
@pytest.mark.parametrize("dim", [5, 47])
def test_a_token_alone_is_the_token_in_a_block(dim):
    """Features left over from the vectors included, in a block of eight and its remainders of four, two and one."""
    keys = ("streams", "y", "grad", "d_x", "d_weights")
    case = cases.make("sinkhorn", 4, dim, 15, dtype=torch.float32)
    whole = cases.run_chained(cpu, case)
    for t in (0, 8, 12, 14):
        alone = cases.run_chained(cpu, case.but(**{key: getattr(case, key)[t : t + 1] for key in keys}))
        for name in ("next", "x", "weights", "d_next", "d_y", "d_weights"):
            assert torch.equal(alone[name][0], whole[name][t]), (name, t)


def chained(first, second, streams, y, z):
    """x of both sites, and the streams after them."""
    x, state = first.begin(streams)
    following, state = first.finish_into(second, state, y)
    return x, following, second.finish(state, z)


def one_by_one(first, second, streams, y, z):
    x, state = first.begin(streams)
    following, state = second.begin(first.finish(state, y))
    return x, following, second.finish(state, z)


def two_sites(first, second=None, dtype=torch.float64):
    """With parameters of their own."""
    sites = site(first, dtype), site(second or first, dtype)
    with torch.no_grad():
        for parameter in sites[1].parameters():
            parameter.mul_(0.8)
    return sites


def assert_is_reference(first, second, streams, y):
    z = normal(*y.shape, seed=7).to(y.dtype).requires_grad_()
    x, _, between = expected_of(first, streams, y)
    following, _, out = expected_of(second, between, z)
    named = {f"{k}.{name}": value for k, hc in enumerate((first, second)) for name, value in hc.named_parameters()}
    leaves, names = [streams, y, z, *named.values()], ["streams", "y", "z", *named]
    got, want = chained(first, second, streams, y, z), (x, following, out)
    assert_all_close(got, want, ("x", "the next x", "streams"), **EXACT)
    assert_all_close(gradients(got, leaves), gradients(want, leaves), names, **EXACT)


@pytest.mark.parametrize(("generator", "mixer", "num_streams"), BUILT[::5])
def test_two_chained_sites_are_the_reference(generator, mixer, num_streams):
    config = temper.preset("mhc", num_streams=num_streams, dim=5, generator=generator, mixer=mixer)
    assert_is_reference(*two_sites(config), *inputs(num_streams))


@pytest.mark.slow
@pytest.mark.parametrize(("generator", "mixer", "num_streams"), BUILT)
def test_every_pair_of_the_grid_is_the_reference(generator, mixer, num_streams):
    test_two_chained_sites_are_the_reference(generator, mixer, num_streams)


def config(preset="temper-cp", num_streams=4, **options):
    return temper.preset(preset, num_streams=num_streams, dim=5, **options)


@pytest.mark.parametrize("leading", [(), (2, 1, 3)], ids=str)
def test_sites_of_different_kinds_and_any_layout(leading):
    first, second = two_sites(config("temper-tucker"), config("mhc-lite"))
    streams, y = inputs(4, leading=leading)
    assert_is_reference(first, second, streams, y)
    streams, y = (tensor.detach() for tensor in (streams, y))
    views = streams.mT.contiguous().mT, torch.stack([y, -y], -1)[..., 0]
    assert_is_reference(first, second, *(view.requires_grad_() for view in views))


@pytest.mark.parametrize("num_streams", [1, 4])
@pytest.mark.parametrize("pair", [("hc", "hc"), ("temper-cp", "hc"), ("hc", "temper-cp"), ("residual", "residual")])
def test_sites_that_cannot_be_chained_run_one_after_the_other(pair, num_streams):
    first, second = (temper.HyperConnection(config(preset, num_streams)).double() for preset in pair)
    streams, y = inputs(num_streams)
    z = y.detach() + 1
    got, want = (call(first, second, streams, y, z) for call in (chained, one_by_one))
    assert all(map(torch.equal, got, want))
    leaves = [streams, y, *first.parameters(), *second.parameters()]
    assert all(map(torch.equal, gradients(got, leaves), gradients(want, leaves)))


def test_another_number_of_streams_is_refused_as_by_the_two():
    first, second = two_sites(config(), config(num_streams=2))
    streams, y = inputs(4)
    _, state = first.begin(streams)
    with pytest.raises(ValueError, match="num_streams=2"):
        first.finish_into(second, state, y)


def test_streams_between_chained_sites_may_be_used_by_somebody_else():
    first, second = two_sites(config())
    streams, y = inputs(4)
    results = []
    for is_chained in (True, False):
        _, state = first.begin(streams)
        if is_chained:
            x, state = first.finish_into(second, state, y)
            between = state.streams
        else:
            between = first.finish(state, y)
            x, state = second.begin(between)
        out = second.finish(state, x.tanh())
        results.append(gradients([out, between], [streams, y, *first.parameters(), *second.parameters()]))
    torch.testing.assert_close(*results, **EXACT)


def test_observers_see_what_they_saw():
    first, second = two_sites(config())
    streams, y = inputs(4)
    seen = []
    second.observers = (lambda hc, streams, routing: seen.append((hc, streams.clone(), *map(torch.clone, routing))),)
    for call in (chained, one_by_one):
        call(first, second, streams, y, y)
    (one, *rest), (other, *expected) = seen
    assert one is other is second
    torch.testing.assert_close(rest, expected, rtol=1e-12, atol=1e-14)


# Beyond four streams a kernel cannot hold all rows of a feature at once.
@pytest.mark.parametrize("num_streams", [4, 6])
def test_in_place_is_for_inference(num_streams):
    first, second = two_sites(config(num_streams=num_streams))
    streams, y = inputs(num_streams)
    want = one_by_one(first, second, streams, y, y)
    _, state = first.begin(streams)
    with pytest.raises(ValueError, match="in_place is for inference"):
        first.finish_into(second, state, y, in_place=True)
    with torch.no_grad():
        x, state = first.begin(streams.clone())
        following, state = first.finish_into(second, state, y, in_place=True)
        got = x, following, second.finish(state, y, in_place=True)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("group", [1, 2, 3])
def test_recompute_gives_the_same_gradients_and_keeps_less(group, backend_of_test):
    sites = [site(config()) for _ in range(4)]
    streams, y = inputs(4, leading=(64,))

    def run():
        kept = {}

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            x, state = sites[0].begin(streams)
            for one, two in itertools.pairwise(sites):
                x, state = one.finish_into(two, state, x.tanh() * y)
            out = sites[-1].finish(state, x.tanh())
        leaves = [streams, y, *(parameter for hc in sites for parameter in hc.parameters())]
        return gradients([out], leaves), sum(kept.values())

    want, kept = run()
    for hc in sites:
        hc.recompute = group
    got, less = run()
    assert all(map(torch.equal, got, want))
    # Only kernels know how to make streams again.
    if group > 1 and backend_of_test != "naive":
        assert less < kept


class Copies(TorchDispatchMode):
    """Counts copies of whole streams."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.count += function is torch.ops.aten.clone.default and out.shape[-2:] == self.shape
        return out


@pytest.mark.once
def test_the_gradient_of_a_sum_over_streams_is_copied_once():
    first, second = two_sites(config(), dtype=torch.float32)
    streams, y = (tensor.detach().float().requires_grad_() for tensor in inputs(4))
    with temper.use_backend("cpu"):
        *_, out = chained(first, second, streams, y, y)
        with Copies((4, 5)) as copies:
            out.sum(-2).sin().sum().backward()
    assert copies.count == 1


@pytest.mark.parametrize("is_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpoints_around_chained_sites(is_reentrant):
    first, second = two_sites(config())
    streams, y = inputs(4)
    leaves = [streams, y, *first.parameters(), *second.parameters()]
    results = []
    for is_checkpointed in (True, False):
        call = (lambda *args: checkpoint(chained, *args, use_reentrant=is_reentrant)) if is_checkpointed else chained
        outputs = call(first, second, streams, y, y)
        loss = sum((output * (k + 1)).square().sum() for k, output in enumerate(outputs))
        loss.backward()
        results.append([leaf.grad.clone() for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    assert all(map(torch.equal, *results))


def test_chained_sites_under_autocast():
    first, second = two_sites(config(), dtype=torch.float32)
    streams, y = (tensor.detach().float().requires_grad_() for tensor in inputs(4))
    want = chained(first, second, streams, y, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = chained(first, second, streams, y, y)
    assert all(map(torch.equal, got, want))


@pytest.mark.once
@pytest.mark.parametrize("backend", ["cpu", "fused"])
def test_chained_sites_compile_without_a_break(backend):
    # Few rounds: the compiler unrolls them where they are plain torch.
    first, second = two_sites(config(mixer={"name": "sinkhorn", "iters": 2}), dtype=torch.float32)
    streams, y = (tensor.detach().float().requires_grad_() for tensor in inputs(4))
    leaves = [streams, y, *first.parameters(), *second.parameters()]
    with temper.use_backend(backend):
        want = chained(first, second, streams, y, y)
        got = torch.compile(chained, backend="aot_eager", fullgraph=True)(first, second, streams, y, y)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(got, leaves), gradients(want, leaves), rtol=1e-4, atol=1e-5)
