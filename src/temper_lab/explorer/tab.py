"""The explorer as a part of a page: traced texts, and models that the page runs by itself."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from temper_lab.console import Bar
from temper_lab.explorer import embed
from temper_lab.explorer.trace import Trace, default_texts, titles, trace
from temper_lab.model import GPT
from temper_lab.report.page import Tab
from temper_lab.report.view import words
from temper_lab.study.results import Results, Run
from temper_lab.train.model_dir import load

# Megabytes of base64. The page of a demo stays below 8 MB, most of which is plotly.
LIVE_MEGABYTES, TRACE_MEGABYTES = 1.5, 8.0
NO_ROOM = "there was no room in the page for its weights (--live-megabytes gives it more)"
# The scripts of the page, and those of its worker.
PAGE = ("reading.js", "heat.js", "flow.js", "maps.js", "runner.js", "explorer.js")
WORKER = ("tokenizer.js", "mixers.js", "engine.js", "worker.js")


@dataclass(frozen=True)
class Subject:
    """A model to inspect.

    Args:
        path: a run or a model folder.
        facts: a few words about it; made from the model if there are none.
    """

    path: Path
    title: str
    facts: str = ""


@dataclass(frozen=True)
class Traced:
    """A subject with its traced texts, and the size of its weights in the page."""

    subject: Subject
    entry: dict[str, Any]
    traces: list[Trace]
    refusal: str | None
    characters: dict[bool, int]
    """The number of base64 characters, by whether the large matrices are shortened."""


def tab(
    study_folder: Path,
    results: Results,
    *,
    live_megabytes: float = LIVE_MEGABYTES,
    trace_megabytes: float = TRACE_MEGABYTES,
) -> Tab | None:
    """The explorer of a study's finished runs: every method at the first N and the lowest seed; None without models.

    Args:
        live_megabytes: the most base64 for weights that the page runs.
        trace_megabytes: the most base64 for traced texts; other N are added as long as there is room.
    """
    subjects = _of_study(Path(study_folder), results)
    first = [subject for subject, is_first in subjects if is_first]
    rest = [subject for subject, is_first in subjects if not is_first]
    read: list[Traced] = []
    texts: list[str] = []
    room = trace_megabytes * 1e6
    with Bar("tracing texts", len(subjects)) as bar:
        for index, subject in enumerate(first + rest):
            bar.update(index, subject.title)
            try:
                model, tokenizer = load(subject.path)
            # A damaged model must not prevent the report.
            except (ValueError, OSError) as error:
                bar.say(f"not in the explorer: {error}")
                continue
            texts = texts or default_texts(subject.path, tokenizer)
            traced = _read(subject, model, tokenizer, texts)
            size = sum(len(part["packed"]) for part in traced.entry["traces"])
            if index >= len(first) and size > room:
                break
            room -= size
            read.append(traced)
    return _build(read, texts, live_megabytes) if read else None


def build(
    subjects: Sequence[Subject], texts: Sequence[str], *, live_megabytes: float = 64.0
) -> tuple[Tab, list[list[Trace]]]:
    """The explorer of some models and texts, and the trace of every model and text."""
    read = []
    with Bar("tracing texts", len(subjects)) as bar:
        for index, subject in enumerate(subjects):
            bar.update(index, subject.title)
            model, tokenizer = load(subject.path)
            texts = list(texts) or default_texts(subject.path, tokenizer)
            read.append(_read(subject, model, tokenizer, texts))
    return _build(read, texts, live_megabytes), [traced.traces for traced in read]


def _of_study(folder: Path, results: Results) -> list[tuple[Subject, bool]]:
    """Finished runs that still have a model, one for every method and N, with whether each is of the first N."""
    chosen: dict[tuple[str, int], Run] = {}
    # Prefers runs without variation, and the lowest seed.
    for run in sorted(results.runs, key=lambda run: (len(run.vary), run.seed)):
        # A key has to be a plain folder name, which cannot lead elsewhere.
        is_name = Path(run.key).name == run.key
        if run.is_finished and is_name and (folder / "runs" / run.key / "model").is_dir():
            chosen.setdefault((run.method, run.streams), run)
    methods = [*results.methods, *(run.method for run in results.runs)]
    streams = [*results.streams, *(run.streams for run in results.runs)]

    # The residual baseline has one stream and no routing to show, so it comes after the first N.
    def place(run: Run) -> tuple[int, bool, int]:
        return 0 if run.is_residual else streams.index(run.streams), run.is_residual, methods.index(run.method)

    runs = sorted(chosen.values(), key=place)
    found = []
    for run in runs:
        bpb = "" if run.bpb is None else f", {run.bpb:.3f} bits per byte"
        added = "" if run.added is None else f"{run.added:,} routing parameters"
        settings = f", {words(run.vary)}" if run.vary else ""
        subject = Subject(
            folder / "runs" / run.key, f"{run.method}, N = {run.streams}{settings}", f"{added}{bpb}, seed {run.seed}"
        )
        found.append((subject, place(run)[0] == place(runs[0])[0]))
    return found


def _read(subject: Subject, model: GPT, tokenizer: Any, texts: Sequence[str]) -> Traced:
    traces = [trace(model, tokenizer, text) for text in texts]
    routing = model.config.routing()
    bounded = routing.is_residual or (routing.gates == "sigmoid" and routing.build_mixer().is_bounded)
    weights = embed.tensors(model)
    entry = {
        "title": subject.title,
        "facts": subject.facts or _facts(model),
        "streams": routing.num_streams,
        "sites": [site.name for site in traces[0].sites],
        "range": "unit" if bounded else "any",
        "command": f'temper inspect --run {shlex.quote(str(subject.path))} --text "..."',
        "traces": [_packed(each) for each in traces],
    }
    sizes = {short: embed.encoded_size(weights, short=short) for short in (False, True)}
    return Traced(subject, entry, traces, embed.refusal(model, tokenizer), sizes)


def _facts(model: GPT) -> str:
    counts, streams = model.num_parameters(), model.num_streams
    return (
        f"{model.config.method}, N = {streams}, {counts['total']:,} parameters, {counts['routing']:,} of them routing"
    )


def _packed(given: Trace) -> dict[str, Any]:
    packed = base64.b64encode(given.packed().numpy().tobytes()).decode()
    return {"pieces": given.pieces, "surprise": given.surprise, "isCut": given.is_cut, "packed": packed}


def _build(read: Sequence[Traced], texts: Sequence[str], live_megabytes: float) -> Tab:
    able = [traced for traced in read if traced.refusal is None]
    room = live_megabytes * 1e6
    # Exact weights if all fit, otherwise 16-bit weights where that is not visible, so that more models fit.
    exact = sum(traced.characters[False] for traced in able) <= room
    models, tokenizers = [], []
    blocks: list[str] = []
    for traced in read:
        entry = {**traced.entry, "live": None, "why": traced.refusal or NO_ROOM}
        models.append(entry)
        if traced.refusal is not None or traced.characters[not exact] > room:
            continue
        model, tokenizer = load(traced.subject.path)
        short = not exact and embed.can_be_short(model, tokenizer, traced.traces)
        if traced.characters[short] > room:
            continue
        room -= traced.characters[short]
        table, encoded = embed.encode(embed.tensors(model), short=short)
        described = embed.describe_tokenizer(tokenizer)
        # The runs of a study share their tokenizer.
        if described not in tokenizers:
            tokenizers.append(described)
        name = f"explorer-weights-{len(blocks)}"
        blocks.append(f'<script type="application/octet-stream;base64" id="{name}">{encoded}</script>')
        entry["why"] = None
        entry["live"] = {
            "weights": name,
            "table": table,
            "description": embed.describe(model),
            "tokenizer": tokenizers.index(described),
        }
    named = [{"title": title, "text": text} for title, text in zip(titles(texts), texts, strict=True)]
    content = {"models": models, "texts": named, "tokenizers": tokenizers}
    # Escaped, so that no text can end its script element.
    encoded = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    data = f'<script type="application/json" id="explorer-data">{encoded}</script>'
    engine = f'<script type="text/plain" id="explorer-engine">{_script(WORKER)}</script>'
    html = "\n".join([_file("explorer.html"), data, engine, *blocks])
    return Tab("explorer", "Routing", html, _file("explorer.css"), f"(() => {{\n{_script(PAGE)}\n}})();")


def _script(names: Sequence[str]) -> str:
    return "\n".join(['"use strict";', *map(_file, names)])


def _file(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
