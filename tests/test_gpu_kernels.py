"""The Triton kernels in the interpreter, against the definition in float64: values, gradients, races, bounds, offsets.

Every process runs several cases, because starting one costs as much as a case.
"""

import importlib.util
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cases
from temper.ops.plan import MIXER_KINDS

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton: `make test` installs it"),
]
HERE = Path(__file__).parent
# In units of the largest entry; in float32 beyond the error of plain torch in float32, in bfloat16 one rounding.
TOLERANCES = {"float64": 1e-10, "float32": 1e-6, "bfloat16": 2**-8}
# Float32 results of bfloat16 streams: products with the other factor in two parts, half of which would be noticed.
UNROUNDED = dict.fromkeys(("weights", "z", "norms", "d_weights", "d_in_map", "d_out", "d_bias"), 2**-16)


def interpret(*arguments):
    path = os.pathsep.join([str(HERE), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("TEMPER_BACKEND", None)
    code = [sys.executable, str(HERE / "triton_interpreter.py"), *arguments]
    return subprocess.run(code, env=environment, capture_output=True, text=True, check=False)


def assert_right(*wanted, side="end"):
    """Runs cases with guard pages at one side of every tensor."""
    done = interpret(json.dumps(wanted), side)
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = []
    for case, errors in zip(wanted, json.loads(done.stdout), strict=True):
        wrong += [(case, too_large(errors, case.get("dtype", "float64")))]
    assert not any(errors for _, errors in wrong), [entry for entry in wrong if entry[1]]


def too_large(errors, dtype):
    tolerances = dict.fromkeys(errors, TOLERANCES[dtype]) | (UNROUNDED if dtype == "bfloat16" else {})
    # Not "is larger": what is not a number is wrong too.
    return {name: error for name, error in errors.items() if not error <= tolerances[name]}


def case(n, mixer="sinkhorn", generator="cp", dtype="float64", **more):
    return {"n": n, "mixer": mixer, "generator": generator, "dtype": dtype, **more}


# Together every mixer, every generator, every padding of N and every dtype; each through all operations.
COVERING = {
    "sinkhorn": [
        case(4, twice=True, tokens=37),
        case(3, "sinkhorn, columns", "tucker"),
        case(4, "sinkhorn", "tucker", "bfloat16", dim=80),
        case(6, "guarded", "dense"),
        case(5, "sinkhorn, tol", "tt", "float32", tokens=7),
    ],
    "other mixers": [
        case(4, "newton", tokens=9),
        case(2, "unconstrained", "dense", "bfloat16"),
        case(4, "birkhoff", "tt", tokens=9),
        case(6, "kronecker", "tucker", tokens=9),
        case(3, "newton, columns", "dense", "float32", tokens=9),
    ],
    "many streams": [
        case(8, "sinkhorn", "tt", "bfloat16"),
        case(16, "sinkhorn", "cp", tokens=7),
        # More features than one program projects.
        case(16, "identity", "cp", dim=136, tokens=3),
        case(8, "kronecker", "dense", "float32", tokens=9),
        case(9, "guarded, columns", "cp", "bfloat16", tokens=5),
    ],
    "unusual": [
        *({"run": "change", "change": change} for change in ("without grad", "without d_x", "without d_weights")),
        {"run": "change", "change": "without grad and d_x"},
        {"run": "change", "change": "wide logits", "n": 3},
        {"run": "change", "change": "strided"},
        {"run": "change", "change": "another y", "dtype": "bfloat16"},
        {"run": "change", "change": "no tokens"},
        {"run": "change", "change": "without d_x and d_weights", "norm_clamp": True, "norm_eps": 0.9},
        {"run": "in place", "n": 4, "dtype": "float32"},
        {"run": "mixer", "n": 3, "mixer": "birkhoff", "dtype": "float64"},
        {"run": "mixer", "n": 6, "mixer": "newton", "dtype": "float64"},
        {"run": "mixer", "n": 5, "mixer": "guarded", "dtype": "bfloat16"},
        {"run": "change", "change": "two parts"},
        {"run": "between", "n": 4, "dtype": "bfloat16"},
    ],
    "folding": [
        {"run": "fold", "names": ["cp", "tucker", "tt"], "gain": "rank-one", "n": 3, "dim": 5, "modes": [3, 3]},
        {"run": "fold", "names": ["tt", "cp", "tucker"], "gain": "full", "n": 2, "dim": 130, "modes": [2, 2]},
        {"run": "fold", "names": ["dense", "tt", "cp"], "gain": "feature", "n": 4, "dim": 5, "modes": [6]},
        {"run": "fold", "names": ["dense", "dense", "dense"], "gain": "none", "n": 2, "dim": 7, "modes": [2, 2]},
    ],
}


@pytest.mark.parametrize("name", COVERING)
def test_kernels_are_the_definition(name):
    assert_right(*COVERING[name])


def test_all_mixers_are_covered():
    sites = [entry for group in COVERING.values() for entry in group if "run" not in entry]
    kinds = {cases.make(site["mixer"], site["n"]).spec.mixer.kind for site in sites}
    assert kinds == set(MIXER_KINDS)


def test_no_kernel_touches_a_byte_before_its_buffers():
    """Above they end at the page that may not be touched."""
    assert_right(
        case(3, "sinkhorn", "cp", "bfloat16", dim=33, tokens=5),
        case(8, "sinkhorn", "dense", "float32", dim=33, tokens=3),
        case(16, "identity", "cp", "bfloat16", dim=9, tokens=3),
        {"run": "mixer", "n": 4, "mixer": "birkhoff", "dtype": "float64"},
        {"run": "fold", "names": ["cp", "tucker", "tt"], "gain": "rank-one", "n": 3, "dim": 5, "modes": [3, 3]},
        side="start",
    )


def test_a_step_outside_a_buffer_is_noticed():
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    assert interpret("step too far").returncode == -signal.SIGSEGV


GRID = [
    (mixer, n)
    for mixer, n in itertools.product(cases.MIXERS, (2, 3, 4, 6, 8, 16))
    if not (mixer == "birkhoff" and n > 6)
]


@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "n"), GRID)
def test_the_whole_grid(mixer, n):
    cells = itertools.product(("cp", "tucker", "tt", "dense"), TOLERANCES)
    # Some 64 numbers a token at every N: the rounding of a float32 sum grows with its terms.
    size = {"dim": 64 // n, "tokens": 9}
    assert_right(*(case(n, mixer, generator, dtype, **size) for generator, dtype in cells))


@pytest.mark.slow
@pytest.mark.parametrize("gain", ["full", "rank-one", "feature", "none"])
@pytest.mark.parametrize(
    "names", [["cp"] * 3, ["tucker"] * 3, ["tt"] * 3, ["dense"] * 3, ["cp", "tucker", "tt"]], ids=str
)
def test_every_fold(names, gain):
    shapes = ((2, 24, [2, 2]), (3, 7, [6]), (4, 150, [4, 4]), (6, 9, [6, 6]))
    assert_right(
        *({"run": "fold", "names": names, "gain": gain, "n": n, "dim": dim, "modes": m} for n, dim, m in shapes)
    )
