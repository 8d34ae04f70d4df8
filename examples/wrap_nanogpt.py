"""Hyper-connections on a nanoGPT-style model in one line, without touching its code.

The model below knows nothing of streams: its blocks say `x = x + f(norm(x))` twice, as everybody's do.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import temper

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 65, 32, 64, 4, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (part.view(batch, time, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def main(steps: int = 60) -> tuple[float, float]:
    """Wraps the model and trains it a little; gives the first and the last loss."""
    torch.manual_seed(0)
    model = GPT()
    before = sum(p.numel() for p in model.parameters())
    temper.wrap(model, "h.*", preset="temper-tucker", num_streams=4)
    print(f"{before:,} parameters, {sum(p.numel() for p in model.parameters()) - before:,} added by routing")

    # Routing has a group and a learning rate of its own; see temper.param_groups for Muon.
    optimizer = torch.optim.AdamW(temper.param_groups(model, lr=3e-3))
    text = "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer "
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(letter) for letter in text])
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT, (8,)).tolist()
        ids = torch.stack([data[start : start + CONTEXT] for start in starts])
        targets = torch.stack([data[start + 1 : start + CONTEXT + 1] for start in starts])
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps")
    with torch.no_grad(), temper.observe(model) as observation:
        model(data[None, :CONTEXT])
    print(observation)
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
