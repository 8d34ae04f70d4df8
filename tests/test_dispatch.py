"""What of torch works with every backend."""

import copy
import pickle
import sys

import pytest
import torch
from torch import distributed, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import temper
from temper.ops import schema
from temper.ops.cpu import operators

DIM = 16
fast = pytest.mark.parametrize("backend", ["fused", "cpu"])


def site(preset="temper-cp", **overrides):
    torch.manual_seed(0)
    config = temper.preset(preset, num_streams=4, dim=DIM, **overrides)
    return temper.HyperConnection(config, branch=nn.Linear(DIM, DIM))


def streams_of(*lead, dtype=torch.float32):
    return torch.randn(*lead, 4, DIM, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def run(module, streams):
    out = module(streams)
    return out, *torch.autograd.grad(out.sin().sum(), [streams, *module.parameters()])


def assert_close(got, want, tolerance=2e-5):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_the_list_of_backends_says_what_falls_back():
    names = [entry.name for entry in temper.backends()]
    assert names == ["triton", "cpu", "fused", "naive"]
    assert all("hc" in str(entry) for entry in temper.backends()[1:3])


@fast
@pytest.mark.parametrize(("preset", "options"), [("temper-cp", {"iters": 3}), ("mhc", {"iters": 2}), ("kromhc", {})])
def test_a_compiled_site_is_the_site(backend, preset, options):
    module = site(preset, **options)
    with temper.backend(backend):
        torch.compiler.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for tokens in (5, 9, 12):
            streams = streams_of(2, tokens)
            out = compiled(streams)
            got = (out, *torch.autograd.grad(out.sin().sum(), [streams, *module.parameters()]))
            assert_close(got, run(module, streams))


@fast
@pytest.mark.parametrize("preset", [preset for preset in temper.PRESETS if preset != "residual"])
def test_every_preset_compiles_for_inference(backend, preset):
    """Where nothing needs a gradient: no autograd function, and nothing for Dynamo to stumble over."""
    module, streams = site(preset), streams_of(2, 5).detach()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with temper.use_backend(backend), torch.inference_mode() if backend == "cpu" else torch.no_grad():
        assert_close([compiled(streams)], [module(streams)])


@fast
def test_a_frozen_site_compiles_with_autograd_on(backend):
    module, streams = site("kromhc").requires_grad_(False), streams_of(2, 5).detach()
    torch.compiler.reset()
    with temper.use_backend(backend):
        assert_close([torch.compile(module, fullgraph=True, backend="eager")(streams)], [module(streams)])


@fast
def test_an_exported_site_is_saved_and_loaded(backend, tmp_path):
    module, streams = site().eval(), streams_of(2, 5).detach()
    with temper.backend(backend), torch.no_grad():
        torch.export.save(torch.export.export(module, (streams,)), tmp_path / "site.pt2")
        loaded = torch.export.load(tmp_path / "site.pt2").module()
        torch.testing.assert_close(loaded(streams), module(streams), rtol=1e-5, atol=1e-5)


@fast
def test_functional_use(backend):
    module, streams = site(), streams_of(2, 5)
    with temper.backend(backend):
        _, d_streams, *wanted = run(module, streams)
        parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}

        def loss(parameters, streams):
            return torch.func.functional_call(module, parameters, (streams,)).sin().sum()

        d_parameters, got = torch.func.grad(loss, argnums=(0, 1))(parameters, streams.detach())
    assert_close([got, *d_parameters.values()], [d_streams, *wanted])


@fast
def test_activation_checkpointing(backend):
    module, streams = site(), streams_of(2, 5)
    with temper.backend(backend):
        _, wanted, *_ = run(module, streams)
        out = checkpoint(module, streams, use_reentrant=False)
        assert torch.equal(torch.autograd.grad(out.sin().sum(), streams)[0], wanted)
        checkpoint(module, streams, use_reentrant=True).sin().sum().backward()
        assert torch.equal(streams.grad, wanted)


@fast
def test_autocast_leaves_streams_and_routing_alone(backend):
    module, streams = site(), streams_of(2, 5)
    with temper.backend(backend):
        plain = module.route(streams)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(streams)
            routing = module.route(streams)
        out.sum().backward()
    assert out.dtype == streams.grad.dtype == torch.float32
    assert all(torch.equal(one, other) for one, other in zip(routing, plain, strict=True))
    # The branch ran in bf16, what is around it did not.
    torch.testing.assert_close(out, module(streams), rtol=0.02, atol=0.02)


@fast
def test_gradients_of_gradients_raise_and_exist_in_naive(backend):
    module, streams = site(), streams_of(2, 3)

    def twice():
        (first,) = torch.autograd.grad(module(streams).sin().sum(), streams, create_graph=True)
        return torch.autograd.grad(first.square().sum(), streams)[0]

    with temper.backend(backend), pytest.raises(RuntimeError, match=r"once_differentiable|not have been used"):
        twice()
    with temper.backend("naive"):
        assert twice().isfinite().all()


@fast
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_in_place(backend, dtype):
    module, streams = site().to(dtype), streams_of(2, 5, dtype=dtype).detach()
    y = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(3)).to(dtype)
    with temper.backend(backend):
        with pytest.raises(ValueError, match="in_place is for inference"):
            module.finish(module.begin(streams)[1], y, in_place=True)
        with torch.no_grad():
            wanted = module.finish(module.begin(streams)[1], y)
            assert wanted.grad_fn is None
            buffer = streams.clone()
            got = module.finish(module.begin(buffer)[1], y, in_place=True)
            assert torch.equal(got, wanted)
            if backend == "cpu":
                assert got.data_ptr() == buffer.data_ptr()


@fast
def test_copies_compute_the_same(backend):
    module, streams = site(), streams_of(2, 5)
    with temper.backend(backend):
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(other(streams), module(streams))


@pytest.fixture
def mesh():
    """One process is enough: what torch can distribute does not depend on how many there are."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("backend", ["naive", "fused", "cpu"])
def test_streams_that_are_sharded_along_the_sequence(mesh, backend):
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    with temper.use_backend(backend):
        for preset in ("mhc", "kromhc", "temper-tucker"):
            module, streams = site(preset), streams_of(2, 5)
            want = run(module, streams)
            sharded = distribute_tensor(streams.detach(), mesh, [Shard(1)]).requires_grad_()
            got = run(distribute_module(module, mesh), sharded)
            assert_close([part.full_tensor() for part in got], want)


def test_a_state_may_be_finished_twice():
    """The gradient of the streams goes one way for both, and is linear in what comes."""
    module, streams = site(), streams_of(2, 5)
    results = []
    for backend in ("naive", "fused", "cpu"):
        with temper.backend(backend):
            x, state = module.begin(streams)
            loss = module.finish(state, x).sin().sum() + module.finish(state, 2 * x).cos().sum()
            results.append(torch.autograd.grad(loss, [streams, module.res.bias]))
    for got in results[1:]:
        assert_close(got, results[0])


OPERATORS = ["fold", "fold_backward", "begin", "finish", "finish_backward", "begin_backward", "mix", "mix_backward"]


PASSES = {"temper::fold", "temper::begin", "temper::finish"}
PASSES |= {f"{name}_backward" for name in PASSES}


class Seen(TorchDispatchMode):
    """The names of the operators that come by."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **(kwargs or {}))


def test_modes_and_the_profiler_see_operators_and_nobody_else_pays_for_them(monkeypatch):
    module, streams = site(), streams_of(3)
    want = run(module, streams)
    with Seen() as seen:
        assert_close(run(module, streams), want, 0)
    assert seen.names >= PASSES
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert_close(run(module, streams), want, 0)
    assert {event.name for event in profiler.events()} >= PASSES
    monkeypatch.setattr(schema, "_WATCHERS", ())
    # Without a watcher even a mode is passed by.
    with Seen() as seen:
        assert_close(run(module, streams), want, 0)
    assert not seen.names & PASSES


def test_a_site_takes_few_python_calls():
    """On a small batch calls cost more than kernels: docs/LOG.md has the counts."""
    module, streams = site(), streams_of(3)
    calls = []

    def count(frame, event, _):
        if event == "call" and "temper" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_qualname)

    def forward():
        x, state = module.begin(streams)
        return module.finish(state, x)

    forward()
    sys.setprofile(count)
    try:
        forward()
    finally:
        sys.setprofile(None)
    assert len(calls) <= 60, calls


def test_tensors_of_other_kinds_go_through_the_dispatcher():
    class Other(torch.Tensor):
        pass

    plain = torch.ones(1)
    assert operators.operator("begin", (plain, None, nn.Parameter(plain))) is operators._run_begin
    for tensor in (plain.as_subclass(Other), plain.to("meta")):
        assert operators.operator("begin", (plain, tensor)) is torch.ops.temper.begin


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_one_that_torch_accepts(name):
    module, streams = site(), streams_of(6).detach()
    spec, folded = module.spec, [tensor.detach() for tensor in module.fold(torch.float32)[:3]]
    numbers, y, grad = spec.packed, torch.randn(6, DIM), torch.randn(6, 4, DIM)
    x, weights, z, norms = torch.ops.temper.begin(streams, *folded, *numbers)
    logits, mixer = torch.randn(6, 4, 4), module.mixer.site_spec().packed
    heads = (module.pre, module.res, module.post)
    tensors = [tensor.detach() for owner in (module.norm, *heads) for tensor in owner.stored()]
    sizes = [len(part) for part in folded]
    arguments = {
        "fold": (tensors, spec.generators, sizes, False),
        "fold_backward": (*folded, tensors, spec.generators, False),
        "begin": (streams, *folded, *numbers),
        "finish": (streams, y, weights, *numbers),
        "finish_backward": (grad, streams, y, weights, *numbers),
        "begin_backward": (grad, x, weights, streams, *folded, weights, z, norms, *numbers),
        "mix": (logits, *mixer),
        "mix_backward": (logits, logits, logits, *mixer),
    }[name]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(torch.ops.temper, name), arguments, test_utils=checks)
