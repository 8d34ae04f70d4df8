"""Claims: hypotheses about a study, written down before its runs and tested after them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from temper.registry import Registered, is_int, unknown
from temper_lab.report.stats import Mean, holm, mean

SHOWN, REFUTED, OPEN = "shown", "refuted", "open"
ALPHA = 0.05
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
# The number of streams as an axis; any other axis is a field of the recipe, such as model.depth.
STREAMS = "streams"
# Fields that residual networks do not depend on, so that their runs are the same for every value.
ROUTING = ("optim.routing_lr",)
COMMON = ("name", "text", "kind", "methods", "streams")

# The final bpb by seed of a method at N, with these fields of the recipe changed.
Lookup = Callable[[str, int, Mapping[str, Any]], Mapping[int, float]]
# The seeds of all runs of a method at N, finished or not, each with the name of its run if that failed.
Runs = Callable[[str, int, Mapping[str, Any]], Mapping[int, str | None]]


@dataclass(frozen=True)
class Record:
    """The date on which a claim entered a study, so that readers see whether it came before the runs.

    Args:
        added: the date, YYYY-MM-DD.
        runs_started: the number of runs that existed by then, of which `runs_finished` had finished.
    """

    added: str
    runs_started: int
    runs_finished: int

    def __str__(self) -> str:
        if not self.runs_started:
            return f"{self.added}, before the first run"
        runs = f"{self.runs_started} run{'s' if self.runs_started != 1 else ''}"
        return f"{self.added}, when {runs} had started and {self.runs_finished} had finished"

    def to_dict(self) -> dict[str, Any]:
        return {"added": self.added, "runs_started": self.runs_started, "runs_finished": self.runs_finished}

    @classmethod
    def from_dict(cls, values: Any) -> Record:
        found = values if isinstance(values, Mapping) else {}
        counts: list[Any] = [found.get(name) for name in ("runs_started", "runs_finished")]
        if not isinstance(found.get("added"), str) or not all(map(is_int, counts)):
            raise ValueError(f"record is {values!r}; expected added, runs_started and runs_finished")
        return cls(found["added"], *counts)


@dataclass(frozen=True)
class Claim:
    """A statement about the runs of a study, with all that its test needs.

    Args:
        name: a name that stays the same for the life of the study.
        text: for people.
        methods: each is tested, at each number of streams; the claim is shown if all are.
        against: the method that they are compared with; empty for kinds that compare the methods with each other.
        limit: the kind's `margin` or `by`, in bpb.
        along, values: the axis of a trend and its values; of `streams`, the values are `streams`.
        planned: the seeds of each of its tests, those that the grid of its recipe has; empty if it is of a study from
            before they were recorded.
        record: None until the claim is part of a study.
    """

    name: str
    text: str
    kind: str
    methods: tuple[str, ...]
    streams: tuple[int, ...]
    against: str = ""
    limit: float = 0.0
    along: str = ""
    values: tuple[float, ...] = ()
    planned: tuple[tuple[int, ...], ...] = ()
    record: Record | None = None

    @property
    def rule(self) -> type[Kind]:
        return Kind.named(self.kind)

    @property
    def statement(self) -> Claim:
        """The claim as it is written down, without what a study adds."""
        return replace(self, planned=(), record=None)

    def needs(self) -> list[list[tuple[str, int, Mapping[str, Any]]]]:
        """The methods, N and changed fields of the runs that each of its tests takes."""
        asked: list[tuple[str, int, Mapping[str, Any]]] = []

        def ask(*run: Any) -> dict[int, float]:
            asked.append(run)
            return {}

        found = []
        for _ in self.rule.samples(self, ask):
            found.append([*asked])
            asked.clear()
        return found

    def to_dict(self) -> dict[str, Any]:
        """The table of the claim as a recipe has it, with its planned seeds and its record."""
        own = {"against": self.against, self.rule.limit: self.limit, "along": self.along, "values": [*self.values]}
        values: dict[str, Any] = {"name": self.name, "text": self.text, "kind": self.kind}
        values |= {"methods": [*self.methods], "streams": [*self.streams]}
        values |= {key: own[key] for key in self.rule.options if own[key] not in ("", [])}
        values |= {"planned": [[*seeds] for seeds in self.planned]} if self.planned else {}
        return values | ({"record": self.record.to_dict()} if self.record else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Claim:
        """Reads a table of a recipe or the output of `to_dict`; a ValueError says what was expected."""
        if not isinstance(values, Mapping):
            raise ValueError(f"a claim is {values!r}; expected a table with {', '.join(COMMON)}")
        name = values.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"a claim has the name {name!r}; expected small letters, digits and dashes")
        try:
            return cls._read(values)
        except ValueError as error:
            raise ValueError(f"claim {name}: {error}") from error

    @staticmethod
    def schema() -> dict[str, Any]:
        """The JSON schema of the output of `to_dict`. Kinds have options of their own, and packages may add kinds."""
        texts, counts = {"type": "array", "items": {"type": "string"}}, {"type": "integer", "minimum": 0}
        record = {"added": {"type": "string", "format": "date"}, "runs_started": counts, "runs_finished": counts}
        return {
            "description": "A statement about the runs of the study, with all that its test needs.",
            "type": "object",
            "properties": {
                **{name: {"type": "string"} for name in ("name", "text", "kind", "against", "along")},
                "methods": texts,
                "streams": {"type": "array", "items": counts},
                **{name: {"type": "number", "minimum": 0} for name in ("margin", "by")},
                "values": {"type": "array", "items": {"type": "number"}},
                "planned": {"type": "array", "items": {"type": "array", "items": counts}},
                "record": {"type": "object", "properties": record, "required": [*record]},
            },
            "required": [*COMMON],
        }

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> Claim:
        rule = Kind.named(values.get("kind", ""))
        known = (*COMMON, *rule.options, "planned", "record")
        for key in values:
            if key not in known:
                raise unknown(f"option of a claim of kind {rule.name}", key, known[:-2])
        if not isinstance(values.get("text"), str) or not values["text"].strip():
            raise ValueError(f"text is {values.get('text')!r}; expected a sentence for people")
        claim = cls(
            name=values["name"],
            text=" ".join(values["text"].split()),
            kind=rule.name,
            methods=_list(values, "methods", lambda value: isinstance(value, str) and bool(value), "names of methods"),
            streams=_list(values, "streams", lambda value: is_int(value) and value >= 2, "whole numbers >= 2"),
            against=_text(values, "against", "the method to compare with") if "against" in rule.options else "",
            limit=_limit(values, rule.limit),
            along=_text(values, "along", f"{STREAMS!r} or a field of the recipe") if "along" in rule.options else "",
            values=_list(values, "values", lambda value: _is_number(value) and value > 0, "numbers > 0")
            if "values" in values
            else (),
            planned=_planned(values["planned"]) if "planned" in values else (),
            record=Record.from_dict(values["record"]) if "record" in values else None,
        )
        if claim.against in claim.methods:
            raise ValueError(f"{claim.against} is compared with itself; expected other methods")
        rule.check(claim)
        if claim.planned and len(claim.planned) != (num_tests := len(claim.needs())):
            raise ValueError(
                f"planned has {len(claim.planned)} lists of seeds; expected one for each test, {num_tests}"
            )
        return claim


@dataclass(frozen=True)
class Sample:
    """The numbers that one test of a claim rests on, one for each seed.

    Args:
        num_streams: None for a trend over N.
    """

    method: str
    against: str
    num_streams: int | None
    by_seed: Mapping[int, float]


class Kind(Registered, family="kind of claim"):
    """A kind of claim, about the true mean of paired differences of bpb or of their slopes.

    A claim is shown if the interval lies inside the region where the claim is true, and refuted if it lies outside.

    Args:
        options: the options of a claim beside those that all kinds have.
        limit: the option that bounds the region: a `margin` > 0, or `by`, which is 0 unless given.
        confidence: the level of the interval that shows the claim: 0.90, whose ends are one-sided 95% bounds, or 0.95.
        refuting: the level of the interval that refutes it.
        is_trend: whether the numbers are slopes.
        shown, refuted: phrases with {method}, {against}, {limit}, {by} and {along} in them.
    """

    options: ClassVar[tuple[str, ...]] = ("against", "margin")
    limit: ClassVar[str] = "margin"
    confidence: ClassVar[float] = 0.90
    refuting: ClassVar[float] = 0.95
    is_trend: ClassVar[bool] = False
    shown: ClassVar[str]
    refuted: ClassVar[str]

    @staticmethod
    def region(limit: float) -> tuple[float, float]:
        """The ends of the values of the true mean for which the claim is true."""
        raise NotImplementedError

    @classmethod
    def check(cls, claim: Claim) -> None:
        """Raises ValueError for options that do not fit each other."""

    @classmethod
    def samples(cls, claim: Claim, bpb: Lookup) -> Iterator[Sample]:
        for method, n in itertools.product(claim.methods, claim.streams):
            yield Sample(method, claim.against, n, _differences(bpb(method, n, {}), bpb(claim.against, n, {})))


class NotWorse(Kind, name="not-worse"):
    """Non-inferiority: a one-sided test."""

    refuting = 0.90
    shown = "{method} is not worse than {against} by more than {limit} bpb"
    refuted = "{method} is worse than {against} by more than {limit} bpb"

    @staticmethod
    def region(limit: float) -> tuple[float, float]:
        return -math.inf, limit


class Equivalent(Kind, name="equivalent"):
    """Two one-sided tests (TOST)."""

    shown = "{method} and {against} differ by less than {limit} bpb"
    refuted = "{method} and {against} differ by more than {limit} bpb"

    @staticmethod
    def region(limit: float) -> tuple[float, float]:
        return -limit, limit


class Flat(Equivalent, name="flat"):
    """All pairs of a family are equivalent. No correction is needed, since all of them have to be shown."""

    options = ("margin",)

    @classmethod
    def check(cls, claim: Claim) -> None:
        if len(claim.methods) < 2:
            raise ValueError(f"methods has only {claim.methods[0]}; expected the members of a family, at least two")

    @classmethod
    def samples(cls, claim: Claim, bpb: Lookup) -> Iterator[Sample]:
        for (one, other), n in itertools.product(itertools.combinations(claim.methods, 2), claim.streams):
            yield Sample(other, one, n, _differences(bpb(other, n, {}), bpb(one, n, {})))


class Better(Kind, name="better"):
    """Lower bpb: a two-sided test."""

    options, limit, confidence = ("against", "by"), "by", 0.95
    shown = "{method} is better than {against}{by}"
    refuted = "{method} is not better than {against}{by}"

    @staticmethod
    def region(limit: float) -> tuple[float, float]:
        return -math.inf, 0.0 - limit


class Worse(Better, name="worse"):
    shown = "{method} is worse than {against}{by}"
    refuted = "{method} is not worse than {against}{by}"

    @staticmethod
    def region(limit: float) -> tuple[float, float]:
        return limit, math.inf


class Grows(Kind, name="grows"):
    """The gain, bpb of `against` minus bpb of the method, grows along an axis.

    Each seed gives one number, the least-squares slope of its gains against log2 of the axis, in bpb per doubling; for
    two values that is the difference of the two gains. Seeds that lack a value of the axis are left out.
    """

    options, limit, confidence = ("against", "along", "values", "by"), "by", 0.95
    is_trend = True
    shown = "the gain of {method} over {against} grows with {along}{by}"
    refuted = "the gain of {method} over {against} does not grow with {along}{by}"

    @staticmethod
    def region(limit: float) -> tuple[float, float]:
        return limit, math.inf

    @classmethod
    def check(cls, claim: Claim) -> None:
        if claim.along == STREAMS:
            if claim.values:
                raise ValueError(f"values are for a field of the recipe; those of {STREAMS} are in {STREAMS}")
            if len(claim.streams) < 2:
                raise ValueError(f"streams is {[*claim.streams]}; expected at least two values to see a trend")
        elif len(claim.values) < 2:
            raise ValueError(f"values is {[*claim.values]}; expected at least two values of {claim.along}")

    @classmethod
    def samples(cls, claim: Claim, bpb: Lookup) -> Iterator[Sample]:
        for method in claim.methods:
            if claim.along == STREAMS:
                points = {float(n): _differences(bpb(claim.against, n, {}), bpb(method, n, {})) for n in claim.streams}
                yield Sample(method, claim.against, None, _slopes(points))
                continue
            for n in claim.streams:
                settings = {value: {claim.along: value} for value in claim.values}
                gains = {
                    value: _differences(bpb(claim.against, n, changed), bpb(method, n, changed))
                    for value, changed in settings.items()
                }
                yield Sample(method, claim.against, n, _slopes(gains))


class Shrinks(Grows, name="shrinks"):
    """The gain falls along an axis."""

    shown = "the gain of {method} over {against} shrinks with {along}{by}"
    refuted = "the gain of {method} over {against} does not shrink with {along}{by}"

    @staticmethod
    def region(limit: float) -> tuple[float, float]:
        return -math.inf, 0.0 - limit


@dataclass(frozen=True)
class Finding:
    """The outcome of one comparison of a claim.

    Args:
        planned: the number of seeds that were planned; the verdict is that of these seeds and of no others.
        estimate: the mean over seeds; None without a seed that has all runs.
        low, high: the interval at `confidence`; None for fewer than two seeds, as is p.
        p: the p value of the test that would show it, below 0.05 exactly if it is shown so far.
        so_far: the verdict of the finished seeds. Deciding before the last seed would be repeated testing, so `verdict`
            stays open until then.
        absent: the planned seeds for which the study lacks a run.
        failed: the names of its runs that failed.
    """

    claim: Claim
    sample: Sample
    estimate: float | None
    low: float | None
    high: float | None
    p: float | None
    so_far: str
    planned: int
    absent: tuple[int, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return OPEN if self.seeds < self.planned else self.so_far

    @property
    def seeds(self) -> int:
        return len(self.sample.by_seed)

    @property
    def place(self) -> str:
        """The N at which it was tested; empty if it was tested over several."""
        return "" if self.sample.num_streams is None else f"N = {self.sample.num_streams}"

    @property
    def sentence(self) -> str:
        """The finding in plain English, with the runs that failed or that the study does not have."""
        failed = f" Failed: {', '.join(self.failed)}." if self.failed else ""
        seeds = f"seed{'s' if len(self.absent) > 1 else ''} {' '.join(map(str, self.absent))}"
        return f"{self._sentence}{failed}{f' Planned, but not in this study: {seeds}.' if self.absent else ''}"

    @property
    def _sentence(self) -> str:
        claim, rule = self.claim, self.claim.rule
        unit = " bpb per doubling" if rule.is_trend else " bpb"
        words = {
            "method": self.sample.method,
            "against": self.sample.against,
            "limit": f"{claim.limit:g}",
            "by": f" by more than {claim.limit:g}{unit}" if claim.limit else "",
            "along": "N" if claim.along == STREAMS else claim.along,
        }
        at = f" at {self.place}" if self.place else ""
        question = f"{rule.shown.format(**words)}{at}"
        if self.low is None or self.high is None:
            have = "only one seed has" if self.seeds else "no seed has"
            of = f" ({self.planned} are planned)" if self.planned > self.seeds else ""
            return (
                f"Open: {have} all of the runs that it takes{of}; at least two are needed to tell whether {question}."
            )
        numbers = (
            f"{self.estimate:+.4f}{unit}, {rule.confidence:.0%} interval {self.low:+.4f} to {self.high:+.4f}, "
            f"{self.seeds} seeds, p = {self.p:.2g}"
        )
        phrase = question if self.so_far == SHOWN else f"{rule.refuted.format(**words)}{at}"
        if self.seeds < self.planned:
            state = f"they cannot tell whether {question}" if self.so_far == OPEN else phrase
            return f"Open: {self.seeds} of {self.planned} seeds have finished; so far {state} ({numbers})."
        if self.verdict == OPEN:
            return f"Open: {self.seeds} seeds cannot tell whether {question} ({numbers})."
        return f"{self.verdict.capitalize()}: {phrase} ({numbers})."


@dataclass(frozen=True)
class Outcome:
    """The outcome of a claim.

    Args:
        p: the largest of its findings, since all have to be shown; None if one of them has none.
        p_holm: corrected for the number of claims; those without p count.
    """

    claim: Claim
    findings: tuple[Finding, ...]
    p: float | None
    p_holm: float | None
    verdict: str

    @property
    def so_far(self) -> str:
        """The verdict of the seeds that there are."""
        return _verdict([one.so_far for one in self.findings])

    @property
    def is_complete(self) -> bool:
        """Whether all runs that were planned for it have finished."""
        return all(one.seeds == one.planned for one in self.findings)

    @property
    def least(self) -> Finding:
        """The finding that lacks the most of its planned seeds; the one with the fewest if none lacks any."""
        return min(self.findings, key=lambda one: (one.seeds - one.planned, one.seeds))

    @property
    def standing(self) -> str:
        """The verdict, with the seeds of a claim that waits for some."""
        return self.verdict if self.is_complete else f"{self.verdict}, {self.least.seeds} of {self.least.planned} seeds"


def judge(claims: Sequence[Claim], bpb: Lookup, runs: Runs | None = None) -> list[Outcome]:
    """Tests every claim on the finished runs of its planned seeds.

    Args:
        runs: the runs that the study has; by default the finished ones.
    """

    def finished(method: str, num_streams: int, settings: Mapping[str, Any]) -> dict[int, str | None]:
        return dict.fromkeys(bpb(method, num_streams, settings))

    found = [tuple(_findings(claim, bpb, runs or finished)) for claim in claims]
    ps = [_largest([one.p for one in findings]) for findings in found]
    corrected = holm([1.0 if p is None else p for p in ps])
    return [
        Outcome(claim, findings, p, None if p is None else adjusted, _verdict([one.verdict for one in findings]))
        for claim, findings, p, adjusted in zip(claims, found, ps, corrected, strict=True)
    ]


def read_claims(values: Any) -> tuple[Claim, ...]:
    """The claims of a recipe, a study.json or a results.json; raises ValueError."""
    if not isinstance(values, list):
        raise ValueError(f"claims is {values!r}; expected a list of tables with {', '.join(COMMON)}")
    claims = tuple(Claim.from_dict(value) for value in values)
    names = [claim.name for claim in claims]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"several claims have the name {', '.join(twice)}; expected a name of its own for each")
    return claims


def joined(known: Sequence[Claim], more: Sequence[Claim]) -> tuple[Claim, ...]:
    """The known claims and the new ones; raises ValueError if a known claim would change."""
    by_name = {claim.name: claim for claim in known}
    for claim in more:
        there = by_name.setdefault(claim.name, claim)
        if there.statement != claim.statement:
            before, now = there.statement.to_dict(), claim.statement.to_dict()
            changes = [
                f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
                for key in {**before, **now}
                if before.get(key) != now.get(key)
            ]
            raise ValueError(
                f"claim {claim.name} is in the study already and would change: {'; '.join(changes)}. A claim stays as "
                "it was written before the runs; give the new one a name of its own"
            )
    return tuple(by_name.values())


def _findings(claim: Claim, bpb: Lookup, runs: Runs) -> Iterator[Finding]:
    """The finding of each test of a claim."""
    samples, tests = claim.rule.samples(claim, bpb), claim.needs()
    for place, (sample, needs) in enumerate(zip(samples, tests, strict=True)):
        there = [runs(*run) for run in needs]
        # A study from before plans were recorded has the runs that were planned.
        planned = claim.planned[place] if claim.planned else sorted(set.intersection(*map(set, there)))
        mine = {seed: value for seed, value in sample.by_seed.items() if seed in planned}
        failed = dict.fromkeys(name for seeds in there for seed in planned if (name := seeds.get(seed)))
        yield replace(
            _find(claim, replace(sample, by_seed=mine), len(planned)),
            absent=tuple(seed for seed in planned if any(seed not in seeds for seeds in there)),
            failed=tuple(failed),
        )


def _find(claim: Claim, sample: Sample, planned: int) -> Finding:
    numbers = list(sample.by_seed.values())
    if len(numbers) < 2:
        return Finding(claim, sample, mean(numbers) if numbers else None, None, None, None, OPEN, planned)
    rule, found = claim.rule, Mean.of(numbers)
    least, most = rule.region(claim.limit)
    low, high = found.interval(rule.confidence)
    widest = found.interval(rule.refuting)
    # One-sided, and doubled where the interval has half of 5% on each side, so that 0.05 is the level in all cases.
    tails = [found.p_above(least)] * math.isfinite(least) + [found.p_below(most)] * math.isfinite(most)
    p = min(1.0, max(tails) * 2 * ALPHA / (1 - rule.confidence))
    if least < low and high < most:
        verdict = SHOWN
    elif widest[0] > most or widest[1] < least:
        verdict = REFUTED
    else:
        verdict = OPEN
    return Finding(claim, sample, found.value, low, high, p, verdict, planned)


def _verdict(verdicts: Sequence[str]) -> str:
    if REFUTED in verdicts:
        return REFUTED
    return OPEN if OPEN in verdicts else SHOWN


def _largest(ps: Sequence[float | None]) -> float | None:
    known = [p for p in ps if p is not None]
    return max(known) if len(known) == len(ps) else None


def _differences(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """The differences, paired by seed."""
    return {seed: one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())}


def _slopes(points: Mapping[float, Mapping[int, float]]) -> dict[int, float]:
    """The least-squares slope of each seed against log2 of the axis."""
    places = [math.log2(value) for value in points]
    centre = mean(places)
    square = math.fsum((place - centre) ** 2 for place in places)
    seeds = set.intersection(*(set(numbers) for numbers in points.values()))
    return {
        seed: math.fsum(
            (place - centre) * numbers[seed] for place, numbers in zip(places, points.values(), strict=True)
        )
        / square
        for seed in sorted(seeds)
    }


def _list(values: Mapping[str, Any], name: str, fits: Callable[[Any], bool], expected: str) -> tuple[Any, ...]:
    given = values.get(name)
    if not isinstance(given, list) or not given or not all(map(fits, given)):
        raise ValueError(f"{name} is {given!r}; expected a list of {expected}")
    return tuple(dict.fromkeys(given))


def _text(values: Mapping[str, Any], name: str, expected: str) -> str:
    given = values.get(name)
    if not isinstance(given, str) or not given:
        raise ValueError(f"{name} is {given!r}; expected {expected}")
    return given


def _planned(values: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(values, list) or not all(isinstance(seeds, list) and all(map(is_int, seeds)) for seeds in values):
        raise ValueError(f"planned is {values!r}; expected the seeds of each test")
    return tuple(map(tuple, values))


def _limit(values: Mapping[str, Any], name: str) -> float:
    given = values.get(name, None if name == "margin" else 0.0)
    if not _is_number(given) or given < 0 or (name == "margin" and given == 0):
        expected = "a number > 0" if name == "margin" else "a number >= 0"
        raise ValueError(f"{name} is {given!r}; expected {expected}, in bpb")
    return float(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
