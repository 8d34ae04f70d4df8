"""The optimizers: Muon against torch's and a plain reference, groups, schedule, clipping, state, shards."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import temper
from temper_lab.optim import GROUPS, Muon, Optimizers, OptimSettings, assign, orthogonalize

VOCAB, WIDTH = 48, 16
SHAPES = [(16, 16), (16, 16), (64, 16), (16, 64), (24, 16), (1, 7), (7, 1), (16, 64)]


class Branch(nn.Module):
    """A norm with a gain, and matrices of three shapes; 33 rows do not divide over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 33, bias=False)
        self.down = nn.Linear(33, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.mix(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, preset: str = "temper-tucker", num_streams: int = 4, vocab: int = VOCAB) -> None:
        super().__init__()
        self.config = temper.preset(preset, num_streams=num_streams, dim=WIDTH)
        self.embedding = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(
            temper.HyperConnection(self.config, layer_index=index, branch=Branch()) for index in range(2)
        )
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        streams = temper.expand_streams(self.embedding(tokens), self.config.num_streams)
        for block in self.blocks:
            streams = block(streams)
        return self.head(temper.reduce_streams(streams))


def batch(index: int, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab, (4, 9), generator=torch.Generator().manual_seed(index))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def make_model(seed: int = 0, **options: object) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def build(model: nn.Module, **changes: object) -> Optimizers:
    return Optimizers.build(model, OptimSettings(**changes), batch_tokens=2**15, width=WIDTH)


def train(model: nn.Module, optimizers: Optimizers, steps: range, total: int = 20) -> list[float]:
    losses = []
    for index in steps:
        loss = loss_of(model, *batch(index))
        loss.backward()
        optimizers.step(index, total)
        losses.append(loss.item())
    return losses


def reference_muon(weights: list[Tensor], grads: list[list[Tensor]], lr: float, momentum: float) -> list[Tensor]:
    """Muon as its definition says, one matrix at a time, in float64."""
    out = []
    for index, weight in enumerate(weights):
        weight, mean = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
        for step_grads in grads:
            grad = step_grads[index].double()
            mean = momentum * mean + (1 - momentum) * grad
            x = (1 - momentum) * grad + momentum * mean
            x = x / max(x.norm().item(), 1e-7)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
            weight = weight - lr * math.sqrt(max(1, weight.shape[0] / weight.shape[1])) * x
        out.append(weight)
    return out


def run_muon(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], grads: list[list[Tensor]]) -> None:
    for step_grads in grads:
        for weight, grad in zip(weights, step_grads, strict=True):
            weight.grad = grad.to(weight.dtype)
        optimizer.step()


def muon_case(num_steps: int = 4) -> tuple[list[Tensor], list[list[Tensor]]]:
    torch.manual_seed(3)
    return [torch.randn(shape) for shape in SHAPES], [
        [torch.randn(shape) for shape in SHAPES] for _ in range(num_steps)
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_muon_equals_the_plain_reference(dtype: torch.dtype, tolerance: float) -> None:
    values, grads = muon_case()
    weights = [nn.Parameter(value.to(dtype, copy=True)) for value in values]
    run_muon(Muon(weights, lr=0.02, momentum=0.9), weights, grads)
    for weight, expected in zip(weights, reference_muon(values, grads, 0.02, 0.9), strict=True):
        assert weight.dtype == dtype
        torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=tolerance)


def test_muon_equals_torch_muon_up_to_its_bfloat16() -> None:
    values, grads = muon_case()
    mine, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    run_muon(Muon(mine, lr=0.02, momentum=0.95), mine, grads)
    other = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.0, adjust_lr_fn="original")
    run_muon(other, theirs, grads)
    for start, a, b in zip(values, mine, theirs, strict=True):
        moved = (b - start).norm()
        # bfloat16 has 8 bits, and five steps add up their rounding.
        assert (a - b).norm() < 0.03 * moved
        assert moved > 0


@given(rows=st.integers(1, 20), cols=st.integers(1, 60), flat=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_orthogonalize_keeps_directions_and_brings_singular_values_near_one(rows, cols, flat, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, _, right = torch.linalg.svd(
        torch.randn(3, rows, cols, generator=generator, dtype=torch.float64), full_matrices=False
    )
    short = min(rows, cols)
    values = torch.ones(short) if flat else torch.logspace(0, -3, short)
    original = left @ (values.double()[:, None] * right)
    result = orthogonalize(original.float()).double()
    expected = values.double() / values.double().norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(result, left @ (expected[:, None] * right), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("rows", "cols"), [(128, 128), (131, 131), (129, 200), (130, 400), (401, 129)])
def test_orthogonalize_of_matrices_large_enough_to_mirror(rows: int, cols: int) -> None:
    torch.manual_seed(0)
    batch = torch.randn(3, rows, cols, dtype=torch.float64)
    x = batch / batch.flatten(1).norm(dim=1)[:, None, None]
    x = x.mT if rows > cols else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    expected = x.mT if rows > cols else x
    torch.testing.assert_close(orthogonalize(batch.clone()), expected, rtol=1e-9, atol=1e-11)
    # A square Gaussian matrix has singular values near zero, which float32 resolves to this.
    torch.testing.assert_close(orthogonalize(batch.float()).double(), expected, rtol=0, atol=2e-5)


def test_orthogonalize_of_many_small_singular_values_is_as_good_as_the_plain_iteration() -> None:
    # The path over the Gram matrix squares singular values, so the smallest are where it would fail.
    torch.manual_seed(0)
    left = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(256, 64, dtype=torch.float64))[0].T
    values = torch.logspace(0, -6, 64, dtype=torch.float64)
    result = orthogonalize((left @ (values[:, None] * right)).float()[None])[0].double()
    expected = values / values.norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    assert (result - left @ (expected[:, None] * right)).abs().max() < 2e-5


def test_muon_skips_parameters_without_gradient_and_zero_gradients_move_nothing() -> None:
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    before = [weight.detach().clone() for weight in weights]
    optimizer = Muon(weights)
    weights[0].grad = torch.randn(4, 4)
    weights[1].grad = torch.zeros(4, 4)
    optimizer.step()
    assert not torch.equal(weights[0], before[0])
    assert torch.equal(weights[1], before[1])
    assert torch.equal(weights[2], before[2])


def test_muon_weight_decay_is_off_and_decoupled() -> None:
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    for weight, decay in zip(weights, (0.0, 0.5), strict=True):
        weight.grad = torch.zeros(4, 4)
        Muon([weight], lr=0.1, weight_decay=decay).step()
    assert torch.equal(weights[0], torch.ones(4, 4))
    torch.testing.assert_close(weights[1].detach(), torch.full((4, 4), 0.95))


def test_muon_survives_a_copy_and_its_own_state_dict() -> None:
    values, grads = muon_case()
    weights = [nn.Parameter(value.clone()) for value in values]
    optimizer = Muon(weights)
    run_muon(optimizer, weights, grads[:2])
    twins = [nn.Parameter(weight.detach().clone()) for weight in weights]
    twin = Muon(twins)
    twin.load_state_dict(copy.deepcopy(optimizer).state_dict())
    run_muon(optimizer, weights, grads[2:])
    run_muon(twin, twins, grads[2:])
    assert all(torch.equal(a, b) for a, b in zip(weights, twins, strict=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"lr": -1}, "lr is -1"), ({"momentum": 1.0}, "momentum is 1.0"), ({"ns_steps": 0}, "ns_steps is 0")],
)
def test_muon_refuses_bad_options(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Muon([nn.Parameter(torch.ones(2, 2))], **options)
    with pytest.raises(ValueError, match="for matrices"):
        Muon([nn.Parameter(torch.ones(2, 2, 2))])


@pytest.mark.parametrize("preset", sorted(temper.PRESETS))
def test_every_trainable_parameter_is_in_exactly_one_group(preset: str) -> None:
    model = make_model(preset=preset)
    model.blocks[0].branch.mix.weight.requires_grad_(False)
    groups = assign(model)
    assert tuple(groups) == GROUPS
    names = [name for members in groups.values() for name in members]
    assert sorted(names) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert list(groups["embedding"]) == ["embedding.weight"]
    assert list(groups["head"]) == ["head.weight"]
    assert set(groups["vector"]) == {f"blocks.{index}.branch.norm.weight" for index in range(2)}
    # What temper itself says about routing and matrices.
    theirs = {group["name"]: {id(p) for p in group["params"]} for group in temper.param_groups(model)}
    for group in ("routing", "matrix"):
        assert {id(p) for p in groups[group].values()} == theirs.get(group, set())


def test_optimizers_hold_every_parameter_once_and_routing_is_never_muons() -> None:
    model = make_model()
    optimizers = build(model, weight_decay=0.1)
    held = [p for o in (optimizers.muon, optimizers.adam) for group in o.param_groups for p in group["params"]]
    assert len({id(p) for p in held}) == len(held) == len(list(model.parameters()))
    muons = {id(p) for p in optimizers.muon.param_groups[0]["params"]}
    assert muons == {id(p) for name, p in model.named_parameters() if ".branch." in name and p.ndim == 2}
    decay = {group["name"]: group["weight_decay"] for group in optimizers.adam.param_groups}
    assert decay == {"embedding": 0.1, "head": 0.1, "routing": 0.0, "vector": 0.0}
    assert optimizers.muon.param_groups[0]["weight_decay"] == 0.1


def test_a_hidden_matrix_with_the_shape_of_the_table_is_not_taken_for_the_head() -> None:
    model = make_model(vocab=33)
    groups = assign(model)
    assert list(groups["head"]) == ["head.weight"]
    assert "blocks.0.branch.up.weight" in groups["matrix"]


class Nameless(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 8, bias=False) for _ in range(num))


def test_the_head_is_found_by_shape_or_by_pattern_and_never_guessed() -> None:
    assert list(assign(Nameless(1))["head"]) == ["layers.0.weight"]
    with pytest.raises(ValueError, match=r"2 matrices have the shape \(8, 4\)"):
        assign(Nameless(2))
    groups = assign(Nameless(2), heads=["layers.1.*"])
    assert (list(groups["head"]), list(groups["matrix"])) == (["layers.1.weight"], ["layers.0.weight"])
    groups = assign(Nameless(2), heads=["layers.1.*"], embeddings=["layers.0.*"])
    assert list(groups["embedding"]) == ["table.weight", "layers.0.weight"]
    with pytest.raises(ValueError, match="no trainable parameter is called 'nope'"):
        assign(Nameless(1), heads=["nope"])


def test_a_tied_head_is_an_embedding() -> None:
    model = make_model()
    model.head.weight = model.embedding.weight
    groups = assign(model)
    assert (list(groups["embedding"]), list(groups["head"])) == (["embedding.weight"], [])


def test_learning_rates_scale_with_batch_and_width() -> None:
    lrs = Optimizers.build(make_model(), batch_tokens=2**17, width=192).lrs
    expected = {"matrix": 0.01, "embedding": 0.3, "head": 0.004, "routing": 0.0025, "vector": 0.0025}
    assert lrs == pytest.approx(expected)
    with pytest.raises(ValueError, match="batch_tokens is 0"):
        Optimizers.build(make_model(), batch_tokens=0, width=16)
    with pytest.raises(ValueError, match="no trainable parameters"):
        Optimizers.build(nn.ReLU(), batch_tokens=1, width=1)


def test_schedule_is_constant_and_then_linear_to_zero() -> None:
    defaults = OptimSettings()
    factors = [defaults.lr_factor(index, 10) for index in range(11)]
    assert factors == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert replace(defaults, warmdown=0.0).lr_factor(9, 10) == 1
    assert [defaults.momentum_at(index) for index in (0, 150, 300, 900)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert replace(defaults, momentum_warmup=0).momentum_at(0) == 0.95


def test_step_applies_the_schedule() -> None:
    model = make_model()
    optimizers = build(model, momentum_warmup=10)
    train(model, optimizers, range(9, 10), total=10)
    for optimizer in (optimizers.muon, optimizers.adam):
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(optimizers.lrs[group["name"]] * 0.25)
    assert optimizers.muon.param_groups[0]["momentum"] == pytest.approx(0.94)
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ValueError, match="step 10 is not one of 10"):
        optimizers.step(10, 10)


def test_clipping_scales_to_the_limit_and_returns_the_norm_before() -> None:
    model = make_model()
    optimizers = build(model, clip=0.5)
    loss_of(model, *batch(0)).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = math.sqrt(sum(grad.double().square().sum().item() for grad in before.values()))
    assert norm > 0.5
    assert optimizers.clip() == pytest.approx(norm, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name] * (0.5 / norm))
    # Inside the limit, not a bit changes.
    after = {name: p.grad.clone() for name, p in model.named_parameters()}
    for unclipped in (build(model, clip=0.51), build(model, clip=0.0)):
        assert unclipped.clip() == pytest.approx(0.5, rel=1e-5)
        assert all(torch.equal(p.grad, after[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_step_before_it_harms(value: float) -> None:
    model = make_model()
    optimizers = build(model)
    train(model, optimizers, range(2))
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizers.state_dict())
    loss_of(model, *batch(0)).backward()
    model.head.weight.grad[3, 4] = value
    with pytest.raises(FloatingPointError, match=r"1 gradients are not finite \(head.weight\)"):
        optimizers.step(2, 20)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(torch.equal(state[0][key], value) for key, value in optimizers.state_dict()[0].items())


def test_loss_falls() -> None:
    model = make_model()
    optimizers = build(model)
    first = loss_of(model, *batch(0)).item()
    for index in range(20):
        loss_of(model, *batch(0)).backward()
        optimizers.step(index, 20)
    assert loss_of(model, *batch(0)).item() < 0.7 * first


def test_resume_is_bit_exact() -> None:
    model = make_model()
    optimizers = build(model)
    train(model, optimizers, range(7))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    tensors, description = optimizers.state_dict()
    tensors = {key: value.clone() for key, value in tensors.items()}
    description = json.loads(json.dumps(description))
    expected = train(model, optimizers, range(7, 12))

    other = make_model(seed=1)
    resumed = build(other)
    other.load_state_dict({key: value.squeeze() if key.endswith("gate") else value for key, value in weights.items()})
    # An older checkpoint holds gates, and what belongs to them, as scalars.
    older = {key: value.squeeze() if key.endswith("gate") else value for key, value in tensors.items()}
    resumed.load_state_dict(older, description)
    assert train(other, resumed, range(7, 12)) == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    again = resumed.state_dict()[0]
    assert all(torch.equal(value, again[key]) for key, value in optimizers.state_dict()[0].items())


def test_state_has_stable_names_and_is_complete_before_the_first_step() -> None:
    model = make_model()
    optimizers = build(model)
    names = set(optimizers.state_dict()[0])
    assert {"momentum.blocks.0.branch.mix.weight", "exp_avg.head.weight", "step.blocks.1.res.gate"} <= names
    train(model, optimizers, range(1))
    assert set(optimizers.state_dict()[0]) == names
    compiled = torch.compile(model, backend="eager")
    assert set(build(compiled).state_dict()[0]) == names
    model.blocks[0].branch = torch.compile(model.blocks[0].branch, backend="eager")
    assert set(build(model).state_dict()[0]) == names


def test_fresh_state_is_what_torch_would_have_made() -> None:
    # In float64: AdamW divides by the gradient's own size, which turns the rounding of a tiny one into a whole step.
    model, other = make_model().double(), make_model().double()
    optimizers = build(model, momentum_warmup=0, warmdown=0.0, clip=0.0)
    groups = [
        {"params": [dict(other.named_parameters())[name] for name in members], "lr": optimizers.lrs[group]}
        for group, members in optimizers.groups.items()
    ]
    plain = [
        Muon(groups[:1]),
        torch.optim.AdamW(groups[1:], betas=(0.8, 0.95), eps=1e-10, weight_decay=0, foreach=False),
    ]
    for index in range(4):
        loss_of(model, *batch(index)).backward()
        loss_of(other, *batch(index)).backward()
        optimizers.step(index, 10)
        for optimizer in plain:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda t, d: t.pop("exp_avg.head.weight"), "missing exp_avg.head.weight"),
        (lambda t, d: t.update(extra=torch.ones(1)), "unexpected extra"),
        (
            lambda t, d: t.update({"exp_avg.head.weight": torch.ones(2, 2)}),
            r"float32 \(2, 2\), expected float32 \(48, 16\)",
        ),
        (lambda t, d: t.update({"exp_avg.head.weight": t["exp_avg.head.weight"].double()}), "is float64"),
        (lambda t, d: t["exp_avg.head.weight"].fill_(math.nan), "not finite"),
        (lambda t, d: d["groups"].pop("routing"), "not in the saved group routing"),
        (lambda t, d: d["groups"]["matrix"].append("head.weight"), "head.weight is in the saved group matrix"),
        (lambda t, d: d.clear(), "has no groups"),
    ],
)
def test_state_that_does_not_fit_is_refused_whole(harm, words: str) -> None:
    model = make_model()
    optimizers = build(model)
    train(model, optimizers, range(2))
    tensors, description = copy.deepcopy(optimizers.state_dict())
    train(model, optimizers, range(2, 3))
    before = copy.deepcopy(optimizers.state_dict()[0])
    harm(tensors, description)
    with pytest.raises(ValueError, match=words):
        optimizers.load_state_dict(tensors, description)
    assert all(torch.equal(value, before[key]) for key, value in optimizers.state_dict()[0].items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"matrix_lr": -0.1}, "matrix_lr is -0.1"),
        ({"routing_lr": math.nan}, "routing_lr is nan"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"betas": (0.9, 1.5)}, r"betas\[1\] is 1.5"),
        ({"betas": (0.9,)}, "betas is"),
        ({"warmdown": 1.5}, "warmdown is 1.5"),
        ({"ns_steps": 0}, "ns_steps is 0"),
        ({"clip": "1"}, "clip is '1'"),
    ],
)
def test_settings_refuse_bad_values(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OptimSettings(**options)


def sharded_run(rank: int, world: int, port: int, target: str) -> None:
    """Trains on this rank's rows of each batch; rank 0 saves the whole model and optimizer state."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    wrapped = nn.parallel.DistributedDataParallel(make_model())
    assert {k: list(v) for k, v in assign(wrapped).items()} == {k: list(v) for k, v in assign(make_model()).items()}
    model = make_model().double()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizers = build(model, clip=0.5)
    assert any(isinstance(p, DTensor) for p in optimizers.parameters.values())
    norms = []

    def steps(indices: range) -> None:
        for index in indices:
            tokens, targets = (part.chunk(world)[rank] for part in batch(index))
            loss_of(model, tokens, targets).backward()
            norms.append(optimizers.step(index, 8))

    steps(range(3))
    saved = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    weights = {name: value.detach().clone() for name, value in saved.items()}
    tensors, description = optimizers.state_dict()
    tensors = {name: value.clone() for name, value in tensors.items()}
    steps(range(3, 5))
    # Back to the third step, and the same two again: the state of shards is whole and comes back.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = weights[name]
            if isinstance(parameter, DTensor):
                whole = torch.distributed.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)
    optimizers.load_state_dict(tensors, description)
    steps(range(3, 5))
    assert norms[3:5] == norms[5:7]
    final = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    if rank == 0:
        torch.save({"weights": final, "norms": norms[:5]}, target)
    dist.destroy_process_group()


def test_sharded_training_equals_one_process(tmp_path, unused_port: int) -> None:
    target = str(tmp_path / "sharded.pt")
    mp.spawn(sharded_run, args=(2, unused_port, target), nprocs=2)
    sharded = torch.load(target, weights_only=True)
    model = make_model().double()
    optimizers = build(model, clip=0.5)
    norms = []
    for index in range(5):
        loss_of(model, *batch(index)).backward()
        norms.append(optimizers.step(index, 8))
    assert norms == pytest.approx(sharded["norms"], rel=1e-9)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sharded["weights"][name], parameter.detach(), rtol=0, atol=1e-9)


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
