"""The explorer as a part of a page: traced texts, and models that the page runs by itself."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from temper_lab.load import load
from temper_lab.model import GPT
from temper_lab.progress import Bar
from temper_lab.report.explorer import bpe, live
from temper_lab.report.explorer.texts import default_texts, titles
from temper_lab.report.explorer.trace import Trace, trace
from temper_lab.report.page import Tab
from temper_lab.report.results import Run, words

LIVE_MEGABYTES, TRACE_MEGABYTES = 24.0, 8.0
# The page's own script, and what its worker runs.
PAGE = ("reading.js", "heat.js", "flow.js", "maps.js", "runner.js", "explorer.js")
WORKER = ("tokenizer.js", "mixers.js", "engine.js", "worker.js")


@dataclass(frozen=True)
class Subject:
    """A model to look at.

    Args:
        path: a run or a model folder.
        facts: a few words about it; made from the model if there are none.
    """

    path: Path
    title: str
    facts: str = ""


@dataclass(frozen=True)
class Traced:
    """A subject with its texts read, and what it would cost to put its weights into the page."""

    subject: Subject
    entry: dict[str, Any]
    traces: list[Trace]
    refusal: str | None
    characters: dict[bool, int]
    """Of base64, by whether the large matrices are shortened."""


def tab(
    study_folder: Path,
    results: Mapping[str, Any],
    *,
    live_megabytes: float = LIVE_MEGABYTES,
    trace_megabytes: float = TRACE_MEGABYTES,
) -> Tab | None:
    """The routing of a study's finished runs, every method at the first N and the lowest seed; None without models.

    Args:
        results: the content of `results.json`.
        live_megabytes: of base64, for weights that the page runs.
        trace_megabytes: of base64, for traced texts; as long as there is room, the other N come too.
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
            # One damaged model is no reason for no report.
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
    """The explorer of some models and texts, and what every model did with every text."""
    read = []
    with Bar("tracing texts", len(subjects)) as bar:
        for index, subject in enumerate(subjects):
            bar.update(index, subject.title)
            model, tokenizer = load(subject.path)
            texts = list(texts) or default_texts(subject.path, tokenizer)
            read.append(_read(subject, model, tokenizer, texts))
    return _build(read, texts, live_megabytes), [traced.traces for traced in read]


def _of_study(folder: Path, results: Mapping[str, Any]) -> list[tuple[Subject, bool]]:
    """Finished runs that still have a model, one of every method and N; and whether each is of the first N."""
    chosen: dict[tuple[str, int], Run] = {}
    known = [Run.of(entry) for entry in results["runs"]]
    # The recipe as it is, if there are such runs, and the lowest seed.
    for run in sorted(known, key=lambda run: (len(run.vary), run.seed)):
        # A key is the name of a folder in there, and of nothing else.
        is_name = Path(run.key).name == run.key
        if run.is_finished and is_name and (folder / "runs" / run.key / "model").is_dir():
            chosen.setdefault((run.method, run.streams), run)
    methods = [*map(str, results.get("methods") or []), *(run.method for run in known)]
    streams = [*(results.get("streams") or []), *(run.streams for run in known)]

    # The residual baseline has one stream at every N, and nothing to look at: it comes after the first N.
    def place(run: Run) -> tuple[int, bool, int]:
        return 0 if run.is_residual else streams.index(run.streams), run.is_residual, methods.index(run.method)

    runs = sorted(chosen.values(), key=place)
    found = []
    for run in runs:
        bpb = "" if run.bpb is None else f", {run.bpb:.3f} bits per byte"
        added = "" if run.added is None else f"{run.added:,} routing parameters"
        settings = f", {words(dict(run.vary))}" if run.vary else ""
        subject = Subject(
            folder / "runs" / run.key, f"{run.label}, N = {run.streams}{settings}", f"{added}{bpb}, seed {run.seed}"
        )
        found.append((subject, place(run)[0] == place(runs[0])[0]))
    return found


def _read(subject: Subject, model: GPT, tokenizer: Any, texts: Sequence[str]) -> Traced:
    traces = [trace(model, tokenizer, text) for text in texts]
    routing = model.config.routing()
    bounded = routing.is_residual or (routing.gates == "sigmoid" and routing.build_mixer().is_bounded)
    weights = live.tensors(model)
    entry = {
        "title": subject.title,
        "facts": subject.facts or _facts(model),
        "streams": routing.num_streams,
        "sites": [site.name for site in traces[0].sites],
        "range": "unit" if bounded else "any",
        "command": f'temper inspect --run {shlex.quote(str(subject.path))} --text "..."',
        "traces": [_packed(each) for each in traces],
    }
    sizes = {short: live.encoded_size(weights, short=short) for short in (False, True)}
    return Traced(subject, entry, traces, live.refusal(model, tokenizer), sizes)


def _facts(model: GPT) -> str:
    counts, streams = model.num_parameters(), model.num_streams
    return (
        f"{model.config.preset}, N = {streams}, {counts['total']:,} parameters, {counts['routing']:,} of them routing"
    )


def _packed(given: Trace) -> dict[str, Any]:
    packed = base64.b64encode(given.packed().numpy().tobytes()).decode()
    return {"pieces": given.pieces, "surprise": given.surprise, "isCut": given.is_cut, "packed": packed}


def _build(read: Sequence[Traced], texts: Sequence[str], live_megabytes: float) -> Tab:
    able = [traced for traced in read if traced.refusal is None]
    room = live_megabytes * 1e6
    # Exact weights if they fit for all, else shortened where nobody could tell, so that more models come along.
    exact = sum(traced.characters[False] for traced in able) <= room
    models, tokenizers, blocks = [], [], []
    for traced in read:
        entry = {**traced.entry, "live": None, "why": traced.refusal or "there was no room in the page for its weights"}
        models.append(entry)
        if traced.refusal is not None or traced.characters[not exact] > room:
            continue
        model, tokenizer = load(traced.subject.path)
        short = not exact and live.can_be_short(model, tokenizer, traced.traces)
        if traced.characters[short] > room:
            continue
        room -= traced.characters[short]
        table, encoded = live.encode(live.tensors(model), short=short)
        described = bpe.describe(tokenizer)
        # The runs of a study share their tokenizer.
        if described not in tokenizers:
            tokenizers.append(described)
        name = f"explorer-weights-{len(blocks)}"
        blocks.append(f'<script type="application/octet-stream;base64" id="{name}">{encoded}</script>')
        entry["why"] = None
        entry["live"] = {
            "weights": name,
            "table": table,
            "description": live.describe(model),
            "tokenizer": tokenizers.index(described),
        }
    named = [{"title": title, "text": text} for title, text in zip(titles(texts), texts, strict=True)]
    content = {"models": models, "texts": named, "tokenizers": tokenizers}
    # No text may end the block it is in.
    encoded = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    data = f'<script type="application/json" id="explorer-data">{encoded}</script>'
    engine = f'<script type="text/plain" id="explorer-engine">{_script(WORKER)}</script>'
    html = "\n".join([_file("explorer.html"), data, engine, *blocks])
    return Tab("explorer", "Routing", html, _file("explorer.css"), f"(() => {{\n{_script(PAGE)}\n}})();")


def _script(names: Sequence[str]) -> str:
    return "\n".join(['"use strict";', *map(_file, names)])


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
