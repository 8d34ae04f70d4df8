"""Sinkhorn by itself, against plain autograd in the log domain, and to its limit."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

import temper
from temper.mixers.sinkhorn import Sinkhorn
from temper_lab.bench.cases import runs_on
from temper_lab.bench.check import TOLERANCE, compare, take_grads
from temper_lab.bench.measure import Run, interleave, milliseconds, ratios, spread
from temper_lab.bench.setting import Setting

ITERS = 20
REPEATS = 3
PLAIN, NEWTON = "plain", "newton"
# "initial": where the paper starts, 0 on the diagonal and -8 beside it, moved by the token. "normal": N(0, 1).
LOGITS = ("initial", "normal")
# At the initial logits res has entries of exp(-8), and Newton's method finds the limit to 2e-6: in float32 its gradient
# has three digits, in whichever implementation.
TOLERANCES = {PLAIN: TOLERANCE, NEWTON: 5e-3}


def measure(setting: Setting, what: str) -> dict[str, Any]:
    """The part "sinkhorn" of a report: forward and backward of twice the tokens of the pair."""
    runs: dict[Any, Run] = {}
    errors: dict[Any, float] = {}
    skipped: list[dict[str, Any]] = []
    tokens = 2 * setting.tokens
    wanted = [name for name in setting.backends if name != "naive"]
    for n, kind in product(setting.streams, LOGITS):
        logits, grad = draw(kind, n, tokens), torch.randn(tokens, n, n)
        for method, name in product((PLAIN, NEWTON), ("naive", *wanted)):
            mixer = Sinkhorn(n, iters=ITERS, method=method)
            if (ran := runs_on(name, logits, mixer)) != name:
                entry = {"part": "sinkhorn", "method": f"sinkhorn {method}", "streams": n, "backend": name}
                skipped.append({**entry, "reason": f"the backend {name} leaves this to {ran}"})
                continue
            if name != "naive":
                _check(f"sinkhorn {method}, N={n}, {kind} logits, {name}", mixer, name, logits, grad)
            runs[n, kind, method, name] = mixer_run(mixer, name, logits, grad)
            errors[n, kind, method, name] = column_error(mixer, name, logits)
    seconds = interleave(runs, setting.rounds, what)

    def row(n: int, kind: str, name: str) -> dict[str, Any]:
        own, base = seconds[n, kind, PLAIN, name], seconds[n, kind, PLAIN, "naive"]
        newton = seconds[n, kind, NEWTON, name]
        return {
            "streams": n,
            "logits": kind,
            "backend": name,
            "autograd_ms": milliseconds(base),
            "ms": milliseconds(own),
            "speedup": spread(ratios(base, own))["median"],
            "newton_ms": milliseconds(newton),
            "newton_ratio": spread(ratios(newton, own))["median"],
            "column_error": errors[n, kind, PLAIN, name],
            "newton_column_error": errors[n, kind, NEWTON, name],
        }

    rows = [
        row(n, kind, name)
        for n, kind, name in product(setting.streams, LOGITS, wanted)
        if (n, kind, PLAIN, name) in runs and (n, kind, NEWTON, name) in runs
    ]
    return {"setting": {"sinkhorn": {"tokens": tokens, "iters": ITERS}}, "sinkhorn": rows, "skipped": skipped}


def draw(kind: str, num_streams: int, tokens: int) -> Tensor:
    """Logits (T, N, N)."""
    logits = torch.randn(tokens, num_streams, num_streams)
    if kind == "initial":
        logits = Sinkhorn(num_streams).initial_bias() + 0.3 * logits
    return logits.requires_grad_()


def mixer_run(mixer: Sinkhorn, name: str, logits: Tensor, grad: Tensor) -> Run:
    """Forward and backward; on `naive` this is `mixer.mix` under autograd."""

    def action() -> None:
        with temper.backend(name):
            res = mixer(logits)
        res.backward(grad)

    return Run(action, [logits], REPEATS)


@torch.no_grad()
def column_error(mixer: Sinkhorn, name: str, logits: Tensor) -> float:
    """How far the column sums are from 1, at most."""
    with temper.backend(name):
        return float(f"{float((mixer(logits).sum(-2) - 1).abs().max()):.2g}")


def _check(label: str, mixer: Sinkhorn, name: str, logits: Tensor, grad: Tensor) -> None:
    def run(backend: str) -> dict[str, Tensor]:
        with temper.backend(backend):
            res = mixer(logits)
        res.backward(grad)
        return {"res": res.detach(), **take_grads({"logits": logits})}

    compare(label, run(name), run("naive"), TOLERANCES[mixer.method])
