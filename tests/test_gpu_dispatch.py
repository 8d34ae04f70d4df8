"""When the Triton kernels run, what torch does with them, and what happens where they cannot be trusted."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import temper
from temper.norm import GAINS
from temper.ops import backend, gpu
from temper.ops.gpu import check, fold_check, launch, tiles
from temper.ops.plan import SiteSpec
from temper_lab.bench import gpu as measure
from temper_lab.cli.gpu_check import gpu_check
from test_fold import Site

pytestmark = pytest.mark.once
HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="no triton: `make test` installs it"
)


@needs_triton
@pytest.mark.parametrize(
    "name",
    [
        "autograd_and_folding",
        "mixer_alone",
        "compile_export_opcheck",
        "wrong_kernel",
        "compile_error",
        "nobody_asked",
        "gpu_check_command",
    ],
)
def test_behind_torch(name):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    environment.pop("TEMPER_BACKEND", None)
    code = [sys.executable, str(HERE / "triton_dispatch.py"), name]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def site():
    return temper.HyperConnection(temper.preset("temper-cp", num_streams=4, dim=16))


@pytest.fixture
def _fresh():
    caches = (gpu._obstacle, gpu._age, gpu._warn)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("has_triton", [True, False])
def test_without_triton_or_a_gpu_the_others_run(site, monkeypatch, has_triton):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_triton else None)
    with temper.use_backend("triton"):
        streams = torch.randn(3, 4, 16)
        with pytest.warns(RuntimeWarning, match="Triton kernels were asked for"):
            backend.choose(streams, site.spec, site.mixer)
        # Once: another warning would be an error.
        assert backend.choose(streams, site.spec, site.mixer) is backend.BACKENDS["cpu"]
        with temper.observe(site) as seen:
            site.begin(streams)
        assert seen.backends[""].startswith("cpu (not triton")
    info = temper.list_backends()[0]
    assert info.name == "triton"
    assert not info.available
    assert ("torch sees no GPU" if has_triton else "triton is not installed") in str(info)
    assert "not yet run on a GPU by us" in str(info)


@pytest.mark.usefixtures("_fresh")
def test_a_gpu_too_old_for_the_kernels_is_not_asked_about_the_others(site, monkeypatch):
    """The streams need not be on the current one."""
    ages = {0: (7, 0), 1: (9, 0)}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(ages))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: ages[device.index if device else 0])
    monkeypatch.setattr(check, "passes", lambda *_: True)
    tiles._target.cache_clear()
    old, new = (SimpleNamespace(dtype=torch.float32, device=torch.device("cuda", index)) for index in ages)
    assert "older" in gpu.refusal(site.spec, site.mixer, old, True)
    assert gpu.refusal(site.spec, site.mixer, new, True) is None
    ages[1] = (7, 5)
    gpu._age.cache_clear()
    gpu._obstacle.cache_clear()
    tiles._target.cache_clear()
    assert "every GPU" in gpu.unavailable()


@pytest.mark.usefixtures("_fresh")
def test_compilers_take_what_is_known_of_the_machine_as_constants():
    """Rather than trace the search for triton and the questions to the driver; a cached function would be a warning."""

    @torch.compile(fullgraph=True, backend="eager")
    def run(x):
        gpu.warn_if_unavailable()
        known = gpu.unavailable() or gpu.too_old(x.device)
        return x + (1 if known else 2) + len(tiles.target_of(x.device))

    with pytest.warns(RuntimeWarning, match="Triton kernels were asked for"):
        assert run(torch.zeros(3)).tolist() == [6.0] * 3


def test_distributed_streams_are_left_to_torch(site, monkeypatch):
    class Distributed(torch.Tensor):
        device_mesh = None

    monkeypatch.setattr(gpu, "unavailable", lambda: None)
    streams = torch.empty(3, 4, 16).as_subclass(Distributed)
    assert "DTensor" in gpu.refusal(site.spec, site.mixer, streams, True)


def test_temper_imports_without_triton():
    """And asks for nothing but torch."""
    code = "import sys; sys.modules['triton'] = None; import temper; print(*temper.list_backends(), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("gain", GAINS)
@pytest.mark.parametrize("names", [("dense", "cp", "tt"), ("cp", "tucker", "dense"), ("tucker", "tt", "cp")], ids=str)
def test_the_check_of_folding_knows_every_generator(names, gain):
    """In float64 but for the order of sums."""
    for modes in ((3, 3), (5,)):
        site = Site(*names, gain, 3, 7, modes)
        got = fold_check.definition_of(site.tensors, site.spec.generators)
        torch.testing.assert_close(got, site.plain()[:3], rtol=1e-12, atol=1e-12)
        assert [part.shape for part in fold_check.random_case(site.spec.generators, torch.float64, "cpu").raw] == [
            tensor.shape for tensor in site.tensors
        ]


@pytest.mark.parametrize(
    ("preset", "n", "options", "reason"),
    [
        ("hc", 4, {}, "tanh"),
        ("temper-cp", 17, {}, "2 to 16 streams"),
        ("kromhc", 7, {}, "1,024 logits"),
        ("kromhc", 14, {}, "1,024 logits"),
        ("mhc", 4, {"tol": 1e-3, "eps": 1e-3}, "with these options"),
        ("temper-tucker", 6, {}, None),
        ("mhc-lite", 6, {}, None),
    ],
)
def test_what_the_kernels_serve(preset, n, options, reason):
    site = temper.HyperConnection(temper.preset(preset, num_streams=n, dim=8, **options))
    found = gpu.unserved(site.spec, site.mixer, torch.bfloat16)
    assert (found is None) if reason is None else (reason in found)
    assert gpu.unserved(site.spec, site.mixer, torch.float16) is not None


def test_tiles_come_from_the_table_or_from_a_file(site, tmp_path, monkeypatch):
    assert tiles.tile("project", 4, "sm_90") == tiles.Tile(64, 64)
    assert tiles.tile("project", 4, "sm_100").tokens == 32
    for target in tiles.TARGETS:
        for padded in (2, 4, 8, 16):
            for name in tiles.NAMES:
                tile = tiles.tile(name, padded, target)
                assert all(number & (number - 1) == 0 for number in tile[:3]), (name, tile)
    file = tmp_path / "tiles.json"
    entry = {"streams": 4, "kernel": "read", "tile": [8, 128, 8, 2]}
    file.write_text(json.dumps({"tiles": {"sm_90": [entry]}}))
    monkeypatch.setenv(tiles.VARIABLE, str(file))
    tiles._table.cache_clear()
    try:
        assert tiles.tile("read", 4, "sm_90") == tiles.Tile(8, 128, 8, 2)
        assert tiles.tile("read", 8, "sm_90") == tiles.Tile(4, 256)
        for text in (
            "",
            "[]",
            json.dumps({"tiles": {"sm_90": [entry | {"kernel": "rm"}]}}),
            json.dumps({"tiles": {"sm_90": [entry | {"tile": [3, 128]}]}}),
            '{"tiles": {"sm_90": [1]}}',
        ):
            file.write_text(text)
            tiles._table.cache_clear()
            with pytest.raises(ValueError, match="gpu-check --tune"):
                tiles.tile("read", 4, "sm_90")
        # Not a failed check, which would only warn.
        spec, mixer = site.spec, site.mixer
        with pytest.raises(ValueError, match="TEMPER_TILES is"):
            check.passes(spec, mixer, torch.bfloat16, torch.device("cpu"))
        with pytest.raises(ValueError, match="TEMPER_TILES is"):
            measure.report(1, measure.Setting(torch.device("cpu"), (), ()))
    finally:
        tiles._table.cache_clear()


@pytest.mark.parametrize(("index", "entered"), [(0, []), (1, [1])])
def test_kernels_are_launched_on_the_gpu_of_their_tensors(index, entered, monkeypatch):
    """Triton launches on the current one, which another part of a model need not be on."""
    seen = []

    @contextmanager
    def enter(device):
        seen.append(device.index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", enter)
    monkeypatch.setattr(launch, "resolve", lambda entry: ({(1,): lambda **_: None}, {}))
    with FakeTensorMode():
        arguments = {"table": None, "T": 3, "x": torch.empty(3, device=f"cuda:{index}")}
    launch.run(launch.Launch("read", (1,), arguments, 4, 1))
    assert seen == entered


@pytest.mark.parametrize(
    ("num_streams", "dtype", "is_chained", "is_chained_backward"),
    [
        (4, torch.bfloat16, True, True),
        (16, torch.bfloat16, True, True),
        (4, torch.float32, True, True),
        (8, torch.float32, False, True),
        (16, torch.float32, False, False),
    ],
)
def test_sites_are_chained_where_the_kernels_fit(num_streams, dtype, is_chained, is_chained_backward):
    with torch.device("meta"), torch.no_grad():
        site = temper.HyperConnection(temper.preset("temper-cp", num_streams=num_streams, dim=64))
        folded, spec = site.fold(torch.float32), site.spec
        streams, y = torch.empty(32, num_streams, 64, dtype=dtype), torch.empty(32, 64, dtype=dtype)
        weights = torch.empty(32, spec.num_weights)
        with launch.recorded() as forward:
            _, routed = launch.finish_begin(streams, streams, y, weights, folded, spec)
        with launch.recorded() as backward:
            later = (streams, y, weights, streams, folded, routed)
            launch.finish_begin_backward(*later, streams, y, weights, spec)
    forward, backward = ([entry.kernel for entry in found] for found in (forward, backward))
    assert ("write_project" in forward) == is_chained == ("project" not in forward)
    assert ("streams_write_backward" in backward) == is_chained_backward == ("streams_backward" not in backward)


@pytest.mark.parametrize("num_streams", [2, 3, 4, 8, 16])
def test_the_self_check_runs_every_loop(num_streams, monkeypatch):
    """As large sites do, at the tiles of every GPU: what is split is split, and no loop ends before its third round."""
    # No kernel runs, so no number matters.
    monkeypatch.setattr(torch, "randn", lambda shape, **_: torch.zeros(shape))
    monkeypatch.setattr(check, "definition", lambda *_: {})
    monkeypatch.setattr(check, "fold_errors", lambda *_: {})
    monkeypatch.setattr(check, "_found", {})
    site, seen = temper.HyperConnection(temper.preset("temper-cp", num_streams=num_streams, dim=4096)), set()
    # Tiles of float32 streams have half as many features.
    for target in tiles.TARGETS:
        monkeypatch.setattr(tiles, "target_of", lambda device, target=target: target)
        check._found.clear()
        with launch.recorded() as found:
            assert check.passes(site.spec, site.mixer, torch.bfloat16, torch.device("cpu"))
        ((_, spec, _),) = check._found
        for name, grid, given, *_ in found:
            seen.add(name)
            if "CHUNK" in given:
                assert grid[1] >= 2, (target, name)
                assert given["CHUNK"] // given.get("BF", given.get("BD")) >= 3, (target, name)
            elif name.startswith(("read_backward", "write_backward", "streams_write_backward")):
                assert spec.dim > 2 * given["BD"], (target, name)
            # Without parts nothing is summed over tokens.
            elif "TILES" in given and given.get("HAS_PARTS", True):
                assert given["TILES"] >= 3, (target, name)
                assert given["TILES"] * given["BT"] < check.TOKENS, (target, name)
    assert {"project", "write_project", "heads_backward", "maps_backward", "streams_backward"} <= seen


def test_a_remembered_check_makes_no_spec(site, monkeypatch):
    """Every forward pass of every site asks for it."""
    ask = functools.partial(check.passes, site.spec, site.mixer, torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(check, "_difference", lambda *_: None)
    monkeypatch.setattr(check, "_found", {})
    assert ask()
    monkeypatch.setattr(SiteSpec, "__post_init__", None)
    assert ask()


@pytest.mark.parametrize(
    ("num_streams", "generator", "passes"), [(4, "cp", 3), (4, "dense", 4), (8, "cp", 3), (16, "cp", 4)]
)
def test_the_gradient_of_few_map_rows_takes_no_pass_of_its_own(num_streams, generator, passes):
    """The backward of `begin` reads the streams that often, or their gradient, and writes their gradient once."""
    with torch.device("meta"), torch.no_grad():
        config = temper.preset("temper-cp", num_streams=num_streams, dim=64, generator=generator)
        site = temper.HyperConnection(config)
        folded, spec = site.fold(torch.float32), site.spec
        streams, x = torch.empty(32, num_streams, 64, dtype=torch.bfloat16), torch.empty(32, 64, dtype=torch.bfloat16)
        with launch.recorded() as found:
            _, routed = launch.begin(streams, folded, spec)
            del found[:]
            launch.begin_backward(streams, x, routed.weights, streams, folded, routed, spec)
    shaped = [
        tensor for entry in found for tensor in entry.arguments.values() if getattr(tensor, "shape", 0) == streams.shape
    ]
    assert len(shaped) == passes + 1


def test_tuning_times_one_kernel_and_takes_no_tile_that_is_wrong(monkeypatch):
    wrong, runs, timed = {32: float("nan"), 128: 2.0}, [], []

    def kernel(x, name, dim, BD=0):
        x.fill_(wrong.get(BD, 1.0))
        runs.append((name, dim, BD))

    def results(case, spec):
        x = torch.zeros(3)
        launch.run(launch.Launch("write", (1,), {"x": x, "name": "write", "dim": spec.dim}, 4, 3))
        features = tiles.tile("read", 4, "sm_90").features
        launch.run(launch.Launch("read", (1,), {"x": x, "name": "read", "dim": spec.dim, "BD": features}, 4, 3))
        return {"x": x}

    def clock(call, *_):
        del runs[:]
        call()
        timed.extend(runs)
        # The earlier the faster.
        return [len(timed)]

    def resolve(entry):
        return {(1,): lambda num_warps, num_stages, **given: kernel(**given)}, entry.arguments

    monkeypatch.setattr(launch, "resolve", resolve)
    monkeypatch.setattr(check, "results", results)
    monkeypatch.setattr(measure, "clock", clock)
    monkeypatch.setattr(measure, "_TRIED", {"read": [(4, features, 4, 3) for features in (32, 128, 64, 16)]})
    found = measure.tune(1, measure.Setting(torch.device("cpu"), (), ((4, 16, 5), (4, 32, 5))))["tiles"]["sm_90"]
    assert found == [{"streams": 4, "kernel": "read", "tile": [4, 64, 4, 3]}]
    # At the larger size, and nothing but the kernel whose tile it is.
    assert timed == [("read", 32, 64), ("read", 32, 16)]


class Lost(torch.Tensor):
    """A result on a GPU where a kernel has read what it must not, which is noticed whenever it is next waited for."""

    def cpu(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_an_error_that_comes_late_does_not_cost_the_report(monkeypatch):
    monkeypatch.setattr(check, "results", lambda case, spec: {"x": torch.zeros(3).as_subclass(Lost)})
    monkeypatch.setattr(fold_check, "results", lambda case: {})
    setting = measure.Setting(torch.device("cpu"), (("temper-cp", 2, 16, 5),), ((2, 16, 5),))
    found = measure.report(1, setting)
    assert [row["is_right"] for row in found["right"]] == [False, False]
    assert "illegal memory access" in found["right"][0]["error"]
    monkeypatch.setattr(measure, "right", lambda *_: {"is_right": True})
    monkeypatch.setattr(measure, "_ways", lambda *_: Lost(3).cpu())
    found = measure.report(1, setting)
    assert found["is_right"]
    assert "illegal memory access" in found["fast"]["error"]
    measure.show(found)


def test_a_report_is_written_before_anything_is_timed(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "unavailable", lambda: None)
    monkeypatch.setattr(gpu, "too_old", lambda device: None)
    monkeypatch.setattr(measure, "full", lambda: measure.Setting(torch.device("cpu"), (), ()))
    monkeypatch.setattr(measure, "fast", stop)
    with pytest.raises(KeyboardInterrupt):
        gpu_check(tmp_path / "gpu.json")
    assert json.loads((tmp_path / "gpu.json").read_text())["is_right"]
