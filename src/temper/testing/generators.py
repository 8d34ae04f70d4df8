"""The suite of every generator."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import temper
from temper.convert import factorize, relative_error
from temper.generators import Generator
from temper.generators.base import Modes, Rank, count

# One and two output modes, odd sizes, one stream, more outputs than features.
MODES: list[tuple[Modes, Modes]] = [
    ((1, 3), (1,)),
    ((2, 5), (2,)),
    ((3, 7), (3, 3)),
    ((4, 6), (4, 4)),
    ((6, 5), (8,)),
    ((4, 3), (24,)),
]

modes = pytest.mark.parametrize(("in_modes", "out_modes"), MODES, ids=str)


class GeneratorSuite:
    """Subclass it, name your generator, and compute W independently of `to_dense`."""

    name: str
    # Options to build with besides those that have defaults.
    options: ClassVar[dict[str, Any]] = {}
    # Whether a W of zeros leaves a parameter with a gradient; behind a frozen core of zeros none has.
    leaves_zero: ClassVar[bool] = True

    def dense(self, generator: Any) -> Tensor:
        """W (N, D, *out_modes) from the stored tensors, independent of `maps`."""
        raise NotImplementedError(f"{type(self).__name__} lacks `dense`; docs/adding-a-generator.md explains it")

    def full_rank(self, in_modes: Modes, out_modes: Modes) -> Rank:
        """A rank at which every W can be held; None for a generator without ranks."""
        return None

    def holdable(self, weight: Tensor) -> Tensor:
        """The nearest W to `weight` that full rank can hold; `weight` itself if that is everything."""
        return weight

    def build(self, in_modes: Modes, out_modes: Modes, dtype: torch.dtype = torch.float64) -> Generator:
        """Builds the generator under test; skips modes that it refuses."""
        generator_class = Generator.named(self.name)
        try:
            generator_class.check_modes(in_modes, out_modes)
        except ValueError as reason:
            pytest.skip(str(reason))
        torch.manual_seed(0)
        generator = generator_class(in_modes, out_modes, **self.options).to(dtype)
        # Initial values can be zero; these are not.
        with torch.no_grad():
            for tensor in (*generator.parameters(), *generator.buffers()):
                tensor.normal_()
        return generator

    @modes
    def test_to_dense(self, in_modes: Modes, out_modes: Modes) -> None:
        generator = self.build(in_modes, out_modes)
        torch.testing.assert_close(generator.to_dense(), self.dense(generator), rtol=1e-12, atol=1e-12)

    @modes
    def test_maps_give_the_logits_of_the_dense_tensor(self, in_modes: Modes, out_modes: Modes) -> None:
        generator = self.build(in_modes, out_modes)
        in_map, out_map = generator.maps()
        streams = torch.randn(3, *in_modes, dtype=torch.float64)
        bottleneck = torch.einsum("tnd,rnd->tr", streams, in_map)
        logits = torch.tensordot(bottleneck, out_map, dims=1)
        expected = torch.tensordot(streams, self.dense(generator), dims=2)
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)

    @modes
    def test_counts_without_allocating(self, in_modes: Modes, out_modes: Modes) -> None:
        generator = self.build(in_modes, out_modes)
        options = {**self.options, **({"rank": generator.rank} if generator.ranked else {})}
        trained = {name: tuple(p.shape) for name, p in generator.named_parameters()}
        frozen = {name: tuple(b.shape) for name, b in generator.named_buffers()}
        assert generator.shapes(in_modes, out_modes, **options) == trained
        assert generator.frozen_shapes(in_modes, out_modes, **options) == frozen
        assert generator.bottleneck(in_modes, out_modes, **options) == generator.maps()[0].shape[0]
        assert generator.maps()[1].shape[1:] == out_modes
        assert generator.fold_flops(in_modes, out_modes, **options) >= 0

    @modes
    def test_gradients(self, in_modes: Modes, out_modes: Modes) -> None:
        generator = self.build(in_modes, out_modes)
        names, parameters = zip(*generator.named_parameters(), strict=True)

        def dense(*tensors: Tensor) -> Tensor:
            named = {f"generator.{name}": tensor for name, tensor in zip(names, tensors, strict=True)}
            return torch.func.functional_call(_Maps(generator), named)

        assert torch.autograd.gradcheck(dense, tuple(p.detach().requires_grad_() for p in parameters))

    @modes
    def test_full_rank_holds_every_tensor(self, in_modes: Modes, out_modes: Modes) -> None:
        self.build(in_modes, out_modes)
        weight = self.holdable(torch.randn(*in_modes, *out_modes, dtype=torch.float64))
        generator = Generator.named(self.name).from_dense(weight, self.full_rank(in_modes, out_modes), **self.options)
        torch.testing.assert_close(generator.to_dense(), weight, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(self.dense(generator), weight, rtol=1e-10, atol=1e-10)

    @modes
    def test_from_dense_of_nothing_can_still_learn(self, in_modes: Modes, out_modes: Modes) -> None:
        self.build(in_modes, out_modes)
        zero = torch.zeros(*in_modes, *out_modes, dtype=torch.float64)
        generator = Generator.named(self.name).from_dense(zero, self.full_rank(in_modes, out_modes), **self.options)
        assert generator.to_dense().abs().max() == 0
        generator.to_dense().backward(torch.randn_like(zero))
        moved = any(p.grad is not None and p.grad.abs().max() > 0 for p in generator.parameters())
        assert moved == self.leaves_zero

    @modes
    def test_a_zeroed_output_can_still_learn(self, in_modes: Modes, out_modes: Modes) -> None:
        generator = self.build(in_modes, out_modes)
        generator.zero_output()
        assert generator.to_dense().abs().max() == 0
        generator.to_dense().backward(torch.randn(*in_modes, *out_modes, dtype=torch.float64))
        assert any(p.grad is not None and p.grad.abs().max() > 0 for p in generator.parameters())

    @modes
    def test_factorize_is_exact_at_full_rank(self, in_modes: Modes, out_modes: Modes) -> None:
        self.build(in_modes, out_modes)
        weight = self.holdable(torch.randn(*in_modes, *out_modes, dtype=torch.float64))
        for moment in (None, _moment(in_modes)):
            found = factorize(weight, self.name, self.full_rank(in_modes, out_modes), moment=moment, **self.options)
            torch.testing.assert_close(self.dense(found), weight, rtol=1e-10, atol=1e-10)

    @modes
    def test_factorize_is_as_good_as_anything_cheaper(self, in_modes: Modes, out_modes: Modes) -> None:
        self.build(in_modes, out_modes)
        weight, moment = torch.randn(*in_modes, *out_modes, dtype=torch.float64), _moment(in_modes)
        rank = 1 if Generator.named(self.name).ranked else None
        given = Generator.named(self.name).from_dense(weight, rank, **self.options)
        plain = factorize(weight, self.name, rank, **self.options)
        weighted = factorize(weight, self.name, rank, moment=moment, **self.options)
        assert relative_error(weight, plain) <= relative_error(weight, given) * (1 + 1e-12)
        assert relative_error(weight, weighted, moment) <= relative_error(weight, plain, moment) * (1 + 1e-12)

    @modes
    def test_a_path_of_ranks_goes_from_small_to_exact(self, in_modes: Modes, out_modes: Modes) -> None:
        self.build(in_modes, out_modes)
        weight = self.holdable(torch.randn(*in_modes, *out_modes, dtype=torch.float64))
        kind = Generator.named(self.name)
        path = kind.rank_path(weight)
        sizes = [count(kind.shapes(in_modes, out_modes, **({"rank": rank} if kind.ranked else {}))) for rank, _ in path]
        assert sizes == sorted(set(sizes))
        torch.testing.assert_close(factorize(weight, self.name, path[-1][0]).to_dense(), weight, rtol=1e-9, atol=1e-9)

    def test_state_dict_round_trip_and_copy(self) -> None:
        generator = self.build((4, 6), (4, 4))
        other = copy.deepcopy(generator)
        other.reset_parameters()
        assert not torch.equal(other.to_dense(), generator.to_dense())
        other.load_state_dict(generator.state_dict())
        assert torch.equal(other.to_dense(), generator.to_dense())

    def test_meta_then_to_empty_then_reset(self) -> None:
        with torch.device("meta"):
            generator = Generator.named(self.name)((4, 6), (4, 4), **self.options)
        generator = generator.to_empty(device="cpu")
        torch.manual_seed(3)
        generator.reset_parameters()
        torch.manual_seed(3)
        built = Generator.named(self.name)((4, 6), (4, 4), **self.options)
        for (name, one), (_, other) in zip(generator.state_dict().items(), built.state_dict().items(), strict=True):
            assert torch.equal(one, other), name

    @pytest.mark.parametrize("bad", [((4,), (4,)), ((4, 6), ()), ((0, 6), (4,)), ((4, 6), (4, -1))], ids=str)
    def test_bad_modes(self, bad: tuple[Modes, Modes]) -> None:
        with pytest.raises(ValueError, match="modes"):
            Generator.named(self.name)(*bad, **self.options)

    def test_works_by_name_in_a_site(self) -> None:
        config = temper.preset("mhc", num_streams=4, dim=6, generator=temper.Choice(self.name, **self.options))
        site = temper.HyperConnection(config, branch=torch.nn.Tanh())
        added = sum(p.numel() for p in site.parameters())
        assert temper.count_parameters(config) == added
        assert temper.RouterConfig.from_dict(config.to_dict()) == config
        streams = torch.randn(2, 3, 4, 6, requires_grad=True)
        site(streams).sin().sum().backward()
        assert streams.grad is not None
        assert torch.isfinite(streams.grad).all()


def _moment(in_modes: Modes) -> Tensor:
    """The second moment of some correlated inputs."""
    size = in_modes[0] * in_modes[1]
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(3 * size, size, generator=random, dtype=torch.float64) @ torch.randn(
        size, size, generator=random, dtype=torch.float64
    )
    return inputs.T @ inputs / len(inputs)


class _Maps(torch.nn.Module):
    """Makes `to_dense` the forward of a module, which is what functional_call calls."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self) -> Tensor:
        return self.generator.to_dense()
