"""Charts for the page: plain plotly figures as JSON, drawn by plotly's own JavaScript."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from temper_lab.report.charts import Axis, Chart, Mark, Panel, Rule, log_ticks
from temper_lab.report.palette import Style

# A rule has many points, so that hovering works anywhere on it.
RULE_POINTS = 33


def figure(panel: Panel) -> dict[str, Any]:
    """The data and layout of one panel, without the page's colours, which follow its theme."""
    x_range, y_range = _range(panel, is_x=True), _range(panel, is_x=False)
    data = [_rule(rule, panel, y_range if rule.is_vertical else x_range) for rule in panel.rules]
    for mark in panel.marks:
        data += _mark(mark, panel)
    layout = {
        "title": {"text": escape(panel.title), "font": {"size": 14}, "x": 0.02, "xanchor": "left", "y": 0.97},
        "showlegend": False,
        "hovermode": "closest",
        "margin": {"l": 48, "r": 16, "t": 36, "b": 40},
        "xaxis": _axis(panel.x, x_range),
        "yaxis": _axis(panel.y, y_range),
    }
    return {"data": data, "layout": layout}


def as_html(chart: Chart) -> str:
    """The element in which the page draws a chart, with the chart's data in it."""
    plots = "".join(
        f'<div class="plot" role="img" aria-label="{escape(f"{chart.title}: {panel.title}")}" '
        f'style="height:{panel.height}px"><script type="application/json">{script_json(figure(panel))}</script></div>'
        for panel in chart.panels
    )
    few = " single" if len(chart.panels) == 1 else ""
    return (
        f'<figure class="chart" data-chart="{escape(chart.name)}"><h2>{escape(chart.title)}</h2>'
        f'<div class="plots{few}">{plots}</div><figcaption class="note">{escape(chart.caption)}</figcaption></figure>'
    )


def legend(looks: Mapping[str, Style]) -> str:
    """A button for each method that hides and shows it in every chart of the page."""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-method="{escape(label)}">{_swatch(style)}{escape(label)}'
        "</button>"
        for label, style in looks.items()
    )
    everything = '<button type="button" class="all">all</button>'
    return f'<div class="legend" role="group" aria-label="Methods shown">{buttons}{everything}</div>'


@cache
def script() -> str:
    """The scripts of a page: plotly, and the code that draws the charts with it."""
    from plotly.offline import get_plotlyjs

    own = (files("temper_lab.report") / "assets" / "charts.js").read_text(encoding="utf-8")
    return f"{get_plotlyjs()}\n{own}"


def script_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _mark(mark: Mark, panel: Panel) -> list[dict[str, Any]]:
    faint = 0.4 if mark.is_faint else 1.0
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "+".join(["lines"] * mark.line + ["markers"] * mark.points) or "none",
        "name": escape(mark.name),
        "meta": mark.method,
        "x": list(mark.x),
        "y": list(mark.y),
        "opacity": faint,
        "line": {"color": mark.style.color, "dash": mark.style.dash, "width": 2},
        "marker": {"color": mark.style.color, "symbol": mark.style.marker, "size": _size(mark)},
        "hovertemplate": _hover(mark.name, panel, bool(mark.texts)),
    }
    if mark.is_ring:
        trace["marker"] |= {"symbol": "circle-open", "size": 17, "line": {"width": 2}}
    if mark.texts:
        trace["text"] = [escape(text) for text in mark.texts]
    for axis, centres, low, high in (("x", mark.x, mark.x_low, mark.x_high), ("y", mark.y, mark.y_low, mark.y_high)):
        if low:
            trace[f"error_{axis}"] = {
                "type": "data",
                "symmetric": False,
                "array": [end - centre for centre, end in zip(centres, high, strict=True)],
                "arrayminus": [centre - end for centre, end in zip(centres, low, strict=True)],
                "thickness": 1.2,
                "width": 3,
            }
    if not mark.low:
        return [trace]
    band = {
        "type": "scatter",
        "mode": "lines",
        "meta": mark.method,
        "x": [*mark.x, *reversed(mark.x)],
        "y": [*mark.high, *reversed(mark.low)],
        "fill": "toself",
        "fillcolor": mark.style.rgba(0.15),
        "line": {"width": 0},
        "hoverinfo": "skip",
    }
    return [band, trace]


def _size(mark: Mark) -> int:
    size = 5 if mark.is_faint or (mark.line and mark.points) else 11
    return size + 2 * (mark.style.marker == "star")


def _rule(rule: Rule, panel: Panel, ends: list[float]) -> dict[str, Any]:
    along = panel.y if rule.is_vertical else panel.x
    places = [ends[0] + (ends[1] - ends[0]) * place / (RULE_POINTS - 1) for place in range(RULE_POINTS)]
    if along.is_log:
        places = [10**place for place in places]
    across = panel.x if rule.is_vertical else panel.y
    value = f"{rule.value:,.{across.digits or 0}f}"
    x, y = ([rule.value] * RULE_POINTS, places) if rule.is_vertical else (places, [rule.value] * RULE_POINTS)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": escape(rule.name),
        "meta": rule.method,
        "x": x,
        "y": y,
        "line": {"color": rule.style.color, "dash": rule.style.dash, "width": 1.6},
        "hovertemplate": f"<b>{escape(rule.name)}</b><br>{escape(across.label)}: {value}<extra></extra>",
    }


def _hover(name: str, panel: Panel, has_text: bool) -> str:
    lines = [f"<b>{_literal(name)}</b>"]
    axes = (("x", panel.x),) if panel.is_rows else (("x", panel.x), ("y", panel.y))
    for which, axis in axes:
        form = "," if axis.digits is None else f",.{axis.digits}f"
        lines.append(f"{_literal(axis.label)}: %{{{which}:{form}}}")
    if has_text:
        lines.append("%{text}")
    return "<br>".join(lines) + "<extra></extra>"


def _literal(text: str) -> str:
    """Escapes text for a template, in which %{...} would be a value."""
    return escape(text).replace("%{", "%&#123;")


def _axis(axis: Axis, ends: list[float]) -> dict[str, Any]:
    layout: dict[str, Any] = {"automargin": True, "range": ends}
    layout["title"] = {"text": escape(axis.label), "standoff": 8}
    layout["zeroline"] = False
    if axis.is_log:
        layout["type"] = "log"
    if ticks := axis.ticks or (log_ticks(10 ** ends[0], 10 ** ends[1]) if axis.is_log else ()):
        layout |= {"tickvals": [value for value, _ in ticks], "ticktext": [escape(name) for _, name in ticks]}
    return layout


def _range(panel: Panel, *, is_x: bool) -> list[float]:
    """The ends of an axis with a margin, as decimal logarithms if it is logarithmic."""
    axis = panel.x if is_x else panel.y
    if panel.is_rows and not is_x:
        return [min(y for y, _ in axis.ticks) - 0.6, 0.6]
    if axis.limits is not None:
        return [math.log10(end) if axis.is_log else end for end in axis.limits]
    values = [rule.value for rule in panel.rules if rule.is_vertical == is_x]
    for mark in panel.marks:
        values += (
            (*mark.x, *mark.x_low, *mark.x_high)
            if is_x
            else (*mark.y, *mark.low, *mark.high, *mark.y_low, *mark.y_high)
        )
    if axis.is_log:
        values = [math.log10(value) for value in values if value > 0]
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or max(0.05 * abs(low), 0.05)
    return [low - room, high + room]


def _swatch(style: Style) -> str:
    """The line and marker of a method, as a small picture."""
    dashes = {"solid": "", "dash": "6 3", "dot": "2 2.5", "dashdot": "6 2 2 2", "longdash": "9 3"}[style.dash]
    shapes = {
        "circle": '<circle cx="15" cy="6" r="3.6"/>',
        "square": '<rect x="11.6" y="2.6" width="6.8" height="6.8"/>',
        "diamond": '<path d="M15 1.4 19.6 6 15 10.6 10.4 6z"/>',
        "triangle-up": '<path d="M15 1.6 19.4 9.4H10.6z"/>',
        "triangle-down": '<path d="M15 10.4 10.6 2.6H19.4z"/>',
        "cross": '<path d="M13.6 1.8h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8V7.4h-2.8V4.6h2.8z"/>',
        "x": '<path d="m13 1 2 2 2-2 3 3-2 2 2 2-3 3-2-2-2 2-3-3 2-2-2-2z"/>',
        "star": '<path d="m15 .6 1.6 3.6 3.9.4-2.9 2.6.8 3.9-3.4-2-3.4 2 .8-3.9L9.5 4.6l3.9-.4z"/>',
    }
    return (
        f'<svg width="30" height="12" aria-hidden="true" fill="{style.color}"><path d="M1 6H29" stroke="{style.color}" '
        f'stroke-width="2" stroke-dasharray="{dashes}"/>{shapes[style.marker]}</svg>'
    )
