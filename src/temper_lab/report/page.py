"""One self-contained HTML page of tabs: no network, light and dark, from a desk to a phone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

# The browser itself refuses anything that would leave the page.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; worker-src blob:; base-uri 'none'; form-action 'none'"
)
# Before anything is painted, so that a page in dark mode does not begin with a white flash.
THEME = 'try{const t=localStorage.getItem("temper-theme");if(t)document.documentElement.dataset.theme=t}catch{}'


@dataclass(frozen=True)
class Tab:
    """A part of a page.

    Args:
        id: a word, which is also its address: page.html#id.
        html: trusted; whoever writes it escapes what it is made of.
        css, js: inlined as they are. The same text in several tabs is inlined once.
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
    # The page's own comes last: it shows the first tab, and by then everybody listens.
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
    return (files("temper_lab.report") / name).read_text(encoding="utf-8")


def _elements(name: str, texts: Iterable[str]) -> str:
    """Each text in an element of its own, which it cannot end: `<\\/` in a string is `</`."""
    safe = (re.sub(f"</(?={name})", r"<\\/", text, flags=re.IGNORECASE) for text in texts)
    return "".join(f"<{name}>{text}</{name}>\n" for text in safe)
