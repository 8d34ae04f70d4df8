"""Streams that are made again instead of kept: the same gradients from less memory."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import temper
from temper.recompute import best_group

N, D = 4, 6


@pytest.fixture(params=["fused", "cpu"], autouse=True)
def backend(request):
    with temper.backend(request.param):
        yield request.param


class Stack(nn.Module):
    """Sites around linear branches, between an expansion and a sum."""

    def __init__(self, sites, preset="temper-cp", num_streams=N, dim=D, residual=()):
        super().__init__()
        torch.manual_seed(sites)
        config = temper.preset(preset, num_streams=num_streams, dim=dim)
        plain = temper.preset("residual", num_streams=num_streams, dim=dim)
        self.sites = nn.ModuleList(
            temper.HyperConnection(plain if k in residual else config, layer_index=k, branch=nn.Linear(dim, dim))
            for k in range(sites)
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.4)
        self.num_streams = num_streams

    def forward(self, x, between=lambda streams: streams):
        streams = temper.expand_streams(x, self.num_streams)
        for site in self.sites:
            streams = between(site(streams))
        return temper.reduce_streams(streams)


def data(tokens=5, dim=D, dtype=torch.float32):
    return torch.randn(tokens, dim, generator=torch.Generator().manual_seed(7)).to(dtype).requires_grad_()


def gradients(model, x, group, run=None):
    """Of x and every parameter."""
    temper.recompute(model, group)
    out = run(model, x) if run else model(x)
    return torch.autograd.grad(out.sin().sum(), [x, *model.parameters()])


def assert_same(model, x, group, run=None):
    plain, again = gradients(model, x, 0, run), gradients(model, x, group, run)
    # The same operations on the same numbers: nothing is rounded differently.
    assert all(map(torch.equal, plain, again))
    assert any(gradient.abs().max() > 0 for gradient in plain)


@pytest.mark.parametrize("sites", range(1, 10))
@pytest.mark.parametrize("group", [1, 2, 3, 20, None])
def test_the_gradients_are_the_same(sites, group):
    assert_same(Stack(sites), data(), group)


@pytest.mark.parametrize("preset", ["mhc", "mhc-lite", "kromhc", "temper-tucker", "hc"])
def test_for_every_form_of_routing(preset):
    assert_same(Stack(5, preset), data(), 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_in_other_precisions(dtype):
    model = Stack(5)
    for site in model.sites:
        site.branch.to(dtype)
    assert_same(model, data(dtype=dtype), 3)


def test_under_autocast():
    def run(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    assert_same(Stack(5), data(), 3, run)


def test_with_residual_sites_in_between():
    assert_same(Stack(7, num_streams=N, residual=(2, 3)), data(), 3)


def test_a_model_that_is_used_twice_before_the_backward():
    def run(model, x):
        return model(model(x)) + model(2 * x)

    assert_same(Stack(4), data(), 3, run)


def test_models_side_by_side():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = Stack(5), Stack(4, "mhc")

        def forward(self, x):
            streams = [temper.expand_streams(x, N)] * 2
            for k in range(5):
                for side, model in enumerate((self.left, self.right)):
                    if k < len(model.sites):
                        streams[side] = model.sites[k](streams[side])
            return temper.reduce_streams(streams[0]) * temper.reduce_streams(streams[1])

    assert_same(Pair(), data(), 3)


def test_streams_that_go_two_ways():
    class Fork(Stack):
        def forward(self, x):
            first, second, left, right = self.sites
            streams = second(first(temper.expand_streams(x, N)))
            return temper.reduce_streams(left(streams) * right(streams))

    assert_same(Fork(4), data(), 4)


@pytest.mark.parametrize(
    "change", [lambda streams: streams * 1.5, lambda streams: streams.mul_(1.5)], ids=["new", "in place"]
)
def test_streams_that_are_changed_between_sites(change):
    """Nothing but a site may be assumed to have made them."""
    assert_same(Stack(5), data(), 3, lambda model, x: model(x, change))


def test_first_streams_that_are_changed_afterwards_are_noticed():
    model = temper.recompute(Stack(3), 3)
    streams = temper.expand_streams(data(), N)
    out = streams
    for site in model.sites:
        out = site(out)
    with torch.no_grad():
        streams.mul_(2)
    # Only the last site's: the first one, whose own streams these are, never runs backwards.
    with pytest.raises(RuntimeError, match=r"in.?place"):
        torch.autograd.grad(out.sin().sum(), list(model.sites[2].pre.parameters()))


def test_a_branch_output_that_is_changed_afterwards_is_noticed():
    model = temper.recompute(Stack(4), 4)
    kept = []

    def remember(module, args, y):
        kept.append(y)

    model.sites[1].branch.register_forward_hook(remember)
    out = model(data())
    with torch.no_grad():
        kept[0].mul_(2)
    with pytest.raises(RuntimeError, match=r"in.?place"):
        out.sum().backward()


def test_a_graph_that_is_kept_goes_backwards_twice():
    model, x = temper.recompute(Stack(7), 3), data()
    loss = model(x).sin().sum()
    leaves = [x, *model.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_part_of_a_graph_goes_backwards():
    def run(model, x):
        return model(x)

    model, x = Stack(6), data()
    results = []
    for group in (0, 4):
        temper.recompute(model, group)
        results.append(torch.autograd.grad(run(model, x).sin().sum(), list(model.sites[4].parameters())))
    assert all(map(torch.equal, *results))


def outputs_alive(model, stage, run):
    """How many of the branch outputs are still in memory at a stage of a step, while its loss lives."""
    outputs = []
    hooks = [
        site.branch.register_forward_hook(lambda module, args, y: outputs.append(StorageWeakRef(y.untyped_storage())))
        for site in model.sites
    ]
    loss = run(model, data()).sin().sum()
    if stage == "after the backward":
        loss.backward()
    for hook in hooks:
        hook.remove()
    return sum(not output.expired() for output in outputs)


def without_autograd(model, x):
    with torch.no_grad():
        return model(x)


def in_a_checkpoint(model, x):
    return checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("group", [0, 3])
@pytest.mark.parametrize(
    ("stage", "run", "alive"),
    [
        ("before the backward", Stack.__call__, 6),
        ("before the backward", without_autograd, 0),
        # What is inside is made again, so that nothing of it need be there.
        ("before the backward", in_a_checkpoint, 0),
        # A loop holds its loss until it has the next: two steps' memory at once would be too much.
        ("after the backward", Stack.__call__, 0),
        ("after the backward", in_a_checkpoint, 0),
    ],
)
def test_nothing_is_held_for_longer_than_autograd_holds_it(group, stage, run, alive):
    assert outputs_alive(temper.recompute(Stack(6), group), stage, run) == alive


class Large(Stack):
    """Wide enough that streams are told from everything else by their size."""

    def __init__(self, sites):
        super().__init__(sites, num_streams=N, dim=64)


STREAMS = 50 * N * 64 * 4


def kept_bytes(model, group, run=None):
    """Bytes of each storage that autograd keeps, without the parameters, the largest first."""
    temper.recompute(model, group)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Held until it is counted: freed memory is used again, and two storages would be one.
        out = model(data(50, 64))
    assert out.requires_grad
    return sorted(storages.values(), reverse=True)


@pytest.mark.parametrize(("sites", "group", "kept"), [(6, 0, 6), (6, 1, 6), (6, 2, 3), (7, 3, 3), (9, 3, 3), (9, 9, 1)])
def test_what_is_saved_is_the_first_streams_of_every_group(sites, group, kept):
    sizes = kept_bytes(Large(sites), group)
    assert sum(size == STREAMS for size in sizes) == kept
    rest = [size for size in sizes if size != STREAMS]
    assert max(rest) < STREAMS
    # Beside the streams: y and x of every site, one a stream wide; the routing; the folded maps.
    assert sum(rest) < sites * (3 * STREAMS // N + 50 * (N * N + 4 * N + 16) * 4 + 40_000)


def test_the_best_group_is_where_the_memory_is_least():
    for num_streams in (2, 4, 8, 16):
        for sites in (1, 2, 12, 24, 100):
            group = best_group(num_streams, sites)

            def cost(group, num_streams=num_streams, sites=sites):
                return num_streams * sites / group + (num_streams + 2) * group

            least = (num_streams * sites / (num_streams + 2)) ** 0.5
            assert least <= group < least + 1
            # Rounding up is no matter where there is something to gain.
            assert sites < 12 or cost(group) <= 1.1 * min(map(cost, range(1, sites + 1)))
    model = temper.recompute(Stack(9))
    assert {site.recompute for site in model.sites} == {best_group(N, 9)} == {3}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint(use_reentrant):
    def run(model, x):
        return checkpoint(model, x, use_reentrant=use_reentrant)

    model, x = Stack(5), data()
    results = []
    for group in (0, 3):
        temper.recompute(model, group)
        model.zero_grad()
        x.grad = None
        run(model, x).sin().sum().backward()
        results.append([leaf.grad.clone() for leaf in (x, *model.parameters())])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_around_branches_that_are_checkpoints(use_reentrant):
    model = Stack(5)
    for site in model.sites:
        linear = site.branch
        site.branch = None
        site.linear = linear
        site.forward = lambda streams, site=site, linear=linear: site.decorate(
            lambda x: checkpoint(linear, x, use_reentrant=use_reentrant)
        )(streams)
    x, results = data(), []
    for group in (0, 3):
        temper.recompute(model, group)
        model.zero_grad()
        x.grad = None
        model(x).sin().sum().backward()
        results.append([leaf.grad.clone() for leaf in (x, *model.parameters())])
    assert all(map(torch.equal, *results))


def test_a_wrapped_model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = temper.wrap(model, "layers.*", preset="temper-tucker", num_streams=4)
    x = torch.randn(2, 5, 16, requires_grad=True)
    plain = gradients(model, x, 0)
    for group in (2, 4, None):
        assert all(map(torch.equal, gradients(model, x, group), plain))


def test_group_zero_turns_it_off():
    model = temper.recompute(temper.recompute(Stack(3), 2), 0)
    assert {site.recompute for site in model.sites} == {0}


@pytest.mark.parametrize("group", [-1, 1.5, True, "3"])
def test_a_group_that_cannot_be(group):
    with pytest.raises(ValueError, match="group is"):
        temper.recompute(Stack(2), group)


def test_a_model_without_sites():
    with pytest.raises(ValueError, match="Linear has no HyperConnection"):
        temper.recompute(nn.Linear(2, 2))
