"""The native fold: what `Router.fold` does in torch, outputs and gradients, for every way to store a generator."""

import dataclasses

import pytest
import torch

import temper
from temper.generators import Generator
from temper.norm import GAINS
from temper.ops import cpu
from temper.ops.plan import FoldedWeights, GeneratorSpec, SiteSpec
from temper.router import Head

pytestmark = pytest.mark.once

STORED = ["dense", "cp", "tucker", "tt"]


class Site:
    """A gain and three generators of any output modes, without a mixer."""

    def __init__(self, pre, res, post, gain, num_streams, dim, res_modes, dtype=torch.float64, **options):
        torch.manual_seed(0)
        modes = ((num_streams,), res_modes, (num_streams,))
        generators = [
            Generator.named(name)((num_streams, dim), out, **(options if Generator.named(name).ranked else {}))
            for name, out in zip((pre, res, post), modes, strict=True)
        ]
        self.heads = [Head(generator) for generator in generators]
        self.norm = temper.norm.StreamNorm(num_streams, dim, gain=gain)
        for module in (*self.heads, self.norm):
            module.to(dtype)
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter)
        rows = tuple(generator.maps()[0].shape[0] for generator in generators)
        form = [num_streams, dim, GAINS.index(gain)]
        form += [number for generator in generators for number in generator.native().packed(generator.out_modes)]
        logits, direct = torch.Size(res_modes).numel(), tuple(generator.direct for generator in generators)
        self.spec = SiteSpec(num_streams, dim, rows, direct, logits, 0.0, False, 0.0, None, tuple(form))
        self.dtype = dtype

    @property
    def tensors(self):
        return (*self.norm.stored(), *(tensor for head in self.heads for tensor in head.stored()))

    def plain(self):
        """What torch makes of the maps, written out."""
        in_maps, outs = [], []
        for head in self.heads:
            in_map, out_map = head.generator.maps()
            in_maps.append(in_map * head.gate if head.generator.direct else in_map)
            if not head.generator.direct:
                outs.append((head.gate * out_map).flatten())
        gain = self.norm.gain()
        in_map = torch.cat(in_maps) if gain is None else torch.cat(in_maps) * gain
        out = torch.cat(outs) if outs else in_map.new_empty(0, requires_grad=True)
        return FoldedWeights(in_map, out, torch.cat([head.bias.flatten() for head in self.heads]))

    def compare(self, **tolerance):
        wanted, got = self.plain()[:3], cpu.folding.fold(self.tensors, self.spec, self.dtype)
        grads = [torch.randn_like(part) for part in wanted]
        # Adding nothing reaches what has no gradient.
        loss = sum((part * grad).sum() for part, grad in zip(wanted, grads, strict=True))
        d_wanted = torch.autograd.grad(loss + sum(0 * tensor.sum() for tensor in self.tensors), self.tensors)
        d_got = cpu.folding.fold_backward(FoldedWeights(*grads), self.tensors, self.spec, self.dtype)
        for actual, expected in zip((*got[:3], *d_got), (*wanted, *d_wanted), strict=True):
            torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("generator", STORED)
@pytest.mark.parametrize("num_streams", [1, 2, 3, 4, 6, 8, 16])
def test_every_generator_with_every_gain(generator, num_streams, gain):
    for dim, res_modes in ((5, (num_streams, num_streams)), (24, (7,)), (300, (num_streams, num_streams))):
        if num_streams == 16 and generator == "dense" and dim == 300:
            continue
        site = Site(generator, generator, generator, gain, num_streams, dim, res_modes)
        site.compare(rtol=1e-11, atol=1e-11 * num_streams * dim)


@pytest.mark.parametrize("generator", ["cp", "tucker", "tt"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_any_number_of_output_modes_and_any_rank(generator, rank):
    for res_modes in ((5,), (3, 4), (3, 4, 5), (3, 4, 3, 5)):
        Site(generator, generator, generator, "full", 3, 9, res_modes, rank=rank).compare(rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize(
    "names", [("dense", "tucker", "cp"), ("tt", "dense", "tucker"), ("cp", "tt", "dense")], ids=str
)
def test_heads_of_different_generators(names):
    Site(*names, "rank-one", 4, 19, (4, 4)).compare(rtol=1e-11, atol=1e-10)


@pytest.mark.parametrize("generator", STORED)
def test_single_precision(generator):
    # Sums of up to 16 * 300 * 16 products of normal numbers.
    Site(generator, generator, generator, "full", 4, 300, (4, 4), torch.float32).compare(rtol=1e-4, atol=2e-2)


def test_parameters_and_gradients_of_any_layout():
    site = Site("tucker", "cp", "tt", "full", 4, 33, (4, 4))
    for head in site.heads:
        for name, parameter in list(head.generator.named_parameters()):
            owner, _, key = name.rpartition(".")
            turned = torch.nn.Parameter(parameter.detach().mT.contiguous().mT if parameter.ndim > 1 else parameter)
            setattr(head.generator.get_submodule(owner), key, turned)
    assert any(not tensor.is_contiguous() for tensor in site.tensors)
    site.compare(rtol=1e-11, atol=1e-10)
    # The gradient of a sum has no memory of its own.
    fold = site.plain()
    ones = FoldedWeights(*(torch.ones(()).to(part.dtype).expand(part.shape) for part in fold[:3]))
    got = cpu.folding.fold_backward(ones, site.tensors, site.spec, site.dtype)
    wanted = torch.autograd.grad(sum(part.sum() for part in fold[:3]), site.tensors)
    torch.testing.assert_close(got, list(wanted))


def folds_of(module, streams, monkeypatch):
    """How often a site's weights are folded by the kernels in one call."""
    calls = []
    plain = type(cpu.folding).fold
    monkeypatch.setattr(type(cpu.folding), "fold", lambda *args: calls.append(args) or plain(*args))
    with temper.backend("cpu"):
        module.route(streams)
    return len(calls)


@pytest.mark.parametrize("name", ["mhc", "temper-cp", "temper-tucker", "temper-tt", "temper-slim", "temper-tucker-res"])
def test_presets_are_folded_by_the_kernels(name, monkeypatch):
    module = temper.HyperConnection(temper.preset(name, num_streams=4, dim=16))
    assert folds_of(module, torch.randn(3, 4, 16), monkeypatch) == 1
    assert folds_of(module, torch.randn(3, 4, 16).bfloat16(), monkeypatch) == 1


def test_a_frozen_core_is_folded_and_stays(monkeypatch):
    module = temper.HyperConnection(temper.preset("temper-tucker-frozen", num_streams=4, dim=16))
    assert folds_of(module, torch.randn(3, 4, 16), monkeypatch) == 1
    x, _ = module.begin(torch.randn(3, 4, 16))
    x.sum().backward()
    assert module.pre.generator.core.grad is None
    assert module.pre.generator.factors[0].grad is not None


def test_a_half_precision_module_is_folded_by_torch(monkeypatch):
    module = temper.HyperConnection(temper.preset("temper-cp", num_streams=4, dim=16)).bfloat16()
    assert folds_of(module, torch.randn(3, 4, 16).bfloat16(), monkeypatch) == 0


def test_other_maps_of_the_same_tensors_are_folded_by_torch(monkeypatch):
    cp = Generator.named("cp")

    class Doubled(cp):
        def maps(self, dtype=None):
            in_map, out_map = super().maps(dtype)
            return 2 * in_map, out_map

    module = temper.HyperConnection(temper.preset("temper-cp", num_streams=4, dim=16))
    streams = torch.randn(3, 4, 16)
    plain = module.route(streams)
    doubled = Doubled((4, 16), (4,), rank=2)
    doubled.load_state_dict(module.pre.generator.state_dict())
    module.pre.generator = doubled
    module._describe()
    assert module.spec.generators is None
    assert folds_of(module, streams, monkeypatch) == 0
    assert not torch.equal(module.route(streams).pre, plain.pre)


def test_a_generator_that_the_kernels_do_not_know():
    assert Generator.named("dense")((2, 3), (2,)).native() == GeneratorSpec("dense")
    assert Generator.native(Generator.named("dense")((2, 3), (2,))) is None
    per_stream = temper.preset("mhc", num_streams=4, dim=16, pre="per-stream")
    assert temper.HyperConnection(per_stream).spec.generators is None


def test_what_the_kernels_fold_is_not_kept_twice():
    """Parameters, the folded weights, the streams and what is small: nothing of what is in between."""
    module, kept = temper.HyperConnection(temper.preset("temper-tucker", num_streams=4, dim=64)), []

    def run():
        kept.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
        )
        with hooks, temper.backend("cpu"):
            x, _ = module.begin(torch.randn(2, 4, 64, requires_grad=True))
        grads = torch.autograd.grad(x.sum(), list(module.parameters()))
        own = {id(parameter) for parameter in module.parameters()}
        return len([tensor for tensor in kept if id(tensor) not in own]), grads

    count, grads = run()
    assert count == 7
    module.spec = dataclasses.replace(module.spec, generators=None)
    torch_count, _ = run()
    assert torch_count > count
    assert all(grad is not None for grad in grads)
