"""Sinkhorn to its limit: it converges, and its gradient is that of the limit."""

import pytest
import torch

import reference
import temper
from temper.mixers.sinkhorn import Sinkhorn
from temper.ops.newton import solve_laplacian

every_backend = pytest.mark.parametrize("backend", ["naive", "fused", "cpu"])


def logits_of(tokens, num_streams, spread, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_streams)
    noise = torch.randn(tokens, num_streams, num_streams, generator=generator, dtype=torch.float64)
    return (spread * noise + torch.full((num_streams, num_streams), -8.0).fill_diagonal_(0)).to(dtype)


@every_backend
@pytest.mark.parametrize("num_streams", [2, 4, 8, 16])
@pytest.mark.parametrize("last", ["rows", "columns"])
def test_rows_and_columns_sum_to_one_at_the_initial_biases(backend, num_streams, last):
    with temper.backend(backend):
        res = Sinkhorn(num_streams, method="newton", last=last)(logits_of(4000, num_streams, 3.0))
    for axis in (-1, -2):
        assert (res.sum(axis) - 1).abs().max() <= 1e-5
    assert (res >= 0).all()
    # Twenty plain rounds are far from it, or this would show nothing.
    plain = Sinkhorn(num_streams, last=last)(logits_of(4000, num_streams, 3.0))
    assert max((plain.sum(axis) - 1).abs().max() for axis in (-1, -2)) > 1e-3


@every_backend
@pytest.mark.parametrize("num_streams", [4, 8, 16])
def test_wide_logits_converge_too_and_enormous_ones_stay_finite(backend, num_streams):
    mixer = Sinkhorn(num_streams, method="newton")
    generator = torch.Generator().manual_seed(0)
    wide = 8 * torch.randn(1000, num_streams, num_streams, generator=generator)
    enormous = (1e4 * wide.sign()).requires_grad_()
    with temper.backend(backend):
        error = (mixer(wide).sum(-2) - 1).abs().amax(-1)
        res = mixer(enormous)
        res.square().sum().backward()
    # Rows are exact; a token in a thousand may need more than the 20 steps that it gets.
    assert error.quantile(0.998) <= 1e-4
    assert res.isfinite().all()
    assert enormous.grad.isfinite().all()


@every_backend
@pytest.mark.parametrize("num_streams", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_is_that_of_an_iteration_that_is_never_stopped(backend, num_streams, dtype):
    exact = logits_of(5, num_streams, 1.0, torch.float64)
    # Nearer to each other than 0 and -8, so that the plain iteration ends within a minute.
    exact = (exact / 4).requires_grad_()
    wanted = reference.sinkhorn(exact, num_streams, method="newton")
    cotangent = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (d_wanted,) = torch.autograd.grad(wanted, exact, cotangent)
    logits = exact.detach().to(dtype).requires_grad_()
    with temper.backend(backend):
        res = Sinkhorn(num_streams, method="newton")(logits)
        (d_logits,) = torch.autograd.grad(res, logits, cotangent.to(dtype))
    # The issue asks for 1e-3 in float32; float64 leaves only what the reference has not converged to.
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    for got, want in ((res, wanted), (d_logits, d_wanted)):
        assert ((got.double() - want).abs().max() / want.abs().max()).item() <= tolerance


@pytest.mark.parametrize("last", ["rows", "columns"])
def test_gradcheck(last):
    logits = logits_of(3, 3, 1.0, torch.float64).div(3).requires_grad_()
    for backend in ("naive", "fused", "cpu"):
        with temper.backend(backend):
            assert torch.autograd.gradcheck(Sinkhorn(3, method="newton", last=last), logits)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8])
def test_a_laplacian_system_is_solved(num_nodes):
    generator = torch.Generator().manual_seed(num_nodes)
    weights = torch.rand(4, num_nodes, num_nodes, dtype=torch.float64, generator=generator)
    weights = weights + weights.mT
    slope = torch.randn(4, num_nodes, dtype=torch.float64, generator=generator)
    slope = slope - slope.mean(-1, keepdim=True)
    x = solve_laplacian(weights, slope)
    laplacian = torch.diag_embed(weights.sum(-1)) - weights
    torch.testing.assert_close((laplacian @ x.unsqueeze(-1)).squeeze(-1), slope, rtol=1e-10, atol=1e-12)


def test_nearly_separate_nodes_keep_their_digits():
    """Two pairs joined by 1e-12: a dense solve loses the difference of the pairs, elimination does not."""
    tiny = 1e-12
    weights = torch.tensor([[0, 1, 0, 0], [1, 0, tiny, 0], [0, tiny, 0, 1], [0, 0, 1, 0]], dtype=torch.float32)
    slope = torch.tensor([tiny, 0, 0, -tiny], dtype=torch.float32)
    x = solve_laplacian(weights[None], slope[None])[0]
    # One unit of flow through the weak link: the potential falls by tiny / tiny = 1 there, and by tiny elsewhere.
    torch.testing.assert_close(x - x[0], torch.tensor([0.0, 0.0, -1.0, -1.0]), rtol=1e-6, atol=1e-6)


def test_bad_options():
    with pytest.raises(ValueError, match="sinkhorn method"):
        Sinkhorn(4, method="newtn")
    with pytest.raises(ValueError, match="eps"):
        Sinkhorn(4, method="newton", eps=1e-6)
