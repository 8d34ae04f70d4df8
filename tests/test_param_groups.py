"""Groups that Muon and AdamW can take."""

import pytest
import torch
from torch import nn

import temper


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        config = temper.preset("temper-tucker", num_streams=4, dim=16)
        self.sites = nn.ModuleList(
            temper.HyperConnection(config, layer_index=k, branch=nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16)))
            for k in range(2)
        )
        self.conv = nn.Conv1d(16, 16, 3)
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        streams = temper.expand_streams(self.embedding(ids), 4)
        for site in self.sites:
            streams = site(streams)
        x = temper.reduce_streams(streams)
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2))


def by_name(model, **options):
    return {group["name"]: group for group in temper.param_groups(model, **options)}


@pytest.mark.parametrize("tied", [False, True])
def test_every_trainable_parameter_in_exactly_one_group(tied):
    model = Model(tied)
    model.conv.bias.requires_grad_(False)
    groups = by_name(model)
    chosen = [id(p) for group in groups.values() for p in group["params"]]
    assert sorted(chosen) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert {id(p) for p in groups["matrix"]["params"]} == {id(site.branch[1].weight) for site in model.sites}
    assert [id(p) for p in groups["embedding"]["params"]] == [id(model.embedding.weight)]
    head = [] if tied else [model.head.weight]
    assert [id(p) for p in groups.get("head", {"params": []})["params"]] == list(map(id, head))
    routing = {id(p) for site in model.sites for key, p in site.named_parameters() if not key.startswith("branch")}
    assert {id(p) for p in groups["routing"]["params"]} == routing


def test_the_optimizers_take_them_and_routing_never_decays():
    model = Model()
    groups = temper.param_groups(model, lr=1e-3, weight_decay=0.1)
    settings = {group["name"]: (group["lr"], group["weight_decay"]) for group in groups}
    assert settings == {
        "matrix": (1e-3, 0.1),
        "embedding": (1e-3, 0.1),
        "head": (1e-3, 0.1),
        "vector": (1e-3, 0.0),
        "routing": (0.005, 0.0),
    }
    muon = torch.optim.Muon([group for group in groups if group["name"] == "matrix"])
    adamw = torch.optim.AdamW([group for group in groups if group["name"] != "matrix"])
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    model(torch.randint(50, (2, 5))).sin().sum().backward()
    for optimizer in (muon, adamw):
        optimizer.step()
    moved = {key for key, p in model.named_parameters() if not torch.equal(p, before[key])}
    # The first site mixes copies, so its res has (nearly) no gradient; everything else moves.
    assert {key for key in before if not key.startswith("sites.0.res")} <= moved


def test_muon_refuses_what_is_not_a_matrix_and_gets_none():
    model = Model()
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon(model.parameters())
    assert all(p.ndim == 2 for p in by_name(model)["matrix"]["params"])


def test_no_lr_leaves_it_to_the_optimizer():
    groups = by_name(Model(), routing_lr=0.02)
    assert "lr" not in groups["matrix"]
    assert groups["routing"]["lr"] == 0.02


def test_more_embeddings_by_name():
    model = Model()
    groups = by_name(model, embeddings=["sites.0.branch.*"])
    assert any(p is model.sites[0].branch[1].weight for p in groups["embedding"]["params"])


def linears(**names):
    modules = {name: nn.Linear(16, size, bias=False) for name, size in names.items()}
    return nn.ModuleDict({"wte": nn.Embedding(64, 16), **modules})


@pytest.mark.parametrize(
    ("names", "head"),
    [
        ({"up": 64, "lm_head": 64}, ["lm_head"]),
        ({"up": 64, "output": 64}, ["output"]),
        ({"output": 16, "last": 64}, ["last"]),
        # A classifier; and a hidden layer that is only called like one of the less certain names.
        ({"up": 64, "head": 10}, ["head"]),
        ({"output": 16}, []),
    ],
)
def test_the_head_is_found_by_name_and_by_shape(names, head):
    model = linears(**names)
    groups = by_name(model)
    assert [id(p) for p in groups.get("head", {"params": []})["params"]] == [id(model[name].weight) for name in head]
    others = [id(model[name].weight) for name in names if name not in head]
    assert [id(p) for p in groups.get("matrix", {"params": []})["params"]] == others


def test_the_head_is_never_guessed():
    model = linears(up=64, last=64)
    with pytest.raises(ValueError, match=r"2 matrices have the shape \(64, 16\) .*heads=\[\.\.\.\], \[\] for none"):
        temper.param_groups(model)
    assert by_name(model, heads=["last.*"])["head"]["params"][0] is model["last"].weight
    assert "head" not in by_name(model, heads=[])
    with pytest.raises(ValueError, match="heads: no trainable parameter is called 'nope'"):
        temper.param_groups(model, heads=["nope"])
    # A tied table is the head already, whatever else has its shape.
    model["lm_head"] = nn.Linear(16, 64, bias=False)
    model["lm_head"].weight = model["wte"].weight
    assert "head" not in by_name(model)


def test_wrapped_models_too():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    count = sum(p.numel() for p in model.parameters())
    temper.wrap(model, "layers.*", preset="temper-cp", num_streams=4)
    routing = sum(p.numel() for p in by_name(model)["routing"]["params"])
    assert routing == 4 * temper.count_parameters(temper.preset("temper-cp", num_streams=4, dim=16))
    assert sum(p.numel() for p in model.parameters()) == count + routing


def test_bad_arguments():
    with pytest.raises(TypeError, match="wants a module"):
        temper.param_groups([])
    with pytest.raises(ValueError, match=r"weight_decay is -0\.1"):
        temper.param_groups(Model(), weight_decay=-0.1)
    with pytest.raises(ValueError, match="routing_lr is -1"):
        temper.param_groups(Model(), routing_lr=-1)
