"""The work of `temper gpu-check`: compares every case with float64 on this GPU, then times it."""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import temper
from temper.ops import fused
from temper.ops.gpu import check, fold_check, launch, tiles
from temper.ops.plan import FoldedWeights, SiteSpec
from temper_lab.bench import gpu_peers
from temper_lab.console import waiting

# The operations of one implementation.
Calls = dict[str, Callable[[], Any]]
# Larger than any cache; written before every round to flush it.
FLUSH = 256 * 2**20


class Case(NamedTuple):
    """A site to check.

    Args:
        options: overrides of the preset.
        other_y: whether branch outputs have the other dtype than the streams, as under autocast.
    """

    preset: str
    num_streams: int
    dim: int
    tokens: int
    options: Mapping[str, Any] = MappingProxyType({})
    other_y: bool = False


class Setting(NamedTuple):
    """The sizes to check and time; a small setting tries the command in Triton's interpreter.

    Args:
        cases: as `Case` takes them.
        sizes: (streams, features, tokens), in bfloat16.
    """

    device: torch.device
    cases: tuple[tuple[Any, ...], ...]
    sizes: tuple[tuple[int, int, int], ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def full() -> Setting:
    cases = [Case("temper-cp", n, d, t) for n, d, t in ((2, 96, 33), (3, 200, 65), (4, 768, 1031), (8, 768, 515))]
    # As many tokens as are timed, for the loops over them.
    cases += [Case("temper-cp", 16, 768, 130), Case("temper-cp", 4, 768, 8192), Case("temper-cp", 8, 512, 8192)]
    cases += [Case("mhc", 4, 1000, 257), Case("temper-tucker", 8, 1536, 129), Case("mhc", 8, 768, 65)]
    cases += [Case("temper-tt", 6, 320, 77), Case("kromhc", 8, 768, 129), Case("mhc-lite", 4, 768, 129)]
    # Most of these share all kernels but those of the routing with the cases above, and compile only these two.
    mixers: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (4, 768, {"name": "sinkhorn", "last": "columns"}),
        (8, 768, {"name": "sinkhorn", "iters": 30, "tol": 1e-5}),
        (4, 768, {"name": "sinkhorn", "method": "newton"}),
        (3, 200, {"name": "sinkhorn", "method": "newton", "last": "columns"}),
        (4, 768, {"name": "sinkhorn", "eps": 1e-2}),
        (8, 768, {"name": "sinkhorn", "eps": 1e-3, "last": "columns"}),
        (4, 768, {"name": "identity"}),
        (12, 192, {"name": "unconstrained"}),
    )
    cases += [Case("temper-cp", n, d, 129, {"mixer": mixer}) for n, d, mixer in mixers]
    cases += [Case("temper-cp", n, 768, 65, other_y=True) for n in (4, 8, 16)]
    # Fewer tokens of 16 streams, for GPUs with less memory.
    sizes = ((2, 4096, 8192), *((n, d, 8192) for n in (4, 8) for d in (768, 4096)), (16, 4096, 4096))
    return Setting(torch.device("cuda"), tuple(case for case in cases if _is_preset(case.preset)), sizes)


def _is_preset(name: str) -> bool:
    return name in temper.PRESETS


def report(
    rounds: int, setting: Setting | None = None, keep: Callable[[dict[str, Any]], None] = lambda found: None
) -> dict[str, Any]:
    """The complete report as plain JSON.

    Args:
        keep: is given the report without times, before anything is timed.
    """
    setting = setting or full()
    tiles.check_file(setting.device)
    begun, known = time.time(), about(setting.device)
    with waiting("checking") as say:
        rows = [right(Case(*case), dtype, setting.device, say) for case in setting.cases for dtype in setting.dtypes]
        is_right = all(row["is_right"] for row in rows)
        found = {"about": known, "is_right": is_right, "right": rows, "fast": None}
        keep(found)
        # Wrong kernels are not timed.
        times = fast(setting, rounds, say) if is_right else None
    return found | {"fast": times, "seconds": round(time.time() - begun, 1)}


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def about(device: torch.device) -> dict[str, Any]:
    """The versions and the hardware."""
    facts: dict[str, Any] = {
        "temper": temper.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for package in ("triton", *(peer.package for peer in gpu_peers.PEERS)):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    facts["target"] = tiles.target_of(device)
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    facts |= {"gpu": properties.name, "memory": properties.total_memory, "processors": properties.multi_processor_count}
    facts |= {"capability": list(torch.cuda.get_device_capability(device))}
    facts |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        facts["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        facts["driver"] = None
    return facts


def right(
    case: Case, dtype: torch.dtype, device: torch.device, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Checks one case: errors against the definition in float64 on the CPU, and whether two runs give the same bits."""
    preset, num_streams, dim, tokens, options, other_y = case
    row = {"preset": preset, "streams": num_streams, "dim": dim, "tokens": tokens, "dtype": str(dtype)[6:]}
    row |= {**options} | ({"other_y": True} if other_y else {})
    say(", ".join(map(str, row.values())))
    try:
        return row | _compared(case, dtype, device)
    # A compiler that fails is what this command is to find. So is a kernel that does, which may be noticed anywhere
    # from there on, in later cases too.
    except Exception as error:
        return row | {"is_right": False, "error": _text(error)}


def _compared(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    config = temper.preset(case.preset, num_streams=case.num_streams, dim=case.dim, **case.options)
    site = temper.HyperConnection(config)
    spec = _spec(site)
    assert spec.generators is not None
    given = check.random_case(spec, dtype, device, case.tokens)
    if case.other_y:
        given["y"] = given["y"].to(torch.float32 if dtype == torch.bfloat16 else torch.bfloat16)
    # Routing is float32 whatever the dtype of the streams.
    weights = fold_check.random_case(spec.generators, torch.float32, device)
    with torch.no_grad():
        got, again = (check.results(given, spec) | fold_check.results(weights) for _ in range(2))
    got, again, given = ({name: value.cpu() for name, value in found.items()} for found in (got, again, given))
    errors = check.worst(got, check.definition(given, spec, site.mixer))
    fold_errors = check.worst(got, fold_check.definition(weights.cpu()))
    same = all(torch.equal(got[name], again[name]) for name in got)
    # The gradient of y has the dtype of y.
    allowed = {name: max(check.TOLERANCES[kind] for kind in (dtype, got[name].dtype)) for name in errors}
    ok = same and all(error <= allowed[name] for name, error in errors.items())
    ok = ok and all(error <= check.TOLERANCES[torch.float32] for error in fold_errors.values())
    return {"is_right": ok, "same_bits": same, "errors": errors, "fold_errors": fold_errors}


def _spec(site: temper.HyperConnection) -> SiteSpec:
    assert site.spec is not None
    return site.spec


def clock(call: Callable[[], Any], device: torch.device, rounds: int) -> list[float]:
    """The sorted milliseconds of all rounds, with a cold cache."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return [1e3 * (time.perf_counter() - start)]
    flush = torch.empty(FLUSH, dtype=torch.int8, device=device)
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        flush.zero_()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return sorted(times)


def fast(setting: Setting, rounds: int, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Times every operation, and gives the fraction of the memory bandwidth that the least bytes correspond to.

    An error ends it; the times so far are kept.
    """
    found: dict[str, Any] = {"copy_bytes_per_second": None, "rows": []}
    try:
        _time_all(found, setting, rounds, say)
    except Exception as error:
        found["error"] = _text(error)
    return found


def _time_all(found: dict[str, Any], setting: Setting, rounds: int, say: Callable[[str], None]) -> None:
    device = setting.device
    source = torch.empty(2**28 if device.type == "cuda" else 2**12, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = statistics.median(clock(lambda: target.copy_(source), device, rounds))
    bandwidth = found["copy_bytes_per_second"] = 2 * source.numel() / (copy * 1e-3)
    for num_streams, dim, tokens in setting.sizes:
        say(f"timing N={num_streams}, D={dim}")
        site = temper.HyperConnection(temper.preset("temper-cp", num_streams=num_streams, dim=dim)).to(device)
        floor = {"unchained": 8 * num_streams + 5, "chained": 6 * num_streams + 5}
        unit = tokens * dim * 2
        for name, calls in _ways(site, tokens, device).items():
            least = floor["chained" if "chained" in name else "unchained"] * unit / bandwidth
            row = {"way": name, "streams": num_streams, "dim": dim, "tokens": tokens}
            times = {"error": calls} if isinstance(calls, str) else _timed(calls, least, device, rounds)
            found["rows"].append(row | times)


def _timed(calls: Calls, least: float, device: torch.device, rounds: int) -> dict[str, Any]:
    """The times of all parts, or the error: a compiler that fails, or another package, should not cost the report."""
    try:
        times = {part: clock(call, device, rounds) for part, call in calls.items()}
    except Exception as error:
        return {"error": _text(error)}
    total = sum(statistics.median(values) for values in times.values())
    parts = {part: {"median": statistics.median(values), "min": values[0]} for part, values in times.items()}
    return {"total_ms": total, "ms": parts, "share_of_floor": least / (total * 1e-3)}


def _ways(site: temper.HyperConnection, tokens: int, device: torch.device) -> dict[str, Calls | str]:
    """The operations of a site by name, for every implementation; whole sites, with autograd and folding, too."""
    spec, mixer = _spec(site), site.mixer
    case = check.random_case(spec, torch.bfloat16, device, tokens)
    streams, y, in_map, out, bias, grad, d_x, d_weights = case.values()
    folded = FoldedWeights(in_map, out, bias)
    spare = torch.empty_like(streams)
    with torch.no_grad():
        _, routed = launch.begin(streams, folded, spec)
        _, other = fused.begin(streams, folded, spec, mixer)
    earlier = (streams, y, routed.weights)
    triton: dict[str, Callable[[], Any]] = {
        "begin": lambda: launch.begin(streams, folded, spec),
        "finish": lambda: launch.finish(spare, *earlier, spec),
        "finish_backward": lambda: launch.finish_backward(grad, *earlier, spec),
        "begin_backward": lambda: launch.begin_backward(grad, d_x, d_weights, streams, folded, routed, spec),
    }
    later = (grad, d_x, d_weights, streams, folded, routed)
    chained: dict[str, Callable[[], Any]] = {
        "finish_begin": lambda: launch.finish_begin(spare, *earlier, folded, spec),
        "finish_begin_backward": lambda: launch.finish_begin_backward(*later, *earlier, spec),
    }
    plain: dict[str, Callable[[], Any]] = {
        "begin": lambda: fused.begin(streams, folded, spec, mixer),
        "finish": lambda: fused.finish(streams, y, other.weights, spec),
        "finish_backward": lambda: fused.finish_backward(grad, streams, y, other.weights, spec),
        "begin_backward": lambda: fused.begin_backward(grad, d_x, d_weights, streams, folded, other, spec, mixer),
    }
    ways: dict[str, Calls | str] = {"triton": triton, "triton, chained": chained, "fused": plain}
    for backend in ("triton", "fused"):
        ways[f"{backend}, site"] = {"site": _whole(_around(site), backend, streams, y, grad)}
    if device.type == "cuda":
        compiled = torch.compile(_around(site))
        ways["fused, site, compiled"] = {"site": _whole(compiled, "fused", streams, y, grad)}
    peers = gpu_peers.steps(streams, y, grad).items()
    return ways | {f"{name}, site": step if isinstance(step, str) else {"site": step} for name, step in peers}


def _around(site: temper.HyperConnection) -> gpu_peers.Site:
    def run(streams: Tensor, y: Tensor) -> Tensor:
        x, state = site.begin(streams)
        return site.finish(state, x + y)

    return run


def _whole(run: gpu_peers.Site, backend: str, streams: Tensor, y: Tensor, grad: Tensor) -> Callable[[], None]:
    def step() -> None:
        leaf = streams.detach().requires_grad_()
        with temper.use_backend(backend), torch.enable_grad():
            run(leaf, y).backward(grad)

    return step


def show(found: dict[str, Any]) -> None:
    """The report in a few lines."""
    wrong = [row for row in found["right"] if not row["is_right"]]
    print(f"{len(found['right']) - len(wrong)} of {len(found['right'])} cases are right")
    for row in wrong:
        print("WRONG:", {key: value for key, value in row.items() if key != "is_right"})
    times = found["fast"] or {"rows": []}
    for row in times["rows"]:
        place = f"N={row['streams']} D={row['dim']} {row['way']:24}"
        if "error" in row:
            print(f"{place} did not run: {row['error']}")
            continue
        print(f"{place} {row['total_ms']:8.3f} ms, {row['share_of_floor']:.0%} of the floor's speed")
    if "error" in times:
        print(f"an error ended the timing: {times['error']}")


# The candidates of --tune: tokens, features, warps, stages.
_TRIED: dict[str, Iterable[tuple[int, int, int, int]]] = {
    "read": tuple(itertools.product((1, 2, 4, 8), (128, 256, 512), (2, 4, 8), (3,))),
    "write": tuple(itertools.product((1, 2, 4, 8), (64, 128, 256), (2, 4, 8), (3,))),
    "read_backward": tuple(itertools.product((2, 4, 8), (128, 256), (2, 4, 8), (2, 3))),
    "write_backward": tuple(itertools.product((2, 4), (64, 128, 256), (4, 8), (2, 3))),
    "project": tuple(itertools.product((16, 32, 64, 128), (64, 128), (2, 4, 8), (2, 3, 4))),
    "streams_backward": tuple(itertools.product((16, 32), (32, 64, 128), (4, 8), (1,))),
    "maps_backward": tuple(itertools.product((32, 64, 128), (64, 128), (4, 8), (2, 3))),
    "write_project": tuple(itertools.product((16, 32), (16, 32, 64), (4, 8, 16), (1, 2))),
    "streams_write_backward": tuple(itertools.product((16,), (16, 32, 64), (4, 8, 16), (1, 2))),
}


def tune(rounds: int, setting: Setting | None = None) -> dict[str, Any]:
    """The fastest tiles of every kernel that touches streams; only those that give the right results count.

    For every number of streams at its last size, where the bytes count most.
    """
    setting = setting or full()
    device, target = setting.device, tiles.target_of(setting.device)
    entries: list[dict[str, Any]] = []
    with waiting("tuning") as say:
        for num_streams, dim, tokens in reversed(setting.sizes):
            if any(entry["streams"] == launch.power(num_streams, 2) for entry in entries):
                continue
            spec = _spec(temper.HyperConnection(temper.preset("temper-cp", num_streams=num_streams, dim=dim)))
            case = check.random_case(spec, torch.bfloat16, device, tokens)
            wanted = check.results(case, spec)
            padded = launch.power(num_streams, 2)
            for kernel, tried in _TRIED.items():
                say(f"N={num_streams}, {kernel}")
                tile = _fastest(kernel, tried, case, spec, wanted, rounds, device)
                if tile is not None:
                    entries.append({"streams": padded, "kernel": kernel, "tile": list(tile)})
    return {"about": about(device), "tiles": {target: entries}}


def _fastest(
    kernel: str,
    tried: Iterable[tuple[int, int, int, int]],
    case: dict[str, Tensor],
    spec: SiteSpec,
    wanted: dict[str, Tensor],
    rounds: int,
    device: torch.device,
) -> tiles.Tile | None:
    best: tuple[float, tiles.Tile] | None = None
    for numbers in tried:
        tile = tiles.Tile(*numbers)
        try:
            with tiles.trying(kernel, tile), torch.no_grad():
                if not _is_close(check.results(case, spec), wanted):
                    continue
                with launch.recorded() as launches:
                    check.results(case, spec)
                # Everything once, or the kernel would read what was never written.
                _run_all(launches)
            # Two kernels do the same for different numbers of streams.
            own = [entry for entry in launches if entry.kernel.removesuffix("_rows").removesuffix("_dot") == kernel]
            taken = statistics.median(clock(partial(_run_all, own), device, rounds))
        except Exception:  # tiles that do not fit are no news
            continue
        if best is None or taken < best[0]:
            best = (taken, tile)
    return None if best is None else best[1]


def _run_all(launches: Iterable[launch.Launch]) -> None:
    for entry in launches:
        launch.run(entry)


def _is_close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    # One result at a time, as doubles take memory. Not "is larger": what is not a number is wrong too.
    return all(
        error <= check.TOLERANCES[torch.bfloat16]
        for name in wanted
        for error in check.worst(got, {name: wanted[name].double()}).values()
    )
