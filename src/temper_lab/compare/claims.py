"""The claims of a recipe, checked against the runs that its grid has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from temper.registry import unknown
from temper_lab.compare.method import Method
from temper_lab.compare.study import Cell, Study, read_grid
from temper_lab.recipe import Recipe
from temper_lab.report.claims import ROUTING, STREAMS, Claim, read_claims


def claims_of(values: Mapping[str, Any], recipe: Recipe, source: str) -> tuple[Claim, ...]:
    """The claims of a section [compare], about runs of its grid; raises ValueError."""
    if "claims" not in values:
        return ()
    study = Study("", recipe, read_grid(values, recipe, source))
    try:
        claims = read_claims(values["claims"])
        if known := [claim.name for claim in claims if claim.record]:
            raise ValueError(f"claim {known[0]} has a record; expected none in a recipe: the study keeps it")
        return tuple(_checked(claim, study) for claim in claims)
    except ValueError as error:
        raise ValueError(f"{source}: [compare] {error}") from error


def _checked(claim: Claim, study: Study) -> Claim:
    """With its methods in their one spelling, all of whose runs are in the grid."""
    fields = {
        f"{section}.{key}": value for section, part in study.recipe.to_dict().items() for key, value in part.items()
    }

    def differing(settings: Iterable[tuple[str, Any]], method: Method) -> dict[str, Any]:
        """What is not as in the recipe, of what a method depends on."""
        ignored = ROUTING if method.preset == "residual" else ()
        return {name: value for name, value in settings if fields.get(name) != value and name not in ignored}

    def find(text: str, streams: int, settings: Mapping[str, Any]) -> dict[int, float]:
        method = Method.parse(text)
        cells = [cell for cell in study.cells if cell.method == method]
        if not cells:
            raise _missing(text, study.methods)
        at = [cell for cell in cells if cell.streams == streams or method.preset == "residual"]
        if not at:
            raise _missing(f"{text} at N = {streams}", sorted({cell.streams for cell in cells}))
        wanted = differing(settings.items(), method)
        if not any(differing(_vary(cell), method) == wanted for cell in at):
            raise _missing(f"{text} with {_words(settings.items())}", sorted({_words(_vary(cell)) for cell in at}))
        return {}

    try:
        if claim.along not in ("", STREAMS, *fields):
            raise unknown("axis", claim.along, {STREAMS, *fields})
        spelled: dict[str, Any] = {"methods": [str(Method.parse(text)) for text in claim.methods]}
        if claim.against:
            spelled["against"] = str(Method.parse(claim.against))
        # The lookup of its own test says which runs it needs.
        list(claim.rule.samples(claim, find))
    except ValueError as error:
        raise ValueError(f"claim {claim.name}: {error}") from error
    return Claim.from_dict({**claim.to_dict(), **spelled})


def _missing(what: str, known: Collection[Any]) -> ValueError:
    return ValueError(f"the grid has no {what}; expected some of {', '.join(map(str, known))}")


def _words(settings: Iterable[tuple[str, Any]]) -> str:
    return " and ".join(f"{name} = {value}" for name, value in settings) or "the recipe as it is"


def _vary(cell: Cell) -> tuple[tuple[str, Any], ...]:
    """The fields of the recipe that are a run's own."""
    return cell.vary
