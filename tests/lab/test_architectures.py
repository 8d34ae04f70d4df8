"""Other people's architectures: with one stream they compute what they did, or they are refused with the reason.

`pytest -m slow tests/lab/test_architectures.py` tries them all.
"""

import copy

import pytest
import torch
from torch import nn

import temper

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {key: SIZES[key] for key in SIZES if key != "vocab_size"} | {"image_size": 32, "patch_size": 8}
T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SPEECH = {"vocab_size": 64, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
SPEECH |= {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in (("layers", 2), ("ffn_dim", 48))}
SPEECH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1}
SPEECH |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
EXPERTS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


IDS = {"input_ids": torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))}
BOTH = IDS | {"decoder_input_ids": IDS["input_ids"]}
IMAGES = {"pixel_values": draw(2, 3, 32, 32)}
SOUNDS = {"input_features": draw(2, 8, 32), "decoder_input_ids": IDS["input_ids"]}
BLOCKS = "model.layers.*"


def causal(kind, blocks=BLOCKS, sites=2, **options):
    def make():
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **SMALL | options), attn_implementation="eager"
        )

    return make, blocks, {"sites": sites}, IDS


def of(name, config, blocks, inputs=IDS, sites=2):
    """A model of a class of transformers whose configuration class has the name of its family."""
    family = next(end for end in ("ForConditionalGeneration", "ForCausalLM", "Model") if name.endswith(end))

    def make():
        return getattr(transformers, name)(getattr(transformers, f"{name.removesuffix(family)}Config")(**config))

    return make, blocks, {"sites": sites}, inputs


def encoder(**options):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder():
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True, norm_first=True), 2)


WORKS = {
    **{kind: causal(kind) for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")},
    **{
        kind: causal(kind)
        for kind in ("olmo", "olmo2", "granite", "smollm3", "starcoder2", "stablelm", "glm4", "nemotron")
    },
    "qwen3_moe": causal("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "mixtral": causal("mixtral", num_local_experts=4),
    "gpt_oss": causal("gpt_oss", num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": causal("deepseek_v3", num_key_value_heads=4, first_k_dense_replace=1, **LATENT | EXPERTS),
    "phi": causal("phi", sites=1),
    "gpt_neox": causal("gpt_neox", "gpt_neox.layers.*", sites=1),
    "cohere": causal("cohere"),
    "gpt_neo": causal("gpt_neo", "transformer.h.*", num_layers=2, num_heads=4, attention_types=[[["global"], 2]]),
    "bloom": causal("bloom", "transformer.h.*", n_layer=2, n_head=4),
    "gpt2": causal("gpt2", "transformer.h.*", n_embd=32, n_layer=2, n_head=4),
    "mamba": of("MambaForCausalLM", MAMBA | {"state_size": 4}, "backbone.layers.*", sites=1),
    "mamba2": of(
        "Mamba2ForCausalLM",
        MAMBA | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2},
        "backbone.layers.*",
        sites=1,
    ),
    "modernbert": of("ModernBertModel", SMALL | {"cls_token_id": 1, "sep_token_id": 2}, "layers.*"),
    "vit": of("ViTModel", VISION, "layers.*", IMAGES),
    "dinov2": of("Dinov2Model", VISION, "encoder.layer.*", IMAGES),
    "clip vision": of("CLIPVisionModel", VISION, "encoder.layers.*", IMAGES),
    "t5 encoder": of("T5ForConditionalGeneration", T5, "encoder.block.*", BOTH),
    "t5 decoder": of("T5ForConditionalGeneration", T5, "decoder.block.*", BOTH, sites=3),
    "whisper encoder": of("WhisperForConditionalGeneration", SPEECH, "model.encoder.layers.*", SOUNDS),
    "whisper decoder": of("WhisperForConditionalGeneration", SPEECH, "model.decoder.layers.*", SOUNDS, sites=3),
    "nn encoder": (lambda: encoder(norm_first=True), "layers.*", {}, (draw(2, 9, 16),)),
    "nn decoder": (decoder, "layers.*", {"sites": 3}, (draw(2, 9, 16), draw(2, 5, 16))),
}
REFUSED = {
    "bert": (of("BertModel", SMALL, "encoder.layer.*"), r"it norms its residual \(layer_norm\).*Post-norm"),
    "roberta": (of("RobertaModel", SMALL, "encoder.layer.*"), r"it norms its residual \(layer_norm\).*Post-norm"),
    "bart": (of("BartModel", SPEECH, "encoder.layers.*"), r"it norms its residual \(layer_norm\).*Post-norm"),
    "opt": (
        causal("opt", "model.decoder.layers.*", word_embed_proj_dim=32, ffn_dim=48),
        "it loses its residual in `reshape`",
    ),
    # Fake tensors cannot run its experts.
    "minimax": (causal("minimax", num_local_experts=2), "it loses its residual in `mul`"),
    "parallel attention": (causal("gpt_neox", "gpt_neox.layers.*"), "1 of its 2 sites were not written"),
    "t5, both stacks": (
        of("T5ForConditionalGeneration", T5, "*coder.block.*", BOTH),
        r"something happens to the residual between encoder\.block\.1 and decoder\.block\.0",
    ),
    "resnet": (
        of(
            "ResNetModel",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
            "encoder.stages.*.layers.*",
            IMAGES,
            sites=1,
        ),
        "BatchNorm2d, as channels-first networks have",
    ),
    # Its width is that of the images: features last would be silently wrong.
    "convnext": (
        of(
            "ConvNextModel",
            {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "image_size": 32},
            "encoder.stages.0.layers.*",
            IMAGES,
            sites=1,
        ),
        "nothing tells which dimension has the features",
    ),
    "swin": (
        of(
            "SwinModel",
            {
                "image_size": 32,
                "patch_size": 4,
                "embed_dim": 16,
                "depths": [2, 2],
                "num_heads": [2, 2],
                "window_size": 4,
            },
            "encoder.layers.*.blocks.*",
            IMAGES,
        ),
        r"something happens to the residual after encoder\.layers\.0\.blocks\.1",
    ),
    "rwkv": (
        of("RwkvModel", MAMBA | {"attention_hidden_size": 32, "intermediate_size": 48}, "blocks.*"),
        "it norms its residual",
    ),
    "nn encoder, post-norm": (
        (encoder, "layers.*", {"example": draw(2, 9, 16)}, (draw(2, 9, 16),)),
        "Post-norm blocks",
    ),
}


def call(model, inputs):
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return output if isinstance(output, torch.Tensor) else output.get("logits", output[0])


def built(make):
    torch.manual_seed(0)
    return make().eval()


@pytest.mark.parametrize("name", WORKS)
def test_works_as_before_with_one_stream_and_learns_with_four(name):
    make, blocks, options, inputs = WORKS[name]
    plain = built(make)
    with torch.no_grad():
        expected = call(plain, inputs)
        model = temper.wrap(copy.deepcopy(plain), blocks, preset="residual", num_streams=4, **options)
        assert torch.equal(call(model, inputs), expected)
        assert torch.equal(call(temper.unwrap(model), inputs), expected)
    model = temper.wrap(plain, blocks, preset="temper-tucker", num_streams=4, **options).train()
    call(model, inputs).float().square().sum().backward()
    missing = [key for key, parameter in model.named_parameters() if parameter.grad is None and "hyper" in key]
    # A second add right after the first reads nothing, so that its reading has nothing to learn.
    assert all(".1.pre." in key for key in missing)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason_and_left_as_it_was(name):
    (make, blocks, options, inputs), reason = REFUSED[name]
    model = built(make)
    before, kinds = set(model.state_dict()), [type(module) for module in model.modules()]
    with torch.no_grad():
        expected = call(model, inputs)
    with pytest.raises(ValueError, match=reason):
        temper.wrap(model, blocks, preset="temper-tucker", num_streams=4, **options)
    assert set(model.state_dict()) == before
    assert [type(module) for module in model.modules()] == kinds
    with torch.no_grad():
        assert torch.equal(call(model, inputs), expected)
