"""`temper compress`: a trained model with fewer routing parameters, what that costs, and how much of it comes back."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

import temper
from temper import HyperConnection, Routing, theory
from temper.convert import Compressed, Moment, moments, sensitivities
from temper.convert import compress as replace_generators
from temper.convert.compress import check
from temper.convert.moments import routed_sites
from temper.generators.base import Rank
from temper_lab.console import Bar, waiting
from temper_lab.data import Corpus, Loader, open_corpus, validation_batches
from temper_lab.distributed import precision, process_group
from temper_lab.eval import bits_per_byte
from temper_lab.eval.models import MAX_CONTEXT
from temper_lab.interop.hf_folder import is_hf_folder
from temper_lab.io import dumps
from temper_lab.method import parse_generator, show_rank
from temper_lab.model import GPT
from temper_lab.optim import Optimizers, OptimSettings
from temper_lab.recipe import Recipe
from temper_lab.tokenizer import FILE_NAME, Tokenizer
from temper_lab.train.model_dir import load, save_model
from temper_lab.train.run_dir import recipe_of

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Settings:
    """The options of a compression, of which exactly one of rank, error and params is given.

    Args:
        model: a model folder, the folder of a run, or a Hugging Face folder of a DeepSeek-V4.
        out: a new folder.
        to: a generator that has ranks, such as `tucker`, optionally with its rank, such as `tucker:rank=2x12`.
        calibrate: the corpus whose training text weights the fit; None fits the weights alone.
        corpus: the corpus that bits per byte are measured on; by default that of `calibrate`, or that of the run.
        plain: use the decompositions of `Generator.from_dense` instead of the best fit.
    """

    model: Path
    out: Path
    to: str
    rank: Rank = None
    error: float | None = None
    params: int | None = None
    calibrate: str | None = None
    calibrate_tokens: int = 16_384
    corpus: str | None = None
    val_fraction: float | None = None
    batches: int = 50
    rows: int = 8
    context: int | None = None
    finetune: int = 0
    finetune_all: bool = False
    plain: bool = False
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        form, rank = parse_generator(self.to)
        if rank is not None:
            if self.rank is not None:
                raise ValueError(f"--to {self.to} has a rank, and --rank is given too; leave one out")
            object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "to", form)
        given = [f"--{name}" for name in ("rank", "error", "params") if getattr(self, name) is not None]
        if len(given) != 1:
            got = f"{' and '.join(given)} together" if given else "none of them"
            raise ValueError(f"expected one of --rank, --error and --params, got {got}")
        if self.error is not None and not 0 <= self.error < math.inf:
            raise ValueError(f"--error is {self.error}; expected a relative error >= 0, such as 0.1")
        if self.params is not None and self.params < 1:
            raise ValueError(f"--params is {self.params}; expected the number of parameters of all sites together")
        for name in ("calibrate_tokens", "batches", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected at least 1")
        if self.finetune < 0:
            raise ValueError(f"--finetune is {self.finetune}; expected a number of steps")
        if self.finetune_all and not self.finetune:
            raise ValueError("--finetune-all says what --finetune STEPS trains, and there are no steps")
        if self.plain and self.calibrate is not None:
            raise ValueError("--plain is the decomposition of the weights alone; leave out --calibrate")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ValueError(f"{self.out} is not empty; expected a new folder for the compressed model")


Branch = Callable[[Tensor], Tensor]


class Subject(Protocol):
    """The interface of a model that can be compressed.

    Args:
        network: the module whose sites are replaced.
        losses: the function that `bits_per_byte` calls.
        tokenizer: with `bos`, `encode_batch` and `token_bytes`.
        limit: tokens that it reads at most.
        context: tokens that it reads unless asked otherwise.
        width: the width of the residual stream.
    """

    losses: Any
    tokenizer: Any
    limit: int
    context: int
    width: int

    @property
    def network(self) -> nn.Module:
        """The module."""

    def read(self, ids_BT: Tensor) -> None:
        """Runs a forward pass for observers."""

    def branches(self, num_tokens: int) -> dict[str, Branch]:
        """The known branches by the name of their site, for rows of a number of tokens."""

    def write(self, out: Path, files: Mapping[str, str]) -> None:
        """Writes the folder of the compressed model, with other files in it, atomically."""


class LabSubject:
    """A model of this lab."""

    def __init__(self, network: GPT, tokenizer: Tokenizer) -> None:
        self.network = self.losses = network
        self.tokenizer = tokenizer
        self.limit = self.context = network.config.context
        self.width = network.config.dim

    def read(self, ids_BT: Tensor) -> None:
        self.network.features(ids_BT)

    def branches(self, num_tokens: int) -> dict[str, Branch]:
        rotation = self.network.rotary(num_tokens)
        found: dict[str, Branch] = {}
        for index, block in enumerate(self.network.blocks):
            found[f"blocks.{index}.attention_site"] = partial(block.attention_branch, rotation=rotation)
            found[f"blocks.{index}.mlp_site"] = block.mlp_branch
        return found

    def write(self, out: Path, files: Mapping[str, str]) -> None:
        network = self.network
        network.config = network.config.with_routings([site.config for site in network.sites()])
        tensors = {name: tensor.cpu() for name, tensor in network.state_dict().items()}
        save_model(out, network.config.to_dict(), tensors, {FILE_NAME: self.tokenizer.to_json(), **files})


class DeepSeek:
    """A `DeepseekV4ForCausalLM` with our sites in place of its own."""

    def __init__(self, path: Path, device: torch.device) -> None:
        from temper_lab.eval.hugging_face import ByteTokenizer, TokenLosses, limit_of, load_hf
        from temper_lab.interop import deepseek

        network, tokenizer = load_hf(path, device=device)
        if network.config.model_type != deepseek.SOURCE:
            raise ValueError(
                f"{path} is a {type(network).__name__}; of transformers' models, DeepSeek-V4 has hyper-connections to "
                "compress. A model exported from this lab is compressed before it is exported."
            )
        if not (path / deepseek.FILE_NAME).is_file():
            deepseek.to_temper(network)
        self.network, self._backend = network, tokenizer.backend
        self.losses, self.tokenizer = TokenLosses(network, tokenizer.num_ids), ByteTokenizer(tokenizer)
        self.limit = limit_of(network)
        self.context = min(self.limit, MAX_CONTEXT)
        self.width = network.config.hidden_size

    def read(self, ids_BT: Tensor) -> None:
        self.network.base_model(input_ids=ids_BT % self.tokenizer.num_ids, use_cache=False)

    def branches(self, num_tokens: int) -> dict[str, Branch]:
        # Masks, caches and experts are between a site and its branch, so only the routing is compared.
        return {}

    def write(self, out: Path, files: Mapping[str, str]) -> None:
        from temper_lab.interop import deepseek

        deepseek.save(self.network, out, tokenizer=self._backend, files=files)


def open_subject(path: Path, device: torch.device) -> Subject:
    """A model folder, the folder of a run, or a Hugging Face folder of a DeepSeek-V4."""
    return DeepSeek(path, device) if is_hf_folder(path) else LabSubject(*load(path, device=device))


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Text:
    """Batches for one model.

    Args:
        train: batches for calibration and finetuning; None if neither is requested.
        val: batches for measurements; None without a corpus.
        note: the reason why there is none.
    """

    train: Corpus | None
    val: Corpus | None
    rows: int
    context: int
    num_batches: int
    seed: int
    note: str = ""

    @contextmanager
    def training(self, subject: Subject) -> Iterator[Iterator[Batch]]:
        """Endless batches of training text, the same for the same seed."""
        assert self.train is not None
        options: dict[str, Any] = {"split": "train", "rows": self.rows, "context": self.context, "seed": self.seed}
        # Only little text is read, so a large corpus is not tokenized completely.
        options |= {"in_memory_mb": 32, "shuffle_mb": 32}
        with Loader(self.train, subject.tokenizer, **options) as loader:
            loader.prepare()
            yield loader

    def validation(self, subject: Subject) -> list[Batch]:
        if self.val is None:
            return []
        return validation_batches(self.val, subject.tokenizer, self.rows, self.context, self.num_batches)


def open_text(settings: Settings, subject: Subject, recipe: Recipe | None) -> Text:
    """Opens the corpora that the settings name, or that of the run; ValueError for a named one that cannot be read."""
    context = settings.context or subject.context
    if not 1 <= context <= subject.limit:
        raise ValueError(f"--context is {context}; this model reads 1 to {subject.limit} tokens")
    data = None if recipe is None else recipe.data
    options: dict[str, Any] = {"val_fraction": settings.val_fraction or (data.val_fraction if data else 0.05)}
    if data is not None:
        options["max_chars"] = data.max_chars or None
    train, val, note = None, None, ""
    named = settings.calibrate or settings.corpus
    if settings.calibrate is not None:
        train = open_corpus(settings.calibrate, **options)
    if named is not None:
        val = train if settings.corpus in (None, settings.calibrate) else open_corpus(settings.corpus, **options)
    elif data is not None:
        try:
            val = open_corpus(data.corpus, **options)
        except ValueError as error:
            note = f"bits per byte were not measured: {error}"
    else:
        note = "bits per byte were not measured: name a --corpus"
    if settings.finetune and train is None:
        if val is None:
            raise ValueError(f"--finetune needs a corpus: --corpus or --calibrate. {note}".rstrip())
        train = val
    sizes = {"rows": settings.rows, "context": context, "num_batches": settings.batches, "seed": settings.seed}
    return Text(train, val, note=note, **sizes)


def finetune(
    subject: Subject, text: Text, steps: int, *, everything: bool = False, optim: OptimSettings | None
) -> None:
    """Trains the routing, or everything, on the training text: one batch per step, with the schedule of a run.

    Args:
        optim: learning rates for 2^19 tokens a step, as in a recipe; the lab's own if None.
    """
    with _trainable(subject.network, everything), text.training(subject) as batches:
        optimizers = Optimizers.build(
            subject.network, optim, batch_tokens=text.rows * text.context, width=subject.width
        )
        device = next(subject.network.parameters()).device
        with Bar("finetuning", steps) as bar:
            for step, batch in enumerate(islice(batches, steps)):
                ids, targets = (part.to(device) for part in batch)
                loss = subject.losses(ids, targets_BT=targets, reduction="none").mean()
                if not math.isfinite(loss.item()):
                    raise FloatingPointError(f"finetuning step {step + 1}: the loss is {loss.item()}")
                loss.backward()
                optimizers.step(step, steps)
                bar.update(step + 1, f"loss {loss.item():.4f}")


@contextmanager
def _trainable(network: nn.Module, everything: bool) -> Iterator[None]:
    """Restricts gradients to the tensors to train, within the context."""
    before = {parameter: parameter.requires_grad for parameter in network.parameters()}
    network.requires_grad_(True)
    groups = {group["name"]: group["params"] for group in temper.param_groups(network)}
    routing = set(map(id, groups["routing"]))
    for parameter, had in before.items():
        parameter.requires_grad_(id(parameter) in routing or (everything and had))
    try:
        yield
    finally:
        for parameter, had in before.items():
            parameter.requires_grad_(had)
            parameter.grad = None


FORMAT = "temper-compress-1"


def make_report(
    settings: Settings,
    subject: Subject,
    text: Text,
    compressed: Compressed[Any],
    deviations: dict[str, theory.Deviation],
    bpb: dict[str, float | None],
) -> dict[str, Any]:
    """The report as plain values for JSON."""
    total = sum(parameter.numel() for parameter in subject.network.parameters())
    after = compressed.after
    return {
        "format": FORMAT,
        "model": str(settings.model),
        "to": settings.to,
        "asked": {name: _plain(getattr(settings, name)) for name in ("rank", "error", "params")},
        "plain": settings.plain,
        "calibrated": None if settings.calibrate is None else _calibration(settings),
        "finetuned": {"steps": settings.finetune, "everything": settings.finetune_all} if settings.finetune else None,
        "parameters": {
            "added": {"before": compressed.before, "after": after},
            "total": {"before": total + compressed.before - after, "after": total},
        },
        "error": compressed.error,
        "corpus": None if text.val is None else text.val.name,
        "bpb": bpb,
        "note": text.note,
        "sites": _sites(compressed, deviations),
    }


def _calibration(settings: Settings) -> dict[str, Any]:
    return {"corpus": settings.calibrate, "tokens": settings.calibrate_tokens, "seed": settings.seed}


def _sites(compressed: Compressed[Any], deviations: dict[str, theory.Deviation]) -> list[dict[str, Any]]:
    sites: dict[str, dict[str, Any]] = {}
    for head in compressed.heads:
        deviation = deviations.get(head.site)
        site = sites.setdefault(head.site, {"site": head.site, "heads": {}, "deviation": None})
        values = asdict(head)
        site["heads"][head.head] = {key: _plain(values[key]) for key in values if key not in ("site", "head")}
        if deviation is not None:
            site["deviation"] = deviation.to_dict()
    return list(sites.values())


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def show_report(report: dict[str, Any], console: Console) -> None:
    """Prints the table of all generators, and a summary below it."""
    from rich.table import Table

    is_calibrated = report["calibrated"] is not None
    table = Table(title=f"{report['model']} to {report['to']}", title_justify="left")
    for name in ("site", "head", "rank"):
        table.add_column(name, no_wrap=True)
    columns = ["parameters", "of before", "weight error", *(["data error"] if is_calibrated else [])]
    columns += ["logits off by (bound)", "streams off by (bound)"]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for site in report["sites"]:
        for head, row in site["heads"].items():
            is_first = head == next(iter(site["heads"]))
            cells = [site["site"] if is_first else "", head, show_rank(row["rank"])]
            cells += [f"{row['after']:,}", f"{row['after'] / row['before']:.1%}", f"{row['weight_error']:.2%}"]
            cells += [f"{row['data_error']:.2%}"] if is_calibrated else []
            gaps = site["deviation"] or {}
            cells += _gap(gaps.get("logits", {}).get(head)) + _gap(gaps.get("block") if is_first else None)
            table.add_row(*cells)
        table.add_section()
    console.print(table)
    for line in lines(report):
        console.print(line, highlight=False, markup=False)


def lines(report: dict[str, Any]) -> list[str]:
    """Parameters, error and bits per byte in a few lines."""
    added, total = report["parameters"]["added"], report["parameters"]["total"]
    where = "of the logits on the calibration text" if report["calibrated"] else "of the weights"
    if report["calibrated"] and report["asked"]["rank"] is None:
        where += ", each weighted by the sensitivity of the loss"
    said = [
        f"added parameters  {added['before']:,} -> {added['after']:,} ({added['after'] / added['before']:.1%})",
        f"all parameters    {total['before']:,} -> {total['after']:,} ({total['after'] / total['before']:.1%})",
        f"relative error    {report['error']:.3%} {where}",
    ]
    bpb = report["bpb"]
    if bpb["before"] is not None:
        words = f"bits per byte     {bpb['before']:.5f} -> {bpb['after']:.5f} ({bpb['after'] - bpb['before']:+.2g})"
        if bpb.get("finetuned") is not None:
            steps = report["finetuned"]["steps"]
            words += f" -> {bpb['finetuned']:.5f} ({bpb['finetuned'] - bpb['before']:+.2g}) after {steps} steps"
        said.append(f"{words} on {report['corpus']}")
    return [*said, report["note"]] if report["note"] else said


def _gap(gap: dict[str, float] | None) -> list[str]:
    return [""] if gap is None else [f"{gap['measured_max']:.2g} ({gap['bound_max']:.2g})"]


REPORT_NAME = "compress.json"
# The rows of text that gradients are taken on.
SENSITIVITY_ROWS = 64


def compress(settings: Settings) -> dict[str, Any]:
    """Compresses a model, measures and finetunes it, and writes its folder; returns the report, which is also in it."""
    with process_group(settings.device) as world:
        if world.size > 1:
            raise ValueError("compressing is the work of one process: start it without torchrun")
        subject = open_subject(settings.model, world.device)
        # Checked before minutes are spent on it.
        check(subject.network, settings.to, rank=settings.rank, error=settings.error, params=settings.params)
        recipe = recipe_of(settings.model)
        text = open_text(settings, subject, recipe)
        batches = text.validation(subject)
        before = _bpb(subject, text, batches, world, "bpb before")
        seen = _calibrate(subject, text, settings, world.device)
        originals = {name: copy.deepcopy(site) for name, site in routed_sites(subject.network).items()}
        minded = _sensitivities(subject, text, settings, world.device)
        compressed = _replace(subject, settings, seen, minded)
        # Frees hundreds of megabytes.
        seen = None
        deviations = _deviations(subject, originals, batches, world.device)
        bpb = {"before": before, "after": _bpb(subject, text, batches, world, "bpb after")}
        if settings.finetune:
            optim = None if recipe is None else recipe.optim
            finetune(subject, text, settings.finetune, everything=settings.finetune_all, optim=optim)
            bpb["finetuned"] = _bpb(subject, text, batches, world, "bpb finetuned")
        report = make_report(settings, subject, text, compressed, deviations, bpb)
        subject.network.eval()
        subject.write(settings.out, {REPORT_NAME: dumps(REPORT_NAME, report)})
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
    """The sensitivity of the loss on some rows of the calibration text."""
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
    """Compares every site with its original on one row of validation text, as read by the compressed model."""
    if not batches:
        return {}
    ids = batches[0][0][:1].to(device)
    branches = subject.branches(ids.shape[1])
    found: dict[str, theory.Deviation] = {}
    sites = routed_sites(subject.network)

    def compare(name: str, site: HyperConnection, streams: Tensor, routing: Routing) -> None:
        found[name] = theory.deviation(originals[name], site, streams, branches.get(name))
        if found[name].exceeded:
            print(f"warning: {name} exceeds its bound in {', '.join(found[name].exceeded)}", file=sys.stderr)
        bar.update(len(found))

    before = {site: site.observers for site in sites.values()}
    with Bar("comparing", len(sites)) as bar:
        for name, site in sites.items():
            site.observers = (partial(compare, name),)
        try:
            subject.read(ids)
        finally:
            for site, observers in before.items():
                site.observers = observers
    return found
