"""What attention asks of a cache, answered by transformers' cache, attention mask and positions.

Letters: B batch, T new token, S cached token, H head, D features of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache


class Past:
    """One forward pass in transformers' terms; the methods are those of `temper_lab.engine.KVCache`.

    Args:
        cache: what was read before, in any of transformers' caches; None to remember nothing.
        mask: 1 for tokens and 0 for padding, on either side, (B, past + T); or a mask (B, 1, T, S) as
            `scaled_dot_product_attention` takes it.
        positions: of the new tokens, (B or 1, T); counted along the mask if left out.
        context: how many positions the model knows.
    """

    def __init__(
        self,
        cache: Cache | None,
        mask: Tensor | None,
        positions: Tensor | None,
        *,
        context: int,
        device: torch.device,
    ) -> None:
        self.cache, self.mask, self.positions = cache, mask, positions
        self.context, self.device = context, device
        self.seen = 0 if cache is None else int(cache.get_seq_length())
        self._made: Tensor | None = None

    @property
    def remembers(self) -> bool:
        return self.cache is not None

    def begin(self, num_tokens: int) -> Tensor:
        """The positions of the new tokens (B or 1, T), checked."""
        end = self.seen + num_tokens
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.seen, end, device=self.device)[None]
        if self.mask is not None and self.mask.ndim == 2:
            if self.mask.shape[1] != end:
                raise ValueError(
                    f"attention_mask has {self.mask.shape[1]} columns; expected {end}: {self.seen} for the cache "
                    f"and {num_tokens} for input_ids"
                )
            if self.mask.all():
                self.mask = None
            elif self.positions is None:
                positions = (self.mask.long().cumsum(-1) - 1).clamp_min(0)[:, self.seen :]
        elif self.mask is not None and self.mask.ndim != 4:
            raise ValueError(f"attention_mask has shape {tuple(self.mask.shape)}; expected (batch, tokens)")
        # A GPU is asked only where a position may lie outside: it would have to wait every time.
        if end > self.context and positions.max() >= self.context:
            raise ValueError(
                f"the text reaches position {int(positions.max())}; this model knows {self.context}. "
                "Shorten the prompt or lower max_new_tokens."
            )
        return positions

    def append(self, layer: int, key_BTHD: Tensor, value_BTHD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores a layer's new keys and values; gives all there are, and the mask if one is needed."""
        num_tokens = key_BTHD.shape[1]
        if self.cache is not None:
            heads_first = key_BTHD.transpose(1, 2), value_BTHD.transpose(1, 2)
            key_BTHD, value_BTHD = (part.transpose(1, 2) for part in self.cache.update(*heads_first, layer))
        # The same for every layer; made when the first one has told how many slots this cache has.
        if layer == 0:
            self._made = self._attention_mask(num_tokens, key_BTHD.shape[1])
        return key_BTHD, value_BTHD, self._made

    def finish(self, num_tokens: int) -> None:
        """Nothing: transformers' caches count for themselves."""

    def _attention_mask(self, num_tokens: int, num_slots: int) -> Tensor | None:
        if self.mask is not None and self.mask.ndim == 4:
            return self.mask
        if self.mask is None and num_slots == self.seen + num_tokens and (self.seen == 0 or num_tokens == 1):
            return None
        slots = torch.arange(num_slots, device=self.device)
        own = slots[self.seen : self.seen + num_tokens, None]
        mask_BTS = (slots <= own)[None]
        if self.mask is not None:
            is_token_BS = F.pad(self.mask.bool(), (0, num_slots - self.mask.shape[1]))
            # Padding sees itself: a softmax over nothing would be NaN, and NaN times zero is NaN again.
            mask_BTS = (mask_BTS & is_token_BS[:, None]) | (slots == own)
        return mask_BTS[:, None]
