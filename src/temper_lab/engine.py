"""Generation: a KV cache, sampling, and batches of prompts of any length.

Letters: B batch, T new token, S cached token, H head, D features of a head, V vocabulary, L layer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from temper.registry import check_int
from temper_lab.model import GPT, ModelConfig


class KVCache:
    """The keys and values of the tokens that a model has read; every row of the batch has its own length.

    Position p of a row is in slot p. Hyper-connections mix streams and never tokens, so only attention needs a
    cache.

    Args:
        capacity: tokens per row; the model's context if left out.
    """

    # A block that is recomputed would write twice, so blocks with a cache are not checkpointed.
    remembers = True

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        *,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        capacity = config.context if capacity is None else capacity
        if not 1 <= capacity <= config.context:
            raise ValueError(f"capacity is {capacity}; expected 1 to {config.context}, the context of the model")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected a whole number >= 1")
        shape = (config.num_layers, batch_size, capacity, config.num_heads, config.head_dim)
        # Zeros, because an empty slot is masked, but zero times uninitialized memory could be NaN.
        self.keys_LBSHD = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LBSHD = torch.zeros_like(self.keys_LBSHD)
        # Kept on the host, because the shapes of a step depend on it.
        self.lengths = [0] * batch_size

    @classmethod
    def for_model(cls, model: GPT, batch_size: int, *, capacity: int | None = None) -> KVCache:
        """An empty cache of the model's dtype and device."""
        like = model.head.weight
        return cls(model.config, batch_size, capacity=capacity, dtype=like.dtype, device=like.device)

    @property
    def batch_size(self) -> int:
        return self.keys_LBSHD.shape[1]

    @property
    def capacity(self) -> int:
        return self.keys_LBSHD.shape[2]

    def begin(self, num_tokens: int) -> Tensor:
        """Prepares for new tokens in every row, and gives their positions (B, T)."""
        end = max(self.lengths) + num_tokens
        if end > self.capacity:
            raise ValueError(f"{num_tokens} more tokens make {end}; this cache holds {self.capacity} per row")
        device = self.keys_LBSHD.device
        starts = torch.tensor(self.lengths, device=device)
        self._positions_BT = starts[:, None] + torch.arange(num_tokens, device=device)
        self._rows_B1 = torch.arange(self.batch_size, device=device)[:, None]
        self._end = end
        self._mask = None
        alike = min(self.lengths) == max(self.lengths)
        if not (end == num_tokens or (alike and num_tokens == 1)):
            slots = torch.arange(end, device=device)
            self._mask = (slots <= self._positions_BT[:, :, None])[:, None]
        return self._positions_BT

    def append(self, layer: int, key_BTHD: Tensor, value_BTHD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores a layer's new keys and values; gives all of them, and the mask (B, 1, T, S) if one is needed."""
        keys_BSHD, values_BSHD = self.keys_LBSHD[layer], self.values_LBSHD[layer]
        keys_BSHD[self._rows_B1, self._positions_BT] = key_BTHD.to(keys_BSHD.dtype)
        values_BSHD[self._rows_B1, self._positions_BT] = value_BTHD.to(values_BSHD.dtype)
        return keys_BSHD[:, : self._end], values_BSHD[:, : self._end], self._mask

    def finish(self, num_tokens: int) -> None:
        """Counts the tokens that `begin` announced."""
        self.lengths = [length + num_tokens for length in self.lengths]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Shortens each row to a number of tokens, dropping padding or a rejected continuation."""
        if len(lengths) != self.batch_size or not all(map(operator.le, lengths, self.lengths)):
            raise ValueError(f"lengths are {list(lengths)}; expected {self.batch_size}, none above {self.lengths}")
        self.lengths = list(lengths)

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps some rows and drops the others."""
        index = torch.tensor(rows, device=self.keys_LBSHD.device)
        self.keys_LBSHD = self.keys_LBSHD.index_select(1, index)
        self.values_LBSHD = self.values_LBSHD.index_select(1, index)
        self.lengths = [self.lengths[row] for row in rows]


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the most likely tokens that together reach this probability, after top_k.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature!r}; expected a finite number >= 0")
        if self.top_k is not None:
            check_int("top_k", self.top_k, 1)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r}; expected a number in (0, 1]")

    def probabilities(self, logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        """The sampling distribution, most likely token first, and the ids in that order."""
        logits_BV, ids_BV = logits_BV.double().sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            logits_BV, ids_BV = logits_BV[:, : self.top_k], ids_BV[:, : self.top_k]
        if self.temperature == 0:
            return torch.ones_like(logits_BV[:, :1]), ids_BV[:, :1]
        # The largest logit is shifted to 0 before the division, so that a tiny temperature cannot overflow.
        p_BV = ((logits_BV - logits_BV[:, :1]) / self.temperature).softmax(dim=-1)
        if self.top_p is not None:
            # A token is kept if those before it have not reached top_p, so the first always is.
            before_BV = p_BV.cumsum(dim=-1) - p_BV
            p_BV = p_BV * (before_BV < self.top_p)
            p_BV = p_BV / p_BV.sum(dim=-1, keepdim=True)
        return p_BV, ids_BV

    def choose(self, logits_BV: Tensor, uniform_B: Tensor) -> Tensor:
        """The ids at the given points of the cumulative distribution."""
        if self.temperature == 0:
            return logits_BV.argmax(dim=-1)
        p_BV, ids_BV = self.probabilities(logits_BV)
        total_BV = p_BV.cumsum(dim=-1)
        point_B1 = uniform_B.to(total_BV)[:, None] * total_BV[:, -1:]
        # Rounding may push a point past the end, but must not select a token of probability zero.
        last_B1 = p_BV.count_nonzero(dim=-1)[:, None] - 1
        index_B1 = torch.searchsorted(total_BV, point_B1, right=True).minimum(last_B1)
        return ids_BV.gather(-1, index_B1).squeeze(-1)


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> list[list[int]]:
    """Continuations of the prompts, without the prompts and without the stop token.

    A row depends on its prompt, its place in the batch and the seed, not on its neighbours. It ends at `stop`,
    after `max_new_tokens`, or when prompt and continuation fill the context.

    Args:
        prompts: lists of ids, of any lengths below the context; a text begins with BOS.
        temperature: 0 always takes the most likely token.
        stop: the id that ends a row, usually BOS.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    settings: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "stop": stop}
    for row, token in stream(model, prompts, max_new_tokens=max_new_tokens, **settings):
        outputs[row].append(token)
    return outputs


def stream(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Generates pairs of row and token as they are sampled, with the arguments of `generate`."""
    sampling = Sampling(temperature, top_k, top_p)
    rows = [list(prompt) for prompt in prompts]
    _check(model.config, rows, max_new_tokens)
    # A nested generator, so that the checks above run at the call, not at the first token.
    return _stream(model, rows, max_new_tokens, sampling, seed, stop)


def _stream(
    model: GPT, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling, seed: int, stop: int | None
) -> Iterator[tuple[int, int]]:
    if not prompts or max_new_tokens == 0:
        return
    context, device = model.config.context, model.head.weight.device
    # The random numbers of a row depend on its place alone.
    uniform = [_uniform(seed, row, max_new_tokens) for row in range(len(prompts))]
    lengths = [len(prompt) for prompt in prompts]
    cache = KVCache.for_model(model, len(prompts), capacity=min(context, max(lengths) + max_new_tokens))
    padded = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]
    logits_BV = _last_logits(model, torch.tensor(padded, device=device), cache, lengths)
    # Padding follows a prompt, where causal attention does not look; its slots are overwritten.
    cache.truncate(lengths)
    rows = list(range(len(prompts)))
    for step in range(max_new_tokens):
        points = torch.stack([uniform[row][step] for row in rows])
        tokens = sampling.choose(logits_BV, points.to(device)).tolist()
        living = []
        for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            if token == stop:
                continue
            yield row, token
            if lengths[row] + step + 1 < context:
                living.append(place)
        if not living or step + 1 == max_new_tokens:
            return
        if len(living) < len(rows):
            rows = [rows[place] for place in living]
            cache.keep(living)
        ids = torch.tensor([[tokens[place]] for place in living], device=device)
        logits_BV = _last_logits(model, ids, cache)


@torch.no_grad()
def _last_logits(model: GPT, ids_BT: Tensor, cache: KVCache, lengths: Sequence[int] | None = None) -> Tensor:
    x_BTD = model.features(ids_BT, cache)
    if lengths is None:
        return model.logits(x_BTD[:, -1])
    rows = torch.arange(len(ids_BT), device=x_BTD.device)
    return model.logits(x_BTD[rows, torch.tensor(lengths, device=x_BTD.device) - 1])


def _uniform(seed: int, row: int, count: int) -> Tensor:
    # Hashed, so that the rows of one seed are not the shifted rows of the next.
    generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + row) % 2**63)
    return torch.rand(count, dtype=torch.float64, generator=generator)


def _check(config: ModelConfig, prompts: list[list[int]], max_new_tokens: int) -> None:
    check_int("max_new_tokens", max_new_tokens)
    for row, prompt in enumerate(prompts):
        if not 1 <= len(prompt) < config.context:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens; expected 1 to {config.context - 1}, "
                "so that one more fits the context"
            )
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"prompt {row} has the id {token}; expected 0 to {config.vocab_size - 1}")
