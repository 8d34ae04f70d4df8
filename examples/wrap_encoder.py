"""Hyper-connections on torch's own `nn.TransformerEncoder` (pre-norm), masks and all."""

import torch
from torch import nn

import temper


def main(steps: int = 40) -> tuple[float, float]:
    """Teaches an encoder to reverse sequences; gives the first and the last loss."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2, norm=nn.LayerNorm(64), enable_nested_tensor=False)
    temper.wrap(encoder, "layers.*", preset="temper-cp", num_streams=4)

    embedding, place, head = nn.Embedding(12, 64), nn.Embedding(8, 64), nn.Linear(64, 12)
    model = nn.ModuleList([embedding, place, encoder, head])
    optimizer = torch.optim.AdamW(temper.param_groups(model, lr=3e-3))
    losses = []
    for _ in range(steps):
        ids = torch.randint(12, (32, 8))
        # Some sequences are shorter: what is padded is not attended to, and not scored.
        padding = torch.arange(8) >= torch.randint(5, 9, (32, 1))
        x = encoder(embedding(ids) + place.weight, src_key_padding_mask=padding)
        losses.append(nn.functional.cross_entropy(head(x)[~padding], ids.flip(1)[~padding]))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    first, last = losses[0].item(), losses[-1].item()
    print(f"loss {first:.3f} -> {last:.3f} in {steps} steps, 4 streams through 2 encoder layers")
    return first, last


if __name__ == "__main__":
    main()
