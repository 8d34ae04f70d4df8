"""The module for a Megatron ModuleSpec, against the facts of Megatron's own, and in a small layer."""

from types import SimpleNamespace

import pytest
import torch

from temper.convert import export_foreign, load_foreign
from temper_lab.interop.megatron import MegatronConnection

S, B, N, C = 5, 2, 4, 6


def settings(**changes):
    values = {"mhc_num_residual_streams": N, "hidden_size": C, "mhc_sinkhorn_iterations": 7}
    return SimpleNamespace(**{**values, "mhc_init_gating_factor": 0.01, "sequence_parallel": False, **changes})


def their_weights():
    torch.manual_seed(0)
    shapes = {"mapping_proj.weight": (24, N * C), "bias": (24,), "alpha_pre": (1,), "alpha_post": (1,)}
    return {key: 0.3 * torch.randn(shape) for key, shape in {**shapes, "alpha_res": (1,)}.items()}


@pytest.mark.parametrize("source", ["megatron.mhc", "megatron.mhc_guarded"])
def test_their_state_dict_loads_and_computes_the_same(source):
    weights = their_weights()
    layer = torch.nn.ModuleDict({"self_attention_hyper_connection": MegatronConnection(settings(), 3, source=source)})
    layer.load_state_dict({f"self_attention_hyper_connection.{key}": value for key, value in weights.items()})
    module = layer["self_attention_hyper_connection"]
    for key, value in export_foreign(source, module.site, iters=7).items():
        torch.testing.assert_close(value, weights[key], rtol=1e-6, atol=0)

    hidden, y, bias = torch.randn(S, B, N * C), torch.randn(S, B, C), torch.randn(C)
    # Stream-major: the first C entries are stream 0.
    site = load_foreign(source, weights, num_streams=N, dim=C, iters=7)
    x, state = site.begin(torch.stack(hidden.split(C, dim=-1), dim=-2))
    aggregated, h_res, h_post = module(hidden, mhc_recompute_manager=None)
    assert (aggregated.shape, h_res.shape, h_post.shape) == ((S, B, C), (S, B, N, N), (S, B, N))
    torch.testing.assert_close(aggregated, x)
    out = module.fused_h_res_h_post_bda(h_res, hidden, h_post, (y, bias), 0.1, False, False)
    torch.testing.assert_close(out, site.finish(state, y + bias).flatten(-2))
    # All of the branch dropped leaves the mixing alone.
    dropped = module.fused_h_res_h_post_bda(h_res, hidden, h_post, (y, bias), 1.0, True, False)
    torch.testing.assert_close(dropped, (h_res @ hidden.unflatten(-1, (N, C))).flatten(-2))


@pytest.mark.parametrize("preset", [None, "temper-tucker"])
def test_it_trains_in_a_layer(preset):
    torch.manual_seed(0)
    config = settings(sequence_parallel=True)
    module = MegatronConnection(config, layer_number=1, preset=preset, return_residual=True)
    assert all(parameter.sequence_parallel for parameter in module.parameters())
    hidden = MegatronConnection.input_expand(torch.randn(S, B, C), N)
    x, h_res, h_post, residual = module(hidden)
    out = module.fused_h_res_h_post_bda(h_res, residual, h_post, (x.tanh(), None), 0.0, True, True)
    MegatronConnection.output_contract(out, N).square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    if preset is None:
        assert module.site.res.gate.item() == pytest.approx(0.01)


def test_what_it_refuses():
    module = MegatronConnection(settings(), 0)
    with pytest.raises(ValueError, match="recompute_modules"):
        module(torch.randn(S, B, N * C), mhc_recompute_manager=object())
    with pytest.raises(ValueError, match="mhc_single_pass"):
        module(torch.randn(S, B, N * C), mhc_state=object())
    with pytest.raises(ValueError, match="unknown source"):
        MegatronConnection(settings(), 0, source="megatron.hc")
    with pytest.raises(ValueError, match=r"expected \[s, b, n\*C\]"):
        module(torch.randn(S, B, C))
    with pytest.raises(ValueError, match="neither mhc_num_residual_streams"):
        MegatronConnection(SimpleNamespace(hidden_size=C), 0)
