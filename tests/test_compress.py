"""Compressing a model: moments against a direct computation, promises kept, sites left the objects they are."""

import copy
import math

import pytest
import torch
from torch import nn

import temper
from temper.config import HEADS
from temper.convert import compress, moments, sensitivities
from temper.convert.moments import RIDGE

N, D = 2, 5


class Net(nn.Module):
    """Two sites around small branches, with routing that is far from where it starts."""

    def __init__(self, preset="mhc", dtype=torch.float64, num_streams=N, **overrides):
        super().__init__()
        config = temper.preset(preset, num_streams=num_streams, dim=D, **overrides)
        self.sites = nn.ModuleList(
            temper.HyperConnection(config, layer_index=index, branch=nn.Linear(D, D)) for index in range(2)
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
        for site in self.sites:
            site.keep_float32 = False
        self.to(dtype)

    def forward(self, x):
        streams = temper.expand_streams(x, self.sites[0].config.num_streams)
        for site in self.sites:
            streams = site(streams.tanh() + streams)
        return temper.reduce_streams(streams)


def inputs(count=200, seed=0, dtype=torch.float64):
    # Neither centred nor of equal size in all directions.
    x = torch.randn(count, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * torch.linspace(0.2, 2, D) + 0.5).to(dtype)


def seen_by(model, x):
    with moments(model) as seen:
        model(x)
    return seen


def dense(site):
    return {head: getattr(site, head).generator.to_dense().detach() for head in site.config.heads}


FROM = ["mhc", "mhc-identity", "kromhc", "mhc-lite", "temper-tucker", "temper-cp", "temper-tt"]


@pytest.mark.parametrize(("preset", "to"), [*((one, "tucker") for one in FROM), ("mhc", "cp"), ("mhc", "tt")])
def test_full_rank_changes_nothing(preset, to):
    model, x = Net(preset), inputs(20)
    expected = model(x)
    # CP is exact from prod(modes) / max(modes) on; of TT no rank is the full one for all heads.
    full = {"tucker": {"rank": (N, D)}, "cp": {"rank": 8}, "tt": {"error": 1e-12}}
    compress(model, to, **full[to], moments=seen_by(model, x))
    assert all(getattr(site.config, head).name == to for site in model.sites for head in site.config.heads)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


def test_full_rank_in_float32():
    model, x = Net(dtype=torch.float32), inputs(20, dtype=torch.float32)
    expected = model(x)
    report = compress(model, "tucker", rank=(N, D), in_place=False)
    assert report.model is not model
    assert all(parameter.dtype == torch.float32 for parameter in report.model.parameters())
    torch.testing.assert_close(report.model(x), expected, rtol=1e-5, atol=1e-5)
    # The model itself is as it was.
    assert model.sites[0].config.res.name == "dense"
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("options", [{}, {"gain": "none"}, {"gain": "rank-one"}, {"norm": "per-stream"}], ids=str)
def test_moments_are_those_of_what_the_generators_see(options):
    model, x = Net(**options), inputs(300)
    with moments(model) as seen:
        # In parts, one of them longer than a chunk would be, and with more dimensions.
        model(x[:100].view(10, 10, D))
        model(x[100:])
    with torch.no_grad():
        streams = temper.expand_streams(x, N)
        for index, site in enumerate(model.sites):
            streams = streams.tanh() + streams
            square = streams.square()
            mean = square.mean(-1, keepdim=True) if "norm" in options else square.mean((-2, -1), keepdim=True)
            hat = streams / (mean + 1e-6).sqrt()
            if "gain" not in options:
                hat = hat * site.norm.weight
            elif options["gain"] == "rank-one":
                hat = hat * site.norm.stream[:, None] * site.norm.feature
            rows = hat.flatten(1)
            found = seen[f"sites.{index}"]
            assert found.tokens == 300
            torch.testing.assert_close(found.mean, rows.mean(0))
            expected = rows.T @ rows / 300 - torch.outer(rows.mean(0), rows.mean(0))
            torch.testing.assert_close(expected, rows.T.cov(correction=0))
            torch.testing.assert_close(
                found.covariance, expected + RIDGE * expected.diagonal().mean() * torch.eye(N * D)
            )
            # The generator makes its logits of exactly these.
            logits = torch.tensordot(hat, dense(site)["pre"], dims=2)
            expected = (site.pre.gate * logits + site.pre.bias).sigmoid()
            torch.testing.assert_close(site.route(streams).pre, expected)
            streams = site(streams)


def test_moments_in_files_are_the_same():
    model, x = Net(dtype=torch.float32), inputs(3000, dtype=torch.float32)
    with moments(model, limit=0) as in_files:
        model(x)
    for name, moment in seen_by(model, x).items():
        assert torch.equal(in_files[name].covariance, moment.covariance)
    # Float32 products, summed in float64: close to all in float64.
    for name, moment in seen_by(model.double(), x.double()).items():
        torch.testing.assert_close(in_files[name].covariance, moment.covariance, rtol=1e-4, atol=1e-5)
    assert all(not site.observers for site in model.sites)


def test_data_that_never_varies():
    model, x = Net(dtype=torch.float32), inputs(1, dtype=torch.float32).repeat(50, 1)
    seen = seen_by(model, x)
    assert not any(moment.covariance.any() for moment in seen.values())
    expected = model(x)
    # Biases can hold all of it.
    assert compress(model, "cp", rank=1, moments=seen).error == 0
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def logit_error(model, original, x):
    """The mean square of what differs in the logits of all sites, each given what the original's site is given."""
    total = 0.0
    captured = []
    for site in original.sites:
        site.observers = (lambda site, streams, routing: captured.append(streams),)
    original(x)
    for site in original.sites:
        site.observers = ()
    for old, new, streams in zip(original.sites, model.sites, captured, strict=True):
        hat = streams * old.norm.rstd(streams) * old.norm.weight
        for head in HEADS:
            one, two = getattr(old, head), getattr(new, head)
            change = torch.tensordot(hat, one.generator.to_dense() - two.generator.to_dense(), dims=2)
            total += (one.gate * change + one.bias - two.bias).square().sum(-1 if change.ndim == 2 else (-2, -1)).mean()
    return float(total.detach())


@pytest.mark.parametrize(("to", "rank"), [("tucker", (2, 2)), ("tt", (1, 2))])
def test_calibration_loses_less_on_the_data(to, rank):
    model, x = Net(), inputs()
    seen = seen_by(model, x)
    weights = compress(model, to, rank=rank, in_place=False)
    data = compress(model, to, rank=rank, moments=seen, in_place=False)
    plain = compress(model, to, rank=rank, plain=True, in_place=False)
    assert data.after == weights.after == plain.after
    assert logit_error(data.model, model, x) < logit_error(weights.model, model, x)
    assert weights.error <= plain.error + 1e-12
    # What is reported is what is measured, and the ridge.
    lost, whole = logit_error(data.model, model, x), 0.0
    for name, moment in seen.items():
        site, other = model.get_submodule(name), data.model.get_submodule(name)
        ridge = RIDGE / (1 + RIDGE) * moment.covariance.diagonal().mean()
        for head, weight in dense(site).items():
            share, flat = getattr(site, head).gate.item() ** 2, weight.flatten(2).flatten(0, 1)
            whole += share * torch.einsum("cp,ce,ep->", flat, moment.covariance, flat).item()
            lost += share * (ridge * (weight - dense(other)[head]).square().sum()).item()
    assert data.error == pytest.approx(math.sqrt(lost / whole), rel=1e-6)
    # The streams of the first site are copies of each other; where data show nothing, weights still do not run away.
    assert all(head.weight_error < 2 for head in data.heads)
    for one, other in zip(data.heads, weights.heads, strict=True):
        assert one.weight_error >= other.weight_error - 1e-6
        assert other.data_error is None


def test_biases_take_over_the_mean():
    model, x = Net(), inputs()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compress(model, "tucker", rank=1, moments=seen_by(model, x))
    site, name = model.sites[1], "sites.1.res"
    assert not torch.equal(site.res.bias, before[f"{name}.bias"])
    # At the first site, whose streams nothing has changed, the logits have the mean that they had.
    streams = temper.expand_streams(x, N)
    streams = streams.tanh() + streams
    hat = streams * model.sites[0].norm.rstd(streams) * model.sites[0].norm.weight
    for head in HEADS:
        part = getattr(model.sites[0], head)
        old = before[f"sites.0.{head}.gate"] * torch.tensordot(hat, before[f"sites.0.{head}.generator.weight"], dims=2)
        new = part.gate * torch.tensordot(hat, part.generator.to_dense(), dims=2)
        expected = (old + before[f"sites.0.{head}.bias"]).mean(0)
        torch.testing.assert_close((new + part.bias).mean(0), expected)
    assert torch.equal(site.norm.weight, before["sites.1.norm.weight"])


@pytest.mark.parametrize(("to", "calibrated"), [("tucker", False), ("tt", True)])
def test_errors_and_budgets_are_kept(to, calibrated):
    model, x = Net(), inputs()
    seen = seen_by(model, x) if calibrated else None
    least = min_params(model, to)
    close = compress(model, to, error=0.4, moments=seen, in_place=False)
    assert close.error <= 0.4
    assert close.after > least
    params = (least + close.after) // 2
    found = compress(model, to, params=params, moments=seen, in_place=False)
    assert least <= found.after <= params
    added = sum(p.numel() for name, p in found.model.named_parameters() if "branch" not in name)
    assert found.after == added == sum(temper.count_parameters(site.config) for site in found.model.sites)
    assert compress(model, to, params=least, in_place=False).after == least
    with pytest.raises(ValueError, match=f"expected at least {least:,}: rank 1 everywhere"):
        compress(model, to, params=least - 1)
    assert model.sites[0].config.pre.name == "dense"


def min_params(model, to):
    return sum(
        temper.count_parameters(
            temper.RouterConfig.from_dict(site.config.to_dict() | {head: {"name": to, "rank": 1} for head in HEADS})
        )
        for site in model.sites
    )


def test_sensitivities_are_squared_gradients_and_decide_who_gets_ranks():
    model, x = Net(), inputs(8)
    model.requires_grad_(False)
    found = sensitivities(model, (model(row[None]).square().sum() for row in x))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_(True)
    expected = 0.0
    for row in x:
        model.zero_grad()
        model(row[None]).square().sum().backward()
        slope = model.sites[1].res.bias.grad.flatten()
        expected = expected + torch.outer(slope, slope) / len(x)
    torch.testing.assert_close(found["sites.1"]["res"], expected.double(), rtol=1e-10, atol=0)
    only_one = {name: {head: torch.zeros_like(minded[head]) for head in HEADS} for name, minded in found.items()}
    only_one["sites.1"]["post"].fill_diagonal_(1.0)
    report = compress(model, "tucker", error=0.01, sensitivities=only_one, in_place=False)
    for head in report.heads:
        is_minded = (head.site, head.head) == ("sites.1", "post")
        assert (head.rank == (1,) * len(head.rank)) != is_minded
    assert report.heads[-1].weight_error <= 0.01


def separable(model):
    """Sensitivities that are products over the output modes, so that nothing is lost by taking them mode by mode."""
    generator, found = torch.Generator().manual_seed(3), {}
    for name, site in model.named_modules():
        if not isinstance(site, temper.HyperConnection):
            continue
        found[name] = {}
        for head in HEADS:
            whole = torch.ones(1, 1, dtype=torch.float64)
            for mode in getattr(site, head).generator.out_modes:
                root = torch.randn(mode, mode, generator=generator, dtype=torch.float64)
                whole = torch.kron(whole, root @ root.T + 0.01 * torch.eye(mode))
            found[name][head] = whole
    return found


@pytest.mark.parametrize("to", ["tucker", "cp", "tt"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_fit_keeps_to_what_the_loss_minds(to, calibrated):
    model, x = Net(num_streams=4), inputs()
    minded = separable(model)
    seen = seen_by(model, x) if calibrated else None

    def cost(compressed):
        """sum of e^T E[g g^T] e over what the logits miss, as a fit sees it."""
        total = 0.0
        for name, site in zip(minded, model.sites, strict=True):
            after = dense(compressed.get_submodule(name))
            for head, before in dense(site).items():
                lost = (before - after[head]).flatten(2).flatten(0, 1)
                inputs_seen = seen[name].covariance if seen else torch.eye(len(lost), dtype=lost.dtype)
                total += (lost.T @ inputs_seen @ lost * minded[name][head]).sum().item()
        return total

    alike = compress(model, to, rank=1, moments=seen, in_place=False).model
    fitted = compress(model, to, rank=1, moments=seen, sensitivities=minded, in_place=False).model
    assert cost(fitted) < 0.9 * cost(alike)


@pytest.mark.parametrize("to", ["tucker", "cp", "tt"])
def test_what_the_loss_minds_changes_nothing_where_nothing_is_lost(to):
    model, x = Net(), inputs()
    rank = {"tucker": (2, 5), "cp": 20, "tt": (2, 2)}[to]
    got = compress(model, to, rank=rank, moments=seen_by(model, x), sensitivities=separable(model), in_place=False)
    # The second bond of res could have four, so this tt leaves something out there.
    whole = [head for head in got.heads if (to, head.head) != ("tt", "res")]
    assert all(head.weight_error < 1e-6 for head in whole)


def test_an_error_is_promised_whatever_the_loss_minds():
    model = Net(num_streams=4)
    got = compress(model, "tucker", error=0.2, sensitivities=separable(model), in_place=False)
    assert got.error <= 0.2


def test_sites_stay_the_objects_they_are():
    model, x = Net(), inputs(5)
    model.requires_grad_(False).eval()
    model.sites[0].res.generator.weight.requires_grad_(True)
    site, called = model.sites[0], []
    site.register_forward_hook(lambda *_: called.append(1))
    routed = site.decorate(lambda x: x)
    before = routed(temper.expand_streams(x, N))
    compress(model, "tucker", rank=1)
    assert model.sites[0] is site
    model(x)
    assert called == [1]
    # A decorated function has the new routing too.
    assert not torch.equal(routed(temper.expand_streams(x, N)), before)
    assert not site.res.generator.training
    assert all(parameter.requires_grad for parameter in site.res.generator.parameters())
    assert not any(parameter.requires_grad for parameter in site.pre.generator.parameters())
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x))
    rebuilt = temper.HyperConnection(temper.RouterConfig.from_dict(site.config.to_dict())).double()
    rebuilt.load_state_dict({key: value for key, value in site.state_dict().items() if "branch" not in key})


@pytest.mark.parametrize("backend", ["naive", "fused", "cpu"])
def test_every_backend_runs_a_compressed_site(backend):
    model, x = Net(dtype=torch.float32), inputs(9, dtype=torch.float32)
    compress(model, "tt", rank=2)
    expected = copy.deepcopy(model).double()(x.double())
    with temper.backend(backend):
        torch.testing.assert_close(model(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_wrapped_models():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, norm_first=True, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    temper.wrap(model, "layers.*", preset="mhc", num_streams=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "hyper_connections" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(2, 5, 8)
    expected = model(x)
    seen = seen_by(model, x)
    report = compress(model, "tucker", rank=(2, 8), moments=seen, in_place=False)
    torch.testing.assert_close(report.model(x), expected, rtol=1e-4, atol=1e-5)
    compress(model, "cp", rank=1)
    assert (model(x) - expected).abs().max() > 1e-4


def test_half_precision_stays_half_precision():
    model, x = Net(dtype=torch.bfloat16), inputs(9, dtype=torch.bfloat16)
    compress(model, "tucker", rank=(1, 3), moments=seen_by(model, x))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.isfinite(model(x)).all()


def test_bad_input_changes_nothing():
    model, x = Net(), inputs(5)
    state = copy.deepcopy(model.state_dict())
    seen = seen_by(model, x)
    cases = [
        (("tucker", {}), "expected one of rank, error and params, got none of them"),
        (("tucker", {"rank": 2, "error": 0.1}), "got rank and error"),
        (("tuker", {"rank": 2}), "Did you mean 'tucker'"),
        (("tucker", {"rank": (4, 3)}), "sites.0, pre: tucker rank 4 of the stream mode .* 1 to 2"),
        (("tt", {"rank": (2, 99)}), "sites.0, pre: tt rank 99"),
        (("cp", {"rank": 10**6}), "cp rank 1000000"),
        (("tucker", {"error": -0.1}), "error is -0.1"),
        (("tucker", {"params": 2.5}), "params is 2.5; expected a whole number"),
        (("dense", {"rank": 2}), "the dense generator has no ranks, got rank"),
        (("cp", {"rank": 2, "moments": {}}), "moments has nothing of 'sites.0'"),
        (("cp", {"rank": 2, "moments": seen, "plain": True}), "plain is without moments"),
    ]
    for (to, options), message in cases:
        with pytest.raises(ValueError, match=message):
            compress(model, to, **options)
    with pytest.raises(ValueError, match=r"no tokens went through sites.0, sites.1"), moments(model):
        pass
    with pytest.raises(ValueError, match="no losses"):
        sensitivities(model, [])
    with pytest.raises(ValueError, match="only plain residuals"):
        compress(Net("residual"), "cp", rank=1)
    with pytest.raises(ValueError, match="no HyperConnection"):
        compress(nn.Linear(2, 2), "cp", rank=1)
    with pytest.raises(TypeError, match="expected a module"):
        compress(3, "cp", rank=1)
    with pytest.raises(ValueError, match=r"sites.0: pre is a per-stream generator, nothing to compress: .*HC's"):
        compress(Net("hc"), "cp", rank=1)
    with pytest.raises(ValueError, match="cannot be pre's"):
        model.sites[0].set_generators(pre=model.sites[0].res.generator)
    with pytest.raises(ValueError, match="no generator 'read'"):
        model.sites[0].set_generators(read=model.sites[0].pre.generator)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        model.sites[1].res.generator.weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"sites.1: res has values that are not finite"):
        compress(model, "cp", rank=1)
