"""The native kernels from outside: the same bits for any number of threads, and not a byte beside their buffers."""

import ctypes
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cases
import test_fold
from temper.ops import cpu
from temper.ops.cpu import build, operators

HERE = Path(__file__).parent
STORED = (torch.float32, torch.bfloat16, torch.float64)


def in_a_process(call):
    """Runs a function of this file in a Python of its own; what it printed."""
    path = os.pathsep.join([str(HERE), *sys.path])
    # Two threads that wait actively for each other on a busy machine would wait long.
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    code = f"import test_kernels; test_kernels.{call}()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Mixer, streams, features, tokens, generator: the last two maps are so large that torch multiplies by them.
THREADED = [
    ("sinkhorn", 4, 130, 1030, "cp"),
    ("newton", 3, 7, 257, "cp"),
    ("birkhoff", 4, 24, 9, "tucker"),
    ("kronecker", 8, 384, 300, "dense"),
    ("unconstrained", 8, 129, 1030, "dense"),
]


# The generators, the gain and the number of streams of a fold.
FOLDED = [
    ("cp", "tucker", "tt", "rank-one", 4),
    ("dense", "dense", "tucker", "full", 3),
    ("tt", "cp", "cp", "feature", 2),
]


def compare_threads():
    for dtype in STORED:
        for mixer, num_streams, dim, tokens, generator in THREADED:
            case = cases.make(mixer, num_streams, dim, tokens, generator=generator, dtype=dtype)
            results = []
            for threads in (1, 2, 2):
                torch.set_num_threads(threads)
                assert torch.get_num_threads() == threads
                chained = {f"chained {name}": value for name, value in cases.run_chained(cpu, case).items()}
                results.append(cases.run(cpu, case) | chained)
            for name, value in results[0].items():
                for other in results[1:]:
                    assert torch.equal(value, other[name]), (dtype, mixer, name)
    # Three chunks of features.
    for names in FOLDED:
        site = test_fold.Site(*names, 700, (4, 4), torch.float32)
        results = []
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            fold = cpu.folding.fold(site.tensors, site.spec, torch.float32)
            slopes = cpu.folding.fold_backward(fold, site.tensors, site.spec, torch.float32)
            results.append([*fold[:3], *slopes])
        for values in zip(*results, strict=True):
            assert all(torch.equal(values[0], value) for value in values), names


def test_one_thread_and_two_agree_bit_for_bit():
    in_a_process("compare_threads")


PAGE = mmap.PAGESIZE


class Guarded:
    """Memory between two pages that may not be touched, for a tensor right after the first or right before the last."""

    def __init__(self, tensor, at_end):
        size = tensor.numel() * tensor.element_size()
        pages = (size + PAGE - 1) // PAGE
        self.memory = mmap.mmap(-1, (pages + 2) * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + PAGE
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for page in (start - PAGE, start + pages * PAGE):
            assert protect(page, PAGE, 0) == 0
        self.address = start + pages * PAGE - size if at_end else start
        self.size, self.like = size, tensor
        ctypes.memmove(self.address, tensor.data_ptr(), size)

    def read(self):
        result = torch.empty_like(self.like)
        ctypes.memmove(result.data_ptr(), self.address, self.size)
        return result


def blank(*shape, like):
    return torch.full(shape, torch.nan, dtype=like.dtype)


def call(name, spec, tokens, flags, tensors, at_end, dtype):
    """A kernel with every tensor between guard pages; what it left in them."""
    blocks = [None if tensor is None else Guarded(tensor, at_end) for tensor in tensors]
    pointers = [None if block is None else block.address for block in blocks]
    operators._kernel(name, dtype)(operators._prepare(*spec.packed)[2], tokens, 1, *flags, *pointers)
    return [None if block is None else block.read() for block in blocks]


def run_guarded(case, at_end, project, extra=0):
    """All kernels by hand, through the C interface; `extra` tokens are too many."""
    spec, fold, streams, y = case.spec, case.folded[:3], case.streams, case.y
    tokens, dtype, rows = len(streams) + extra, streams.dtype, case.spec.num_rows
    made = [blank(*y.shape, like=streams), *(blank(len(y), k, like=fold[2]) for k in (spec.num_weights, rows, 2))]
    if not project:
        made[2] = streams.flatten(1).to(fold[2].dtype) @ fold[0].flatten(1).T
    given = [streams, *fold, *made]
    x, weights, z, norms = call("begin", spec, tokens, (project,), given, at_end, dtype)[4:]
    finish = "finish" if y.dtype == dtype else "finish_other"
    given = [streams, y, weights, blank(*streams.shape, like=streams)]
    following = call(finish, spec, tokens, (), given, at_end, dtype)[3]
    given = [case.grad, streams, y, weights, blank(*y.shape, like=y), blank(*weights.shape, like=weights)]
    d_y, d_weights = call(finish.replace("finish", "finish_backward"), spec, tokens, (), given, at_end, dtype)[4:]
    outputs = [blank(*tensor.shape, like=tensor) for tensor in (streams, fold[0], fold[1], fold[2])]
    outputs.insert(2, None if project else blank(*z.shape, like=z))
    given = [case.grad, case.d_x, d_weights + case.d_weights, streams, *fold, weights, z, norms, *outputs]
    d_streams, _, d_z, d_out, d_bias = call("begin_backward", spec, tokens, (project,), given, at_end, dtype)[10:]
    results = {"x": x, "weights": weights, "next": following, "d_y": d_y, "d_out": d_out, "d_bias": d_bias}
    # Without `project`, what goes through the map is left to a matrix product.
    results |= {"d_streams": d_streams} if project else {"d_z": d_z}
    if project:
        results |= run_chain_guarded(case, weights, tokens, at_end)
    logits = torch.randn(len(streams), spec.num_logits, dtype=fold[2].dtype)
    matrices = torch.zeros(len(streams), spec.num_streams**2, dtype=logits.dtype)
    call("mixer", spec, tokens, (), [logits, None, None, matrices], at_end, dtype)
    call("mixer", spec, tokens, (), [logits, matrices, matrices, torch.zeros_like(logits)], at_end, dtype)
    return results


def run_chain_guarded(case, weights, tokens, at_end):
    """The two chained kernels, as above."""
    spec, fold, streams, y = case.spec, case.folded[:3], case.streams, case.y
    other, dtype = "" if y.dtype == streams.dtype else "_other", streams.dtype
    routed = [blank(len(y), k, like=fold[2]) for k in (spec.num_weights, spec.num_rows, 2)]
    outputs = [blank(*streams.shape, like=streams), blank(*y.shape, like=streams), *routed]
    given = [streams, y, weights, *fold, *outputs]
    following, x, *routed = call(f"finish_begin{other}", spec, tokens, (), given, at_end, dtype)[6:]
    outputs = [blank(*tensor.shape, like=tensor) for tensor in (streams, *fold, y, weights)]
    given = [case.grad, case.d_x, case.d_weights, following, *fold, *routed, streams, y, weights, *outputs]
    slopes = call(f"finish_begin_backward{other}", spec, tokens, (), given, at_end, dtype)[13:]
    values = (following, x, routed[0], *slopes)
    return {f"chained {name}": value for name, value in zip(cases.CHAINED, values, strict=True)}


# Every mixer, every width of what is left over, y in both formats.
SHAPES = [
    ("unconstrained", 2, 1, 1),
    ("sinkhorn", 3, 5, 7),
    ("sinkhorn, tol", 4, 8, 9),
    ("guarded", 5, 17, 8),
    ("newton", 6, 31, 3),
    ("birkhoff", 3, 130, 15),
    ("kronecker", 4, 1030, 9),
    ("sinkhorn", 7, 3, 260),
    ("sinkhorn", 4, 16, 0),
]


def walk_between_guards(at_end):
    for dtype in STORED:
        others = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}
        for k, (mixer, num_streams, dim, tokens) in enumerate(SHAPES):
            y_dtype = others.get(dtype, dtype) if k % 2 else dtype
            generator = "dense" if k % 3 == 0 else "cp"
            case = cases.make(mixer, num_streams, dim, tokens, generator=generator, dtype=dtype, y_dtype=y_dtype)
            plain = cases.run(cpu, case)
            if operators._projects(case.spec, dtype):
                plain |= {f"chained {name}": value for name, value in cases.run_chained(cpu, case).items()}
            for project in (1, 0):
                for name, value in run_guarded(case, at_end, project).items():
                    # Nothing was left unwritten, and it is what torch's own memory gets.
                    assert value.isfinite().all(), (dtype, mixer, name)
                    if project and name in plain:
                        assert torch.equal(value, plain[name]), (dtype, mixer, name)


def fold_between_guards(at_end):
    for dtype in STORED:
        wide = torch.promote_types(dtype, torch.float32)
        for names in FOLDED:
            for dim in (1, 25, 270):
                site = test_fold.Site(*names, dim, (4, 4), wide)
                tensors = [tensor.detach() for tensor in site.tensors]
                plain = cpu.folding.fold(tensors, site.spec, dtype)
                given = [Guarded(tensor, at_end) for tensor in tensors]
                made = [Guarded(blank(*part.shape, like=part), at_end) for part in plain[:3]]
                slopes = [Guarded(blank(*tensor.shape, like=tensor), at_end) for tensor in tensors]
                form = operators._generators(site.spec.generators)
                addresses = [block.address for block in made]
                operators._kernel("fold", dtype)(form, 1, _addresses(given), *addresses)
                operators._kernel("fold_backward", dtype)(form, 1, _addresses(given), *addresses, _addresses(slopes))
                results = [block.read() for block in (*made, *slopes)]
                for got, wanted in zip(
                    results, [*plain[:3], *cpu.folding.fold_backward(plain, tensors, site.spec, dtype)], strict=True
                ):
                    assert torch.equal(got, wanted), (dtype, names, dim)


def _addresses(blocks):
    return (ctypes.c_void_p * len(blocks))(*[block.address for block in blocks])


def step_over_the_end():
    run_guarded(cases.make("unconstrained", 2, 1, 8, dtype=torch.float32), at_end=True, project=1, extra=1)


def step_before_the_start():
    ctypes.memset(Guarded(torch.zeros(3), at_end=False).address - 1, 0, 1)


def stay_inside():
    for at_end in (True, False):
        walk_between_guards(at_end)
        fold_between_guards(at_end)


def report():
    """The signal that ended each walk, from children: what touches a guard page is killed."""
    # A core of a process with torch in it is large.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for walk in (step_over_the_end, step_before_the_start, stay_inside):
        child = os.fork()
        if not child:
            walk()
            os._exit(0)
        print(walk.__name__, os.waitpid(child, 0)[1])


def test_no_kernel_touches_a_byte_outside_its_buffers():
    """Above and below, for everything that a kernel is given; a step beyond is shown to be noticed."""
    statuses = dict(line.split() for line in in_a_process("report").splitlines())
    assert {name: int(status) for name, status in statuses.items()} == {
        "step_over_the_end": signal.SIGSEGV,
        "step_before_the_start": signal.SIGSEGV,
        "stay_inside": 0,
    }


def has(word):
    return Path("/proc/cpuinfo").exists() and word in Path("/proc/cpuinfo").read_text()


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="no valgrind")
@pytest.mark.skipif(has("avx512"), reason="valgrind does not know AVX-512")
def test_memcheck_finds_nothing_in_the_kernels_own_memory(tmp_path):
    """Guard pages do not see the buffers that a kernel makes for itself, nor what is read before it is written."""
    program, compiler = tmp_path / "memcheck", build._compiler()
    source = [str(HERE / "memcheck.cpp"), "-I", str(build.SOURCES), "-ldl", "-o", str(program)]
    subprocess.run([compiler, "-std=c++17", "-g", *source], check=True)
    for dtype in STORED:
        library = build.library(operators.ELEMENT_TYPES[dtype])._name
        wide = torch.promote_types(dtype, torch.float32)
        checked = [
            "valgrind",
            "-q",
            "--error-exitcode=9",
            str(program),
            library,
            str(dtype.itemsize),
            str(wide.itemsize),
        ]
        done = subprocess.run(checked, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
