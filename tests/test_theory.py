"""Theory as numbers: ranks against torch's, bounds that are never exceeded, constants that are approached."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import temper
from temper import theory
from temper.generators import Generator
from temper.mixers import Mixer

GENERATORS = ("dense", "cp", "tucker", "tt")
MIXERS = ("unconstrained", "identity", "sinkhorn", "birkhoff", "kronecker")
N, D = 3, 5


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def site_of(generator="dense", mixer="sinkhorn", *, seed=0, scale=1.0, num_streams=N, dim=D, **overrides):
    """A site in float64 with every parameter random: gates, biases and gain too."""
    config = temper.preset("mhc", num_streams=num_streams, dim=dim, generator=generator, mixer=mixer, **overrides)
    site = temper.HyperConnection(config).double()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in site.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=source, dtype=torch.float64))
    return site


def like(site, **tensors):
    """The same site with some tensors of its state dict replaced or changed by a function."""
    other = temper.HyperConnection(site.config).double()
    state = site.state_dict()
    other.load_state_dict(state | {key: value(state[key]) for key, value in tensors.items()})
    return other


def built(name, in_modes=(N, D), out_modes=(N, N), seed=0, **options):
    generator = Generator.named(name)(in_modes, out_modes, **options).double()
    with torch.no_grad():
        for index, parameter in enumerate(generator.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + index))
    return generator


class TestRank:
    def test_tucker_is_the_theorem(self):
        generator = built("tucker", (4, 9), (4, 4), rank=(2, 3))
        stream, feature = generator.factors[0], generator.factors[1]
        # L as an explicit matrix: its columns are the images of the unit matrices.
        units = torch.eye(36, dtype=torch.float64).view(36, 4, 9)
        explicit = (stream.T @ units @ feature).flatten(1).T
        found = theory.compression_spectrum(generator)
        assert (found.rank, found.nullity) == (2 * 3, 4 * 9 - 2 * 3)
        assert found.rank == torch.linalg.matrix_rank(explicit)
        torch.testing.assert_close(
            torch.tensor(found.values, dtype=torch.float64), torch.linalg.svdvals(explicit).detach()
        )
        assert found.tolerance == 9 * torch.finfo(torch.float64).eps

    @pytest.mark.parametrize("lost", [0, 1])
    def test_factors_without_full_column_rank_are_found_out(self, lost):
        generator = built("tucker", (4, 9), (4,), rank=(2, 3, 2))
        with torch.no_grad():
            generator.factors[lost][:, 1] = 2 * generator.factors[lost][:, 0]
        found = theory.compression_spectrum(generator)
        assert found.rank == (1 * 3, 2 * 2)[lost]
        assert found.nullity == 36 - found.rank

    @pytest.mark.parametrize("name", [*GENERATORS, "per-stream"])
    @pytest.mark.parametrize("out_modes", [(4,), (4, 4)])
    def test_the_routing_subspace_is_the_rank_of_the_explicit_map(self, name, out_modes):
        generator = built(name, (4, 9), out_modes)
        units = torch.eye(36, dtype=torch.float64).view(36, 4, 9)
        in_map, _ = generator.maps()
        explicit = torch.stack([(in_map * unit).sum((1, 2)) for unit in units], dim=1)
        found = theory.routing_spectrum(generator)
        assert found.rank == torch.linalg.matrix_rank(explicit)
        assert found.rank + found.nullity == 36
        # The logits see no more than that.
        assert torch.linalg.matrix_rank(generator.to_dense().flatten(2).flatten(0, 1)) <= found.rank
        torch.testing.assert_close(
            torch.tensor(found.values, dtype=torch.float64), torch.linalg.svdvals(explicit).detach()
        )

    def test_a_deficient_dense_weight(self):
        generator = built("dense", (4, 9), (4, 4))
        with torch.no_grad():
            generator.weight[..., 1] = generator.weight[..., 0]
        assert theory.routing_spectrum(generator).rank == 12
        torch.nn.init.zeros_(generator.weight)
        assert theory.routing_spectrum(generator).rank == 0
        assert theory.null_direction(generator).norm() == pytest.approx(1)

    def test_a_site_sees_what_its_heads_see_together(self):
        site = site_of("cp", num_streams=4, dim=9, rank=2)
        maps = [head.generator.maps()[0].flatten(1) for head in (site.pre, site.res, site.post)]
        assert theory.site_spectrum(site).rank == torch.linalg.matrix_rank(torch.cat(maps)) == 6
        with torch.no_grad():
            for factor, same in zip(site.post.generator.factors[:2], site.pre.generator.factors[:2], strict=True):
                factor.copy_(same)
        # Heads of very different size do not hide each other.
        with torch.no_grad():
            site.res.generator.factors[0].mul_(1e-14)
        assert theory.site_spectrum(site).rank == 4

    @pytest.mark.parametrize("name", GENERATORS)
    def test_a_null_direction_leaves_the_logits_alone(self, name):
        generator = built(name, (4, 9), (4,), seed=3)
        hat, weight = normal(7, 4, 9, seed=5), generator.to_dense()

        def logits(hat):
            return torch.einsum("tnd,ndo->to", hat, weight)

        for seed in (0, 1):
            direction = theory.null_direction(generator, seed)
            assert direction.norm() == pytest.approx(1)
            assert (logits(hat + 10 * direction) - logits(hat)).abs().max() < 1e-12
        assert (theory.null_direction(generator, 0) - theory.null_direction(generator, 1)).norm() > 0.1
        other = normal(4, 9, seed=9)
        other = other / other.norm()
        assert (logits(hat + 10 * other) - logits(hat)).abs().max() > 1e-2

    @pytest.mark.parametrize("name", GENERATORS)
    def test_the_projection_is_one(self, name):
        generator = built(name, (4, 9), (4,))
        basis = theory.visible_basis(generator).flatten(1)
        torch.testing.assert_close(basis @ basis.T, torch.eye(len(basis), dtype=torch.float64))
        directions = normal(6, 4, 9)
        hidden = theory.null_project(generator, directions)
        torch.testing.assert_close(theory.null_project(generator, hidden), hidden)
        explicit = torch.eye(36, dtype=torch.float64) - torch.linalg.pinv(basis) @ basis
        torch.testing.assert_close(hidden.flatten(1), directions.flatten(1) @ explicit.detach())

    def test_a_null_direction_of_a_trained_float32_weight_is_exact(self):
        generator = Generator.named("tucker")((4, 16), (4, 4), rank=(2, 4))
        direction = theory.null_direction(generator)
        in_map = generator.maps(torch.float64)[0]
        assert (in_map * direction).sum((1, 2)).abs().max() < 1e-12
        assert theory.compression_spectrum(generator).tolerance == 16 * torch.finfo(torch.float32).eps

    def test_bad_input(self):
        generator = built("dense", (2, 2), (2, 2))
        with pytest.raises(ValueError, match="see all 4 directions"):
            theory.null_direction(generator)
        with pytest.raises(ValueError, match=r"expected \(\.\.\., \(2, 2\)\)"):
            theory.null_project(generator, torch.zeros(3, 2))
        with pytest.raises(TypeError, match="got Linear"):
            theory.null_direction(torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match="routes nothing"):
            theory.site_spectrum(temper.HyperConnection(temper.preset("residual", num_streams=4, dim=8)))


def attended(x):
    """A branch that mixes tokens, as attention does."""
    return x.tanh() + x.mean(0, keepdim=True)


BRANCHES = {"tokenwise": torch.tanh, "mixing": attended, "steep": lambda x: 30 * x, "constant": torch.ones_like}


class TestBounds:
    @pytest.mark.parametrize("mixer", MIXERS)
    @pytest.mark.parametrize("generator", GENERATORS)
    @settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        scale=st.sampled_from([1e-3, 0.3, 1.0, 5.0]),
        change=st.sampled_from([0.0, 1e-9, 1e-2, 1.0]),
        size=st.sampled_from([1e-4, 1.0, 1e3]),
        branch=st.sampled_from(sorted(BRANCHES)),
        seed=st.integers(0, 10_000),
    )
    def test_none_is_exceeded(self, generator, mixer, scale, change, size, branch, seed):
        site = site_of(generator, mixer, seed=seed, scale=scale)
        moved = {key: lambda value: value + change * normal(*value.shape, seed=seed + 1) for key in site.state_dict()}
        found = theory.deviation(site, like(site, **moved), size * normal(4, N, D, seed=seed), BRANCHES[branch])
        assert found.exceeded == []
        assert found.tokens == 4
        if change:
            assert all(found.routing[head].measured_max > 0 for head in ("pre", "post")) or scale == 5.0
        else:
            assert all(gap.measured_max == 0 for gap in found.gaps.values())

    @pytest.mark.parametrize("generator", GENERATORS)
    @pytest.mark.parametrize("mixer", MIXERS)
    def test_a_dense_site_against_every_compression(self, generator, mixer):
        dense = site_of("dense", mixer)
        config = temper.preset("mhc", num_streams=N, dim=D, generator=generator, mixer=mixer)
        other = temper.HyperConnection(config).double()
        state = {key: value for key, value in dense.state_dict().items() if ".generator." not in key}
        for head in config.heads:
            near = Generator.named(generator).from_dense(getattr(dense, head).generator.weight.detach())
            state |= {f"{head}.generator.{key}": value for key, value in near.state_dict().items()}
        other.load_state_dict(state)
        found = theory.deviation(dense, other, normal(2, 3, N, D), BRANCHES["tokenwise"])
        assert found.exceeded == []
        # At these sizes TT's default ranks are the full ones for all but res.
        exact = generator == "dense" or (generator, mixer) == ("tt", "identity")
        assert (found.block.measured_max > 1e-3) != exact

    def test_measured_is_what_the_public_operations_give(self):
        """Every number again, token by token, from the paper's formulas."""
        site = site_of("dense", "sinkhorn", scale=0.5)
        other = like(site, **{f"{head}.generator.weight": lambda w: 0.8 * w for head in ("pre", "res", "post")})
        linear = torch.nn.Linear(D, D).double()
        streams = normal(6, N, D, seed=4)
        found = theory.deviation(site, other, streams, linear)
        routing, routing_other = site.route(streams), other.route(streams)
        for head in ("pre", "res", "post"):
            change = getattr(routing, head) - getattr(routing_other, head)
            assert found.routing[head].measured_max == pytest.approx(change.flatten(1).norm(dim=1).max().item())
        mean = streams.square().mean((1, 2), keepdim=True)
        hat = streams * (mean + 1e-6).rsqrt() * site.norm.weight
        gaps = {head: (getattr(site, head).generator.weight * 0.2).norm() for head in ("pre", "res", "post")}
        lemma = hat.flatten(1).norm(dim=1) * gaps["res"]
        assert found.logits["res"].bound_max == pytest.approx(lemma.max().item(), rel=1e-9)
        assert found.logits["res"].bound_mean == pytest.approx(lemma.mean().item(), rel=1e-9)
        z = torch.einsum("tnd,ndij->tij", hat, site.res.generator.weight)
        assert found.logits["res"].measured_total == pytest.approx(0.2 * z.norm().item())
        x, x_other = site.read(streams, routing), other.read(streams, routing_other)
        y, y_other = linear(x), linear(x_other)
        block = site.write(streams, y, routing) - other.write(streams, y_other, routing_other)
        assert found.block.measured_mean == pytest.approx(block.flatten(1).norm(dim=1).mean().item())
        slope = (y - y_other).norm(dim=1).max() / (x - x_other).norm(dim=1).max()
        assert found.branch_lipschitz == pytest.approx(slope.item())
        assert found.branch_norm == pytest.approx(y.norm(dim=1).max().item())
        # The three terms of the paper, for the token where each is largest.
        sizes, hats = streams.flatten(1).norm(dim=1), hat.flatten(1).norm(dim=1)
        # What 20 rounds have left of the columns.
        far = (routing.res.sum(1) - routing_other.res.sum(1)).abs().sum(1) * ((N - 1) / 2) ** 0.5
        terms = {
            "res": site.res.gate.abs() / 2 * hats * sizes * gaps["res"] + far * sizes,
            "post": site.post.gate.abs() / 2 * y.norm(dim=1).max() * hats * gaps["post"],
            "pre": (site.pre.gate.abs() / 2 * N**0.5 * slope * hats * sizes * gaps["pre"]).max().expand(6),
        }
        for name, term in terms.items():
            assert found.terms[name].bound_max == pytest.approx(term.max().item(), rel=1e-9), name
        assert found.block.bound_max == pytest.approx(sum(terms.values()).max().item(), rel=1e-9)

    def test_the_lemma_is_attained(self):
        """W - Wt of rank one, and Hhat along it: nothing is lost."""
        site = site_of("dense", "unconstrained")
        with torch.no_grad():
            site.norm.weight.fill_(1.0)
        direction = normal(N, D, seed=8)
        step = torch.einsum("nd,ij->ndij", direction, normal(N, N, seed=9))
        found = theory.deviation(site, like(site, **{"res.generator.weight": lambda w: w + step}), 3 * direction[None])
        assert found.logits["res"].ratio_max == pytest.approx(1, abs=1e-9)
        assert found.routing["res"].ratio_max == pytest.approx(1, abs=1e-9)
        assert found.logits["res"].ratio_max <= 1

    def test_the_block_bound_is_nearly_attained(self):
        """A small step of post at logits of zero: sigmoid's full slope, and nothing else moves."""
        site = site_of("dense", "unconstrained")
        with torch.no_grad():
            for parameter in (site.post.generator.weight, site.post.bias):
                parameter.zero_()
            site.norm.weight.fill_(1.0)
        direction = normal(N, D, seed=8)
        step = 1e-4 * torch.einsum("nd,i->ndi", direction, normal(N, seed=9))
        other = like(site, **{"post.generator.weight": lambda w: w + step})
        found = theory.deviation(site, other, direction[None], torch.tanh)
        assert 0.999 < found.block.ratio_max <= 1

    def test_gates_biases_gains_and_norms_may_differ(self):
        site = site_of("dense", "sinkhorn", scale=0.5)
        for key in ("res.gate", "pre.bias", "norm.weight", "res.bias", "post.gate"):
            other = like(site, **{key: lambda value: 1.5 * value})
            found = theory.deviation(site, other, normal(5, N, D), torch.tanh)
            assert found.exceeded == []
            assert found.block.measured_max > 1e-4, key
        config = temper.preset("mhc", num_streams=N, dim=D, norm_eps=0.5)
        other = temper.HyperConnection(config).double()
        other.load_state_dict(site.state_dict())
        found = theory.deviation(site, other, normal(5, N, D), torch.tanh)
        assert found.exceeded == []
        assert found.logits["res"].measured_max > 1e-3

    def test_hc_has_bounds_too(self):
        config = temper.preset("hc", num_streams=N, dim=D)
        site, other = (temper.HyperConnection(config).double() for _ in range(2))
        for index, module in enumerate((site, other)):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.copy_(normal(*parameter.shape, seed=index, scale=0.5))
        found = theory.deviation(site, other, normal(5, N, D), torch.tanh)
        assert found.exceeded == []
        assert found.block.ratio_max > 0.01

    @pytest.mark.parametrize(
        "options",
        [
            {"iters": 1},
            {"iters": 3, "last": "columns"},
            {"tol": 0.1},
            {"eps": 1e-2, "iters": 4},
            {"method": "newton"},
            {"method": "newton", "last": "columns"},
        ],
        ids=str,
    )
    def test_every_form_of_sinkhorn_as_it_runs(self, options):
        """Far from the limit one half is exceeded; the distance to the limit is in the bound."""
        site = site_of("dense", temper.Choice("sinkhorn", **options), scale=1.5)
        for change in (1e-6, 0.1):
            other = like(site, **{"res.bias": lambda value, change=change: value + change * normal(N, N)})
            assert theory.deviation(site, other, normal(20, N, D), torch.tanh).exceeded == []

    def test_one_round_of_sinkhorn_is_steeper_than_one_half(self):
        # Every column sits on the first row: the next row sees the difference of two rows of logits.
        logits = torch.tensor([[0.0, 0.0], [-30.0, -30.0]], dtype=torch.float64)
        steep = theory.local_lipschitz(Mixer.named("sinkhorn")(2, iters=1), logits)
        assert steep.item() == pytest.approx(0.5**0.5)
        assert theory.sinkhorn_lipschitz(logits).item() == pytest.approx(0.5)

    def test_without_a_branch_and_with_the_site_s_own(self):
        site, other = site_of(seed=1), site_of("cp", seed=2)
        streams = normal(2, 3, N, D)
        found = theory.deviation(site, other, streams)
        assert found.block is None
        assert found.terms == {}
        assert set(found.gaps) == {
            f"{kind} {head}" for kind in ("logits", "routing") for head in ("pre", "res", "post")
        }
        own = temper.HyperConnection(site.config, branch=torch.nn.Tanh()).double()
        own.load_state_dict(site.state_dict())
        assert theory.deviation(own, other, streams).block == theory.deviation(site, other, streams, torch.tanh).block
        assert own.branch is not None
        json.dumps(found.to_dict(), allow_nan=False)

    def test_half_precision_sites_are_compared_in_float64(self):
        dense = temper.HyperConnection(temper.preset("mhc", num_streams=4, dim=8))
        other = temper.HyperConnection(temper.preset("temper-cp", num_streams=4, dim=8))
        linear = torch.nn.Linear(8, 8).bfloat16()
        found = theory.deviation(dense, other, torch.randn(3, 4, 8).bfloat16(), linear)
        assert found.exceeded == []
        assert next(dense.parameters()).dtype == torch.float32
        before = torch.get_rng_state()
        theory.deviation(dense, other, torch.ones(3, 4, 8))
        assert torch.equal(torch.get_rng_state(), before)

    def test_bad_input(self):
        site, streams = site_of(), normal(2, N, D)
        residual = temper.HyperConnection(temper.preset("residual", num_streams=N, dim=D))
        for other, message in (
            (residual, "routes nothing"),
            (site_of(dim=D + 1), "differ in dim, 5 and 6"),
            (site_of(num_streams=2), "differ in num_streams"),
            (site_of(mixer="birkhoff"), "differ in mixer, Choice.'sinkhorn'"),
            (site_of(mixer=temper.Choice("sinkhorn", iters=5)), "differ in mixer"),
            (site_of(pre_eps=0.1), "differ in pre_eps"),
        ):
            with pytest.raises(ValueError, match=message):
                theory.deviation(site, other, streams)
        with pytest.raises(TypeError, match="got a Linear"):
            theory.deviation(site, torch.nn.Linear(2, 2), streams)
        with pytest.raises(ValueError, match="expected"):
            theory.deviation(site, site, streams[..., :2])
        with pytest.raises(ValueError, match="at least one token"):
            theory.deviation(site, site, streams[:0])
        with pytest.raises(ValueError, match="not finite"):
            theory.deviation(site, site, streams * math.nan)
        with pytest.raises(ValueError, match="two results for one input"):
            theory.deviation(site, site, streams, torch.rand_like)


class TestDepth:
    def test_it_compounds_and_holds(self):
        sites = [site_of("dense", "sinkhorn", seed=seed, scale=0.4) for seed in range(4)]
        others = [like(site, **{"res.bias": lambda b: b + 0.1, "pre.bias": lambda b: b - 0.1}) for site in sites]
        branches = [torch.tanh, attended] * 2
        streams = normal(5, N, D)
        found = list(theory.through_depth(zip(sites, others, branches, strict=True), streams))
        mine = theirs = streams
        for step, site, other, branch in zip(found, sites, others, branches, strict=True):
            mine, theirs = (
                module.finish(state, branch(x))
                for module, (x, state) in ((site, site.begin(mine)), (other, other.begin(theirs)))
            )
            assert step.measured == pytest.approx((mine - theirs).norm().item())
            assert step.size == pytest.approx(mine.norm().item())
            assert step.exceeded == []
        assert found[0].growth == 0
        assert found[0].bound == found[0].deviation.block.bound_total
        by_hand = found[1].growth * found[0].bound + found[1].deviation.block.bound_total
        assert found[1].bound == pytest.approx(by_hand)

    def test_equal_networks_stay_together(self):
        sites = [site_of(seed=seed) for seed in range(2)]
        found = list(theory.through_depth([(site, site, torch.tanh) for site in sites], normal(2, N, D).float()))
        assert [step.measured for step in found] == [0, 0]


def steepest(mixer, seed, steps=40):
    """Logits found by gradient ascent on the norm of a small step's image, in the steepest direction so far."""
    logits = normal(8, *mixer.logit_shape, seed=seed, scale=2.0).requires_grad_()
    direction = normal(8, *mixer.logit_shape, seed=seed + 1).requires_grad_()
    optimizer = torch.optim.Adam([logits, direction], lr=0.3)
    for _ in range(steps):
        unit = direction / direction.flatten(1).norm(dim=1).view(-1, *[1] * len(mixer.logit_shape))
        steep = (mixer.mix(logits + 1e-3 * unit) - mixer.mix(logits - 1e-3 * unit)).flatten(1).norm(dim=1) / 2e-3
        optimizer.zero_grad()
        (-steep.sum()).backward()
        optimizer.step()
    return logits.detach()


class TestSmoothness:
    @pytest.mark.parametrize("num_streams", [2, 3, 4])
    @pytest.mark.parametrize("name", MIXERS)
    def test_the_constant_is_never_exceeded(self, name, num_streams):
        options = {"method": "newton"} if name == "sinkhorn" else {}
        mixer = Mixer.named(name)(num_streams, **options).double()
        random = normal(50, *mixer.logit_shape, scale=3.0)
        found = theory.local_lipschitz(mixer, torch.cat([random, steepest(mixer, seed=num_streams)]))
        assert found.max() <= mixer.lipschitz() * (1 + 1e-9)
        # Going uphill comes near, so the constant says something.
        assert found.max() >= 0.9 * mixer.lipschitz()

    @pytest.mark.parametrize("num_streams", [2, 3, 4, 6])
    @pytest.mark.parametrize("name", MIXERS)
    def test_it_is_approached(self, name, num_streams):
        """Where two permutations without a common place, or two entries of a row, share the weight."""
        options = {"method": "newton"} if name == "sinkhorn" else {}
        mixer = Mixer.named(name)(num_streams, **options).double()
        logits = mixer.initial_bias().double() * 5
        if name == "sinkhorn":
            logits[:2, :2] = 0
        elif name == "birkhoff":
            every = list(itertools.permutations(range(num_streams)))
            logits[every.index((*range(1, num_streams), 0))] = 0
        elif name == "kronecker":
            # In the first factor the identity and a cycle.
            size = mixer.sizes[0]
            logits[list(itertools.permutations(range(size))).index((*range(1, size), 0))] = 0
        assert theory.local_lipschitz(mixer, logits).item() == pytest.approx(mixer.lipschitz(), rel=1e-6)

    def test_two_streams_attain_one_half(self):
        assert theory.sinkhorn_lipschitz(torch.zeros(2, 2)).item() == pytest.approx(0.5, abs=1e-12)

    @settings(max_examples=25, deadline=None)
    @given(st.integers(2, 5), st.sampled_from([0.1, 1.0, 4.0, 12.0]), st.integers(0, 10_000))
    def test_one_half_for_the_limit(self, num_streams, scale, seed):
        logits = normal(6, num_streams, num_streams, seed=seed, scale=scale)
        assert theory.sinkhorn_lipschitz(logits).max() <= 0.5 + 1e-9

    def test_it_is_the_jacobian_of_autograd(self):
        for name, options in (("sinkhorn", {}), ("kronecker", {}), ("sinkhorn", {"method": "newton"})):
            mixer = Mixer.named(name)(4, **options).double()
            logits = normal(2, 3, *mixer.logit_shape)
            found = theory.local_lipschitz(mixer, logits)
            assert found.shape == (2, 3)
            jacobian = torch.autograd.functional.jacobian(mixer.mix, logits[1, 2]).reshape(16, -1)
            assert found[1, 2].item() == pytest.approx(torch.linalg.svdvals(jacobian)[0].item())

    @settings(max_examples=40, deadline=None)
    @given(
        st.integers(2, 6), st.sampled_from([0.3, 2.0, 10.0]), st.sampled_from([1e-4, 0.3, 5.0]), st.integers(0, 10_000)
    )
    def test_column_sums_bound_what_other_scalings_change(self, num_streams, scale, change, seed):
        """Matrices of the same logits with rows exact differ by at most sqrt((N - 1) / 2) of their column sums."""
        logits = normal(20, num_streams, num_streams, seed=seed, scale=scale)
        shift = normal(2, 20, 1, num_streams, seed=seed + 1) * torch.tensor([scale, change]).view(2, 1, 1, 1).double()
        one, two = (logits + shift[0]).softmax(-1), (logits + shift.sum(0)).softmax(-1)
        sums = (one.sum(-2) - two.sum(-2)).abs().sum(-1)
        far = (one - two).flatten(1).norm(dim=1)
        assert (far <= ((num_streams - 1) / 2) ** 0.5 * sums + 1e-12).all()
        slack = Mixer.named("sinkhorn")(num_streams).slack(logits, one, logits, two)
        assert (far <= slack + 1e-12).all()

    def test_one_row_that_takes_it_all_attains_that(self):
        # The first row does not move, and the second takes all of the change.
        logits = torch.tensor([[60.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
        one, two = logits.softmax(-1), (logits + torch.tensor([0.4, -0.4], dtype=torch.float64)).softmax(-1)
        assert (one - two).norm() == pytest.approx((one.sum(0) - two.sum(0)).abs().sum().item() / 2**0.5)

    def test_bad_input(self):
        mixer = Mixer.named("birkhoff")(3)
        with pytest.raises(ValueError, match=r"logits are \(2, 5\); expected \(\.\.\., 6\)"):
            theory.local_lipschitz(mixer, torch.zeros(2, 5))
        with pytest.raises(ValueError, match=r"expected \(\.\.\., N, N\)"):
            theory.sinkhorn_lipschitz(torch.zeros(2, 3))
        with pytest.raises(ValueError, match="not finite"):
            theory.sinkhorn_lipschitz(torch.full((2, 2), math.nan))
        assert theory.local_lipschitz(mixer, torch.zeros(0, 6)).shape == (0,)

        class Unknown(Mixer):
            name = "unknown"

            @classmethod
            def logit_shape_for(cls, num_streams):
                return (num_streams,)

        with pytest.raises(ValueError, match="no Lipschitz constant is known of the unknown mixer"):
            Unknown(3).lipschitz()
