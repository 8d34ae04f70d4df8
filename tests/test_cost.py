"""Counted costs against costs that torch measures."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import temper

ROUTED = [name for name in temper.PRESETS if name != "residual"]


def build(name, num_streams, dim=64, **overrides):
    config = temper.preset(name, num_streams=num_streams, dim=dim, **overrides)
    torch.manual_seed(0)
    return config, temper.HyperConnection(config)


def run(site, streams, y):
    _, state = site.begin(streams)
    return site.finish(state, y)


def saved_bytes(site, streams, y):
    """Bytes of the distinct storages that autograd keeps, the site's own tensors left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*site.parameters(), *site.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(site, streams, y)
    total = sum(kept.values())
    del out
    return total


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("num_streams", [2, 4, 6])
def test_activation_memory_is_what_autograd_keeps(name, num_streams):
    tokens = 256
    config, site = build(name, num_streams)
    streams = torch.randn(tokens, num_streams, 64, requires_grad=True)
    y = torch.randn(tokens, 64, requires_grad=True)
    counted = temper.cost(config, tokens).activation_bytes
    with temper.backend("fused"):
        measured = saved_bytes(site, streams, y)
    # Exact to the small change: a broadcast or view that autograd keeps or not.
    assert measured * 0.97 <= counted <= measured * 1.12
    # The kernels that fold by themselves keep the maps once instead of twice.
    with temper.backend("cpu"):
        assert saved_bytes(site, streams, y) * 0.97 <= counted


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("num_streams", [2, 4, 6])
def test_flops_are_those_torch_counts_and_the_elementwise_ones_it_does_not(name, num_streams):
    tokens, dim = 64, 512
    config, site = build(name, num_streams, dim)
    # Torch counts its own operations, not native kernels.
    with temper.backend("naive"), FlopCounterMode(display=False) as counter:
        run(site, torch.randn(tokens, num_streams, dim), torch.randn(tokens, dim))
    products = counter.get_total_flops()
    counted = temper.cost(config, tokens).flops
    # Per token: norm 2 N D, writing 2 N D, and what has no D in it; per forward: the gain and CP's outer products.
    rows = sum(part.generator.maps()[0].shape[0] for part in (site.pre, site.res, site.post))
    elementwise = tokens * (4 * num_streams * dim + 40 * num_streams**3 * 20) + 2 * rows * num_streams * dim
    assert products <= counted <= products + elementwise


@pytest.mark.parametrize("backend", ["cpu", "fused"])
def test_bf16_streams_are_kept_as_they_are_and_float64_is_twice_float32(backend):
    config, site = build("temper-cp", 4)
    streams, y = torch.randn(256, 4, 64).bfloat16(), torch.randn(256, 64).bfloat16()
    with temper.backend(backend):
        half = saved_bytes(site, streams.requires_grad_(), y.requires_grad_())
    assert half == pytest.approx(temper.cost(config, 256, dtype=torch.bfloat16).activation_bytes, rel=0.12)
    wide = temper.cost(config, 256, dtype=torch.float64).activation_bytes
    assert wide == 2 * temper.cost(config, 256).activation_bytes


def test_parameters_frozen_parameters_and_many_sites():
    config = temper.preset("temper-tucker-frozen", num_streams=4, dim=768)
    cost = temper.cost(config, 100)
    assert cost.parameters == temper.count_parameters(config)
    assert cost.frozen_parameters == 192
    assert (24 * cost).parameters == 24 * cost.parameters
    assert (cost * 24).flops == 24 * cost.flops


def test_nothing_is_allocated_and_a_residual_is_free():
    assert temper.cost(temper.preset("mhc-lite", num_streams=16, dim=768), 10**9).flops > 10**26
    residual = temper.cost(temper.preset("residual", num_streams=4, dim=768), 512)
    assert (residual.parameters, residual.activation_bytes, residual.flops) == (0, 0, 512 * 768)


def test_bad_arguments():
    config = temper.preset("mhc", num_streams=4, dim=8)
    for tokens in (-1, 2.5, True):
        with pytest.raises(ValueError, match="tokens is"):
            temper.cost(config, tokens)
    with pytest.raises(TypeError, match="RouterConfig"):
        temper.cost("mhc", 10)
