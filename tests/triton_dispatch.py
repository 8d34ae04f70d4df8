"""The Triton backend behind torch, with interpreted kernels as the CPU implementations of the operators.

    python triton_dispatch.py NAME

runs one of the functions below. A process of its own, because it changes what the operators do.
"""

import sys
import warnings

import torch

import temper

# First: it decides that kernels are interpreted.
import triton_interpreter
from temper.ops import backend, gpu
from temper.ops.gpu import check, kernels, operators

DIM = 16
# The one after it, as `fused` is on a GPU.
next_best = backend.BACKENDS["cpu"]
triton = backend.BACKENDS["triton"]


def pretend():
    """From here on, CPU tensors are what the kernels are for."""
    triton_interpreter.setup()
    check.TOKENS = 5
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    gpu._unavailable = lambda: None
    library = torch.library.Library("temper", "IMPL")
    for name, function in operators.IMPLS.items():
        library.impl(name, function, "CPU", allow_override=True)
    return library


def make(name="temper-cp", **overrides):
    torch.manual_seed(0)
    return temper.HyperConnection(temper.preset(name, num_streams=4, dim=DIM, **overrides), branch=torch.nn.Tanh())


def streams_of(tokens=5, dtype=torch.float32):
    source = torch.Generator().manual_seed(2)
    return torch.randn(2, tokens, 4, DIM, generator=source).to(dtype).requires_grad_()


def chosen(site, streams):
    return backend.choose(streams, site.spec, site.mixer)


def run(site, streams):
    out = site(streams)
    return out, *torch.autograd.grad(out.sin().sum(), [streams, *site.parameters()])


def compare(got, want, tolerance=2e-5):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def autograd_and_folding():
    for name, options in (("temper-cp", {"iters": 2}), ("temper-tucker-krom", {})):
        site, streams = make(name, **options), streams_of()
        with temper.use_backend("naive"):
            want = run(site, streams)
        with temper.use_backend("triton"):
            assert chosen(site, streams) is triton
            compare(run(site, streams), want)
            with temper.observe(site) as seen:
                site(streams)
            assert seen.backends == {"": "triton"}, seen.backends
            assert "backend: triton" in str(seen)


def compile_export_opcheck():
    site, streams = make(iters=2), streams_of()
    with temper.use_backend("triton"):
        want = run(site, streams)
        compiled = torch.compile(site, fullgraph=True, backend="aot_eager", dynamic=True)
        out = compiled(streams)
        compare((out, *torch.autograd.grad(out.sin().sum(), [streams, *site.parameters()])), want)
        with torch.no_grad():
            exported = torch.export.export(site.eval(), (streams.detach(),))
            names = {str(node.target) for node in exported.graph.nodes}
            assert {"temper.begin.default", "temper.finish.default", "temper.fold.default"} <= names, names
            compare([exported.module()(streams.detach())], want[:1])
    spec, flat = site.spec, streams.detach().flatten(0, 1)
    folded = [part.detach() for part in site.fold(torch.float32)[:3]]
    _, weights, z, norms = torch.ops.temper.begin(flat, *folded, *spec.packed)
    raw = [tensor.detach() for owner in (site.norm, site.pre, site.res, site.post) for tensor in owner.stored()]
    y, sizes = torch.randn(len(flat), DIM), [len(part) for part in folded]
    arguments = {
        "fold": (raw, spec.generators, sizes, False),
        "fold_backward": (*folded, raw, spec.generators, False),
        "begin": (flat, *folded, *spec.packed),
        "finish": (flat, y, weights, *spec.packed),
        "finish_backward": (flat, flat, y, weights, *spec.packed),
        "begin_backward": (flat, y, weights, flat, *folded, weights, z, norms, *spec.packed),
    }
    for name, given in arguments.items():
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.temper, name), given, test_utils=checks)


def wrong_kernel():
    """A kernel that writes something else is found before it is used, once, and `fused` takes over."""

    class Wrong:
        def __getitem__(self, grid):
            def call(**arguments):
                original[grid](**arguments)
                arguments["x"].mul_(1.01)

            return call

    original = kernels.KERNELS["read"]
    kernels.KERNELS["read"] = Wrong()
    _falls_back("x is off by")


def compile_error():
    """So is one that does not compile."""

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("out of resources: shared memory\nand more")

    kernels.KERNELS["streams_backward"] = Broken()
    _falls_back("RuntimeError: out of resources: shared memory")


def _falls_back(reason):
    site, streams = make(iters=2), streams_of()
    with temper.use_backend("triton"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert chosen(site, streams) is next_best
        assert chosen(site, streams) is next_best
    assert len(caught) == 1, [str(entry.message) for entry in caught]
    assert reason in str(caught[0].message), caught[0].message
    assert "fused" in str(caught[0].message)
    (info,) = [entry for entry in temper.list_backends() if entry.name == "triton"]
    assert reason in str(info), info
    assert "failed their check" in triton.refusal(site.spec, site.mixer, streams, True)
    # What does not go through that kernel, or is another spec, is checked by itself.
    assert list(check._found.values()) != [None]


def nobody_asked():
    """Without a report from this kind of GPU the kernels wait to be asked for."""
    site, streams = make(iters=2), streams_of()
    assert chosen(site, streams) is not triton
    assert "TEMPER_BACKEND=triton" in triton.refusal(site.spec, site.mixer, streams, False)
    gpu.CONFIRMED = frozenset({"small"})
    assert triton.refusal(site.spec, site.mixer, streams, False) is None


def gpu_check_command():
    """`temper gpu-check` from end to end, on a case small enough for the interpreter."""
    from temper_lab.bench import gpu as measure

    setting = measure.Setting(torch.device("cpu"), (("temper-slim", 2, 24, 5),), ((2, 16, 5),), (torch.bfloat16,))
    found = measure.report(1, setting)
    assert found["is_right"], found["right"]
    assert {row["way"] for row in found["fast"]["rows"]} == {"triton", "triton, chained", "fused"}
    measure.show(found)
    original = kernels.KERNELS["write"]
    kernels.KERNELS["write"] = None
    wrong = measure.report(1, setting)
    assert not wrong["is_right"]
    assert wrong["fast"] is None
    kernels.KERNELS["write"] = original
    measure._TRIED = {"read": [(4, 32, 4, 3), (3, 32, 4, 3)]}
    tiles = measure.tune(1, setting)
    assert tiles["tiles"] == {"small": [{"streams": 2, "kernel": "read", "tile": [4, 32, 4, 3]}]}, tiles


if __name__ == "__main__":
    kept = pretend()
    globals()[sys.argv[1]]()
