"""Every mixer inherits the suite; here is only what res is, said in another way."""

import itertools
import math
from typing import ClassVar

import pytest
import torch

import temper
from temper.mixers import Mixer
from temper.testing import MixerSuite


class TestUnconstrained(MixerSuite):
    name = "unconstrained"

    def matrix(self, mixer, logits):
        return logits


class TestIdentity(MixerSuite):
    name = "identity"

    def matrix(self, mixer, logits):
        return torch.diag(torch.ones(mixer.num_streams, dtype=logits.dtype))


class TestSinkhorn(MixerSuite):
    name = "sinkhorn"

    def matrix(self, mixer, logits):
        matrix = logits.exp()
        for _ in range(20):
            matrix = matrix / matrix.sum(0, keepdim=True)
            matrix = matrix / matrix.sum(1, keepdim=True)
        return matrix


class TestSinkhornColumnsLast(MixerSuite):
    name = "sinkhorn"
    options: ClassVar = {"last": "columns", "iters": 30}

    def matrix(self, mixer, logits):
        matrix = logits.exp()
        for _ in range(30):
            matrix = matrix / matrix.sum(1, keepdim=True)
            matrix = matrix / matrix.sum(0, keepdim=True)
        return matrix


class TestSinkhornTolerance(MixerSuite):
    name = "sinkhorn"
    options: ClassVar = {"tol": 1e-3, "iters": 50}
    column_error = 1e-3

    def matrix(self, mixer, logits):
        matrix = logits.exp()
        for _ in range(50):
            matrix = matrix / matrix.sum(0, keepdim=True)
            matrix = matrix / matrix.sum(1, keepdim=True)
            if (matrix.sum(0) - 1).abs().max() <= 1e-3:
                break
        return matrix


def mixture(logits, size):
    weights = logits.exp() / logits.exp().sum()
    matrix = torch.zeros(size, size, dtype=logits.dtype)
    for weight, permutation in zip(weights, itertools.permutations(range(size)), strict=True):
        for i, j in enumerate(permutation):
            matrix[i, j] += weight
    return matrix


class TestBirkhoff(MixerSuite):
    name = "birkhoff"

    def matrix(self, mixer, logits):
        return mixture(logits, mixer.num_streams)


FACTORS = {1: [1], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3], 8: [2, 2, 2], 12: [2, 2, 3]}


class TestKronecker(MixerSuite):
    name = "kronecker"

    def matrix(self, mixer, logits):
        matrix = torch.ones(1, 1, dtype=logits.dtype)
        for size in FACTORS[mixer.num_streams]:
            part, logits = logits[: math.factorial(size)], logits[math.factorial(size) :]
            matrix = torch.kron(mixture(part, size), matrix)
        return matrix


def test_every_mixer_has_a_suite():
    assert {cls.name for cls in MixerSuite.__subclasses__()} >= set(Mixer.members)


def test_the_guarded_form_adds_eps_where_deepseek_does():
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, 4, 4, dtype=torch.float64)
    eps = 1e-3
    expected = logits.softmax(-2) + eps
    expected = expected / (expected.sum(-1, keepdim=True) + eps)
    for _ in range(4):
        expected = expected / (expected.sum(-2, keepdim=True) + eps)
        expected = expected / (expected.sum(-1, keepdim=True) + eps)
    torch.testing.assert_close(Mixer.named("sinkhorn")(4, iters=5, eps=eps)(logits), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_a_token_that_has_converged_is_left_alone(eps):
    torch.manual_seed(0)
    # One token that converges at once beside one that takes long: each must be what it is alone.
    logits = torch.stack([torch.zeros(4, 4), 8 * torch.randn(4, 4)]).double()
    mixer = Mixer.named("sinkhorn")(4, iters=400, tol=1e-4, eps=eps)
    together = mixer(logits)
    for k in range(2):
        assert torch.equal(together[k], mixer(logits[k]))
        assert (together[k].sum(0) - 1).abs().max() <= 1e-4
    plain = Mixer.named("sinkhorn")(4, iters=400, eps=eps)(logits)
    assert not torch.equal(plain, together)


def test_kronecker_takes_every_number_of_streams():
    for num_streams in [*range(2, 11), 12, 14, 16, 24]:
        mixer = Mixer.named("kronecker")(num_streams).double()
        res = mixer(torch.randn(3, *mixer.logit_shape, dtype=torch.float64))
        assert res.shape == (3, num_streams, num_streams)
        for axis in (-1, -2):
            torch.testing.assert_close(res.sum(axis), torch.ones(3, num_streams, dtype=torch.float64))
    with pytest.raises(ValueError, match="39,916,800"):
        Mixer.named("kronecker")(22)


def test_birkhoff_above_six_streams_says_what_it_would_take():
    config = temper.preset("mhc-lite", num_streams=8, dim=768)
    assert temper.count_parameters(config) == 247_870_867
    with pytest.raises(
        ValueError, match=r"40,320 at N=8.*247,870,867 parameters per site \(5,948,900,808 in 24 sites\)"
    ):
        temper.HyperConnection(config)
    assert temper.count_parameters(temper.preset("mhc-lite", num_streams=20, dim=8)) > math.factorial(20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iters": 0}, "iters is 0"),
        ({"iters": 2.5}, "iters is 2.5"),
        ({"tol": 0.0}, "tol is 0.0"),
        ({"last": "both"}, "expected 'rows' or 'columns'"),
        ({"eps": -1e-6}, "eps is -1e-06"),
    ],
)
def test_sinkhorn_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        Mixer.named("sinkhorn")(4, **options)
    with pytest.raises(ValueError, match=message):
        temper.preset("mhc", num_streams=4, dim=8, **options)


@pytest.mark.parametrize("num_streams", [0, -1, 2.0, True, "4"])
def test_a_number_of_streams_that_cannot_be(num_streams):
    with pytest.raises(ValueError, match="num_streams is"):
        Mixer.named("sinkhorn")(num_streams)
