"""Streams made again instead of kept: the same gradients, less memory."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import temper
from temper.recompute import best_group

DIM, TOKENS = 16, 11
backends = pytest.mark.parametrize("backend", ["fused", "cpu"])


def stack(sites, num_streams=4, preset="temper-cp", seed=0):
    torch.manual_seed(seed)
    config = temper.preset(preset, num_streams=num_streams, dim=DIM)
    model = nn.Sequential(
        *(
            temper.HyperConnection(config, layer_index=k, branch=nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()))
            for k in range(sites)
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def gradients(model, streams):
    return torch.autograd.grad(model(streams).sin().sum(), [streams, *model.parameters()])


def inputs(num_streams=4, dtype=torch.float32):
    return (
        torch.randn(2, TOKENS, num_streams, DIM, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    )


@backends
@pytest.mark.parametrize("sites", [1, 2, 5, 9])
@pytest.mark.parametrize("group", [1, 2, 3, None])
def test_gradients_are_the_same_bit_for_bit(backend, sites, group):
    model, streams = stack(sites), inputs()
    with temper.backend(backend):
        wanted = gradients(model, streams)
        temper.recompute(model, group)
        for got, want in zip(gradients(model, streams), wanted, strict=True):
            assert torch.equal(got, want)


def kept_bytes(model, streams):
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(streams)
    return sum(kept.values()), out


@pytest.mark.parametrize("num_streams", [4, 8])
def test_only_the_first_streams_of_a_group_are_kept(num_streams):
    model, streams = stack(8, num_streams), inputs(num_streams)
    everything, _ = kept_bytes(model, streams)
    some, _ = kept_bytes(temper.recompute(model, 4), streams)
    one = streams.numel() * 4
    # Eight times the streams before, two groups' first ones after.
    assert everything - some == 6 * one


def test_the_best_group():
    assert [best_group(4, 16), best_group(8, 16), best_group(4, 1)] == [4, 4, 1]
    assert best_group(8, 100) == math.ceil(math.sqrt(80))
    model = temper.recompute(stack(9))
    assert {site.recompute for site in model} == {best_group(4, 9)}


@backends
def test_a_graph_that_is_kept_can_run_backwards_twice(backend):
    model, streams = temper.recompute(stack(5), 3), inputs()
    with temper.backend(backend):
        loss = model(streams).sin().sum()
        first = torch.autograd.grad(loss, streams, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(loss, streams)[0])


def test_two_passes_before_one_backward():
    model, streams = stack(5), inputs()
    other = (2 * streams).detach().requires_grad_()

    def both():
        return torch.autograd.grad(model(streams).sin().sum() + model(other).cos().sum(), [streams, other])

    wanted = both()
    temper.recompute(model, 3)
    assert all(torch.equal(got, want) for got, want in zip(both(), wanted, strict=True))


def test_inside_activation_checkpointing_in_half_precision_and_without_autograd():
    model, streams = temper.recompute(stack(6), 3), inputs(dtype=torch.bfloat16)
    model = model.to(torch.bfloat16)
    wanted = torch.autograd.grad(model(streams).float().sin().sum(), streams)[0]
    out = checkpoint(model, streams, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(out.float().sin().sum(), streams)[0], wanted)
    with torch.no_grad():
        assert torch.equal(model(streams), out)


def test_a_branch_output_changed_afterwards_is_noticed():
    config = temper.preset("temper-cp", num_streams=4, dim=DIM)
    sites = temper.recompute(nn.ModuleList(temper.HyperConnection(config) for _ in range(3)), 3)
    streams = start = inputs()
    outputs = []
    for site in sites:
        x, state = site.begin(streams)
        outputs.append(x * 2)
        streams = site.finish(state, outputs[-1])
    with torch.no_grad():
        outputs[0].mul_(3)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|changed in place"):
        torch.autograd.grad(streams.sum(), start)


def test_a_wrapped_model():
    def build(recompute):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(DIM, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        return temper.wrap(model, "layers.*", preset="temper-tucker", num_streams=4, recompute=recompute)

    x = torch.randn(2, 5, DIM, requires_grad=True)
    wanted, got = (torch.autograd.grad(build(on)(x).sin().sum(), x)[0] for on in (False, True))
    assert torch.equal(got, wanted)


def test_bad_groups():
    with pytest.raises(ValueError, match="group is -1"):
        temper.recompute(stack(1), -1)
    with pytest.raises(ValueError, match="no HyperConnection"):
        temper.recompute(nn.Linear(2, 2))
