"""A Llama of transformers (tiny, random) gets four streams, with the logits that it had, and trains on."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import temper

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.2,
)


def similarity(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """The mean cosine of two different streams before the last site; 1 means copies."""
    with torch.no_grad(), temper.observe(model) as observation:
        model(ids)
    return observation.reports()[-1].stream_similarity


def main(steps: int = 20) -> tuple[float, float, float]:
    """Upcycles, compares and trains; gives the largest difference of a logit, the first and the last loss."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    ids = torch.randint(64, (4, 32))
    with torch.no_grad():
        before = model(ids).logits

    temper.wrap(model, "model.layers.*", preset="temper-tucker", num_streams=4)
    temper.convert.upcycle(model)
    with torch.no_grad():
        difference = (model(ids).logits - before).abs().max().item()
    print(f"logits up to {before.abs().max():.2f}, largest difference {difference:.1e}")

    # Not copies: every site writes more to one stream than to the others, and their mean is what the one stream was.
    print(f"similarity of the streams {similarity(model, ids):.3f}")
    optimizer = torch.optim.AdamW(temper.param_groups(model.train(), lr=3e-3))
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps, similarity {similarity(model, ids):.3f}")
    return difference, losses[0], losses[-1]


if __name__ == "__main__":
    main()
