"""The suite of every mixer."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import temper
from temper.mixers import Mixer

STREAMS = [1, 2, 3, 4, 6, 8]

streams_of = pytest.mark.parametrize("num_streams", STREAMS)


class MixerSuite:
    """Subclass it, name your mixer, and compute `res` of one token independently of `forward`."""

    name: str
    options: ClassVar[dict[str, Any]] = {}
    # How far sums may be from one for logits in (-1, 1), along an axis that the mixer calls "limit".
    limit_error: ClassVar[float] = 1e-5

    def matrix(self, mixer: Any, logits: Tensor) -> Tensor:
        """res (N, N) of the logits (*logit_shape) of one token."""
        raise NotImplementedError(f"{type(self).__name__} lacks `matrix`; docs/adding-a-mixer.md explains it")

    def build(self, num_streams: int) -> Mixer:
        """Builds the mixer under test; skips a number of streams that it refuses."""
        mixer_class = Mixer.named(self.name)
        if reason := mixer_class.refusal(num_streams):
            with pytest.raises(ValueError, match="N="):
                mixer_class(num_streams, **self.options)
            pytest.skip(reason)
        return mixer_class(num_streams, **self.options).to(torch.float64)

    def logits(self, mixer: Mixer, *lead: int, scale: float = 1.0) -> Tensor:
        """Random logits, the same every time, with leading dimensions `lead`."""
        torch.manual_seed(0)
        return scale * torch.randn(*lead, *mixer.logit_shape, dtype=torch.float64)

    @streams_of
    def test_matrix_of_every_token(self, num_streams: int) -> None:
        mixer = self.build(num_streams)
        logits = self.logits(mixer, 2, 3)
        res = mixer(logits)
        assert res.shape == (2, 3, num_streams, num_streams)
        for i in range(2):
            for j in range(3):
                torch.testing.assert_close(res[i, j], self.matrix(mixer, logits[i, j]), rtol=1e-10, atol=1e-12)

    @streams_of
    def test_as_stochastic_as_it_says(self, num_streams: int) -> None:
        mixer = self.build(num_streams)
        allowed = {"exact": 1e-12, "limit": self.limit_error, "no": math.inf}
        facts = {-1: mixer.row_stochastic, -2: mixer.column_stochastic}
        res = mixer(self.logits(mixer, 50).tanh())
        for axis, fact in facts.items():
            assert (res.sum(axis) - 1).abs().max() <= allowed[fact]
        if mixer.is_bounded:
            assert res.min() >= 0

    @streams_of
    @pytest.mark.parametrize("step", [1e-4, 1.0])
    def test_as_smooth_as_it_says(self, num_streams: int, step: float) -> None:
        mixer = self.build(num_streams)
        if type(mixer).lipschitz is Mixer.lipschitz:
            pytest.skip("gives no Lipschitz constant")
        logits = torch.cat([self.logits(mixer, 50, scale=scale) for scale in (0.1, 1.0, 4.0)])
        other = logits + step * torch.randn_like(logits)
        res, other_res = mixer(logits), mixer(other)
        change = (res - other_res).flatten(1).norm(dim=1)
        limit = mixer.lipschitz() * (logits - other).flatten(1).norm(dim=1)
        assert (change <= limit + mixer.slack(logits, res, other, other_res) + 1e-12).all()

    @streams_of
    def test_starts_near_the_identity(self, num_streams: int) -> None:
        mixer = self.build(num_streams)
        bias = mixer.initial_bias().double()
        assert bias.shape == mixer.logit_shape
        # exp(-8) for every competitor of the identity.
        rivals = max(1, bias.numel())
        torch.testing.assert_close(
            mixer(bias), torch.eye(num_streams, dtype=torch.float64), rtol=0, atol=rivals * 3.4e-4
        )

    @streams_of
    def test_gradients(self, num_streams: int) -> None:
        if num_streams > 4:
            pytest.skip("gradcheck is quadratic; four streams show it")
        mixer = self.build(num_streams)
        assert torch.autograd.gradcheck(mixer, self.logits(mixer, 2).requires_grad_())

    @streams_of
    def test_enormous_logits_stay_finite(self, num_streams: int) -> None:
        mixer = self.build(num_streams).float()
        logits = 1e4 * self.logits(mixer, 20).float().sign()
        logits.requires_grad_()
        res = mixer(logits)
        res.square().sum().backward()
        assert torch.isfinite(res).all()
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()

    @streams_of
    def test_tokens_do_not_depend_on_each_other(self, num_streams: int) -> None:
        mixer = self.build(num_streams)
        logits = self.logits(mixer, 7, scale=3.0)
        torch.testing.assert_close(mixer(logits)[3:4], mixer(logits[3:4]), rtol=1e-14, atol=1e-14)

    @streams_of
    def test_counts_without_building(self, num_streams: int) -> None:
        mixer = self.build(num_streams)
        assert Mixer.named(self.name).logit_shape_for(num_streams) == mixer.logit_shape
        assert mixer.flops(num_streams, **self.options) >= 0
        assert mixer.saved(num_streams, **self.options) >= 0
        assert not list(mixer.state_dict())

    def test_empty_batch(self) -> None:
        mixer = self.build(4)
        assert mixer(self.logits(mixer, 0)).shape == (0, 4, 4)

    def test_copies_and_moves(self) -> None:
        with torch.device("meta"):
            mixer = Mixer.named(self.name)(4, **self.options)
        mixer = copy.deepcopy(mixer).to_empty(device="cpu").to(torch.float64)
        fresh = self.build(4)
        logits = self.logits(fresh, 3)
        assert torch.equal(mixer(logits), fresh(logits))

    def test_compiles_without_a_break(self) -> None:
        mixer = self.build(4)
        logits = self.logits(mixer, 3)
        torch.compiler.reset()
        compiled = torch.compile(mixer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(logits), mixer(logits))

    def test_works_by_name_in_a_site(self) -> None:
        config = temper.preset("mhc", num_streams=4, dim=6, mixer=temper.Choice(self.name, **self.options))
        site = temper.HyperConnection(config, branch=torch.nn.Tanh())
        assert temper.count_parameters(config) == sum(p.numel() for p in site.parameters())
        assert temper.RouterConfig.from_dict(config.to_dict()) == config
        streams = torch.randn(2, 3, 4, 6)
        # The identity, nearly: what comes out is what went in plus what was written.
        routing = site.route(streams)
        torch.testing.assert_close(routing.res, torch.eye(4).expand(2, 3, 4, 4), rtol=0, atol=0.01)
        assert site(streams).shape == streams.shape
