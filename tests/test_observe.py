"""Diagnostics as hooks: right numbers, and nothing left behind."""

import json

import pytest
import torch
from torch import nn

import temper


class Stack(nn.Module):
    def __init__(self, name, num_streams=4, sites=3, **overrides):
        super().__init__()
        torch.manual_seed(0)
        config = temper.preset(name, num_streams=num_streams, dim=6, **overrides)
        self.num_streams = config.num_streams
        self.sites = nn.ModuleList(
            temper.HyperConnection(config, layer_index=k, branch=nn.Linear(6, 6)) for k in range(sites)
        )
        with torch.no_grad():
            for key, parameter in self.named_parameters():
                if "branch" not in key:
                    parameter.normal_(0, 0.7)

    def forward(self, x):
        streams = temper.expand_streams(x, self.num_streams)
        for site in self.sites:
            streams = site(streams)
        return streams


def observed(model, *inputs):
    with torch.no_grad(), temper.observe(model) as observation:
        for x in inputs:
            model(x)
    return observation


def seen_by_hand(model, x):
    """Streams and routing of every site."""
    streams, seen = temper.expand_streams(x, model.num_streams), []
    for site in model.sites:
        seen.append((streams, site.route(streams)))
        streams = site(streams)
    return seen


@pytest.mark.parametrize("name", ["mhc", "temper-tucker", "kromhc", "hc"])
def test_the_numbers_by_hand(name):
    model = Stack(name).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    reports = observed(model, x).reports()
    assert [report.name for report in reports] == ["sites.0", "sites.1", "sites.2"]
    product = torch.eye(4, dtype=torch.float64)
    for report, (streams, routing) in zip(reports, seen_by_hand(model, x), strict=True):
        res = routing.res
        product = res @ product
        assert report.tokens == 10
        assert report.row_error == pytest.approx((res.sum(-1) - 1).abs().max().item(), abs=1e-12)
        off_diagonal = sum(res[..., m, n].abs().mean().item() for m in range(4) for n in range(4) if m != n) / 4
        assert report.off_diagonal == pytest.approx(off_diagonal)
        assert report.column_error == pytest.approx((res.sum(-2) - 1).abs().max().item(), abs=1e-12)
        inf_norm, one_norm = (torch.linalg.matrix_norm(res, ord=o).mean().item() for o in (torch.inf, 1))
        assert (report.forward_gain, report.backward_gain) == pytest.approx((inf_norm, one_norm))
        composite = [torch.linalg.matrix_norm(product, ord=o).mean().item() for o in (torch.inf, 1)]
        assert [report.composite_forward_gain, report.composite_backward_gain] == pytest.approx(composite)
        cosines = [
            torch.cosine_similarity(streams[..., i, :], streams[..., j, :], dim=-1).mean().item()
            for i in range(4)
            for j in range(i)
        ]
        assert report.stream_similarity == pytest.approx(sum(cosines) / len(cosines))
        pre, post = routing.pre, routing.post / 2
        for share, weights in ((report.pre_saturation, pre), (report.post_saturation, post)):
            assert share == pytest.approx(((weights < 0.05) | (weights > 0.95)).double().mean().item())
        features = torch.cat([routing.pre, routing.res.flatten(-2), routing.post], -1).flatten(0, 1)
        values = torch.linalg.svdvals(features - features.mean(0)).square()
        p = values / values.sum()
        entropy = -(p * p.clamp_min(1e-300).log()).sum()
        assert report.effective_rank == pytest.approx(entropy.exp().item(), rel=1e-6)


def test_several_passes_are_one_longer_pass():
    model = Stack("temper-cp").double()
    x = torch.randn(6, 5, 6, dtype=torch.float64)
    whole = observed(model, x).to_dict()
    parts = observed(model, x[:1], x[1:3], x[3:]).to_dict()
    json.dumps(whole)
    for one, other in zip(whole, parts, strict=True):
        assert one.pop("name") == other.pop("name")
        assert one == pytest.approx(other, rel=1e-9)


def test_doubly_stochastic_mixing_never_amplifies():
    for report in observed(Stack("kromhc", sites=6), torch.randn(2, 5, 6)).reports():
        assert report.row_error < 1e-5
        assert report.column_error < 1e-5
        assert report.composite_forward_gain == pytest.approx(1, abs=1e-5)
        assert report.composite_backward_gain == pytest.approx(1, abs=1e-5)


def test_routing_that_does_not_vary_has_rank_zero():
    model = Stack("mhc")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "generator" in key:
                parameter.zero_()
    reports = observed(model, torch.randn(4, 6)).reports()
    assert [report.effective_rank for report in reports] == [0.0, 0.0, 0.0]
    assert reports[0].stream_similarity == pytest.approx(1)


def test_a_residual_network_can_be_watched_too():
    (report, *_) = observed(Stack("residual"), torch.randn(2, 5, 6)).reports()
    assert (report.row_error, report.forward_gain, report.stream_similarity) == (0.0, 1.0, 1.0)
    (report, *_) = observed(Stack("mhc-identity"), torch.randn(2, 5, 6)).reports()
    assert (report.row_error, report.off_diagonal, report.composite_forward_gain) == (0.0, 0.0, 1.0)


def test_nothing_is_left_behind_and_nothing_changes():
    model = Stack("temper-tucker")
    x = torch.randn(2, 5, 6)
    expected = model(x)
    with temper.observe(model) as outer, temper.observe(model):
        inside = model(x)
    assert torch.equal(inside, expected)
    assert all(site.observers == () for site in model.sites)
    with pytest.raises(ZeroDivisionError), temper.observe(model):
        raise ZeroDivisionError
    assert all(site.observers == () for site in model.sites)
    seen = len(outer.reports())
    model(x)
    assert len(outer.reports()) == seen == 3


def test_gradients_flow_as_before_while_watched():
    model = Stack("temper-cp")
    x = torch.randn(2, 5, 6)
    expected = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    with temper.observe(model):
        watched = torch.autograd.grad(model(x).sin().sum(), list(model.parameters()))
    for one, other in zip(watched, expected, strict=True):
        assert torch.equal(one, other)


def test_streams_that_do_not_fit_have_no_composite():
    model = nn.ModuleList([*Stack("mhc", 4, 1).sites, *Stack("mhc", 2, 1).sites])
    with torch.no_grad(), temper.observe(model) as observation:
        model[0](torch.randn(3, 4, 6))
        model[1](torch.randn(3, 2, 6))
    first, second = observation.reports()
    assert first.composite_forward_gain is not None
    assert second.composite_forward_gain is None
    assert " - " in str(observation)


def test_the_table_and_an_empty_batch():
    model = Stack("temper-tucker")
    text = str(observed(model, torch.randn(2, 5, 6)))
    assert len(text.splitlines()) == 5
    assert text.splitlines()[-1].startswith("backend: ")
    assert "sites.2" in text
    assert observed(model, torch.randn(0, 5, 6)).reports() == []


def test_a_model_without_sites():
    with pytest.raises(ValueError, match="no HyperConnection"), temper.observe(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("name", ["mhc", "hc", "residual"])
def test_token_by_token(name):
    model = Stack(name).double()
    inputs = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(1, 3, 6, dtype=torch.float64)
    with torch.no_grad(), temper.observe(model, per_token=True) as observation:
        for x in inputs:
            model(x)
    with torch.no_grad():
        by_hand = [each for x in inputs for each in seen_by_hand(model, x)]
    product = torch.eye(model.num_streams, dtype=torch.float64)
    for index, (report, (streams, routing)) in enumerate(zip(observation.tokens, by_hand, strict=True)):
        assert report.name == f"sites.{index % 3}"
        for mine, other in zip(report.routing, routing, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        product = routing.res if index % 3 == 0 else routing.res @ product
        torch.testing.assert_close(report.composite, product, rtol=1e-12, atol=1e-12)
        assert report.stream_similarity.shape == report.row_error.shape == streams.shape[:-2]
        torch.testing.assert_close(report.composite_forward_gain, torch.linalg.matrix_norm(product, float("inf")))
    # The running statistics are the same numbers.
    for number, site in enumerate(observation.reports()):
        parts = [report for report in observation.tokens if report.name == site.name]
        for key in ("forward_gain", "composite_backward_gain", "stream_similarity"):
            every = torch.cat([getattr(part, key).flatten() for part in parts])
            assert getattr(site, key) == pytest.approx(every.mean().item()), (number, key)
        assert site.column_error == max(part.column_error.max().item() for part in parts)
    with torch.no_grad(), temper.observe(model) as observation:
        model(inputs[0])
    assert observation.tokens == []
