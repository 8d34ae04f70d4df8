"""The content of a results.json, made up: nothing was trained."""

import json
import random

import temper
from temper_lab import recipe as recipes
from temper_lab.report.view import StudyView
from temper_lab.report.write import compute
from temper_lab.study.results import Results
from temper_lab.study.vary import ordered, suffix

MODEL = {"depth": 3, "vocab_size": 2048, "context": 256, "head_dim": 64}
STEPS, VAL_EVERY = 120, 15
WIDTH, SITES = 192, 6


def run_entry(
    method="temper-cp", streams=4, seed=0, *, bpb=2.0, status="finished", reason=None, core=None, vary=None, **options
):
    """One run; its curves come down to `bpb` with some noise of its own.

    Args:
        vary: the fields in which its recipe differs.
    """
    vary = vary or {}
    label = "".join([method, *(f"-{key}{value}" for key, value in options.items())])
    asked = ":".join([method, ",".join(f"{key}={value}" for key, value in options.items())]).rstrip(":")
    streams = 1 if method == "residual" else streams
    rng = random.Random(f"{label} {streams} {seed}")
    config = temper.preset(method, num_streams=streams, dim=WIDTH, **options)
    counts = [SITES * temper.count_parameters(config, include_frozen=frozen) for frozen in (False, True)]
    is_finished = status == "finished"
    steps = list(range(1, STEPS + 1)) if is_finished else []
    loss = [2.1 * bpb + 3 * 0.96**step + rng.gauss(0, 0.05) for step in steps]
    val_steps = list(range(VAL_EVERY, STEPS + 1, VAL_EVERY)) if is_finished else []
    val = [bpb + 0.9 * (1 - step / STEPS) ** 2 + rng.gauss(0, 0.002) for step in val_steps[:-1]] + [bpb] * is_finished
    routing = {}
    if is_finished and streams > 1:
        # A mixer that is the identity stays it; the others leave it, each at a pace of its own.
        pace = 0 if method == "mhc-identity" else rng.uniform(0.9, 1.1) * (1 + len(method) / 40)
        routing["routing"] = {
            "step": val_steps,
            "res_off_diagonal": [1e-3 * pace * (1 + (step / 20) ** 2) for step in val_steps],
            "composite_gain": [1.0 + rng.gauss(0, 1e-7) for _ in val_steps],
            "composite_backward_gain": [1.0 + 1e-4 * step for step in val_steps],
            "stream_similarity": [1 - 0.004 * step * rng.uniform(0.95, 1.05) for step in val_steps],
        }
    final = {"train_loss": sum(loss[-12:]) / 12, "val_loss": 2.3 * bpb, "bpb": bpb} if is_finished else None
    return {
        "key": f"{label}-n{streams}-s{seed}{suffix(tuple(vary.items()))}",
        "method": asked,
        "preset": method,
        "options": options,
        "label": label,
        "streams": streams,
        "seed": seed,
        "vary": vary,
        "status": status,
        "reason": reason,
        "parameters": {"total": 2_113_536 + counts[1], "added": counts[0], "frozen": counts[1] - counts[0]},
        "flops_per_token": None,
        "step": len(steps),
        "steps": STEPS,
        "tokens": 4096 * len(steps),
        "train": {"step": steps, "loss": loss},
        "val": {"step": val_steps, "bpb": val, "loss": [2.3 * value for value in val]},
        "final": final,
        **routing,
        "core": None
        if core is None
        else {"CORE": core, "tasks": {"copa": core + 0.1, "piqa": {"centered": core - 0.1}}},
        "timing": {"step_seconds": 0.81, "tokens_per_second": 5056.8, "seconds": 97.2} if is_finished else None,
    }


def results(runs, *, cost=None, **changes):
    """A study of these runs."""
    recipe = recipes.load("cpu-smoke").to_dict()
    recipe["model"] |= MODEL
    recipe["train"] |= {"steps": STEPS, "batch_tokens": 4096}
    fields = dict.fromkeys(name for run in runs for name in run["vary"])
    axes = {name: [run["vary"].get(name, _of(recipe, name)) for run in runs] for name in fields}
    return {
        "format": "temper-results-1",
        "study": "made-up",
        "command": "temper compare --recipe made-up --out made-up",
        "commit": "0123abcd+changes",
        "versions": {"temper": temper.__version__, "torch": "2.13.0", "python": "3.11.7"},
        "machine": {"cpu": "a made-up CPU", "cores": 2, "memory_gb": 24, "system": "Linux"},
        "recipe": recipe,
        "methods": list(dict.fromkeys(run["method"] for run in runs)),
        "streams": sorted({run["streams"] for run in runs if run["preset"] != "residual"}),
        "seeds": sorted({run["seed"] for run in runs}),
        "vary": {name: list(ordered(values)) for name, values in axes.items()},
        "runs": runs,
        "cost": cost,
        **changes,
    }


def loaded(raw):
    return Results.from_dict(json.loads(json.dumps(raw)))


def viewed(raw):
    return StudyView.of(loaded(raw))


def computed(raw):
    return compute(loaded(raw))


def _of(recipe, name):
    section, key = name.split(".")
    return recipe[section][key]


# How much better than residual each method is made to be, and how much seeds differ from one another.
EFFECTS = {
    "residual": 0.0,
    "mhc": -0.007,
    "kromhc": -0.006,
    "temper-cp": -0.005,
    "temper-tucker": -0.008,
    "temper-tt": 0.004,
    "temper-slim": -0.0002,
}


RANKS = ["temper-cp", "temper-cp:rank=4", "temper-cp:rank=8"]
# Claims of every shape: below a margin, between two, beyond zero on either side, and a trend.
CLAIMS = [
    {
        "name": name,
        "text": text,
        "kind": kind,
        "methods": methods,
        "streams": streams,
        **options,
        "record": {"added": "2026-11-18", "runs_started": 0, "runs_finished": 0},
    }
    for name, text, kind, methods, streams, options in (
        ("compact", "TEMPER is no worse than mhc", "not-worse", RANKS[:1], [4, 8], {"against": "mhc", "margin": 0.003}),
        ("ranks", "ranks hardly matter", "flat", RANKS, [4], {"margin": 0.001}),
        ("trains", "TT is worse than Tucker", "worse", ["temper-tt"], [4], {"against": "temper-tucker", "by": 0.0}),
        ("slim", "slim is better", "better", ["temper-slim", "hc"], [4], {"against": "residual", "by": 0.002}),
        ("streams", "more is better", "grows", ["mhc"], [4, 8], {"against": "residual", "along": "streams", "by": 0.0}),
    )
]


def full_study(seeds=3, noise=0.001):
    """Two N, three seeds, ranks, CORE, a cost, claims, and runs that failed, were skipped or are waiting."""
    rng = random.Random(0)
    runs, numbers = [], {4: seeds, 8: max(1, seeds - 1)}
    level = [2.07 + rng.gauss(0, 0.01) for _ in range(seeds)]
    for method, effect in EFFECTS.items():
        for n, count in numbers.items() if method != "residual" else [(1, seeds)]:
            for seed in range(count):
                bpb = level[seed] + effect * (1.3 if n == 8 else 1) + rng.gauss(0, noise)
                runs.append(run_entry(method, n, seed, bpb=bpb, core=0.18 - 2 * effect + rng.gauss(0, 0.002)))
    for rank in (4, 8, 16):
        for seed in range(seeds):
            runs.append(run_entry("temper-cp", 4, seed, bpb=level[seed] - 0.005 + rng.gauss(0, noise), rank=rank))
    runs.append(run_entry("mhc-lite", 4, 0, status="failed", reason="loss is not finite at step 12"))
    skipped = run_entry("mhc-lite", 4, 0, status="skipped", reason="mhc-lite at N = 8 would add 371,863,182 parameters")
    runs.append(skipped | {"key": "mhc-lite-n8-s0", "streams": 8, "parameters": {"total": None, "added": 371_863_182}})
    runs.append(run_entry("hc", 4, 0, status="waiting"))
    rows = [
        {"method": method, "streams": n, "step_ms": _spread(400 * ratio), "ratio": _spread(ratio)}
        for n in (4, 8)
        for method, ratio in (("mhc", 1.3 + n / 40), ("temper-cp", 1.1), ("temper-cp:rank=8", 1.15), ("kromhc", 1.2))
    ]
    cost = {"setting": {"rounds": 7, "threads": 1}, "rows": [_residual_cost(), *rows]}
    return results(runs, cost=cost, claims=CLAIMS)


def _residual_cost():
    one = {"median": 1.0, "low": 1.0, "high": 1.0}
    return {"method": "residual", "streams": 1, "step_ms": _spread(400.0), "ratio": one}


def _spread(value):
    return {"median": value, "low": 0.98 * value, "high": 1.03 * value}
