"""The three kinds of tasks: the form of their prompts, and the tokens that are scored."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from temper.registry import is_int
from temper_lab.io import brief

Item = Mapping[str, Any]
BLANK_LINE = "\n\n"
SHOT_SEED = 1234


class Row(NamedTuple):
    """A prompt to score: its tokens from `start` to the end."""

    ids: tuple[int, ...]
    start: int

    def crop(self, limit: int) -> Row:
        """The last `limit` tokens; a token with nothing before it cannot be scored."""
        drop = max(len(self.ids) - limit, 0)
        return Row(self.ids[drop:], max(self.start - drop, 1))


class Score(NamedTuple):
    """The mean loss of a row over its span, and whether every token of the span was the most likely one."""

    loss: float
    is_match: bool


class Kind:
    """The base of all kinds of tasks: examples are rendered like items with the answer, and come first."""

    def trouble(self, item: Item) -> str | None:
        """Describes the fault of an item, or None."""
        raise NotImplementedError

    def shot(self, item: Item, delimiter: str) -> str:
        """An item with its answer."""
        raise NotImplementedError

    def asked(self, item: Item, delimiter: str) -> list[str]:
        """The prompts of the item itself, one or several."""
        raise NotImplementedError

    def prompts(self, item: Item, shots: Sequence[Item], delimiter: str) -> list[str]:
        """The texts to tokenize."""
        before = "".join(self.shot(shot, delimiter) + BLANK_LINE for shot in shots)
        return [before + asked for asked in self.asked(item, delimiter)]

    def rows(self, encoded: Sequence[Sequence[int]]) -> list[Row]:
        """The rows to score, made from the tokens of the prompts."""
        raise NotImplementedError

    def is_correct(self, item: Item, scores: Sequence[Score]) -> bool:
        # The first of equal scores wins.
        losses = [score.loss for score in scores]
        return losses.index(min(losses)) == item["gold"]


class MultipleChoice(Kind):
    """One query, several answers: the tokens that the answers do not share are scored."""

    def trouble(self, item: Item) -> str | None:
        return _not_text(item, "query") or _not_options(item, "choices")

    def shot(self, item: Item, delimiter: str) -> str:
        return item["query"] + delimiter + item["choices"][item["gold"]]

    def asked(self, item: Item, delimiter: str) -> list[str]:
        return [item["query"] + delimiter + choice for choice in item["choices"]]

    def rows(self, encoded: Sequence[Sequence[int]]) -> list[Row]:
        start = common_prefix(encoded)
        return [Row(tuple(ids), start) for ids in encoded]


class Schema(Kind):
    """Several contexts, one continuation: the tokens that all end with are scored."""

    def trouble(self, item: Item) -> str | None:
        return _not_options(item, "context_options") or _not_text(item, "continuation")

    def shot(self, item: Item, delimiter: str) -> str:
        return item["context_options"][item["gold"]] + delimiter + item["continuation"]

    def asked(self, item: Item, delimiter: str) -> list[str]:
        return [context + delimiter + item["continuation"] for context in item["context_options"]]

    def rows(self, encoded: Sequence[Sequence[int]]) -> list[Row]:
        length = common_prefix([ids[::-1] for ids in encoded])
        return [Row(tuple(ids), len(ids) - length) for ids in encoded]


class LanguageModeling(Kind):
    """A context and its continuation, every token of which has to be the most likely one."""

    def trouble(self, item: Item) -> str | None:
        return _not_text(item, "context") or _not_text(item, "continuation")

    def shot(self, item: Item, delimiter: str) -> str:
        return item["context"].strip() + delimiter + item["continuation"]

    def asked(self, item: Item, delimiter: str) -> list[str]:
        return [item["context"].strip() + delimiter, self.shot(item, delimiter)]

    def prompts(self, item: Item, shots: Sequence[Item], delimiter: str) -> list[str]:
        without, with_ = super().prompts(item, shots, delimiter)
        # A trailing space would be a token of its own, which the whole text does not have.
        return [without.strip(), with_]

    def rows(self, encoded: Sequence[Sequence[int]]) -> list[Row]:
        without, with_ = encoded
        if list(with_[: len(without)]) != list(without):
            raise ValueError("the tokens of the prompt without its continuation do not begin those of the whole prompt")
        return [Row(tuple(with_), len(without))]

    def is_correct(self, item: Item, scores: Sequence[Score]) -> bool:
        return scores[0].is_match


KINDS: dict[str, Kind] = {
    "multiple_choice": MultipleChoice(),
    "schema": Schema(),
    "language_modeling": LanguageModeling(),
}


def shots_of(items: Sequence[Item], index: int, count: int) -> list[Item]:
    """The examples that come before an item: others of the same list, the same every time."""
    # Drawn by index among the others without making a list of them: 20,000 such lists would take longer than the rest.
    places = random.Random(SHOT_SEED + index).sample(range(len(items) - 1), count)
    return [items[place + (place >= index)] for place in places]


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """The length of the prefix that all rows share."""
    # Of sorted rows, the first and the last have the shortest common prefix.
    low, high = min(map(list, rows)), max(map(list, rows))
    return next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def _not_text(item: Item, name: str) -> str | None:
    value = item.get(name)
    return None if isinstance(value, str) else f"{name!r} is {brief(value)}; expected a text"


def _not_options(item: Item, name: str) -> str | None:
    options, gold = item.get(name), item.get("gold")
    if not isinstance(options, list) or len(options) < 2 or not all(isinstance(text, str) for text in options):
        return f"{name!r} is {brief(options)}; expected a list of at least two texts"
    if not is_int(gold) or not 0 <= gold < len(options):
        return f"'gold' is {brief(gold)}; expected 0 to {len(options) - 1}, the place of the right one in {name!r}"
    return None
