"""The bounds of `temper.theory` beside measurements, on a trained model and on real text."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

import temper
from temper import theory
from temper.config import HEADS
from temper.generators import Generator
from temper.generators.base import Rank
from temper.mixers.sinkhorn import Sinkhorn
from temper_lab.data import Corpus, open_corpus, validation_batches
from temper_lab.interop.hf_folder import is_hf_folder
from temper_lab.method import show_rank
from temper_lab.model import GPT
from temper_lab.model.functional import rms_norm
from temper_lab.train.model_dir import load
from temper_lab.train.plan import corpus_of
from temper_lab.train.run_dir import recipe_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def open_network(path: Path) -> tuple[GPT, Any]:
    """A model of the lab and its tokenizer: from a run, from a model folder, or exported for transformers."""
    if not is_hf_folder(path):
        return load(path)
    from temper_lab.eval.hugging_face import load_hf

    hf_model, tokenizer = load_hf(path)
    network = getattr(hf_model, "model", None)
    if not isinstance(network, GPT):
        raise ValueError(f"{path} holds a {type(hf_model).__name__}; expected a model of this lab (TemperForCausalLM)")
    return network, tokenizer


def rows_of_text(
    path: Path, network: GPT, tokenizer: Any, tokens: int, text: str | None, corpus: str | None
) -> tuple[Tensor, Tensor, str]:
    """Ids and targets (B, T) of about a number of tokens, and their source."""
    context = min(network.config.context, tokens)
    if text is not None:
        ids = torch.tensor(tokenizer.encode_batch([text], bos=True))[:, : context + 1]
        if ids.shape[1] < 3:
            raise ValueError(f"--text {text!r} has {ids.shape[1] - 1} tokens; expected at least two")
        return ids[:, :-1], ids[:, 1:], "the given text"
    opened = _open_corpus(path, corpus)
    ids, targets = validation_batches(opened, tokenizer, max(1, tokens // context), context, 1)[0]
    return ids, targets, f"validation text of {opened.name}"


def _open_corpus(path: Path, corpus: str | None) -> Corpus:
    if corpus is not None:
        return open_corpus(corpus)
    recipe = recipe_of(path)
    try:
        return open_corpus("sotu") if recipe is None else corpus_of(recipe.data)
    # The corpus of a run from another machine may be missing.
    except (ValueError, OSError):
        return open_corpus("sotu")


# The relative perturbation of the stored tensors where there is no lower rank.
NUDGE = 0.01


def with_neighbours(network: GPT, to: str | None = None, rank: Rank = None) -> GPT:
    """A copy of the model in which every site is its neighbour."""
    if network.config.routing().is_residual:
        raise ValueError(f"the {network.config.method} model routes nothing: there is no generator to look at")
    other = copy.deepcopy(network)
    for block in other.blocks:
        block.attention_site = neighbour(block.attention_site, to, rank)
        block.mlp_site = neighbour(block.mlp_site, to, rank)
    return other


def neighbour(site: temper.HyperConnection, to: str | None = None, rank: Rank = None) -> temper.HyperConnection:
    """The site with every generator compressed, to a given kind and rank or to the next lower rank.

    By default a generator without a rank becomes Tucker at its default rank, others have every rank lowered by one, and
    where all ranks are one the stored tensors are perturbed by 1%.
    """
    other = copy.deepcopy(site)
    other.set_generators(**{head: _compressed(getattr(site, head).generator, to, rank) for head in site.config.heads})
    return other


def _compressed(generator: Generator, to: str | None, rank: Rank) -> Generator:
    weight = generator.to_dense().detach()
    if to is not None or rank is not None:
        name = to or (generator.name if generator.ranked else "tucker")
        return Generator.named(name).from_dense(weight, rank)
    if not generator.ranked:
        return Generator.named("tucker").from_dense(weight)
    rank = cast("int | tuple[int, ...]", generator.rank)
    lower = _one_less(rank)
    return _nudged(generator) if lower == rank else type(generator).from_dense(weight, lower)


def _one_less(rank: int | tuple[int, ...]) -> int | tuple[int, ...]:
    return tuple(max(1, r - 1) for r in rank) if isinstance(rank, tuple) else max(1, rank - 1)


def _nudged(generator: Generator) -> Generator:
    moved = copy.deepcopy(generator)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            step = torch.randn(parameter.shape, generator=source, dtype=torch.float64).to(parameter)
            parameter.add_(NUDGE * parameter.square().mean().sqrt() * step)
    return moved


# The number of tokens to take Jacobians of, which have N^2 rows per token.
JACOBIANS = 256


def study(
    network: GPT,
    other: GPT,
    ids_BT: Tensor,
    targets_BT: Tensor,
    *,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """Compares theory and measurement for two models that differ in their routing alone, in float64.

    Args:
        other: a model with the same backbone.
        progress: called with the number of sites done.
    """
    check_backbone(network, other)
    stored = zip(network.sites(), other.sites(), strict=True)
    network, other = (copy.deepcopy(model).double().eval() for model in (network, other))
    with torch.no_grad():
        streams = temper.expand_streams(rms_norm(network.embedding(ids_BT)), network.num_streams)
        names, steps = zip(*_steps(network, other, network.rotary(ids_BT.shape[1])), strict=True)
        sites = []
        for name, pair, step, depth in zip(names, stored, steps, theory.through_depth(steps, streams), strict=True):
            sites.append({"site": name, **_ranks(*pair), **_measured(step[0], depth)})
            progress(len(sites))
        return {
            "tokens": ids_BT.numel(),
            "streams": network.num_streams,
            "width": network.config.dim,
            "sites": sites,
            "whole": _whole(network, other, ids_BT, targets_BT, sites[-1]),
            "exceeded": [f"{site['site']}: {what}" for site in sites for what in site["exceeded"]],
        }


def check_backbone(network: GPT, other: GPT) -> None:
    """Raises ValueError unless the models are equal except for their sites."""
    if network.config.routing().is_residual or other.config.routing().is_residual:
        raise ValueError("a residual model routes nothing: there is no generator to look at")
    tensors, others = (_backbone(model) for model in (network, other))
    if tensors.keys() != others.keys():
        raise ValueError("the two models have different layers; expected the same backbone")
    for name, value in tensors.items():
        if value.shape != others[name].shape or not torch.equal(value, others[name].to(value.dtype)):
            raise ValueError(
                f"the two models differ in {name}; expected the same backbone, because the bounds are for sites that "
                "share their branch (compress one model into the other, without training its branches)"
            )


def _backbone(network: GPT) -> dict[str, Tensor]:
    return {name: value for name, value in network.state_dict().items() if "_site." not in name}


def _steps(network: GPT, other: GPT, rotation: tuple[Tensor, Tensor]) -> Iterator[tuple[str, theory.Step]]:
    """Every pair of sites with the branch between them, by name, in the order in which they run."""
    for index, (block, other_block) in enumerate(zip(network.blocks, other.blocks, strict=True)):
        attend = partial(block.attention_branch, rotation=rotation)
        yield f"block {index} attention", (block.attention_site, other_block.attention_site, attend)
        yield f"block {index} mlp", (block.mlp_site, other_block.mlp_site, block.mlp_branch)


def _ranks(site: temper.HyperConnection, other: temper.HyperConnection) -> dict[str, Any]:
    """The ranks of the stored tensors; the rounding of float32 weights decides what counts as zero."""
    return {
        "heads": {
            head: _head(getattr(site, head).generator, getattr(other, head).generator) for head in site.config.heads
        },
        "together": asdict(theory.site_spectrum(site)),
    }


def _measured(site: temper.HyperConnection, depth: theory.Depth) -> dict[str, Any]:
    return {
        "mixer": _mixer(site, depth.streams),
        "deviation": depth.deviation.to_dict(),
        "growth": depth.growth,
        "measured": depth.measured,
        "bound": depth.bound,
        "size": depth.size,
        "exceeded": depth.exceeded,
    }


def _head(generator: temper.Generator, other: temper.Generator) -> dict[str, Any]:
    dense = generator.to_dense()
    size, apart = dense.norm().item(), (dense - other.to_dense()).norm().item()
    return {
        "generator": describe(generator),
        "against": describe(other),
        # A zero compared with a nonzero value has an infinite ratio.
        "relative_error": apart / size if size else float(apart > 0),
        "compression": asdict(theory.compression_spectrum(generator)),
        "routing": asdict(theory.routing_spectrum(generator)),
    }


def describe(generator: temper.Generator) -> str:
    """`dense`, `cp 2`, `tucker 2x12x2x2`."""
    rank = getattr(generator, "rank", None)
    return generator.name if rank is None else f"{generator.name} {show_rank(rank)}"


def _mixer(site: temper.HyperConnection, streams: Tensor) -> dict[str, Any]:
    """The mixer's proved constant, and its slope at the logits of some tokens: as it runs, and in Sinkhorn's limit."""
    logits = theory.res_logits(site, streams).flatten(0, streams.ndim - 3)
    some = logits[:: math.ceil(len(logits) / JACOBIANS)]
    slopes = theory.local_lipschitz(site.mixer, some)
    found = {
        "name": site.mixer.name,
        "constant": site.mixer.lipschitz(),
        "slope_max": slopes.max().item(),
        "slope_mean": slopes.mean().item(),
    }
    if isinstance(site.mixer, Sinkhorn):
        limit = Sinkhorn(site.mixer.num_streams, method="newton", iters=100)(logits)
        found["limit_slope_max"] = theory.sinkhorn_lipschitz(some).max().item()
        found["distance_max"] = torch.linalg.matrix_norm(site.mixer(logits) - limit).max().item()
    return found


def _whole(network: GPT, other: GPT, ids_BT: Tensor, targets_BT: Tensor, last: dict[str, Any]) -> dict[str, Any]:
    one, two = (model.features(ids_BT) for model in (network, other))
    change = max(
        (network.logits(part) - network.logits(part_other)).abs().max().item()
        for part, part_other in zip(one.flatten(0, 1).split(256), two.flatten(0, 1).split(256), strict=True)
    )
    return {
        "measured": last["measured"],
        "bound": last["bound"],
        "size": last["size"],
        "loss": network.loss(ids_BT, targets_BT).item(),
        "loss_against": other.loss(ids_BT, targets_BT).item(),
        "largest_logit_change": change,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Prints ranks, the distance of the two models with its bounds, and the summary."""
    console.print(_rank_table(report))
    console.print(_bound_table(report))
    for line in summary(report):
        console.print(line, highlight=False)


def summary(report: dict[str, Any]) -> list[str]:
    """The whole model in words."""
    whole, size = report["whole"], report["whole"]["size"]
    lines = [
        f"all {len(report['sites'])} sites: the streams end {whole['measured'] / size:.3%} apart (measured), at most "
        f"{_share(whole['bound'] / size)} (each bound carried on by the measured growth of the sites behind it)"
        + (f", {loose(whole['bound'], whole['measured'])} loose" if whole["measured"] else ""),
        f"loss {whole['loss']:.4f} against {whole['loss_against']:.4f}; largest change of a logit "
        f"{whole['largest_logit_change']:.3g}",
    ]
    mixers = [site["mixer"] for site in report["sites"]]
    steepest = max(mixers, key=lambda mixer: mixer["slope_max"])
    line = f"{steepest['name']}: steepest slope {steepest['slope_max']:.4f} on these logits"
    if "limit_slope_max" in steepest:
        limit, far = (max(mixer[name] for mixer in mixers) for name in ("limit_slope_max", "distance_max"))
        line += f", {limit:.4f} in the limit, which res is within {far:.1e} of"
    return [*lines, f"{line}; proved {steepest['constant']:.4f}"]


def loose(bound: float, measured: float) -> str:
    """The ratio of bound to measurement as text."""
    return f"{bound / measured:,.3g}x" if measured else "-"


def _rank_table(report: dict[str, Any]) -> Table:
    inputs = report["streams"] * report["width"]
    table = _table(f"What the logits see: rank (nullity) of every compression, of N D = {inputs:,} directions")
    for name in ("site", "generators"):
        table.add_column(name, no_wrap=True)
    for name in (*HEADS, "all logits"):
        table.add_column(name, justify="right", no_wrap=True)
    for site in report["sites"]:
        heads = site["heads"]
        kinds = " / ".join(dict.fromkeys(head["generator"] for head in heads.values()))
        spectra = [*(heads[head]["compression"] if head in heads else None for head in HEADS), site["together"]]
        cells = (f"{found['rank']} ({found['nullity']})" if found else "-" for found in spectra)
        table.add_row(site["site"], kinds, *cells)
    return table


def _bound_table(report: dict[str, Any]) -> Table:
    kinds = dict.fromkeys(head["against"] for site in report["sites"] for head in site["heads"].values())
    table = _table(
        f"Against {' / '.join(kinds)}, on {report['tokens']:,} tokens; loose is bound / measured where it is least"
    )
    table.add_column("site", no_wrap=True)
    names = ["|dW|/|W|\npre res post", "logits loose\npre res post", "routing loose\npre res post"]
    for name in [*names, "block\nmeasured", "bound", "loose", "L_f", "mixer\nslope"]:
        table.add_column(name, justify="right", no_wrap=True)
    for site in report["sites"]:
        heads, found, block = site["heads"], site["deviation"], site["deviation"]["block"]
        table.add_row(
            site["site"],
            "  ".join(f"{heads[head]['relative_error']:.2f}" if head in heads else "-" for head in HEADS),
            "  ".join(_loose(found["logits"][head]) for head in HEADS),
            "  ".join(_loose(found["routing"][head]) for head in HEADS),
            f"{block['measured_max']:.3g}",
            f"{block['bound_max']:.3g}",
            _loose(block),
            f"{found['branch_lipschitz']:.3g}",
            f"{site['mixer']['slope_max']:.3f}",
        )
    return table


def _loose(gap: dict[str, float]) -> str:
    return loose(1.0, gap["ratio_max"])


def _share(share: float) -> str:
    return f"{share:.1%}" if share < 10 else f"{share:,.3g} times their size"


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left")
