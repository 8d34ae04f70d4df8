"""`temper sample`: a model continues prompts."""

from __future__ import annotations

from pathlib import Path

MAX_ROWS, MAX_TOKENS = 10_000, 1 << 24


def sample(
    model: Path,
    prompt: str = "",
    num: int = 1,
    max_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Let a model continue a prompt.

        temper sample --model runs/smoke --prompt "The people"
        temper sample --model runs/smoke/model --prompt "My fellow citizens" --num 3 --top-p 0.9
        temper sample --model runs/smoke --temperature 0

    Args:
        model: A model folder, or the folder of a run: its final model, or that of its newest checkpoint.
        prompt: The text to continue; empty starts a document.
        num: How many continuations.
        max_tokens: The longest continuation; it also ends where the document or the context does.
        temperature: 0 always takes the likeliest token.
        top_k: Choose among the k likeliest tokens only.
        top_p: Choose among the likeliest tokens that together have this probability.
        seed: The same seed gives the same text.
        device: Where to compute.
    """
    for name, value, largest in (("num", num, MAX_ROWS), ("max-tokens", max_tokens, MAX_TOKENS)):
        if not 1 <= value <= largest:
            raise ValueError(f"--{name} is {value}; expected at least 1 and at most {largest:,}")
    from temper_lab.engine import stream
    from temper_lab.load import load
    from temper_lab.progress import Bar

    network, tokenizer = load(model, device=device)
    ids = tokenizer.encode(prompt, bos=True)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "stop": tokenizer.bos}
    rows: list[list[int]] = [[] for _ in range(num)]
    with Bar("sampling", num * max_tokens) as bar:
        for count, (row, token) in enumerate(stream(network, [ids] * num, max_new_tokens=max_tokens, **settings), 1):
            rows[row].append(token)
            bar.update(count)
    for index, row in enumerate(rows):
        if index:
            print("-" * 8)
        print(prompt + tokenizer.decode(row))
