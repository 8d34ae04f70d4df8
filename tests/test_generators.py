"""Every generator inherits the suite; here is only what W is, said in another way."""

import math
from typing import ClassVar

import numpy as np
import pytest
import tensorly
import torch
from hypothesis import given
from hypothesis import strategies as st

from temper.generators import Generator
from temper.testing import GeneratorSuite

tensorly.set_backend("pytorch")


class TestDense(GeneratorSuite):
    name = "dense"

    def dense(self, generator):
        return generator.weight


class TestCP(GeneratorSuite):
    name = "cp"

    def dense(self, generator):
        return tensorly.cp_to_tensor((None, list(generator.factors)))

    def full_rank(self, in_modes, out_modes):
        modes = in_modes + out_modes
        return math.prod(modes) // max(modes)


class TestTucker(GeneratorSuite):
    name = "tucker"

    def dense(self, generator):
        return tensorly.tucker_to_tensor((generator.core, list(generator.factors)))

    def full_rank(self, in_modes, out_modes):
        return in_modes + out_modes


class TestTuckerFrozen(TestTucker):
    options: ClassVar = {"freeze_core": True}
    leaves_zero = False


class TestTT(GeneratorSuite):
    name = "tt"

    def dense(self, generator):
        return tensorly.tt_to_tensor(list(generator.cores))

    def full_rank(self, in_modes, out_modes):
        modes = in_modes + out_modes
        return tuple(min(math.prod(modes[:k]), math.prod(modes[k:])) for k in range(1, len(modes)))


class TestPerStream(GeneratorSuite):
    name = "per-stream"

    def dense(self, generator):
        num_streams = generator.in_modes[0]
        dense = torch.zeros(*generator.in_modes, *generator.out_modes, dtype=generator.weight.dtype)
        for n in range(num_streams):
            dense[n, ..., n] = generator.weight
        return dense

    def holdable(self, weight):
        num_streams = weight.shape[0]
        mean = sum(weight[n, ..., n] for n in range(num_streams)) / num_streams
        held = torch.zeros_like(weight)
        for n in range(num_streams):
            held[n, ..., n] = mean
        return held


def test_every_generator_has_a_suite(suites_of):
    built_in = {name for name, kind in Generator.members.items() if kind.__module__.startswith("temper.")}
    assert suites_of("GeneratorSuite") >= built_in


RANKED = [name for name, cls in Generator.members.items() if cls.ranked]


@given(
    name=st.sampled_from(RANKED),
    num_streams=st.integers(1, 9),
    dim=st.integers(1, 40),
    out_modes=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    fraction=st.floats(0.001, 1.0),
)
def test_a_fraction_stays_within_its_share_of_the_dense_parameters(name, num_streams, dim, out_modes, fraction):
    generator = Generator.named(name)((num_streams, dim), out_modes, rank=fraction)
    modes = (num_streams, dim, *out_modes)
    trained = sum(p.numel() for p in generator.parameters())
    smallest = sum(p.numel() for p in Generator.named(name)((num_streams, dim), out_modes, rank=1).parameters())
    assert trained <= max(fraction * math.prod(modes), smallest)
    # The same as giving that rank in numbers.
    assert Generator.named(name).resolve_rank((num_streams, dim), out_modes, generator.rank) == generator.rank


@given(
    name=st.sampled_from(RANKED),
    num_streams=st.integers(1, 6),
    dim=st.integers(1, 12),
    out_modes=st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple),
)
def test_default_ranks_fit_any_modes(name, num_streams, dim, out_modes):
    generator = Generator.named(name)((num_streams, dim), out_modes)
    weight = generator.to_dense().detach().double()
    assert weight.shape == (num_streams, dim, *out_modes)
    again = Generator.named(name).from_dense(weight, generator.rank)
    assert torch.isfinite(again.to_dense()).all()


@pytest.mark.parametrize(
    ("name", "rank", "message"),
    [
        ("cp", 0, r"cp rank 0 of modes \(4, 6, 4, 4\) is out of range: expected 1 to 384"),
        ("cp", 385, "expected 1 to 384"),
        ("cp", (2, 3, 2, 2), "expected one number"),
        ("cp", 1.5, "fraction of the dense parameters"),
        ("cp", True, "whole number"),
        ("cp", "two", "whole number"),
        ("tucker", (5, 3), r"tucker rank 5 of the stream mode \(size 4\) is out of range: expected 1 to 4"),
        ("tucker", (2, 7), r"rank 7 of the feature mode \(size 6\)"),
        ("tucker", (2, 2, 2, 5), r"rank 5 of the output 1 mode \(size 4\)"),
        ("tucker", (2, 2, 2), "expected 4 numbers"),
        ("tucker", 0.0, "fraction"),
        (
            "tt",
            (5, 4),
            r"tt rank 5 of the bond between modes 0 and 1 of \(4, 6, 4, 4\) is out of range: expected 1 to 4",
        ),
        ("tt", (4, 17, 4), "expected 1 to 16"),
        ("tt", (4, 4, 4, 4), "expected 3 bond ranks"),
        ("tt", -1.0, "fraction"),
    ],
)
def test_a_rank_out_of_range_names_mode_rank_and_limit(name, rank, message):
    with pytest.raises(ValueError, match=message):
        Generator.named(name)((4, 6), (4, 4), rank=rank)


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [("tucker", (2, 3), (2, 3, 2, 2)), ("tucker", 2, (2, 2, 2, 2)), ("tt", (3, 4), (3, 4, 4)), ("tt", 2, (2, 2, 2))],
)
def test_short_forms_of_a_rank(name, short, long):
    assert Generator.named(name)((4, 6), (4, 4), rank=short).rank == long


def test_a_superdiagonal_core_makes_tucker_equal_cp():
    torch.manual_seed(0)
    cp = Generator.named("cp")((4, 6), (4, 4), rank=3).double()
    tucker = Generator.named("tucker")((4, 6), (4, 4), rank=(3, 3)).double()
    with torch.no_grad():
        tucker.core.zero_()
        for q in range(3):
            tucker.core[q, q, q, q] = 1
        for mine, theirs in zip(tucker.factors, cp.factors, strict=True):
            mine.copy_(theirs)
    torch.testing.assert_close(tucker.to_dense(), cp.to_dense(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("name", "rank"), [("tucker", (2, 3, 2, 2)), ("tt", (2, 3, 2))])
def test_a_planted_rank_is_found_exactly(name, rank):
    torch.manual_seed(0)
    planted = Generator.named(name)((4, 9), (4, 4), rank=rank).double().to_dense().detach()
    found = Generator.named(name).from_dense(planted, rank)
    torch.testing.assert_close(found.to_dense(), planted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank", [(2, 3, 2, 2), (1, 2, 3, 4), (4, 8, 1, 2)])
def test_hosvd_is_as_close_as_tensorly(rank):
    torch.manual_seed(0)
    weight = torch.randn(4, 9, 4, 4, dtype=torch.float64)
    ours = Generator.named("tucker").from_dense(weight, rank).to_dense()
    core, factors = tensorly.decomposition.tucker(weight, rank=list(rank), n_iter_max=0, init="svd")
    theirs = tensorly.tucker_to_tensor((core, factors))
    assert (ours - weight).norm() <= (theirs - weight).norm() * (1 + 1e-9)


@pytest.mark.parametrize("rank", [(2, 3, 2), (4, 8, 3), (1, 1, 1)])
def test_tt_svd_equals_tensorly(rank):
    torch.manual_seed(0)
    weight = torch.randn(4, 9, 4, 4, dtype=torch.float64)
    ours = Generator.named("tt").from_dense(weight, rank).to_dense()
    theirs = tensorly.tt_to_tensor(tensorly.decomposition.tensor_train(weight, rank=[1, *rank, 1]))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_cp_error_falls_with_the_rank_and_is_what_was_left_out():
    torch.manual_seed(0)
    weight = torch.randn(3, 8, 3, dtype=torch.float64)
    errors = [(Generator.named("cp").from_dense(weight, r).to_dense() - weight).norm().item() for r in range(1, 10)]
    assert np.all(np.diff(errors) < 0)
    assert errors[-1] < 1e-12


def test_from_dense_refuses_what_it_cannot_use():
    dense = Generator.named("dense")
    with pytest.raises(ValueError, match="has no rank"):
        dense.from_dense(torch.zeros(4, 6, 4), 2)
    with pytest.raises(ValueError, match="num_streams, dim"):
        dense.from_dense(torch.zeros(4, 6))
    with pytest.raises(ValueError, match="finite"):
        dense.from_dense(torch.full((4, 6, 4), torch.nan))


def test_a_frozen_core_is_saved_and_not_trained():
    generator = Generator.named("tucker")((4, 6), (4, 4), freeze_core=True)
    assert "core" in generator.state_dict()
    assert "core" not in dict(generator.named_parameters())
    before = generator.core.clone()
    optimizer = torch.optim.AdamW(generator.parameters(), lr=0.1, weight_decay=0.1)
    generator.to_dense().square().sum().backward()
    optimizer.step()
    assert torch.equal(generator.core, before)


@pytest.mark.parametrize("name", RANKED)
def test_init_std_overrides_the_default(name):
    torch.manual_seed(0)
    generator = Generator.named(name)((4, 600), (4, 4), init_std=0.02)
    values = torch.cat([p.detach().flatten() for p in generator.parameters()])
    assert values.std().item() == pytest.approx(0.02, rel=0.05)
    with pytest.raises(ValueError, match="init_std"):
        Generator.named(name)((4, 6), (4, 4), init_std=-1.0)
