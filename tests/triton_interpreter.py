"""Runs the Triton kernels in Triton's interpreter, on a CPU. A process of its own: a kernel is interpreted or compiled.

    python triton_interpreter.py '[{"n": 4, "mixer": "sinkhorn", "dtype": "float64"}]'

prints the errors of every case as JSON. The interpreter keeps bfloat16 as bits and knows nothing of races, so this adds
real bfloat16, an error for every address that a launch reads or writes after it wrote it, and one for offsets of tokens
that would not be large enough for many of them. Tensors end at a page that may not be touched, or begin after one if a
second argument says `start`.
"""

import ctypes
import functools
import inspect
import json
import mmap
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

import cases
import temper
from temper.ops import backend
from temper.ops.gpu import check, launch, operators, tiles
from temper.ops.plan import FoldedWeights

HERE = torch.device("cpu")


def _widen(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(values):
    """To the nearest bfloat16, ties to even, as bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def mend_bfloat16():
    """Casts round, products see values, and any other arithmetic on bfloat16 is an error."""
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot, convert, binary = builder.cast_impl, builder.create_dot, builder.create_fp_to_fp, builder.binary_op

    def new_cast(self, source, target):
        old, new = source.dtype.scalar, target.scalar
        if old == tl.bfloat16 and new != tl.bfloat16:
            return handle(_widen(source.data).astype(interpreter._get_np_dtype(target)), new)
        if new == tl.bfloat16 and old != tl.bfloat16:
            return handle(_round(source.data.astype(np.float32)), new)
        return cast(self, source, target)

    def new_convert(self, source, target, mode):
        is_half = tl.bfloat16 in (source.dtype.scalar, target.scalar)
        return new_cast(self, source, target) if is_half else convert(self, source, target, mode)

    def new_dot(self, left, right, *rest):
        sides = [handle(_widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (left, right)]
        return dot(self, *sides, *rest)

    def new_binary(self, left, right, *rest):
        if tl.bfloat16 in (left.dtype.scalar, right.dtype.scalar):
            raise TypeError("arithmetic on bfloat16: widen it first")
        return binary(self, left, right, *rest)

    builder.cast_impl, builder.create_dot = new_cast, new_dot
    builder.create_fp_to_fp, builder.binary_op = new_convert, new_binary


def look_once():
    """Without this the interpreter looks through all of triton.language in every call inside a kernel."""

    @functools.cache
    def builtins_of(package):
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def new_patch(package, builder, scope):
        for name in builtins_of(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = new_patch


class RaceError(AssertionError):
    pass


def detect_races():
    """An address that was written in a launch may be neither read nor written again in it, by no program."""
    builder, grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
    call, load, store = grid.__call__, builder.create_masked_load, builder.create_masked_store
    written = set()

    def new_call(self, *args, **kwargs):
        written.clear()
        return call(self, *args, **kwargs)

    def addresses(pointers, mask):
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        chosen = np.broadcast_to(mask.data, shape).astype(bool)
        return np.broadcast_to(pointers.data, shape)[chosen].ravel().tolist()

    def new_load(self, pointers, mask, *rest):
        if not written.isdisjoint(addresses(pointers, mask)):
            raise RaceError("a kernel reads what it wrote")
        return load(self, pointers, mask, *rest)

    def new_store(self, pointers, value, mask, *rest):
        found = addresses(pointers, mask)
        if len(set(found)) < len(found) or not written.isdisjoint(found):
            raise RaceError("a kernel writes an address twice")
        written.update(found)
        return store(self, pointers, value, mask, *rest)

    grid.__call__, builder.create_masked_load, builder.create_masked_store = new_call, new_load, new_store


class OffsetError(AssertionError):
    pass


def check_offsets():
    """Offsets from the start of a tensor with tokens have 64 bits: T N D may be more than 2^31."""
    builder, grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
    call, step, splat = grid.__call__, builder.create_addptr, builder.create_splat
    convert, starts = interpreter._implicit_cvt, {}

    def new_call(self, *args, **kwargs):
        starts.clear()
        kernel = self.fn.__name__
        # Weights and sums over tokens, in which another size may happen to be T.
        others = {"maps", "bias", "table", "out" if kernel.startswith("route") else "parts"}
        for name, value in kwargs.items():
            # (T, ..) or (splits, T, ..).
            if name not in others and isinstance(value, torch.Tensor) and kwargs.get("T") in value.shape[:2]:
                starts[value.data_ptr()] = f"{name} of {kernel}"
        return call(self, *args, **kwargs)

    def new_convert(value):
        converted = convert(value)
        if isinstance(value, torch.Tensor) and value.data_ptr() in starts:
            converted.handle.set_attr("start of", starts[value.data_ptr()])
        return converted

    def new_splat(self, kind, scalar):
        block = splat(self, kind, scalar)
        block.attr.update(scalar.attr)
        return block

    def new_step(self, pointer, offset):
        stepped = step(self, pointer, offset)
        if "start of" in pointer.attr and offset.dtype.scalar.primitive_bitwidth < 64:
            if offset.data.size > 1:
                raise OffsetError(f"offsets into {pointer.attr['start of']} do not have 64 bits")
            # One number, such as where a split begins; tokens come later.
            stepped.attr.update(pointer.attr)
        return stepped

    grid.__call__, builder.create_addptr, builder.create_splat = new_call, new_step, new_splat
    interpreter._implicit_cvt = new_convert


_protect = ctypes.CDLL(None).mprotect
_protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(like, at_end):
    """A copy of a tensor that ends (or begins) at a page that may not be touched."""
    size, page = like.numel() * like.element_size(), mmap.PAGESIZE
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + page
    for place in (start - page, start + pages * page):
        assert _protect(place, page, 0) == 0
    if not size:
        return like.clone()
    offset = page + (pages * page - size if at_end else 0)
    tensor = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).view(like.dtype).view(like.shape)
    return tensor.copy_(like)


def guard_everything(at_end):
    """Every launch gets its tensors beside such pages, and what nobody has written is NaN."""
    # The setting fills what torch allocates.
    torch.use_deterministic_algorithms(True)
    call = interpreter.GridExecutor.__call__

    @torch.no_grad()
    def new_call(self, **arguments):
        # By address: a kernel may write over what it reads.
        copies = {}

        def beside(value):
            if isinstance(value, tuple):
                return tuple(map(beside, value))
            if not isinstance(value, torch.Tensor):
                return value
            assert value.is_contiguous()
            return copies.setdefault(value.data_ptr(), (value, guarded(value, at_end)))[1]

        call(self, **{name: beside(value) for name, value in arguments.items()})
        for tensor, copy in copies.values():
            tensor.copy_(copy)

    interpreter.GridExecutor.__call__ = new_call


def run_site(n, mixer, dtype, generator="cp", dim=40, tokens=19, twice=False, **config):
    """Every operation, unchained and chained; with `twice`, also whether bits are the same and tokens independent."""
    dtype = getattr(torch, dtype)
    site = cases.make(mixer, n, dim, 1, generator=generator, dtype=dtype, **config)
    case = check.random_case(site.spec, dtype, HERE, tokens)
    got = check.results(case, site.spec)
    want = check.definition(case, site.spec, site.mixer)
    errors = check.worst(got, want)
    if dtype == torch.float32:
        # Beyond those of plain torch in float32: where a sum cancels, they alone are more than 1e-6 of the largest.
        plain = check.worst(check.definition(case, site.spec, site.mixer, dtype), want)
        errors = {name: error - plain[name] for name, error in errors.items()}
    if twice:
        again = check.results(case, site.spec)
        errors["other bits"] = float(sum(not torch.equal(got[name], again[name]) for name in got))
        per_token = ("streams", "y", "grad", "d_x", "d_weights")
        fewer = check.results({k: v[:7] if k in per_token else v for k, v in case.items()}, site.spec)
        alone = [name for name in got if len(fewer[name]) == 7 and len(got[name]) == tokens]
        assert {"x", "weights", "next", "d_streams", "chained x", "chained d_next", "chained d_y"} <= set(alone)
        errors["other tokens"] = float(sum(not torch.equal(got[name][:7], fewer[name]) for name in alone))
    return errors


def run_change(change, n=4, mixer="sinkhorn", dtype="float64", **config):
    """One site with something unusual about it, through the functions of the backend."""
    case = cases.make(mixer, n, 24, 10, dtype=getattr(torch, dtype), **config)
    if change.startswith("without "):
        case = case.but(**dict.fromkeys(change.removeprefix("without ").split(" and ")))
    elif change == "wide logits":
        bias = case.folded.bias.clone()
        bias[n : n + n * n] *= 40
        case = case.but(folded=case.folded._replace(bias=bias))
    elif change == "strided":
        case = case.but(grad=case.grad.sum(0, keepdim=True).expand(case.grad.shape), d_x=case.d_x.T.contiguous().T)
    elif change == "another y":
        case = case.but(y=case.y.float())
    elif change == "no tokens":
        case = case.but(**{key: getattr(case, key)[:0] for key in ("streams", "y", "grad", "d_x", "d_weights")})
    elif change == "two parts":
        # As with float32 streams and many of them, for which the chained kernels are too large.
        tiles.fits = lambda *_: False
    else:
        raise ValueError(change)
    gpu = temper.ops.gpu
    errors = cases.worst(cases.run(gpu, case), cases.expected(case))
    chained = cases.worst(cases.run_chained(gpu, case), cases.expected_chained(case))
    return errors | {f"chained {name}": error for name, error in chained.items()}


def run_in_place(n, dtype):
    """`finish` into its own streams."""
    case = cases.make("sinkhorn", n, 40, 9, dtype=getattr(torch, dtype))
    gpu = temper.ops.gpu
    weights = gpu.begin(case.streams, case.folded, case.spec, case.mixer)[1].weights
    want = gpu.finish(case.streams, case.y, weights, case.spec)
    chained, x, _ = gpu.finish_begin(case.streams, case.y, weights, case.folded, case.spec, case.mixer)
    streams = case.streams.clone()
    other, *_ = operators.IMPLS["finish_begin_"](streams, case.y, weights, *case.folded[:3], *case.spec.packed)
    operators.IMPLS["finish_"](case.streams, case.y, weights, *case.spec.packed)
    pairs = ((case.streams, want), (streams, chained), (other, x))
    return {"in place": float(sum(not torch.equal(one, two) for one, two in pairs))}


def run_between(n, dtype):
    """The chained operations, against `begin` and `finish_backward` on the very tensors that they stored."""
    case, gpu = cases.make("sinkhorn", n, 40, 9, dtype=getattr(torch, dtype)), temper.ops.gpu
    weights = gpu.begin(case.streams, case.folded, case.spec, case.mixer)[1].weights
    following, x, routed = gpu.finish_begin(case.streams, case.y, weights, case.folded, case.spec, case.mixer)
    want_x, want = gpu.begin(following, case.folded, case.spec, case.mixer)
    later = (case.grad, case.d_x, case.d_weights, following, case.folded, routed)
    earlier = (case.streams, case.y, weights)
    d_next, _, *slopes = gpu.finish_begin_backward(*later, *earlier, case.spec, case.mixer)
    wanted = (want_x, *want, *gpu.finish_backward(d_next, *earlier, case.spec))
    names = ("x", "weights", "z", "norms", "d_y", "d_weights")
    results = dict(zip(names, (x, *routed, *slopes), strict=True))
    return check.worst(results, {name: value.double() for name, value in zip(names, wanted, strict=True)})


def run_mixer(n, mixer, dtype):
    """A mixer by itself."""
    mixer = cases.make(mixer, n, 8, 1, dtype=getattr(torch, dtype)).mixer
    logits = torch.randn(11, *mixer.logit_shape, dtype=getattr(torch, dtype), requires_grad=True)
    want, grad = mixer.mix(logits.double()), torch.randn(11, n, n, dtype=logits.dtype)
    (d_logits,) = torch.autograd.grad(want, logits, grad.double())
    with torch.no_grad():
        res = temper.ops.gpu.mix(logits, mixer)
        got = {"res": res, "d_logits": temper.ops.gpu.mix_backward(logits, res, grad, mixer)}
    return check.worst(got, {"res": want.detach(), "d_logits": d_logits.double()})


def run_fold(names, gain, n, dim, modes, dtype="float64"):
    """Folding, against what torch makes of the maps."""
    import test_fold

    site = test_fold.Site(*names, gain, n, dim, tuple(modes), getattr(torch, dtype))
    spec, raw = site.spec, [tensor.detach() for tensor in site.tensors]
    want = site.plain()[:3]
    grads = [torch.randn_like(part) for part in want]
    # Adding nothing reaches what has no gradient.
    loss = sum((part * grad).sum() for part, grad in zip(want, grads, strict=True))
    slopes = torch.autograd.grad(loss + sum(0 * tensor.sum() for tensor in site.tensors), site.tensors)
    folding = temper.ops.gpu.folding
    got = (
        *folding.fold(raw, spec, site.dtype)[:3],
        *folding.fold_backward(FoldedWeights(*grads), raw, spec, site.dtype),
    )
    wanted = {str(k): value.detach().double() for k, value in enumerate((*want, *slopes))}
    return check.worst({str(k): value for k, value in enumerate(got)}, wanted)


def step_too_far():
    """Reads 16 bytes behind a tensor: what the guard pages are for."""
    import triton

    @triton.jit
    def copy(source, target, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(target + i, tl.load(source + i))

    copy[(1,)](source=torch.ones(60), target=torch.empty(64), BLOCK=64)


RUNS = {
    "site": run_site,
    "change": run_change,
    "in place": run_in_place,
    "between": run_between,
    "mixer": run_mixer,
    "fold": run_fold,
}


def setup():
    torch.set_num_threads(1)
    mend_bfloat16()
    look_once()
    tiles.elsewhere, operators.DEVICE = tiles.SMALL, "cpu"
    # Few programs, so that some take several tiles of tokens.
    launch.ENOUGH = 6
    backend.BACKENDS["triton"].device = "cpu"


if __name__ == "__main__":
    setup()
    detect_races()
    check_offsets()
    guard_everything(at_end="start" not in sys.argv[2:])
    if sys.argv[1] == "step too far":
        step_too_far()
        sys.exit()
    json.dump([RUNS[case.pop("run", "site")](**case) for case in json.loads(sys.argv[1])], sys.stdout)
