"""The backbone against a plain one written on its own, the chunked loss against the whole one."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F

import temper
from temper_lab.model import GPT, ModelConfig
from temper_lab.model.functional import chunked_cross_entropy

SMALL = {"depth": 2, "vocab_size": 97, "context": 24, "head_dim": 32}


def small(**changes) -> ModelConfig:
    return ModelConfig(**{**SMALL, **changes})


def shaken(config: ModelConfig, seed: int = 0) -> GPT:
    """A model none of whose matrices is zero."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch(config: ModelConfig, rows: int = 3, tokens: int = 20, seed: int = 1):
    ids = torch.randint(config.vocab_size, (rows, tokens + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def plain_logits(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The residual network once more, from the recipe alone and with none of the model's code."""
    weights, config = model.state_dict(), model.config
    num_tokens, half = ids.shape[1], config.head_dim // 2

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    angle = torch.arange(num_tokens)[:, None] / 10_000 ** (torch.arange(half)[None] / half)
    cos, sin = angle.cos().to(weights["head.weight"]), angle.sin().to(weights["head.weight"])

    def rotated(x):
        first, second = x[..., :half], x[..., half:]
        return norm(torch.cat((first * cos + second * sin, -first * sin + second * cos), -1))

    x = norm(weights["embedding.weight"][ids])
    hidden = torch.ones(num_tokens, num_tokens).triu(1).bool()
    for layer in range(config.depth):
        part = {key.split(".", 2)[2]: value for key, value in weights.items() if key.startswith(f"blocks.{layer}.")}
        y = norm(x)
        q, k, v = (
            (y @ part[f"attention.{name}.weight"].T).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        scores = rotated(q) @ rotated(k).transpose(-1, -2) / math.sqrt(config.head_dim)
        y = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        x = x + y.transpose(1, 2).flatten(2) @ part["attention.out.weight"].T
        x = x + (norm(x) @ part["mlp.up.weight"].T).clamp(min=0).pow(2) @ part["mlp.down.weight"].T
    return 15 * torch.tanh(norm(x) @ weights["head.weight"].T / 15)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-5)])
def test_residual_is_the_plain_network(dtype, tolerance):
    model = shaken(small()).to(dtype)
    ids, _ = batch(model.config)
    torch.testing.assert_close(model(ids), plain_logits(model, ids), rtol=0, atol=tolerance)


def test_residual_gradients_are_those_of_the_plain_network():
    model = shaken(small()).double()
    ids, targets = batch(model.config)
    loss = model.loss(ids, targets)
    weights = list(model.parameters())
    mine = torch.autograd.grad(loss, weights)
    detached = model.state_dict
    model.state_dict = lambda: dict(model.named_parameters())
    plain = F.cross_entropy(plain_logits(model, ids).flatten(0, 1), targets.flatten())
    model.state_dict = detached
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6)
    # The tables of the model are float32; those of the plain network are not.
    torch.testing.assert_close(mine, torch.autograd.grad(plain, weights), rtol=1e-4, atol=1e-7)


def test_one_stream_and_residual_are_the_same_bit_for_bit():
    ids, _ = batch(small())
    one = shaken(small(preset="mhc", num_streams=1))
    residual = shaken(small(preset="residual", num_streams=4))
    assert residual.num_streams == one.num_streams == 1
    assert torch.equal(one(ids), residual(ids))


def test_streams_go_around_both_branches_of_every_block():
    model = GPT(small(preset="mhc", num_streams=4))
    assert [site.layer_index for site in model.sites()] == [0, 1, 2, 3]
    seen = []
    for site in model.sites():
        site.observers = (lambda site, streams, routing: seen.append((site.layer_index, tuple(streams.shape))),)
    model(batch(model.config)[0])
    assert seen == [(index, (3, 20, 4, 128)) for index in range(4)]


@pytest.mark.parametrize("with_gradients", [True, False])
def test_all_sites_are_chained_unless_a_block_has_to_be_called(monkeypatch, with_gradients):
    model = shaken(small(preset="temper-cp", num_streams=4))
    (ids, targets), chained, seen = batch(model.config), [], []
    finish_into = temper.HyperConnection.finish_into

    def spy(site, following, *args, **options):
        chained.append((site.layer_index, following.layer_index))
        return finish_into(site, following, *args, **options)

    monkeypatch.setattr(temper.HyperConnection, "finish_into", spy)

    def run():
        chained.clear()
        with torch.set_grad_enabled(with_gradients):
            loss = model.loss(ids, targets)
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters())) if with_gradients else ()

    expected = run()
    assert chained == [(0, 1), (1, 2), (2, 3)]
    model.blocks[1].register_forward_hook(lambda block, args, out: seen.append((args[0].shape, out.shape)))
    torch.testing.assert_close(run(), expected, rtol=0, atol=0)
    assert chained == [(0, 1), (2, 3)]
    assert seen == [((3, 20, 4, 128), (3, 20, 4, 128))]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_chunked_loss_is_the_plain_loss(reduction, dtype, tolerance):
    torch.manual_seed(0)
    x = torch.randn(3, 23, 32, dtype=dtype, requires_grad=True)
    # Wide enough for the cap to bite.
    weight = torch.randn(61, 32, dtype=dtype, requires_grad=True)
    targets = torch.randint(61, (3, 23))
    chunked = chunked_cross_entropy(x, weight, targets, reduction=reduction, chunk=10)
    logits = 15 * torch.tanh(x @ weight.T / 15)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction).view(chunked.shape)
    torch.testing.assert_close(chunked, plain, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(plain)
    mine = torch.autograd.grad(chunked, (x, weight), upstream)
    theirs = torch.autograd.grad(plain, (x, weight), upstream)
    scale = max(part.abs().max().item() for part in theirs)
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * scale)


def test_losses_agree_with_the_logits():
    model = shaken(small())
    ids, targets = batch(model.config)
    each = model.loss(ids, targets, reduction="none")
    expected = F.cross_entropy(model(ids).transpose(1, 2), targets, reduction="none")
    torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model.loss(ids, targets), each.mean())
        torch.testing.assert_close(model.loss(ids, targets, reduction="sum"), each.sum())


def test_frozen_parts_get_no_gradient():
    model = shaken(small())
    ids, targets = batch(model.config)
    model.head.weight.requires_grad_(False)
    model.loss(ids, targets).backward()
    assert model.head.weight.grad is None
    assert model.embedding.weight.grad is not None
    model.requires_grad_(False)
    model.head.weight.requires_grad_(True)
    model.loss(ids, targets).backward()
    assert model.head.weight.grad is not None


def test_a_uniform_model_loses_log_v():
    model = GPT(small())
    torch.nn.init.zeros_(model.head.weight)
    ids, targets = batch(model.config)
    each = model.loss(ids, targets, reduction="none")
    torch.testing.assert_close(each, torch.full_like(each, math.log(97)), rtol=0, atol=1e-6)


def test_whole_logits_are_never_kept():
    config = small(vocab_size=5000)
    model = shaken(config)
    ids, targets = batch(config, rows=50, tokens=24)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.numel()) or x, lambda x: x):
        model.loss(ids, targets)
    assert max(shapes) < ids.numel() * config.vocab_size / 5


@pytest.mark.parametrize("preset", ["residual", "temper-tucker"])
def test_checkpointing_changes_nothing(preset):
    config = small(preset=preset, num_streams=4)
    ids, targets = batch(config)
    found = []
    for flag in (False, True):
        model = shaken(config.with_(checkpoint_blocks=flag))
        assert model.checkpoint_blocks is flag
        loss = model.loss(ids, targets)
        found.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("preset", sorted(temper.PRESETS))
def test_every_preset_learns(preset):
    config = small(preset=preset, num_streams=4)
    torch.manual_seed(0)
    model = GPT(config)
    ids, targets = batch(config, rows=2, tokens=16)
    optimizer = torch.optim.AdamW(temper.param_groups(model, lr=3e-3))
    losses = []
    for _ in range(20):
        loss = model.loss(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(97)) < 0.1
    assert losses[-1] < 0.75 * losses[0]


def test_the_seed_alone_decides_the_backbone():
    states = []
    for preset in ("residual", "mhc", "temper-cp"):
        torch.manual_seed(7)
        states.append(GPT(small(preset=preset, num_streams=4)).state_dict())
    for state in states[1:]:
        assert all(torch.equal(state[key], value) for key, value in states[0].items())


def test_initial_values():
    torch.manual_seed(0)
    model = GPT(small(depth=4, vocab_size=2000))
    state = model.state_dict()
    assert state["embedding.weight"].std().item() == pytest.approx(1, rel=0.02)
    assert state["head.weight"].std().item() == pytest.approx(0.001, rel=0.02)
    for name in ("attention.query", "attention.key", "attention.value", "mlp.up"):
        weight = state[f"blocks.0.{name}.weight"]
        assert weight.std().item() == pytest.approx(1 / 16, rel=0.02)
        assert weight.abs().max().item() <= math.sqrt(3) / 16
    assert not state["blocks.0.attention.out.weight"].any()
    assert not state["blocks.0.mlp.down.weight"].any()


@pytest.mark.parametrize("preset", ["residual", "mhc-lite", "temper-tucker-frozen"])
def test_meta_construction(preset):
    config = small(preset=preset, num_streams=4)
    torch.manual_seed(3)
    direct = GPT(config)
    with torch.device("meta"):
        late = GPT(config)
    assert all(tensor.is_meta for tensor in (*late.parameters(), *late.buffers()))
    late.to_empty(device="cpu")
    torch.manual_seed(3)
    late.reset_parameters()
    ids, _ = batch(config)
    assert torch.equal(direct(ids), late(ids))
    # Tables that no state dict holds come back without reset_parameters too.
    with torch.device("meta"):
        loaded = GPT(config)
    loaded.to_empty(device="cpu")
    source = shaken(config)
    loaded.load_state_dict(source.state_dict())
    assert torch.equal(source(ids), loaded(ids))
    assert not any("rotary" in key for key in source.state_dict())


def test_counts_of_the_paper():
    config = ModelConfig(depth=12, vocab_size=32768, context=2048)
    assert (config.dim, config.num_heads, config.num_layers) == (768, 6, 12)
    with torch.device("meta"):
        model = GPT(config)
        tucker = GPT(config.with_(preset="temper-tucker", num_streams=4))
    counts = model.num_parameters()
    assert counts == {
        "embedding": 25_165_824,
        "head": 25_165_824,
        "blocks": 84_934_656,
        "routing": 0,
        "total": 135_266_304,
    }
    assert tucker.num_parameters()["routing"] == 743_880
    flops = 6 * (84_934_656 + 25_165_824) + 12 * 768 * 2048 * 12
    assert model.flops_per_token() == flops
    assert flops < tucker.flops_per_token() < 1.05 * flops


@pytest.mark.parametrize("preset", ["residual", "temper-tucker"])
def test_memory_estimate_is_near_what_is_kept(preset):
    config = small(depth=4, vocab_size=512, context=64, preset=preset, num_streams=4)
    model = shaken(config)
    ids, targets = batch(config, rows=32, tokens=64)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(ids, targets)
    estimate = model.memory_estimate(ids.numel())
    assert sum(kept.values()) == pytest.approx(estimate["activations"], rel=0.25)
    assert estimate["parameters"] == 4 * model.num_parameters()["total"]
    assert estimate["total"] == sum(value for key, value in estimate.items() if key != "total")
    model.checkpoint_blocks = True
    assert model.memory_estimate(ids.numel())["activations"] < estimate["activations"]
    assert loss.isfinite()


def test_half_precision_and_autocast():
    config = small(preset="temper-cp", num_streams=2)
    model = shaken(config)
    ids, targets = batch(config)
    expected = model.loss(ids, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.loss(ids, targets)
        logits = model(ids)
    loss.backward()
    assert logits.dtype == loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 0.05
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model.bfloat16()
    loss = model.loss(ids, targets, reduction="none")
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert abs(loss.mean().item() - expected.item()) < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth is 0"),
        ({"depth": 2.0}, "depth is 2.0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"context": True}, "context is True"),
        ({"head_dim": 31}, "even"),
        ({"num_streams": 0}, "num_streams is 0"),
        ({"width": 100}, "width is 100; expected a multiple of head_dim 32"),
        ({"width": -32}, "width is -32"),
        ({"width": 96.0}, "width is 96.0"),
        ({"rope_base": 0}, "rope_base"),
        ({"checkpoint_blocks": 1}, "checkpoint_blocks is 1"),
        ({"preset": "temper-tuker"}, "Did you mean 'temper-tucker'"),
        ({"preset": "mhc", "num_streams": 4, "router": {"rnk": 2}}, "rnk"),
        ({"router": [1]}, "expected a mapping"),
        ({"preset": "mhc", "num_streams": 2, "router": {"mixer": 3}}, "router is"),
        ({"preset": "temper-cp", "num_streams": 4, "router": {"rank": 10**6}}, "rank"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_configurations_survive_json():
    router = {"rank": (2, 8), "mixer": temper.Choice("sinkhorn", iters=5), "gain": "none"}
    config = small(preset="temper-tucker", num_streams=4, router=router)
    back = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert back == config
    assert hash(back) == hash(config)
    assert back.routing() == config.routing()
    assert back.routing().mixer.options["iters"] == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.depth = 3
    with pytest.raises(ValueError, match="Did you mean 'depth'"):
        ModelConfig.from_dict({**SMALL, "dept": 3})
    with pytest.raises(ValueError, match="lacks vocab_size, context"):
        ModelConfig.from_dict({"depth": 3})


@pytest.mark.parametrize(("depth", "head_dim", "width"), [(1, 128, 128), (3, 128, 256), (4, 64, 256), (5, 64, 320)])
def test_width_follows_depth(depth, head_dim, width):
    config = small(depth=depth, head_dim=head_dim)
    assert config.dim == width
    assert config.num_heads * head_dim == width
    assert "width" not in config.to_dict()
    # Not remembered as a number: another depth has another width.
    assert config.with_(depth=10, head_dim=64).dim == 640


def test_a_width_of_its_own():
    config = small(width=96, preset="temper-cp", num_streams=4)
    assert (config.dim, config.num_heads, config.routing().dim) == (96, 3, 96)
    assert config.with_(depth=7).dim == 96
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.with_routings(config.routings()) == config
    model = GPT(config)
    assert model.num_parameters()["blocks"] == sum(
        p.numel() for n, p in model.named_parameters() if "_site" not in n and "blocks" in n
    )
    plain = shaken(small(width=96)).double()
    ids, _ = batch(plain.config)
    torch.testing.assert_close(plain(ids).double(), plain_logits(plain, ids), rtol=1e-5, atol=1e-5)


def test_bad_ids():
    model = GPT(small())
    ids, targets = batch(model.config)
    with pytest.raises(ValueError, match="25 tokens"):
        model(torch.zeros(1, 25, dtype=torch.long))
    with pytest.raises(ValueError, match="whole numbers"):
        model(ids.float())
    with pytest.raises(ValueError, match="whole numbers"):
        model(ids[0])
    with pytest.raises(ValueError, match="targets have shape"):
        model.loss(ids, targets[:, 1:])
    with pytest.raises(ValueError, match="unknown reduction"):
        model.loss(ids, targets, reduction="max")
    with pytest.raises(TypeError, match="ModelConfig"):
        GPT({"depth": 2})
