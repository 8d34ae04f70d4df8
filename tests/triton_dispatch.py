"""The Triton backend behind torch, with interpreted kernels as the CPU implementations of the operators.

    python triton_dispatch.py NAME

runs one of the functions below. A process of its own, because it changes what the operators do.
"""

import itertools
import sys
import types
import warnings

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import temper

# First: it decides that kernels are interpreted.
import triton_interpreter
from temper.ops import backend, gpu
from temper.ops.gpu import check, kernels, launch, operators

DIM = 16
# The one after it, as `fused` is on a GPU.
next_best = backend.BACKENDS["cpu"]
triton = backend.BACKENDS["triton"]


def pretend():
    """From here on, CPU tensors are what the kernels are for."""
    triton_interpreter.setup()
    check.TOKENS, check.FEATURES, launch.CHUNK = 5, 16, 256
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    gpu._obstacle = lambda: None
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
            with temper.observe(site) as seen:
                compare(run(site, streams), want)
            assert seen.backends == {"": "triton"}, seen.backends
            assert "backend: triton" in str(seen)
    _recompute_chained()


def _recompute_chained():
    """`finish` makes again what a chained pass wrote, by sums in another order (docs/gpu.md)."""
    sites, streams = [make(iters=2), make(iters=2)], streams_of()
    parameters = [parameter for site in sites for parameter in site.parameters()]
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.1 * torch.randn_like(parameter)
    found, kept = [], []
    for group in (0, 2):
        saved = {}

        def save(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        for site in sites:
            site.recompute = group
        with temper.use_backend("triton"), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            out = chained(*sites, streams)
            found.append([out, *torch.autograd.grad(out.sin().sum(), [streams, *parameters])])
        kept.append(sum(saved.values()))
    assert kept[0] - kept[1] == streams.nbytes, kept
    compare(*found, 2e-6)


def chained(first, second, streams):
    x, state = first.begin(streams)
    x, state = first.finish_into(second, state, x.tanh())
    return second.finish(state, x.tanh())


def mixer_alone():
    """A mixer has no rows to project: the check of a site would read past the end of its maps."""
    for name, dtype, tolerance in (("temper-cp", torch.float32, 2e-5), ("kromhc", torch.bfloat16, 2**-6)):
        mixer = make(name).mixer
        logits = torch.randn(7, *mixer.logit_shape).to(dtype).requires_grad_()
        found = []
        for backend_name in ("naive", "triton"):
            with temper.use_backend(backend_name):
                res = mixer(logits)
                found.append((res, *torch.autograd.grad(res.square().sum(), logits)))
        assert next(reversed(check._found.values())) is None
        compare(*found, tolerance)
    # And a mixer by itself has a check of its own.
    original, check.launch.mix_backward = check.launch.mix_backward, lambda logits, *_: torch.zeros_like(logits)
    with temper.use_backend("triton"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = logits.detach().float()
        assert backend.choose(logits, mixer.site_spec(), mixer) is next_best
    assert "d_logits is off by" in str(caught[0].message), caught
    check.launch.mix_backward = original


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
        _compile_chained(site, make(iters=2))
    spec, flat = site.spec, streams.detach().flatten(0, 1)
    folded = [part.detach() for part in site.fold(torch.float32)[:3]]
    _, weights, z, norms = torch.ops.temper.begin(flat, *folded, *spec.packed)
    raw = [tensor.detach() for owner in (site.norm, site.pre, site.res, site.post) for tensor in owner.stored()]
    y, sizes = torch.randn(len(flat), DIM), [len(part) for part in folded]
    logits, mixer = torch.randn(len(flat), *site.mixer.logit_shape), site.mixer.site_spec().packed
    arguments = {
        "fold": (raw, spec.generators, sizes, False),
        "fold_backward": (*folded, raw, spec.generators, False),
        "begin": (flat, *folded, *spec.packed),
        "finish": (flat, y, weights, *spec.packed),
        "finish_": (flat.clone(), y, weights, *spec.packed),
        "finish_backward": (flat, flat, y, weights, *spec.packed),
        "begin_backward": (flat, y, weights, flat, *folded, weights, z, norms, *spec.packed),
        "finish_begin": (flat, y, weights, *folded, *spec.packed),
        "finish_begin_": (flat.clone(), y, weights, *folded, *spec.packed),
        "finish_begin_backward": (flat, y, weights, flat, *folded, weights, z, norms, flat, y, weights, *spec.packed),
        "mix": (logits, *mixer),
        "mix_backward": (logits, logits, logits, *mixer),
    }
    assert arguments.keys() == operators.IMPLS.keys()
    for name, given in arguments.items():
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(torch.ops.temper, name), given, test_utils=checks)


def _compile_chained(first, second):
    """Two sites are one pass in a compiled forward graph, too; see docs/gpu.md for the backward."""
    # Not above: it imports triton, which then would not interpret.
    from functorch.compile import make_boxed_func

    streams, targets = streams_of(), []

    def both(streams):
        return chained(first, second, streams)

    def collect(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiler = torch._dynamo.backends.common.aot_autograd(fw_compiler=collect)
    results = []
    for function in (both, torch.compile(both, fullgraph=True, backend=compiler)):
        out = function(streams)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [streams, *second.parameters()])])
    compare(*results)
    assert "temper.finish_begin.default" in targets, targets


def wrong_kernel():
    """A kernel that writes something else is found before it is used, once, and `fused` takes over."""

    class Wrong:
        def __init__(self, name, harm):
            self.original, self.harm = kernels.KERNELS[name], harm

        def __getitem__(self, grid):
            def call(**arguments):
                self.original[grid](**arguments)
                self.harm(arguments)

            return call

    wrong = (
        # Features that another program projects than the first.
        ("project", lambda arguments: arguments["z"][1:].mul_(0.5), "x is off by"),
        # Folding is checked, too.
        ("fold_small_backward", lambda arguments: arguments["d_res"][5].mul_(1.01), "] is off by"),
    )
    for name, harm, reason in wrong:
        kernels.KERNELS[name] = Wrong(name, harm)
        _falls_back(reason)
        kernels.KERNELS[name] = kernels.KERNELS[name].original
        check._found.clear()


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
    # Whoever meets the kernels first, real numbers are compared: in a trial on fake tensors, or while compiling.
    given = streams.detach()
    with FakeTensorMode() as mode:
        assert triton.refusal(site.spec, site.mixer, mode.from_tensor(given), True) is None
    other = make("kromhc")
    with temper.use_backend("triton"), torch.no_grad():
        torch.compile(other, fullgraph=True, backend="eager")(streams)
    assert list(check._found.values()) == [None, None], check._found
    assert chosen(site, streams) is not triton
    assert "TEMPER_BACKEND=triton" in triton.refusal(site.spec, site.mixer, streams, False)
    gpu.CONFIRMED = frozenset({"small"})
    assert triton.refusal(site.spec, site.mixer, streams, False) is None


def gpu_check_command():
    """`temper gpu-check` from end to end, on a case small enough for the interpreter."""
    from temper_lab.bench import gpu as measure

    _install_peers()
    setting = measure.Setting(torch.device("cpu"), (("temper-slim", 2, 24, 5),), ((2, 16, 5),), (torch.bfloat16,))
    found = measure.report(1, setting)
    assert found["is_right"], found["right"]
    rows = {row["way"]: row for row in found["fast"]["rows"]}
    ways = {"triton", "triton, chained", "fused", "triton, site", "fused, site"}
    assert set(rows) == {*ways, "liger-kernel, site", "transformer-engine, site"}
    assert [way for way in rows if "total_ms" not in rows[way]] == ["liger-kernel, site"]
    assert "no LigerMHC" in rows["liger-kernel, site"]["error"]
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


def _install_peers():
    """Packages that look like the others: one is broken, one does nothing but check what it is given."""

    def fused_projection(x, phi):
        assert (x.shape, phi.shape) == ((5, 32), (8, 32))
        return x.float() @ phi.float().T, x.float().square().mean(-1)

    def fused_scale(projected, alpha, beta, squares, n):
        assert (alpha.shape, beta.shape) == ((3,), (1, n * n + 2 * n))
        logits = projected * squares[:, None].rsqrt() * alpha.sum() + beta
        return logits[:, :n].sigmoid(), logits[:, n : 2 * n].sigmoid(), logits[:, 2 * n :]

    # Without n, as in later versions.
    def fused_sinkhorn(res):
        return res.softmax(-1)

    def fused_aggregate(x, pre, n):
        return (x * pre[:, :, None]).sum(-1).to(x.dtype)

    def fused_expand_combine(f, bias, post, x, res, n):
        assert bias is None
        return (f[..., None] * post[:, :, None] + x.float() @ res).to(x.dtype)

    made = {name: types.ModuleType(name) for name in ("liger_kernel.transformers.mhc", "liger_kernel")}
    made |= {f"liger_kernel.{name}": types.ModuleType(name) for name in ("transformers",)}
    names = ("transformer_engine", "pytorch", "triton", "mhc")
    made |= {name: types.ModuleType(name) for name in itertools.accumulate(names, lambda a, b: f"{a}.{b}")}
    for function in (fused_projection, fused_scale, fused_sinkhorn, fused_aggregate, fused_expand_combine):
        setattr(made["transformer_engine.pytorch.triton.mhc"], f"mhc_{function.__name__}", function)

    def broken(*args, **kwargs):
        raise RuntimeError("no LigerMHC here")

    made["liger_kernel.transformers.mhc"].LigerMHC = broken
    sys.modules |= made


if __name__ == "__main__":
    kept = pretend()
    globals()[sys.argv[1]]()
