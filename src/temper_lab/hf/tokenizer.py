"""Our tokenizer as one of transformers'."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from temper_lab.tokenizer import BOS, Tokenizer


def fast_tokenizer(tokenizer: Tokenizer, *, context: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of transformers with the same ids.

    `tokenizer(text)` begins with BOS, as every text that the model has read; `add_special_tokens=False` leaves it
    out. BOS also ends a text and fills a batch up, on the left. In a text, "<|bos|>" is seven characters.

    Args:
        context: the longest text the model reads, in tokens.
    """
    backend = Backend.from_str(tokenizer.to_json())
    backend.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, tokenizer.bos)]
    )
    limit = {} if context is None else {"model_max_length": context}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=BOS,
        pad_token=BOS,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        **limit,
    )
