"""A trained model in, a compressed one and what it cost out."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from temper import HyperConnection, theory
from temper.convert import Compressed, Moment, moments, sensitivities
from temper.convert import compress as replace_generators
from temper.convert.compress import check
from temper.convert.moments import routed_sites
from temper_lab.compress.finetune import finetune
from temper_lab.compress.report import make_report
from temper_lab.compress.settings import Settings
from temper_lab.compress.subject import Subject, open_subject
from temper_lab.compress.text import Batch, Text, open_text
from temper_lab.distributed import precision, session
from temper_lab.eval import bits_per_byte
from temper_lab.io import dumps
from temper_lab.progress import Bar, waiting
from temper_lab.provenance import recipe_of

FILE_NAME = "compress.json"
# Rows of text, each with a backward pass.
SENSITIVITY_ROWS = 64


def compress(settings: Settings) -> dict[str, Any]:
    """Compresses a model, measures, finetunes if asked to, writes the folder; the report, which is also in it."""
    with session(settings.device) as world:
        if world.size > 1:
            raise ValueError("compressing is the work of one process: start it without torchrun")
        subject = open_subject(settings.model, world.device)
        # Before minutes are spent on what could not be done in the end.
        check(subject.network, settings.to, rank=settings.rank, error=settings.error, params=settings.params)
        recipe = recipe_of(settings.model)
        text = open_text(settings, subject, recipe)
        batches = text.validation(subject)
        before = _bpb(subject, text, batches, world, "bpb before")
        seen = _calibrate(subject, text, settings, world.device)
        originals = {name: copy.deepcopy(site) for name, site in routed_sites(subject.network).items()}
        minded = _sensitivities(subject, text, settings, world.device)
        compressed = _replace(subject, settings, seen, minded)
        # Hundreds of megabytes that nobody needs any more.
        seen = None
        deviations = _deviations(subject, originals, batches, world.device)
        bpb = {"before": before, "after": _bpb(subject, text, batches, world, "bpb after")}
        if settings.finetune:
            optim = None if recipe is None else recipe.optim
            finetune(subject, text, settings.finetune, everything=settings.finetune_all, optim=optim)
            bpb["finetuned"] = _bpb(subject, text, batches, world, "bpb finetuned")
        report = make_report(settings, subject, text, compressed, deviations, bpb)
        subject.network.eval()
        subject.write(settings.out, {FILE_NAME: dumps(FILE_NAME, report)})
    return report


def _replace(subject: Subject, settings: Settings, seen: Mapping[str, Moment] | None, minded: Any) -> Compressed[Any]:
    with waiting(f"compressing {len(routed_sites(subject.network))} sites"):
        return replace_generators(
            subject.network,
            settings.to,
            rank=settings.rank,
            error=settings.error,
            params=settings.params,
            moments=seen,
            sensitivities=minded,
            plain=settings.plain,
        )


def _bpb(subject: Subject, text: Text, batches: list[Batch], world: Any, what: str) -> float | None:
    if not batches:
        return None
    _, autocast = precision("auto", world.device)
    with Bar(what, len(batches)) as bar:
        options = {"world": world, "autocast": autocast, "progress": bar.update}
        return bits_per_byte(subject.losses, batches, subject.tokenizer.token_bytes, **options).bpb


@torch.no_grad()
def _calibrate(subject: Subject, text: Text, settings: Settings, device: torch.device) -> Mapping[str, Moment] | None:
    if settings.calibrate is None:
        return None
    num_batches = -(-settings.calibrate_tokens // (text.rows * text.context))
    with (
        moments(subject.network) as seen,
        text.training(subject) as batches,
        Bar("calibrating", settings.calibrate_tokens) as bar,
    ):
        done = 0
        for ids, _ in islice(batches, num_batches):
            subject.read(ids.to(device))
            done += ids.numel()
            bar.update(done)
    return seen


def _sensitivities(subject: Subject, text: Text, settings: Settings, device: torch.device) -> Any:
    """What the loss minds, on some rows of the calibration text."""
    if settings.calibrate is None:
        return None

    def losses() -> Iterator[Tensor]:
        with text.training(subject) as batches, Bar("weighing", SENSITIVITY_ROWS) as bar:
            rows = (row for ids, targets in batches for row in zip(ids.split(1), targets.split(1), strict=True))
            for done, (ids, targets) in enumerate(islice(rows, SENSITIVITY_ROWS), 1):
                yield subject.losses(ids.to(device), targets_BT=targets.to(device), reduction="none").mean()
                bar.update(done)

    return sensitivities(subject.network, losses())


@torch.no_grad()
def _deviations(
    subject: Subject, originals: Mapping[str, HyperConnection], batches: list[Batch], device: torch.device
) -> dict[str, theory.Deviation]:
    """Every site beside the one it was, on one row of validation text as the compressed model reads it."""
    if not batches:
        return {}
    ids = batches[0][0][:1].to(device)
    branches = subject.branches(ids.shape[1])
    found: dict[str, theory.Deviation] = {}
    sites = routed_sites(subject.network)

    def compare(name: str, streams: Tensor) -> None:
        found[name] = theory.deviation(originals[name], sites[name], streams, branches.get(name))
        if found[name].exceeded:
            print(f"warning: {name} exceeds its bound in {', '.join(found[name].exceeded)}", file=sys.stderr)

    before = {site: site.observers for site in sites.values()}
    with Bar("comparing", len(sites)) as bar:
        for name, site in sites.items():
            site.observers = (lambda _, streams, routing, name=name: (compare(name, streams), bar.update(len(found))),)
        try:
            subject.read(ids)
        finally:
            for site, observers in before.items():
                site.observers = observers
    return found
