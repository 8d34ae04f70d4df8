"""A Sinkhorn that converges: its limit, the gradient of the limit, and the system behind both."""

import pytest
import torch

import temper
from temper.mixers import Mixer
from temper.mixers.sinkhorn import newton

BACKENDS = ("naive", "fused", "cpu")
EACH_N = pytest.mark.parametrize("num_streams", [4, 8, 16])
EACH_END = pytest.mark.parametrize("last", ["rows", "columns"])


@pytest.fixture(params=BACKENDS)
def backend(request):
    with temper.backend(request.param):
        yield request.param


def mixer(num_streams, last="rows", **options):
    return Mixer.named("sinkhorn")(num_streams, method="newton", last=last, **options)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def initial_logits(tokens, num_streams, std=3.0, seed=0):
    """The biases that training starts from, 0 and -8, and noise."""
    return torch.full((num_streams, num_streams), -8.0).fill_diagonal_(0) + std * normal(
        tokens, num_streams, num_streams, seed=seed
    )


def sums_off_by(res):
    return (res.sum(-1) - 1).abs().max().item(), (res.sum(-2) - 1).abs().max().item()


@EACH_N
@EACH_END
def test_rows_and_columns_sum_to_one_within_1e_5(backend, num_streams, last):
    res = mixer(num_streams, last)(initial_logits(4000, num_streams).float())
    rows, columns = sums_off_by(res)
    assert rows <= 1e-5
    assert columns <= 1e-5
    assert (res >= 0).all()
    # Exact on the axis that was asked for: N entries, each rounded once.
    assert (rows if last == "rows" else columns) <= num_streams * torch.finfo(torch.float32).eps


def test_twenty_plain_rounds_do_not():
    """What the method is for: by the tolerance of the test above the plain iteration is far away."""
    assert sums_off_by(Mixer.named("sinkhorn")(4)(initial_logits(4000, 4).float()))[1] > 1e-2


# A step that stands because it is nearer by one of two measures goes round in circles for ever at each of these.
CIRCLES = """
20.9496 18.2668 -17.1679 -2.0873  -2.8990 -2.7659 10.6079 12.7109
9.1582 6.9072 8.2360 10.1262  9.7458 -15.1741 10.2562 -7.9088

11.5046 -9.0202 -5.3178 3.7281  4.2932 1.3520 11.6646 -3.0877
-20.5373 -10.1442 1.6324 8.0754  2.2079 -19.9286 -5.0001 1.7031

0.9244 -16.3829 -17.3618 0.8466  -3.4933 -0.0363 -8.1872 1.7251
4.9396 2.1483 -9.9741 -6.1582  -8.2106 9.0409 4.5560 0.0654
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tokens_that_are_hard(backend, dtype):
    logits = torch.tensor([float(word) for word in CIRCLES.split()], dtype=dtype).view(-1, 4, 4)
    assert max(sums_off_by(mixer(4)(logits))) <= (2e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("num_streams", [3, 4, 8, 16])
def test_logits_of_deviation_8(backend, num_streams):
    logits = 8 * normal(4000, num_streams, num_streams, seed=9).float()
    assert max(sums_off_by(mixer(num_streams)(logits))) <= 1e-4


@pytest.mark.parametrize("num_streams", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_logits_of_any_size_are_finite(backend, num_streams, dtype):
    signs = normal(50, num_streams, num_streams).sign()
    logits = torch.cat([1e4 * signs, 1e4 * normal(50, num_streams, num_streams, seed=1)]).to(dtype).requires_grad_()
    res = mixer(num_streams)(logits)
    assert res.isfinite().all()
    assert (res.sum(-1) - 1).abs().max() <= 1e-6
    (res * normal(*res.shape, seed=2).to(dtype)).sum().backward()
    assert logits.grad.isfinite().all()


def plainly(logits, cotangent, rounds=8000):
    """The plain iteration run until it stands still, and its sweep backwards until that does: no solver anywhere.

    Where the iteration stands still, going back through a normalisation takes P times the sum of the gradient from it.
    """
    value = logits.double()
    for _ in range(rounds):
        value = value - value.logsumexp(-2, keepdim=True)
        value = value - value.logsumexp(-1, keepdim=True)
    limit = value.exp()
    carry = limit * cotangent.double()
    for _ in range(rounds):
        carry = carry - limit * carry.sum(-1, keepdim=True)
        carry = carry - limit * carry.sum(-2, keepdim=True)
    still = torch.maximum(carry.sum(-1).abs().amax(-1), (limit.sum(-2) - 1).abs().amax(-1)) < 1e-11
    return limit, carry, still


def per_token(actual, wanted):
    """Errors in units of the largest entry of each token."""
    return ((actual.double() - wanted).abs().amax((-2, -1)) / wanted.abs().amax((-2, -1))).max().item()


@EACH_N
def test_limit_and_gradient_are_those_of_a_converged_plain_iteration(num_streams):
    logits, cotangent = initial_logits(100, num_streams, seed=3), normal(100, num_streams, num_streams, seed=4)
    limit, gradient, still = plainly(logits, cotangent)
    # The others would take millions of rounds; there, Newton's method is the only witness.
    assert still.sum() > 40
    for backend in BACKENDS:
        for dtype, value_error, gradient_error in ((torch.float64, 1e-9, 1e-8), (torch.float32, 1e-4, 1e-3)):
            leaf = logits.to(dtype).requires_grad_()
            with temper.backend(backend):
                res = mixer(num_streams)(leaf)
            (got,) = torch.autograd.grad(res, leaf, cotangent.to(dtype))
            assert per_token(res[still], limit[still]) <= value_error, (backend, dtype)
            assert per_token(got[still], gradient[still]) <= gradient_error, (backend, dtype)


def test_the_sweep_of_this_file_is_what_autograd_says():
    logits, cotangent = normal(5, 4, 4), normal(5, 4, 4, seed=1)
    leaf = logits.clone().requires_grad_()
    value = leaf
    for _ in range(300):
        value = value - value.logsumexp(-2, keepdim=True)
        value = value - value.logsumexp(-1, keepdim=True)
    (wanted,) = torch.autograd.grad(value.exp(), leaf, cotangent)
    limit, gradient, still = plainly(logits, cotangent, 300)
    assert still.all()
    torch.testing.assert_close((limit, gradient), (value.exp().detach(), wanted), rtol=1e-9, atol=1e-11)


@EACH_END
@pytest.mark.parametrize("num_streams", [2, 3, 5, 8])
def test_the_implementations_agree(num_streams, last):
    logits, cotangent = initial_logits(33, num_streams, 2.0, seed=5), normal(33, num_streams, num_streams, seed=6)
    results = []
    for backend in BACKENDS:
        leaf = logits.clone().requires_grad_()
        with temper.backend(backend):
            res = mixer(num_streams, last)(leaf)
        results.append((res.detach(), *torch.autograd.grad(res, leaf, cotangent)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-11)


@EACH_END
def test_columns_last_is_the_transpose(backend, last):
    logits = initial_logits(20, 5, seed=7)
    other = {"rows": "columns", "columns": "rows"}[last]
    torch.testing.assert_close(mixer(5, last)(logits), mixer(5, other)(logits.mT).mT, rtol=1e-12, atol=1e-14)


@EACH_END
def test_gradcheck(backend, last):
    assert torch.autograd.gradcheck(mixer(3, last), (2 * normal(3, 3, 3).requires_grad_(),))


@EACH_END
def test_second_derivatives_of_the_plain_form(last):
    with temper.backend("naive"):
        assert torch.autograd.gradgradcheck(mixer(3, last), (normal(2, 3, 3).requires_grad_(),))


def test_a_tolerance_of_its_own(backend):
    logits = initial_logits(500, 4, seed=8)
    coarse = sums_off_by(mixer(4, tol=1e-2)(logits))[1]
    assert 1e-8 < coarse <= 1e-2
    assert sums_off_by(mixer(4)(logits))[1] <= 1e-12


def test_the_guard_is_refused():
    with pytest.raises(ValueError, match="needs no guard"):
        mixer(4, eps=1e-6)
    with pytest.raises(ValueError, match="newtown"):
        Mixer.named("sinkhorn")(4, method="newtown")


@pytest.mark.parametrize("num_streams", [2, 3, 4, 9, 16])
def test_a_laplacian_system_is_solved(num_streams):
    weights = normal(6, num_streams, num_streams).square()
    weights = (weights + weights.mT) * (1 - torch.eye(num_streams))
    slope = normal(6, num_streams, seed=1)
    slope = slope - slope.mean(-1, keepdim=True)
    laplacian = torch.diag_embed(weights.sum(-1)) - weights
    # The solution is free up to a constant: lstsq takes the shortest, ours has a first entry of zero.
    wanted = torch.linalg.lstsq(laplacian, slope.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    got = newton.solve_laplacian(weights, slope)
    assert torch.equal(got[:, 0], torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(got, wanted - wanted[:, :1], rtol=1e-9, atol=1e-11)


def test_weak_couplings_keep_their_digits():
    """Two pairs that hardly know each other: 1 + 1e-12 is 1 in float32, and a plain elimination would lose the link."""
    weak = 1e-12
    weights = torch.tensor([[0, 1, weak, 0], [1, 0, 0, 0], [weak, 0, 0, 2], [0, 0, 2, 0]], dtype=torch.float32)
    # Units of flow: from 1 through 0 over the weak link to 2 and on to 3.
    slope = torch.tensor([0.0, 1.0, 0.0, -1.0])
    wanted = torch.tensor([0.0, 1.0, -1 / weak, -1 / weak - 0.5])
    torch.testing.assert_close(newton.solve_laplacian(weights, slope), wanted, rtol=1e-6, atol=0)


def test_a_nearly_permuted_token_has_no_gradient_to_speak_of(backend):
    """res within 1e-8 of a permutation: the system is nearly zero, its solution could be anything."""
    logits = torch.tensor([[0.0, -21.0, -22.0], [-20.0, 0.0, -23.0], [-24.0, -21.0, 0.0]])
    leaf = logits.requires_grad_()
    res = mixer(3)(leaf)
    (gradient,) = torch.autograd.grad(res, leaf, normal(3, 3).float())
    torch.testing.assert_close(res, torch.eye(3), rtol=0, atol=1e-6)
    assert gradient.abs().max() < 1e-6
