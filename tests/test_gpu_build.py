"""The Triton kernels compiled ahead of time for GPUs that are not here: what the interpreter cannot see."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton: `make test` installs it"),
]
HERE = Path(__file__).parent
NVIDIA = ["sm_80", "sm_90", "sm_100"]
# Room below 255, because the next compiler needs some more; and what an sm_86 or sm_89 can load.
REGISTERS, SHARED = 170, 99 * 1024
KERNELS = {
    "fold",
    "fold_backward",
    "fold_small_backward",
    "split_maps",
    "project",
    "route",
    "read",
    "write_backward",
    "read_backward",
    "route_backward",
    "streams_backward",
    "maps_backward",
    "heads_backward",
    "add_heads",
    "write",
    "write_project",
    "streams_write_backward",
    "mix",
    "mix_backward",
}


def build(target, *sites):
    path = os.pathsep.join([str(HERE), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    # Compiled once for every source and version: the second run takes nothing.
    environment.setdefault("TRITON_CACHE_DIR", str(Path(sys.prefix) / "triton-cache"))
    request = json.dumps({"target": target, "sites": sites})
    code = [sys.executable, str(HERE / "triton_build.py"), request]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_fit(rows, registers=REGISTERS):
    wrong = [
        row
        for row in rows
        if "error" in row
        or row["registers"] > registers
        or row["spills"]
        or row["shared"] > SHARED
        or row["atomics"]
        # Products of float32 are three of TF32, which is as good; bfloat16 needs none at all.
        or "tf32" in row["precisions"]
        or (row["tf32"] and "tf32x3" not in row["precisions"])
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("target", NVIDIA)
def test_every_kernel_compiles_and_fits(target):
    rows = build(target, {"n": 4})
    assert {row["kernel"] for row in rows} == KERNELS
    # A number that is one is compiled in, unless the kernel is not to be specialized for it.
    ones = {row["kernel"]: row["ones"] for row in rows if row.get("ones")}
    assert ones == {"project": ["BLOCKS"], "maps_backward": ["BLOCKS"]}
    assert_fit(rows)


MIXERS = {
    "sinkhorn": "cp",
    "sinkhorn, columns": "dense",
    "newton": "tucker",
    "kronecker": "tt",
    "unconstrained": "cp",
    "birkhoff": "cp",
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 16])
def test_every_kernel_of_every_number_of_streams_fits(n, target, dtype):
    mixers = {mixer: generator for mixer, generator in MIXERS.items() if not (mixer == "birkhoff" and n > 6)}
    assert_fit(build(target, *({"n": n, "mixer": m, "generator": g, "dtype": dtype} for m, g in mixers.items())))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_every_kernel_fits_an_amd_gpu(n):
    assert_fit(build("gfx942", {"n": n}), registers=256)
