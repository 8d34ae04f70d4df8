"""A self-contained HTML page of tabs: without a network, light or dark, on a desktop or a phone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from temper_lab.report import outcomes, plots_plotly
from temper_lab.report.palette import VERDICTS, styles
from temper_lab.report.stats import explanation
from temper_lab.report.table import as_html, whole
from temper_lab.report.tables import SCALE, paper, why
from temper_lab.report.view import StudyView, words
from temper_lab.study.claims import Outcome

if TYPE_CHECKING:
    from temper_lab.report.write import Content
    from temper_lab.study.results import Results

# The content security policy makes the browser refuse every request.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; worker-src blob:; base-uri 'none'; form-action 'none'"
)
# Runs before anything is painted, so that a dark page does not begin with a white flash.
THEME = 'try{const t=localStorage.getItem("temper-theme");if(t)document.documentElement.dataset.theme=t}catch{}'


@dataclass(frozen=True)
class Tab:
    """A tab of a page.

    Args:
        id: a word, which is also its address: page.html#id.
        html: trusted HTML, in which the caller has escaped all texts.
        css, js: inlined unchanged; the same text in several tabs is inlined once.
    """

    id: str
    title: str
    html: str
    css: str = ""
    js: str = ""


def page(title: str, tabs: Sequence[Tab]) -> str:
    """An HTML document with these tabs; the first is shown unless the address names another."""
    if not tabs:
        raise ValueError("a page needs at least one tab")
    ids = [tab.id for tab in tabs]
    if bad := [id for id in ids if not re.fullmatch(r"[a-z][a-z0-9-]*", id)] or [id for id in ids if ids.count(id) > 1]:
        raise ValueError(f"tab id {bad[0]!r}: expected small letters, digits and dashes, and each id once")
    styles = dict.fromkeys([_asset("page.css"), *(tab.css for tab in tabs if tab.css)])
    # The page's own script comes last: it shows the first tab when all listeners are registered.
    scripts = dict.fromkeys([*(tab.js for tab in tabs if tab.js), _asset("page.js")])
    buttons = "".join(
        f'<button type="button" role="tab" id="tab-{tab.id}" aria-controls="{tab.id}" data-tab="{tab.id}">'
        f"{escape(tab.title)}</button>"
        for tab in tabs
    )
    panels = "".join(
        f'<section role="tabpanel" id="{tab.id}" aria-labelledby="tab-{tab.id}" tabindex="0">{tab.html}</section>\n'
        for tab in tabs
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<script>{THEME}</script>\n"
        f"{_elements('style', styles)}</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1>"
        '<button type="button" id="theme" aria-label="Light or dark">◐</button></header>\n'
        f'<nav role="tablist" aria-label="Parts of the page">{buttons}</nav>\n<main>\n{panels}</main>\n'
        f"{_elements('script', scripts)}</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (files("temper_lab.report") / "assets" / name).read_text(encoding="utf-8")


def _elements(name: str, texts: Iterable[str]) -> str:
    """Wraps each text in an element, which it cannot end: `<\\/` in a string is `</`."""
    safe = (re.sub(f"</(?={name})", r"<\\/", text, flags=re.IGNORECASE) for text in texts)
    return "".join(f"<{name}>{text}</{name}>\n" for text in safe)


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
    """The tab of sweeps; None for a study that varies nothing."""
    parts = _charts(content, [name for name in content.charts if name.startswith("sweep-")])
    return _tab(content, "sweeps", "Sweeps", parts) if parts else None


def parameters(content: Content) -> Tab:
    parts = _charts(content, ["pareto-bpb", "pareto-core", "parameters"])
    if content.study.size is None:
        parts.append(_sentence("The recipe in results.json does not say the size of the model, so nothing is counted."))
    return _tab(content, "parameters", "Parameters", [*parts, _table(content, "core")])


def cost(content: Content) -> Tab:
    parts = [*_charts(content, ["cost"]), _table(content, "cost")]
    measured = content.study.results.cost
    if measured and measured.setting:
        parts.append(_card(f"<h2>How it was measured</h2>{_facts(measured.setting)}"))
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
    """The tab of claims; None for a study without claims."""
    found = content.claims
    if not found:
        return None
    counts = [(verdict, sum(one.verdict == verdict for one in found)) for verdict in VERDICTS]
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
    # Rows are claims, not methods, so there is no legend.
    return Tab("claims", "Claims", "\n".join(filter(None, parts)), js=plots_plotly.script())


def _findings(one: Outcome) -> str:
    items = "".join(f"<li>{escape(finding.sentence)}</li>" for finding in one.findings)
    title = f"{escape(one.claim.name)}: {one.verdict}"
    return f'<h3>{title}</h3><p>{escape(one.claim.text)}</p><ul class="statements">{items}</ul>'


def about(content: Content) -> Tab:
    study = content.study
    results = study.results
    facts = {
        "study": study.name,
        "command": results.command,
        "commit": results.commit or "not from a git checkout",
        "methods": ", ".join(results.methods),
        "streams": ", ".join(map(str, results.streams)),
        "seeds": ", ".join(map(str, results.seeds)),
        **({"varied": results.vary} if results.vary else {}),
        **_taken_over(results),
    }
    recipe = json.dumps(results.recipe or None, indent=2, ensure_ascii=False)
    parts = [
        _table(content, "runs"),
        _card(
            f"<h2>To do it again</h2>{_facts(facts)}<h3>Machine</h3>{_facts(results.machine)}"
            f"<h3>Versions</h3>{_facts(results.versions)}"
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


def _taken_over(results: Results) -> dict[str, str]:
    """The sources of runs that this study did not train itself."""
    sources = [run.source for run in results.runs if run.source]
    commits = sorted({f"{source.study} at commit {source.commit}" for source in sources})
    return {"taken over": f"{len(sources)} runs of {', '.join(commits)}"} if sources else {}


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
    return Tab(id, title, f"{plots_plotly.legend(looks)}{html}", js=plots_plotly.script())


def _charts(content: Content, names: Iterable[str]) -> list[str]:
    return [plots_plotly.as_html(content.charts[name]) for name in names if name in content.charts]


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


def _setting(study: StudyView) -> str:
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


def _unfinished(study: StudyView) -> str:
    """The runs without a number, with the reason."""
    others = [run for run in study.runs if not run.is_finished or run.bpb is None]
    if not others:
        return ""
    known = [(run, reason) for run in others if (reason := why(run))]
    lines = "".join(f"<li>{escape(run.key)}: {escape(run.status)} ({escape(reason)})</li>" for run, reason in known)
    # Limited, because hundreds of runs may be waiting; the tab About lists them all.
    rest = Counter(run.status for run in others if not why(run))
    lines += "".join(f"<li>{status}: {count} run{'s' if count != 1 else ''}</li>" for status, count in rest.items())
    return _card(f'<h2>Not in the numbers</h2><ul class="statements">{lines}</ul>', " warning")


def _steps() -> str:
    return " and ".join(f"{steps:,} steps at N = {n}" for n, steps in paper()["steps"].items())


TABS = (overview, claims, curves, sweeps, parameters, cost, significance)
