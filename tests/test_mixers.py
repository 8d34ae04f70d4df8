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
    limit_error = 1e-3

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


def test_every_mixer_has_a_suite(suites_of):
    built_in = {name for name, kind in Mixer.members.items() if kind.__module__.startswith("temper.")}
    assert suites_of("MixerSuite") >= built_in


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


def test_what_sinkhorn_promises_of_each_axis_depends_on_its_options():
    def facts(**options):
        mixer = Mixer.named("sinkhorn")(4, **options)
        rows = mixer(torch.ones(4, 4, dtype=torch.float64)).sum(-1)
        assert (mixer.row_stochastic == "exact") <= bool((rows - 1).abs().max() < 1e-12)
        return mixer.row_stochastic, mixer.column_stochastic

    assert facts() == ("exact", "limit")
    assert facts(last="columns") == ("limit", "exact")
    assert facts(eps=1e-6) == ("limit", "limit")


def test_the_columns_of_sinkhorn_converge():
    logits = torch.randn(7, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    errors = [(Mixer.named("sinkhorn")(6, iters=n)(logits).sum(-2) - 1).abs().max().item() for n in (2, 20, 200)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-12


class Negative(Mixer):
    """Rows and columns that sum to one with entries below zero: a promise that is not kept."""

    row_stochastic = column_stochastic = "exact"

    @classmethod
    def logit_shape_for(cls, num_streams):
        return (num_streams,)

    def mix(self, logits):
        return 2 * torch.eye(4) - torch.full((4, 4), 0.25) + 0 * logits[..., None]


class RowsOnly(Negative):
    row_stochastic, column_stochastic = "exact", "no"

    def mix(self, logits):
        return logits.softmax(-1)[..., None, :].expand(*logits.shape, 4)


@pytest.mark.once
@pytest.mark.parametrize(("mixer", "facts"), [(Negative, {}), (RowsOnly, {"column_stochastic": "exact"})])
def test_the_suite_catches_a_promise_that_is_not_kept(monkeypatch, mixer, facts):
    for name, fact in facts.items():
        monkeypatch.setattr(mixer, name, fact)
    monkeypatch.setattr(MixerSuite, "build", lambda suite, num_streams: mixer(num_streams))
    with pytest.raises(AssertionError):
        MixerSuite().test_as_stochastic_as_it_says(4)


@pytest.mark.once
def test_a_row_stochastic_mixer_is_held_to_its_rows_alone(monkeypatch):
    monkeypatch.setattr(MixerSuite, "build", lambda suite, num_streams: RowsOnly(num_streams))
    MixerSuite().test_as_stochastic_as_it_says(4)


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
        ({"clamp": True}, "clamp needs eps"),
        ({"clamp": 1, "eps": 0.1}, "clamp is 1"),
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
