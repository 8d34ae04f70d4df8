"""Decompositions against tensorly, closed forms and brute force; ranks against what they promise."""

import importlib
import itertools
import math

import pytest
import tensorly
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorly.decomposition import parafac, tensor_train, tucker

from temper.convert import factorize, ranks_for, relative_error
from temper.decompose import descent
from temper.decompose.moment import Moment, Problem
from temper.decompose.steps import feature_step, stream_step
from temper.generators import Generator
from temper.generators.base import count

tensorly.set_backend("pytorch")

RANKED = ["cp", "tucker", "tt"]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def structured(*shape, seed=0):
    """Singular values that fall in every mode."""
    weight = normal(*shape, seed=seed)
    for mode in shape:
        scales = torch.logspace(0, -2, mode, dtype=torch.float64)
        weight = torch.tensordot(weight, normal(mode, mode, seed=mode) * scales, dims=([0], [1]))
    return weight


def moment_of(num_streams, dim, seed=0, tokens=None):
    """A second moment that does not separate over streams and features."""
    size = num_streams * dim
    tokens = normal(tokens or 4 * size, size, seed=seed) @ (
        normal(size, size, seed=seed + 1) * torch.linspace(2, 0.02, size)
    )
    return tokens.T @ tokens / len(tokens)


def relative(weight, other):
    return ((weight - other).norm() / weight.norm()).item()


@pytest.mark.parametrize(
    ("name", "rank"),
    [("cp", 2), ("cp", 4), ("tucker", (2, 3, 2, 3)), ("tucker", (2, 12)), ("tt", (2, 3, 2)), ("tt", 3)],
)
def test_planted_tensors_are_found(name, rank):
    torch.manual_seed(1)
    planted = Generator.named(name)((4, 24), (4, 4), rank=rank).double().to_dense().detach()
    assert relative_error(planted, factorize(planted, name, rank)) < 1e-8
    moment = moment_of(4, 24)
    assert relative_error(planted, factorize(planted, name, rank, moment=moment), moment) < 1e-8
    # What was planted is one of the tensors of this rank, so the best of them is not further away than the noise.
    noise = normal(4, 24, 4, 4)
    noisy = planted + 0.05 * planted.norm() / noise.norm() * noise
    found = factorize(noisy, name, rank)
    assert relative_error(noisy, found) <= relative(noisy, planted)
    assert relative(planted, found.to_dense()) < 0.05


def theirs(weight, name, rank):
    if name == "tucker":
        return tensorly.tucker_to_tensor(tucker(weight, rank=list(rank), n_iter_max=60, tol=1e-7))
    if name == "tt":
        return tensorly.tt_to_tensor(tensor_train(weight, rank=[1, *rank, 1]))
    runs = [parafac(weight, rank, init=init, n_iter_max=60, tol=1e-7, random_state=0) for init in ("svd", "random")]
    return min(map(tensorly.cp_to_tensor, runs), key=lambda found: relative(weight, found))


@pytest.mark.parametrize("make", [normal, structured])
@pytest.mark.parametrize(
    ("shape", "name", "rank"),
    [
        ((4, 192, 4, 4), "tucker", (2, 8, 2, 2)),
        ((4, 192, 4, 4), "cp", 2),
        ((4, 192, 4, 4), "tt", (3, 4, 4)),
        ((8, 96, 8, 8), "tucker", (2, 8, 2, 2)),
        ((8, 96, 8, 8), "cp", 4),
        ((8, 96, 8, 8), "tt", (4, 8, 8)),
        ((4, 64, 4), "tucker", (2, 3, 2)),
        ((4, 64, 4), "cp", 3),
        ((4, 64, 4), "tt", (2, 2)),
    ],
)
def test_at_least_as_close_as_tensorly(make, shape, name, rank):
    weight = make(*shape)
    ours = relative_error(weight, factorize(weight, name, rank))
    # The landscape of noise is flat: both stop somewhere on the way to the same place.
    assert ours <= relative(weight, theirs(weight, name, rank)) * (1 + 2e-5)


@pytest.mark.parametrize(("num_streams", "name"), [(1, "cp"), (1, "tt"), (1, "tucker"), (3, "tt"), (3, "tucker")])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_one_stream_or_all_of_them_is_reduced_rank_regression(num_streams, name, rank):
    weight, moment = normal(num_streams, 9, 5), moment_of(num_streams, 9)
    flat = weight.flatten(0, 1)
    left = torch.linalg.eigvalsh(flat.T @ moment @ flat)[:-rank].sum()
    expected = (left / torch.trace(flat.T @ moment @ flat)).sqrt().item()
    ranks = {"cp": rank, "tt": (num_streams, rank), "tucker": (num_streams, min(9, num_streams * rank), rank)}
    found = factorize(weight, name, ranks[name], moment=moment)
    assert relative_error(weight, found, moment) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "rank"), [("cp", 2), ("tucker", (2, 3, 2, 2)), ("tt", (2, 3, 2))])
def test_a_moment_that_separates_is_a_plain_problem_in_other_bases(name, rank):
    weight = structured(3, 8, 3, 3)
    by_stream, by_feature = moment_of(1, 3), moment_of(1, 8, seed=5)
    moment = torch.kron(by_stream, by_feature)
    lower = [torch.linalg.cholesky(part) for part in (by_stream, by_feature)]
    seen = torch.einsum("mn,cd,mcop->ndop", *lower, weight)
    expected = relative_error(seen, factorize(seen, name, rank))
    assert relative_error(weight, factorize(weight, name, rank, moment=moment), moment) <= expected * (1 + 1e-5)


def brute_force(weight, moment, name, rank, starts):
    """The least error that LBFGS on all factors at once finds."""
    lower = torch.linalg.cholesky(moment)
    least = math.inf
    for seed in range(starts):
        torch.manual_seed(seed)
        generator = Generator.named(name)(tuple(weight.shape[:2]), tuple(weight.shape[2:]), rank=rank).double()
        optimizer = torch.optim.LBFGS(
            generator.parameters(), max_iter=150, history_size=20, line_search_fn="strong_wolfe", tolerance_change=1e-12
        )

        def loss(generator=generator, optimizer=optimizer):
            optimizer.zero_grad()
            value = (lower.T @ (weight - generator.to_dense()).flatten(0, 1).flatten(1)).square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        least = min(least, relative_error(weight, generator, moment))
    return least


@pytest.mark.parametrize(
    ("shape", "name", "rank"),
    [
        ((3, 6, 3, 3), "cp", 2),
        ((2, 6, 4), "cp", 2),
        ((3, 6, 3, 3), "tucker", (2, 3, 2, 2)),
        ((3, 6, 3, 3), "tucker", (2, 2, 2, 1)),
        ((3, 6, 3, 3), "tt", (2, 3, 2)),
        ((3, 6, 4), "tt", (2, 2)),
    ],
)
def test_weighted_solutions_are_as_good_as_brute_force(shape, name, rank):
    weight, moment = normal(*shape), moment_of(*shape[:2])
    ours = relative_error(weight, factorize(weight, name, rank, moment=moment, iters=200, tol=1e-7, restarts=4), moment)
    assert ours <= brute_force(weight, moment, name, rank, starts=2) * (1 + 1e-4)


@pytest.mark.parametrize(("direct"), [True, False])
def test_a_step_is_the_exact_solution_of_its_part(direct, monkeypatch):
    if not direct:
        monkeypatch.setattr("temper.decompose.steps.DIRECT", 0)
        monkeypatch.setattr("temper.decompose.steps.GRADIENTS", 200)
    weight, moment = normal(3, 7, 5), Moment(moment_of(3, 7).view(3, 7, 3, 7))
    problem = Problem(moment, weight)
    rows = torch.linalg.qr(normal(5, 2)).Q.T
    stream, mixed, feature = normal(3, 2), normal(2, 4, 2), normal(7, 4)

    def gradient(stream, feature, of):
        part = (stream, feature)[of].requires_grad_()
        error = weight - torch.einsum("na,abr,db,ro->ndo", stream, mixed, feature, rows)
        (found,) = torch.autograd.grad(torch.sum(error * moment.apply(error)), part)
        part.requires_grad_(False)
        return found.norm()

    middle = torch.einsum("abr,db->adr", mixed, feature)
    better = stream_step(problem, rows, stream, middle)
    assert gradient(better, feature, 0) < 1e-6 * gradient(stream, feature, 0)
    better = feature_step(problem, rows, stream, mixed, feature)
    assert gradient(stream, better, 1) < (1e-6 if direct else 1e-3) * gradient(stream, feature, 1)


@pytest.mark.parametrize(("name", "rank"), [("cp", 3), ("tucker", (2, 3, 2, 2)), ("tucker", (2, 8)), ("tt", (2, 3))])
def test_every_weighted_sweep_lowers_the_error(name, rank, monkeypatch):
    module = importlib.import_module(f"temper.decompose.{name}")
    seen = []

    def best(starts, sweep, error, effort, *, defaults, **how):
        if defaults != descent.WEIGHTED:
            return descent.best(starts, sweep, error, effort, defaults=defaults, **how)
        for start in starts:
            seen.append([error(start)])
            for _ in range(6):
                start = sweep(start)
                seen[-1].append(error(start))
        return start

    monkeypatch.setattr(module, "best", best)
    factorize(structured(3, 8, 3, 3), name, rank, moment=moment_of(3, 8), restarts=0)
    assert len(seen) >= 2
    for errors in seen:
        assert errors[-1] < errors[0]
        assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(errors))


@pytest.mark.parametrize("name", RANKED)
def test_a_singular_moment(name):
    weight, moment = normal(3, 8, 3, 3), moment_of(3, 8, tokens=5)
    plain, weighted = factorize(weight, name, 2), factorize(weight, name, 2, moment=moment)
    assert torch.isfinite(weighted.to_dense()).all()
    assert relative_error(weight, weighted, moment) <= relative_error(weight, plain, moment)
    # Where data never goes, nothing is blown up.
    assert weighted.to_dense().norm() < 5 * weight.norm()
    nothing = torch.zeros_like(moment)
    assert relative_error(weight, factorize(weight, name, 2, moment=nothing), nothing) == 0


def test_terms_that_would_cancel_without_limit_stay_finite():
    # The classical tensor whose rank is 3 and which rank 2 comes as close to as one likes, with growing terms.
    a, b = torch.eye(2, dtype=torch.float64)
    weight = sum(torch.einsum("i,j,k->ijk", *vectors) for vectors in ((a, a, b), (a, b, a), (b, a, a)))
    for dtype in (torch.float64, torch.bfloat16):
        found = factorize(weight.to(dtype), "cp", 2, iters=60, tol=0.0)
        factors = [factor.detach().double() for factor in found.factors]
        assert all(torch.isfinite(factor).all() for factor in factors)
        norms = torch.stack([factor.norm(dim=0) for factor in factors])
        assert norms.max() / norms.min() < 1.01
        # Storing the terms costs less than their being large gains.
        assert relative_error(weight, found) < 0.03
    assert factorize(weight, "cp", 3).to_dense().sub(weight).norm() < 1e-8
    moment = moment_of(2, 2)
    assert torch.isfinite(factorize(weight, "cp", 2, moment=moment).to_dense()).all()


@pytest.mark.parametrize("name", [*RANKED, "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_layout_and_the_random_state_are_kept(name, dtype):
    weight = structured(4, 4, 10, 4).to(dtype).transpose(1, 2)
    assert not weight.is_contiguous()
    rank = None if name == "dense" else 2
    state = torch.get_rng_state()
    found = factorize(weight, name, rank, seed=3, iters=20)
    again = factorize(weight.contiguous(), name, rank, seed=3, iters=20)
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(found.parameters(), again.parameters(), strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)
    in_float64 = relative_error(weight, factorize(weight.double(), name, rank, seed=3, iters=20))
    assert relative_error(weight, found) == pytest.approx(in_float64, abs=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", RANKED)
def test_nothing_and_less_than_the_rank(name):
    moment = moment_of(3, 6)
    zero = torch.zeros(3, 6, 3, 3)
    for given_moment in (None, moment):
        found = factorize(zero, name, 2, moment=given_moment)
        assert found.to_dense().abs().max() == 0
        assert relative_error(zero, found, given_moment) == 0
        # One direction in every mode, and room for more.
        thin = torch.einsum("a,b,c,d->abcd", normal(3), normal(6), normal(3), normal(3))
        found = factorize(thin, name, 3, moment=given_moment)
        assert all(torch.isfinite(p).all() for p in found.parameters())
        assert relative_error(thin, found) < 1e-10
    assert relative_error(zero, torch.ones_like(zero)) == math.inf


def test_options_reach_the_generator():
    found = factorize(normal(4, 6, 4), "tucker", (2, 3), freeze_core=True)
    assert "core" in dict(found.named_buffers())
    assert found.rank == (2, 3, 2)
    assert factorize(normal(4, 6, 4), "tt", 0.5).rank == Generator.named("tt").resolve_rank((4, 6), (4,), 0.5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((torch.zeros(4, 6), "cp"), {}, "num_streams, dim"),
        (([1.0], "cp"), {}, "list"),
        ((torch.full((2, 3, 2), torch.nan), "cp"), {}, "finite"),
        ((torch.zeros(2, 3, 2, dtype=torch.long), "cp"), {}, "floating-point"),
        ((torch.ones(2, 3, 2), "cpp"), {}, "Did you mean 'cp'"),
        ((torch.ones(2, 3, 2), "cp", 0), {}, "out of range"),
        ((torch.ones(2, 3, 2), "dense", 2), {}, "has no rank"),
        ((torch.ones(2, 3, 2), "cp", 1), {"moment": torch.eye(5)}, r"expected \(6, 6\)"),
        ((torch.ones(2, 3, 2), "cp", 1), {"moment": torch.full((6, 6), torch.inf)}, "finite"),
        ((torch.ones(2, 3, 2), "cp", 1), {"moment": torch.ones(6, 6).triu()}, "symmetric"),
        ((torch.ones(2, 3, 2), "cp", 1), {"moment": -torch.eye(6)}, "semidefinite"),
        ((torch.ones(2, 3, 2), "cp", 1), {"restarts": -1}, "restarts"),
        ((torch.ones(2, 3, 2), "cp", 1), {"iters": 1.5}, "iters"),
        ((torch.ones(2, 3, 2), "cp", 1), {"tol": 2.0}, "tol"),
    ],
)
def test_bad_input_of_factorize(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        factorize(*arguments, **options)


def test_relative_error_refuses_another_shape():
    with pytest.raises(ValueError, match="expected a generator or a tensor"):
        relative_error(torch.ones(2, 3, 2), torch.ones(2, 3, 3))


def size_of(name, weights, ranks):
    kind = Generator.named(name)
    return sum(
        count(kind.shapes(tuple(w.shape[:2]), tuple(w.shape[2:]), **({"rank": rank} if kind.ranked else {})))
        for w, rank in zip(weights, ranks, strict=True)
    )


def error_of(name, weights, ranks, moments=None, **effort):
    moments = moments or [None] * len(weights)
    left = total = 0.0
    for weight, rank, moment in zip(weights, ranks, moments, strict=True):
        measure = torch.eye(weight.shape[0] * weight.shape[1], dtype=torch.float64) if moment is None else moment
        error = (
            (weight - factorize(weight, name, rank, moment=moment, **effort).to_dense().detach())
            .flatten(0, 1)
            .flatten(1)
        )
        flat = weight.flatten(0, 1).flatten(1)
        left, total = left + torch.sum(error * (measure @ error)), total + torch.sum(flat * (measure @ flat))
    return math.sqrt(left / total) if total else 0.0


collections = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.integers(1, 5),
        st.lists(st.integers(1, 3), min_size=1, max_size=3),
        st.sampled_from([0.0, 1.0, 10.0]),
        st.integers(0, 99),
    ).map(lambda t: t[3] * normal(t[0], t[1], *t[2], seed=t[4])),
    min_size=1,
    max_size=3,
)
# The promise is for the effort that was asked for; little is enough to check it.
QUICK = {"iters": 3, "restarts": 0}


@settings(max_examples=10, deadline=None)
@given(weights=collections, name=st.sampled_from(RANKED), error=st.floats(0.0, 1.0))
def test_an_asked_for_error_is_met(weights, name, error):
    ranks = ranks_for(weights, name, error=error, **QUICK)
    assert error_of(name, weights, ranks, **QUICK) <= max(error, 1e-12) * (1 + 1e-9)
    looser = ranks_for(weights, name, error=min(1.0, error + 0.1), **QUICK)
    assert size_of(name, weights, looser) <= size_of(name, weights, ranks)
    for weight, rank in zip(weights, ranks, strict=True):
        assert weight.any() or size_of(name, [weight], [rank]) == size_of(name, [weight], [1])


@settings(max_examples=40, deadline=None)
@given(weights=collections, name=st.sampled_from(RANKED), more=st.integers(0, 200))
def test_a_budget_is_kept(weights, name, more):
    smallest = size_of(name, weights, [1] * len(weights))
    ranks = ranks_for(weights, name, params=smallest + more)
    assert size_of(name, weights, ranks) <= smallest + more
    wider = ranks_for(weights, name, params=smallest + more + 20)
    for one, other in zip(ranks, wider, strict=True):
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        assert all(a <= b for a, b in pairs)


@pytest.mark.parametrize("name", RANKED)
def test_ranks_with_moments(name):
    weights = [structured(3, 6, 3, 3, seed=k) for k in range(2)] + [torch.zeros(3, 6, 3).double()]
    moments = [moment_of(3, 6, seed=k) for k in range(3)]
    ranks = ranks_for(weights, name, error=0.2, moments=moments, **QUICK)
    assert error_of(name, weights, ranks, moments, **QUICK) <= 0.2
    full = ranks_for(weights, name, error=0, moments=moments, **QUICK)
    assert size_of(name, weights, ranks) < 0.8 * size_of(name, weights, full)


@pytest.mark.parametrize("name", RANKED)
def test_parameters_go_where_they_are_needed(name):
    torch.manual_seed(0)
    planted = Generator.named(name)((4, 12), (4, 4), rank=1).double().to_dense().detach()
    weights = [planted / planted.norm(), normal(4, 12, 4, 4) / 30]
    easy, hard = ranks_for(weights, name, error=0.02, **QUICK)
    assert size_of(name, weights[:1], [easy]) == size_of(name, weights[:1], [1])
    assert size_of(name, weights[1:], [hard]) > size_of(name, weights[1:], [1])
    # A tensor that counts for nothing gets nothing.
    assert ranks_for(weights, name, params=400, weighting=[1, 0])[1] in (1, (1, 1, 1), (1, 1, 1, 1))


def test_tucker_ranks_grow_per_mode():
    torch.manual_seed(0)
    planted = Generator.named("tucker")((4, 12), (4, 4), rank=(1, 3, 3, 1)).double().to_dense().detach()
    assert ranks_for([planted], "tucker", error=1e-6) == [(1, 3, 3, 1)]
    assert ranks_for([planted], "dense", error=0.5) == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of them"),
        ({"error": 0.1, "params": 10}, "expected one of them"),
        ({"error": -0.1}, "error is -0.1"),
        ({"error": math.nan}, "error is nan"),
        ({"params": 18}, "the smallest ranks take 19"),
        ({"params": 1e6}, "whole number"),
        ({"error": 0.1, "moments": []}, "0 moments for 1 weights"),
        ({"error": 0.1, "weighting": [-1]}, "weighting"),
    ],
)
def test_bad_input_of_ranks_for(options, message):
    with pytest.raises(ValueError, match=message):
        ranks_for([normal(4, 11, 4)], "cp", **options)


def test_an_error_below_full_rank_names_the_limit():
    with pytest.raises(ValueError, match="no weights"):
        ranks_for([], "cp", error=0.1)
    with pytest.raises(ValueError, match=r"full ranks leave 0\.982"):
        ranks_for([normal(4, 6, 4)], "per-stream", error=0.1)
    with pytest.raises(ValueError, match=r"full ranks leave 0\.00"):
        ranks_for([normal(4, 6, 4).bfloat16()], "tucker", error=1e-4)
