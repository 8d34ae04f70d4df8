"""The tabs of a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from temper_lab.report import interactive, outcomes
from temper_lab.report.claims import Outcome
from temper_lab.report.comparisons import explanation
from temper_lab.report.compute import Content
from temper_lab.report.counts import paper
from temper_lab.report.formats import as_html, whole
from temper_lab.report.outcomes import LOOKS
from temper_lab.report.page import Tab
from temper_lab.report.results import Study, words
from temper_lab.report.styles import styles
from temper_lab.report.tables import SCALE, why


def overview(content: Content) -> Tab:
    study = content.study
    parts = [
        f"<p>{escape(_setting(study))}</p>",
        _tiles(content),
        _unfinished(study),
        _table(content, "main"),
        _statements(content),
        *_charts(content, ["pareto-bpb"]),
    ]
    return _tab(content, "overview", "Overview", parts)


def curves(content: Content) -> Tab:
    mixing = [name for name in content.charts if name.startswith("mixing-")]
    return _tab(content, "curves", "Curves", _charts(content, ["curves", "gaps", "loss", *mixing]), _nothing("curve"))


def sweeps(content: Content) -> Tab | None:
    """Only for a study that varies something."""
    parts = _charts(content, [name for name in content.charts if name.startswith("sweep-")])
    return _tab(content, "sweeps", "Sweeps", parts) if parts else None


def parameters(content: Content) -> Tab:
    parts = _charts(content, ["pareto-bpb", "pareto-core", "parameters"])
    if content.study.size is None:
        parts.append(_sentence("The recipe in results.json does not say the size of the model, so nothing is counted."))
    return _tab(content, "parameters", "Parameters", [*parts, _table(content, "core")])


def cost(content: Content) -> Tab:
    parts = [*_charts(content, ["cost"]), _table(content, "cost")]
    setting = (content.study.raw.get("cost") or {}).get("setting")
    if setting:
        parts.append(_card(f"<h2>How it was measured</h2>{_facts(setting)}"))
    nothing = (
        "The cost of a step was not measured in this study. `temper compare` measures it after the runs unless it is "
        "given --no-cost. Times of the runs themselves are under About: they ran at different times."
    )
    return _tab(content, "cost", "Cost", parts, nothing)


def significance(content: Content) -> Tab:
    forests = [name for name in content.charts if name.startswith("forest-")]
    text = "".join(f"<p>{escape(line)}</p>" for line in explanation(content.comparisons))
    parts = [*_charts(content, forests), _table(content, "significance")]
    against = {one.against for one in content.comparisons}
    if content.study.baseline not in against:
        parts.append(
            _sentence("No residual run has finished beside another method, so nothing is compared with residual.")
        )
    return _tab(content, "significance", "Significance", [_card(text) if against else "", *parts])


def claims(content: Content) -> Tab | None:
    """Only for a study that claims something."""
    found = content.claims
    if not found:
        return None
    counts = [(verdict, sum(one.verdict == verdict for one in found)) for verdict in LOOKS]
    tiles = "".join(f'<div class="tile"><b>{count}</b><span>{verdict}</span></div>' for verdict, count in counts)
    text = "".join(f"<p>{escape(line)}</p>" for line in outcomes.explanation(found))
    parts = [
        f'<div class="tiles">{tiles}</div>',
        _card(text),
        _table(content, "claims"),
        *_charts(content, ["claims", "claims-trends"]),
        _card("<h2>What was found</h2>" + "".join(map(_findings, found))),
        _table(content, "claim-tests"),
    ]
    # Rows are claims, not methods: there is nothing to hide, so no legend.
    return Tab("claims", "Claims", "\n".join(filter(None, parts)), js=interactive.script())


def _findings(one: Outcome) -> str:
    items = "".join(f"<li>{escape(finding.sentence)}</li>" for finding in one.findings)
    title = f"{escape(one.claim.name)}: {one.verdict}"
    return f'<h3>{title}</h3><p>{escape(one.claim.text)}</p><ul class="statements">{items}</ul>'


def about(content: Content) -> Tab:
    study = content.study
    raw = study.raw
    facts = {
        "study": study.name,
        "command": raw.get("command"),
        "commit": raw.get("commit") or "not from a git checkout",
        "methods": ", ".join(map(str, raw.get("methods") or [])),
        "streams": ", ".join(map(str, raw.get("streams") or [])),
        "seeds": ", ".join(map(str, raw.get("seeds") or [])),
        **({"varied": raw["vary"]} if raw.get("vary") else {}),
    }
    recipe = json.dumps(raw.get("recipe"), indent=2, ensure_ascii=False)
    parts = [
        _table(content, "runs"),
        _card(
            f"<h2>To do it again</h2>{_facts(facts)}<h3>Machine</h3>{_facts(raw.get('machine') or {})}"
            f"<h3>Versions</h3>{_facts(raw.get('versions') or {})}"
        ),
        _card(
            "<h2>Recipe</h2><p>The shared part: each run has its own preset, streams, routing options, seed and varied "
            "fields.</p>"
            f'<pre tabindex="0">{escape(recipe)}</pre>'
        ),
        _card(
            f"<h2>About the paper's numbers</h2><p>{escape(paper()['name'])}: {paper()['depth']} blocks, width "
            f"{paper()['dim']}, {_steps()}.</p><p>{escape(SCALE)}</p>"
        ),
        _card(
            "<h2>About this page</h2><p>Everything here is computed from results.json"
            " (an explorer of the routing, if there is one, reads the models too). Figures are in figures/ as PNG and "
            "SVG, tables in tables/ as CSV in full precision, LaTeX and Markdown. The page loads nothing from "
            "anywhere.</p>"
        ),
    ]
    return _tab(content, "about", "About", parts)


def _tab(content: Content, id: str, title: str, parts: Iterable[str], nothing: str = "") -> Tab:
    html = "\n".join(part for part in parts if part)
    if not html:
        return Tab(id, title, _sentence(nothing))
    if 'class="plot"' not in html:
        return Tab(id, title, html)
    looks = styles(content.study.preset_of)
    if 'data-chart="parameters"' in html:
        # Methods that are only counted, not trained, can be hidden too.
        counted = (mark.method for panel in content.charts["parameters"].panels for mark in panel.marks)
        looks = styles({**content.study.preset_of, **{label: label for label in counted if label not in looks}})
    return Tab(id, title, f"{interactive.legend(looks)}{html}", js=interactive.script())


def _charts(content: Content, names: Iterable[str]) -> list[str]:
    return [interactive.as_html(content.charts[name]) for name in names if name in content.charts]


def _table(content: Content, name: str) -> str:
    table = content.tables.get(name)
    return _card(as_html(table)) if table is not None and table.rows else ""


def _card(html: str, kind: str = "") -> str:
    return f'<div class="card{kind}">{html}</div>'


def _sentence(text: str) -> str:
    return _card(f"<p>{escape(text)}</p>")


def _nothing(what: str) -> str:
    return f"No run has finished yet, so there is no {what} to show. About has the state of every run."


def _facts(values: Mapping[str, Any]) -> str:
    rows = (
        f"<dt>{escape(str(key))}</dt><dd><code>{escape(_plain(value))}</code></dd>" for key, value in values.items()
    )
    return f'<dl class="facts">{"".join(rows)}</dl>'


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _setting(study: Study) -> str:
    """The study in one sentence."""
    model, train = study.section("model"), study.section("train")
    parts = [
        f"{len(study.labels)} method{'s' if len(study.labels) != 1 else ''}",
        f"N = {', '.join(map(str, study.streams))}",
    ]
    if study.size is not None:
        parts.append(f"{model['depth']} blocks of width {study.size[0]}")
    steps, batch = train.get("steps"), train.get("batch_tokens")
    if isinstance(steps, int) and isinstance(batch, int):
        parts.append(f"{steps:,} steps of {batch:,} tokens")
    if corpus := study.section("data").get("corpus"):
        parts.append(f"corpus {corpus}")
    parts += [f"{name} varied" for name in study.fields]
    equal = " and of the same settings" if study.fields else ""
    return (
        f"{'; '.join(parts)}. All methods of a seed{equal} see the same data in the same order for the same number of "
        "steps."
    )


def _tiles(content: Content) -> str:
    study = content.study
    finished = [run for run in study.runs if run.is_finished]
    tiles = [(f"{len(finished)} of {len(study.runs)}", "runs finished")]
    rows = [row for row in content.tables["main"].rows if row["bpb"] is not None]
    if rows:
        best = min(rows, key=lambda row: row["bpb"])
        where = "" if best["method"] == study.baseline else f", N = {best['streams']}"
        settings = "".join(f", {words({name: best[name]})}" for name in study.fields)
        tiles.append((f"{best['bpb']:.4f}", f"lowest mean bpb: {best['method']}{where}{settings}"))
    routed = [row for row in rows if row["added"]]
    if routed:
        least = min(routed, key=lambda row: row["added"])
        tiles.append((whole(least["added"]), f"fewest added parameters: {least['method']}, N = {least['streams']}"))
    seeds = {row["seeds"] for row in rows}
    if seeds:
        span = str(min(seeds)) if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
        tiles.append((span, "seeds of each method"))
    cells = "".join(
        f'<div class="tile"><b>{escape(number)}</b><span>{escape(what)}</span></div>' for number, what in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _statements(content: Content) -> str:
    blocks = []
    for n, lines in content.statements.items():
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        blocks.append(f'<div><h3>N = {n}</h3><ul class="statements">{items}</ul></div>')
    if not blocks:
        return _sentence(content.lines[0])
    return _card(f'<h2>What the numbers say</h2><div class="columns">{"".join(blocks)}</div>')


def _unfinished(study: Study) -> str:
    """Runs without a number, and why."""
    others = [run for run in study.runs if not run.is_finished or run.bpb is None]
    if not others:
        return ""
    lines = "".join(
        f"<li>{escape(run.key)}: {escape(run.status)}{escape(f' ({why(run)})' if why(run) else '')}</li>"
        for run in others
    )
    return _card(f'<h2>Not in the numbers</h2><ul class="statements">{lines}</ul>', " warning")


def _steps() -> str:
    return " and ".join(f"{steps:,} steps at N = {n}" for n, steps in paper()["steps"].items())


TABS = (overview, claims, curves, sweeps, parameters, cost, significance)
