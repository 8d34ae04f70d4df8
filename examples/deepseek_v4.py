"""DeepSeek-V4 (transformers' own, tiny and random) with our hyper-connections in place of its own, and back."""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel

import temper
from temper_lab.interop.deepseek import to_deepseek, to_temper


def tiny(vocab_size: int = 64) -> DeepseekV4ForCausalLM:
    """Three layers, one of each kind of attention, whose routing is far from where it starts."""
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=32,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
        hc_mult=4,
        num_attention_heads=4,
        head_dim=16,
        partial_rotary_factor=0.5,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=2,
        sliding_window=8,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.1,
    )
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_hc." in name:
                parameter.normal_(0, 0.5)
    return model


def num_parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def main() -> float:
    """Swaps, compares and swaps back; gives the largest difference of a logit."""
    model = tiny()
    before, count = {key: value.clone() for key, value in model.state_dict().items()}, num_parameters(model)
    ids = torch.randint(64, (2, 32))
    theirs = model(ids).logits

    to_temper(model)
    ours = model(ids).logits
    difference = (ours - theirs).abs().max().item()
    sites = [module for module in model.modules() if isinstance(module, temper.HyperConnection)]
    print(f"{len(sites)} hyper-connections swapped; parameters before {count:,}, after {num_parameters(model):,}")
    print(f"logits up to {theirs.abs().max():.2f}, largest difference {difference:.1e}")

    # Now they are sites like any other: look inside.
    with temper.observe(model) as observation:
        model(ids)
    print(observation)

    to_deepseek(model)
    after = model.state_dict()
    is_exact = before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    print(f"swapped back: every weight {'as it was' if is_exact else 'CHANGED'}")
    assert is_exact
    return difference


if __name__ == "__main__":
    main()
