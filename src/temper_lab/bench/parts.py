"""The parts of a benchmark: block pair, growth with N, a whole training step, recomputation, Sinkhorn alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import temper
from temper.mixers.sinkhorn import Sinkhorn
from temper_lab.bench.cases import RESIDUAL, AnySite, Case, Setting, Stack, branches, runs_on
from temper_lab.bench.measure import (
    TOKENS,
    TOLERANCE,
    Run,
    Tensors,
    bandwidth,
    chain_run,
    compare,
    copy_run,
    interleave,
    milliseconds,
    ratios,
    saved_bytes,
    scatter,
    site_bytes,
    site_run,
    spread,
    stack_run,
    take_grads,
)
from temper_lab.console import Bar
from temper_lab.engine import KVCache
from temper_lab.model import GPT, ModelConfig
from temper_lab.model.functional import rms_norm

COPY, SITE, CHAIN, PAIR = "copy", "site", "chain", "pair"
# The sites of two blocks.
CHAINED = 4


def measure_pair(setting: Setting, pairs: Sequence[Case], growth: Sequence[Case], what: str) -> dict[str, Any]:
    """Measures the parts "pair", "peers" and "growth" of a report, and what they add to its setting.

    Args:
        pairs: cases to measure as a whole pair and as a single site.
        growth: cases to measure as a single site.
    """
    tokens, width = setting.tokens, setting.width
    tensors, blocks = Tensors(), branches(width)
    x_shape = RESIDUAL.shape(tokens, width)
    runs: dict[Any, Run] = {COPY: copy_run()}
    saved: dict[Case, int] = {}
    site_of = shared_sites(width)
    for case in dict.fromkeys([RESIDUAL, *pairs, *growth]):
        shape = case.shape(tokens, width)
        streams, grad, sites = tensors.leaf(shape), tensors.grad(shape), [site_of(case, layer) for layer in (0, 1)]
        if case != RESIDUAL:
            grads = [tensors.grad(x_shape), grad]
            runs[SITE, case] = site_run(case, sites[0], streams, tensors.leaf(x_shape), grads)
        if case != RESIDUAL and case in pairs:
            chain = [site_of(case, layer) for layer in range(CHAINED)]
            grads = [*[tensors.grad(x_shape)] * CHAINED, grad]
            runs[CHAIN, case] = chain_run(case, chain, streams, tensors.leaf(x_shape), grads)
        if case == RESIDUAL or case in pairs:
            stack = Stack(blocks, sites)
            runs[PAIR, case] = stack_run(case, stack, streams, grad)
            saved[case] = saved_bytes(case, stack, streams)
    return Timed(setting, interleave(runs, setting.rounds, what), saved).report(pairs, growth)


def shared_sites(width: int) -> Any:
    """Makes the site of a case at a layer; the backends of a method share theirs."""

    @cache
    def make(case: Case, layer: int) -> AnySite:
        return case.site(width, layer)

    return lambda case, layer: make(case._replace(backend=case.backend and "naive"), layer)


@dataclass(frozen=True)
class Timed:
    """The times of one interleaved run, and the rows made from them."""

    setting: Setting
    seconds: dict[Any, list[float]]
    saved: dict[Case, int]

    def report(self, pairs: Sequence[Case], growth: Sequence[Case]) -> dict[str, Any]:
        """The rows by part."""
        return {
            "setting": {
                "bandwidth_gb_s": round(bandwidth(self.seconds[COPY]) / 1e9, 2),
                "pair_ms": milliseconds(self.seconds[PAIR, RESIDUAL]),
                "pair_saved_bytes": self.saved[RESIDUAL],
            },
            "pair": [self.pair_row(case) for case in pairs if case.backend is not None],
            "peers": [self.pair_row(case) for case in pairs if case.backend is None],
            "growth": [self.growth_row(case, growth) for case in growth],
        }

    def site_row(self, case: Case) -> dict[str, Any]:
        """The row of a single site, whose time relative to a pair is less noisy than the difference of two pairs."""
        seconds = self.seconds[SITE, case]
        ratio = spread(1 + 2 * share for share in ratios(seconds, self.seconds[PAIR, RESIDUAL]))
        return {**case.fields(), "site_ms": milliseconds(seconds), "ratio": ratio["median"], "ratio_spread": ratio}

    def pair_row(self, case: Case) -> dict[str, Any]:
        """The row of a whole pair, with the bytes that it saves and moves."""
        row = self.site_row(case)
        chained = ratios(self.seconds[CHAIN, case], self.seconds[PAIR, RESIDUAL])
        chained_ratio = spread(1 + 2 * share / CHAINED for share in chained)
        whole = spread(ratios(self.seconds[PAIR, case], self.seconds[PAIR, RESIDUAL]))
        moved = site_bytes(case.num_streams, self.setting.width, self.setting.tokens)
        speed = moved / row["site_ms"]["median"] * 1000
        return row | {
            "chained_ratio": chained_ratio["median"],
            "chained_ratio_spread": chained_ratio,
            "pair_ratio": whole["median"],
            "pair_ratio_spread": whole,
            "saved_ratio": round(self.saved[case] / self.saved[RESIDUAL], 4),
            "bytes": moved,
            "bandwidth_share": round(speed / bandwidth(self.seconds[COPY]), 4),
        }

    def growth_row(self, case: Case, growth: Sequence[Case]) -> dict[str, Any]:
        """The row of a site, with its time relative to the fewest streams."""
        family = (other for other in growth if (other.method, other.backend) == (case.method, case.backend))
        least = min(family, key=lambda other: other.num_streams)
        times = spread(ratios(self.seconds[SITE, case], self.seconds[SITE, least]))
        return self.site_row(case) | {"times_least": times["median"]}


BATCH_ROWS = 4


class Step(nn.Module):
    """A model that gives its loss on one batch."""

    def __init__(self, model: GPT, batch: Tensor) -> None:
        super().__init__()
        self.model = model
        self.ids, self.targets = batch

    def forward(self) -> Tensor:
        return self.model.loss(self.ids, self.targets)


class PeerGPT(GPT):
    """The same backbone with sites of another package, whose streams are (B N, T, D)."""

    def __init__(self, config: ModelConfig, case: Case) -> None:
        super().__init__(config)
        self.num_streams = case.num_streams
        for index, block in enumerate(self.blocks):
            block.register_module("attention_site", case.site(config.dim, 2 * index))
            block.register_module("mlp_site", case.site(config.dim, 2 * index + 1))

    def features(self, ids_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """The features as in `GPT`, except for the layout of the streams."""
        assert cache is None
        rotation = self.rotary(ids_BT.shape[1])
        streams = rms_norm(self.embedding(ids_BT)).repeat_interleave(self.num_streams, dim=0)
        for block in self.blocks:
            streams = block(streams, rotation)
        return rms_norm(streams.unflatten(0, (-1, self.num_streams)).sum(1))


def model_config(setting: Setting) -> ModelConfig:
    """Four rows of half the tokens, a third of the width: depth 4, width 256 and 256 tokens at the default sizes."""
    depth, context = max(1, setting.width // 192), setting.tokens // 2
    return ModelConfig(depth=depth, vocab_size=4096, context=context, head_dim=64)


def measure_step(setting: Setting, cases: Sequence[Case], what: str) -> dict[str, Any]:
    """Measures the part "step" of a report, and what it adds to its setting."""
    config = model_config(setting)
    batch = torch.randint(config.vocab_size, (2, BATCH_ROWS, config.context))

    # The backends of a method share its model.
    @cache
    def model_of(method: str, num_streams: int, is_peer: bool) -> Step:
        if is_peer:
            return Step(PeerGPT(config, Case(method, num_streams, None)), batch)
        return Step(GPT(config.with_(preset=method, num_streams=num_streams)), batch)

    runs: dict[Case, Run] = {}
    saved: dict[Case, int] = {}
    for case in (RESIDUAL, *cases):
        step = model_of(case.method, case.num_streams, case.backend is None and case != RESIDUAL)
        runs[case], saved[case] = step_run(case, step), saved_bytes(case, step)
    # A step is the longest turn, and therefore the steadiest.
    rounds = (setting.rounds + 1) // 2
    seconds = interleave(runs, rounds, what)

    def row(case: Case) -> dict[str, Any]:
        ratio = spread(ratios(seconds[case], seconds[RESIDUAL]))
        return {
            **case.fields(),
            "step_ms": milliseconds(seconds[case]),
            "ratio": ratio["median"],
            "ratio_spread": ratio,
            "saved_ratio": round(saved[case] / saved[RESIDUAL], 4),
        }

    added = {
        "depth": config.depth,
        "width": config.dim,
        "context": config.context,
        "tokens": batch[0].numel(),
        "vocab_size": config.vocab_size,
        "rounds": rounds,
        "times": "forward + backward",
        "step_ms": milliseconds(seconds[RESIDUAL]),
    }
    return {"setting": {"step": added}, "step": [row(case) for case in cases]}


def step_run(case: Case, step: Step) -> Run:
    """Forward and backward."""

    def action() -> None:
        with case.chosen():
            loss = step()
        loss.backward()

    return Run(action, list(step.parameters()))


BLOCKS = 8


def measure_recompute(setting: Setting, cases: Sequence[Case], what: str) -> dict[str, Any]:
    """Measures the part "recompute" of a report, after comparing gradients."""
    width, blocks = setting.width, branches(setting.width)
    plain = Stack(blocks, [RESIDUAL.site(width) for _ in range(2 * BLOCKS)])
    base = saved_bytes(RESIDUAL, plain, torch.randn(RESIDUAL.shape(setting.tokens, width), requires_grad=True))
    rows = []
    with Bar(what, len(cases)) as bar:
        for done, case in enumerate(cases):
            bar.update(done, str(case))
            stack = Stack(blocks, [case.site(width, layer) for layer in range(2 * BLOCKS)])
            streams = torch.randn(case.shape(setting.tokens, width), requires_grad=True)
            saved = saved_bytes(case, stack, streams)
            with_less = saved_bytes(case, temper.recompute(stack), streams)
            rows.append(
                {
                    **case.fields(),
                    "blocks": BLOCKS,
                    "group": stack.routed()[0].recompute,
                    "saved_ratio": round(saved / base, 4),
                    "recompute_saved_ratio": round(with_less / base, 4),
                }
            )
            _check_recompute(case, stack, width)
    return {"recompute": rows}


def _check_recompute(case: Case, stack: Stack, width: int) -> None:
    for site in stack.routed():
        scatter(site)
    streams = torch.randn(case.shape(TOKENS, width), requires_grad=True)
    grad = torch.randn_like(streams)
    leaves = {"streams": streams, **dict(stack.named_parameters())}

    def run(group: int | None) -> dict[str, Tensor]:
        temper.recompute(stack, group)
        with case.chosen():
            out = stack(streams)
        out.backward(grad)
        return {"the last streams": out.detach(), **take_grads(leaves)}

    compare(f"{case} with recompute", run(None), run(0))


ITERS = 20
SINKHORN_REPEATS = 3
PLAIN, NEWTON = "plain", "newton"
# "initial": where the paper starts, 0 on the diagonal and -8 beside it, moved by the token. "normal": N(0, 1).
LOGITS = ("initial", "normal")
# At the initial logits res has entries of exp(-8), and Newton's method finds the limit to 2e-6: in float32 its gradient
# has three digits in any implementation.
TOLERANCES = {PLAIN: TOLERANCE, NEWTON: 5e-3}


def measure_sinkhorn(setting: Setting, what: str) -> dict[str, Any]:
    """Measures the part "sinkhorn" of a report, forward and backward, on twice the tokens of the pair."""
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
                _check_sinkhorn(f"sinkhorn {method}, N={n}, {kind} logits, {name}", mixer, name, logits, grad)
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
    """Draws random logits (T, N, N)."""
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

    return Run(action, [logits], SINKHORN_REPEATS)


@torch.no_grad()
def column_error(mixer: Sinkhorn, name: str, logits: Tensor) -> float:
    """The largest distance of a column sum from 1."""
    with temper.backend(name):
        return float(f"{float((mixer(logits).sum(-2) - 1).abs().max()):.2g}")


def _check_sinkhorn(label: str, mixer: Sinkhorn, name: str, logits: Tensor, grad: Tensor) -> None:
    def run(backend: str) -> dict[str, Tensor]:
        with temper.backend(backend):
            res = mixer(logits)
        res.backward(grad)
        return {"res": res.detach(), **take_grads({"logits": logits})}

    compare(label, run(name), run("naive"), TOLERANCES[mixer.method])
