"""Other people's weights: their modules, written anew here from their facts, against ours."""

import itertools

import pytest
import torch

import temper
from temper.convert import export_foreign, load_foreign

HYPER_CONN = ["hyper_conn.mhc", "hyper_conn.mhc_lite", "hyper_conn.kromhc"]
MEGATRON = ["megatron.mhc", "megatron.mhc_guarded"]


def num_logits(source, n):
    factorial = torch.arange(1, n + 1).prod().item()
    return {"hyper_conn.mhc": n * n, "hyper_conn.mhc_lite": factorial, "hyper_conn.kromhc": 2 * (n.bit_length() - 1)}[
        source
    ]


def random_weights(source, n, d, dtype, scale=0.3):
    torch.manual_seed(n * d)
    c = n * d
    if source in MEGATRON:
        shapes = {"mapping_proj.weight": (n * (2 + n), c), "bias": (n * (2 + n),)}
        shapes |= {"alpha_pre": (1,), "alpha_post": (1,), "alpha_res": (1,)}
    elif source == "deepseek_v4":
        shapes = {"fn": (n * (2 + n), c), "base": (n * (2 + n),), "scale": (3,)}
    else:
        k = num_logits(source, n)
        static = (n, 1 + n) if source == "hyper_conn.mhc" else (n + k,)
        shapes = {"norm.gamma": (c,), "pre_branch_scale": (1,), "residual_scale": (1,), "h_post_scale": ()}
        shapes |= {"static_alpha": static, "dynamic_alpha_fn": (c, n + k)}
        shapes |= {"static_beta": (n,), "dynamic_beta_fn": (c, n)}
    return {key: scale * torch.randn(shape, dtype=dtype) for key, shape in shapes.items()}


def their_matrix(source, logits, n):
    """A[s, t] for one batch of residual logits, by loops over what the sources say."""
    if source == "hyper_conn.mhc":
        matrix = logits.unflatten(-1, (n, n)).exp()
        for _ in range(20):
            matrix = matrix / matrix.sum(-2, keepdim=True)
            matrix = matrix / matrix.sum(-1, keepdim=True)
        return matrix
    if source == "hyper_conn.mhc_lite":
        weights = logits.softmax(-1)
        matrix = torch.zeros(*logits.shape[:-1], n, n, dtype=logits.dtype)
        for k, permutation in enumerate(itertools.permutations(range(n))):
            one = torch.zeros(n, n, dtype=logits.dtype)
            for i, j in enumerate(permutation):
                one[i, j] = 1
            matrix = matrix + weights[..., k, None, None] * one
        return matrix
    matrix = torch.ones(*logits.shape[:-1], 1, 1, dtype=logits.dtype)
    for pair in logits.unflatten(-1, (-1, 2)).softmax(-1).unbind(-2):
        p, q = pair[..., 0], pair[..., 1]
        factor = torch.stack([torch.stack([p, q], -1), torch.stack([q, p], -1)], -2)
        size = matrix.shape[-1] * 2
        matrix = torch.einsum("...ij,...kl->...ikjl", matrix, factor).reshape(*logits.shape[:-1], size, size)
    return matrix


def hyper_conn(source, w, streams, y):
    n, d = streams.shape[-2:]
    flat = streams.flatten(-2)
    normed = flat / flat.norm(dim=-1, keepdim=True).clamp_min(1e-12) * (n * d) ** 0.5 * (1 + w["norm.gamma"])
    alpha = normed @ w["dynamic_alpha_fn"]
    if source == "hyper_conn.mhc":
        alpha = alpha.unflatten(-1, (n, 1 + n))
        pre = w["pre_branch_scale"] * alpha[..., 0] + w["static_alpha"][:, 0]
        res = (w["residual_scale"] * alpha[..., 1:] + w["static_alpha"][:, 1:]).flatten(-2)
    else:
        pre = w["pre_branch_scale"] * alpha[..., :n] + w["static_alpha"][:n]
        res = w["residual_scale"] * alpha[..., n:] + w["static_alpha"][n:]
    post = 2 * torch.sigmoid(w["h_post_scale"] * (normed @ w["dynamic_beta_fn"]) + w["static_beta"])
    x = torch.einsum("...s,...sd->...d", pre.sigmoid(), streams)
    mixed = torch.einsum("...st,...sd->...td", their_matrix(source, res, n), streams)
    return x, mixed + post.unsqueeze(-1) * y.unsqueeze(-2)


def deepseek(source, w, streams, y):
    n = streams.shape[-2]
    flat = streams.flatten(-2)
    flat = flat * (flat.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    pre, post, comb = (flat @ w["fn"].T).split([n, n, n * n], -1)
    pre_base, post_base, comb_base = w["base"].split([n, n, n * n])
    pre = (pre * w["scale"][0] + pre_base).sigmoid() + 1e-6
    post = 2 * (post * w["scale"][1] + post_base).sigmoid()
    comb = (comb * w["scale"][2] + comb_base).unflatten(-1, (n, n)).softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    x = torch.einsum("...s,...sd->...d", pre, streams)
    return x, torch.einsum("...st,...sd->...td", comb, streams) + post.unsqueeze(-1) * y.unsqueeze(-2)


def megatron(source, w, streams, y):
    n, d = streams.shape[-2:]
    flat = streams.flatten(-2)
    r = 1 / (flat.norm(dim=-1, keepdim=True) / (n * d) ** 0.5 + 1e-6)
    alpha = torch.cat([w["alpha_pre"].expand(n), w["alpha_post"].expand(n), w["alpha_res"].expand(n * n)])
    logits = r * (flat @ w["mapping_proj.weight"].T) * alpha + w["bias"]
    pre, post, res = logits[..., :n].sigmoid(), 2 * logits[..., n : 2 * n].sigmoid(), logits[..., 2 * n :]
    res = res.unflatten(-1, (n, n))
    if source == "megatron.mhc":
        res = (res - res.amax(-1, keepdim=True)).exp()
        for _ in range(20):
            res = res / res.sum(-1, keepdim=True).clamp(min=1e-6)
            res = res / res.sum(-2, keepdim=True).clamp(min=1e-6)
    else:
        pre = pre + 1e-6
        res = res.softmax(-1) + 1e-6
        res = res / (res.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            res = res / (res.sum(-1, keepdim=True) + 1e-6)
            res = res / (res.sum(-2, keepdim=True) + 1e-6)
        res = res.mT
    return (pre.unsqueeze(-1) * streams).sum(-2), res @ streams + post.unsqueeze(-1) * y.unsqueeze(-2)


THEIRS = {**dict.fromkeys(HYPER_CONN, hyper_conn), "deepseek_v4": deepseek, **dict.fromkeys(MEGATRON, megatron)}
CASES = [(source, n) for source in THEIRS for n in (2, 3, 4, 8)]
CASES = [
    (source, n)
    for source, n in CASES
    if not (source == "hyper_conn.mhc_lite" and n == 8) and not (source == "hyper_conn.kromhc" and n == 3)
]


@pytest.mark.parametrize(("source", "n"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)], ids=str)
def test_theirs_computes_what_ours_computes(source, n, dtype, tolerance):
    d = 10
    weights = random_weights(source, n, d, dtype)
    hc = load_foreign(source, weights, num_streams=n, dim=d)
    assert next(hc.parameters()).dtype == dtype
    streams = torch.randn(2, 3, n, d, dtype=dtype, requires_grad=True)
    y = torch.randn(2, 3, d, dtype=dtype, requires_grad=True)
    probes = torch.randn(2, 3, d, dtype=dtype), torch.randn(2, 3, n, d, dtype=dtype)

    def gradients(x, out):
        return torch.autograd.grad((x * probes[0]).sum() + (out * probes[1]).sum(), (streams, y))

    theirs = THEIRS[source](source, weights, streams, y)
    x, state = hc.begin(streams)
    ours = (x, hc.finish(state, y))
    # Relative to the largest entry: 1e-6 is eight times the spacing of float32 there.
    for one, other in zip((*ours, *gradients(*ours)), (*theirs, *gradients(*theirs)), strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max().clamp_min(1)


@pytest.mark.parametrize("source", [*HYPER_CONN, *MEGATRON])
def test_a_token_of_zeros(source):
    weights = random_weights(source, 4, 6, torch.float64)
    hc = load_foreign(source, weights, num_streams=4, dim=6)
    streams = torch.zeros(2, 4, 6, dtype=torch.float64)
    y = torch.randn(2, 6, dtype=torch.float64)
    x, state = hc.begin(streams)
    expected = THEIRS[source](source, weights, streams, y)
    torch.testing.assert_close(x, expected[0])
    torch.testing.assert_close(hc.finish(state, y), expected[1])


@pytest.mark.parametrize("source", MEGATRON)
def test_megatrons_guards_where_they_matter(source):
    """Streams as small as the guard of the norm, and logits so far apart that sums fall under the one of Sinkhorn."""
    weights = random_weights(source, 4, 6, torch.float64)
    weights["bias"] = weights["bias"].clone()
    # Nobody takes from stream 2.
    weights["bias"][8:].view(4, 4)[:, 2] -= 30
    hc = load_foreign(source, weights, num_streams=4, dim=6)
    streams = (1e-6 * torch.randn(5, 4, 6, dtype=torch.float64)).requires_grad_()
    y = torch.randn(5, 6, dtype=torch.float64)
    x, state = hc.begin(streams)
    ours, theirs = (x, hc.finish(state, y)), megatron(source, weights, streams, y)
    grads = [torch.autograd.grad(1e6 * one.sum() + other.sin().sum(), streams)[0] for one, other in (ours, theirs)]
    for one, other in zip((*ours, grads[0]), (*theirs, grads[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize(("source", "n"), CASES)
def test_the_way_back_is_exact(source, n):
    weights = random_weights(source, n, 6, torch.float64)
    back = export_foreign(source, load_foreign(source, weights, num_streams=n, dim=6))
    assert back.keys() == weights.keys()
    for key, value in weights.items():
        assert back[key].shape == value.shape
        torch.testing.assert_close(back[key], value, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("target", "name", "settings"),
    [
        ("hyper_conn.mhc", "temper-tucker", {"last": "columns"}),
        ("hyper_conn.mhc", "temper-cp", {"last": "columns", "gain": "none"}),
        ("hyper_conn.mhc_lite", "mhc-lite", {"generator": "tt", "gain": "rank-one"}),
        ("hyper_conn.kromhc", "temper-slim", {}),
        ("deepseek_v4", "temper-tucker", {"eps": 1e-6, "pre_eps": 1e-6}),
        ("deepseek_v4", "temper-cp", {"eps": 1e-6, "pre_eps": 1e-6, "gain": "none"}),
        ("megatron.mhc", "temper-tucker", {"eps": 1e-6, "clamp": True, "last": "columns", "norm_outside": True}),
    ],
)
def test_a_compact_site_goes_into_their_dense_module(target, name, settings):
    if target.startswith("hyper_conn"):
        settings = settings | {"norm_eps": 1e-24 / 24, "norm_clamp": True}
    hc = temper.HyperConnection(temper.preset(name, num_streams=4, dim=6, **settings), layer_index=2).double()
    with torch.no_grad():
        for parameter in hc.parameters():
            parameter.normal_()
    weights = export_foreign(target, hc)
    streams, y = torch.randn(5, 4, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    expected = THEIRS[target](target, weights, streams, y)
    x, state = hc.begin(streams)
    torch.testing.assert_close(x, expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(hc.finish(state, y), expected[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("iters", [20, 3])
def test_transformers_own_deepseek_v4_module(n, iters):
    module = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers import DeepseekV4Config

    torch.manual_seed(0)
    config = DeepseekV4Config(hc_mult=n, hidden_size=12, hc_sinkhorn_iters=iters)
    theirs = module.DeepseekV4HyperConnection(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
    overrides = {} if iters == 20 else {"iters": iters}
    hc = load_foreign("deepseek_v4", theirs.state_dict(), num_streams=n, dim=12, **overrides)
    streams = torch.randn(2, 5, n, 12, requires_grad=True)
    y = torch.randn(2, 5, 12)
    post, comb, their_x = theirs(streams)
    their_out = post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ streams
    x, state = hc.begin(streams)
    out = hc.finish(state, y)
    torch.testing.assert_close(x, their_x, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, their_out, rtol=1e-6, atol=2e-6)
    (one,) = torch.autograd.grad(out.sin().sum() + x.sin().sum(), streams)
    (other,) = torch.autograd.grad(their_out.sin().sum() + their_x.sin().sum(), streams)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)
    for key, value in export_foreign("deepseek_v4", hc, **overrides).items():
        assert torch.equal(value, theirs.state_dict()[key]), key


def test_hc_equals_the_hyper_connections_package():
    package = pytest.importorskip("hyper_connections")
    torch.manual_seed(0)
    n, d = 4, 6
    theirs = package.HyperConnections(n, dim=d, layer_index=1, tanh=True).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.5)
    # Their norm is x / ||x|| * sqrt(D) * (1 + gamma), without an eps to speak of.
    config = temper.preset("hc", num_streams=n, dim=d, norm_eps=1e-24 / d, norm_clamp=True)
    hc = temper.HyperConnection(config).double()
    w = theirs.state_dict()
    hc.load_state_dict(
        {
            "norm.weight": 1 + w["norm.gamma"],
            "pre.gate": w["dynamic_alpha_scale"],
            "pre.bias": w["static_alpha"][:, 0],
            "pre.generator.weight": w["dynamic_alpha_fn"][:, 0],
            "res.gate": w["dynamic_alpha_scale"],
            "res.bias": w["static_alpha"][:, 1:].T,
            "res.generator.weight": w["dynamic_alpha_fn"][:, 1:],
            "post.gate": w["dynamic_beta_scale"],
            "post.bias": w["static_beta"],
            "post.generator.weight": w["dynamic_beta_fn"],
        }
    )
    streams = torch.randn(2, 3, n, d, dtype=torch.float64)
    y = torch.randn(2, 3, d, dtype=torch.float64)
    # They keep the streams in the batch: (b s) t d.
    their_x, add = theirs(streams.permute(0, 2, 1, 3).reshape(2 * n, 3, d))
    their_out = add(y).view(2, n, 3, d).permute(0, 2, 1, 3)
    x, state = hc.begin(streams)
    torch.testing.assert_close(x, their_x, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(hc.finish(state, y), their_out, rtol=1e-10, atol=1e-10)


def test_what_is_below_a_branch_is_left_aside():
    weights = random_weights("hyper_conn.mhc", 4, 6, torch.float32)
    load_foreign("hyper_conn.mhc", {**weights, "branch.weight": torch.zeros(2)}, num_streams=4, dim=6)


def broken(key, change):
    weights = random_weights("hyper_conn.mhc", 4, 6, torch.float32)
    change(weights, key)
    return weights


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hyper_conn.mcc", {}, 4, 6), "unknown foreign source 'hyper_conn.mcc'. Did you mean 'hyper_conn.mhc'"),
        (("hyper_conn.mhc", {}, 1, 6), "one stream is the plain residual"),
        (("hyper_conn.kromhc", {}, 6, 6), "powers of two"),
        (("hyper_conn.mhc", broken("static_beta", dict.pop), 4, 6), "missing static_beta"),
        (("hyper_conn.mhc", broken("more", lambda w, k: w.update({k: w["static_beta"]})), 4, 6), "unexpected more"),
        (
            ("hyper_conn.mhc", random_weights("hyper_conn.mhc", 4, 6, torch.float32), 4, 7),
            r"norm.gamma is \(24,\), expected",
        ),
        (("hyper_conn.mhc", broken("static_beta", lambda w, k: w[k].fill_(torch.nan)), 4, 6), "static_beta has values"),
        (("hyper_conn.mhc", broken("static_beta", lambda w, k: w.update({k: 3})), 4, 6), "not a floating-point tensor"),
        (("deepseek_v4", random_weights("hyper_conn.mhc", 4, 6, torch.float32), 4, 6), "missing fn"),
    ],
)
def test_weights_that_are_not_theirs(arguments, message):
    source, weights, n, d = arguments
    with pytest.raises(ValueError, match=message):
        load_foreign(source, weights, num_streams=n, dim=d)


def test_a_site_their_module_has_no_setting_for():
    hc = temper.HyperConnection(temper.preset("mhc", num_streams=4, dim=6))
    with pytest.raises(
        ValueError, match=r"hyper_conn.mhc cannot hold this site: mixer is .*'rows'.*theirs .*'columns'"
    ):
        export_foreign("hyper_conn.mhc", hc)
    with pytest.raises(ValueError, match="cannot hold"):
        export_foreign("deepseek_v4", temper.HyperConnection(temper.preset("kromhc", num_streams=4, dim=6)))
    with pytest.raises(ValueError, match="no weights"):
        export_foreign("deepseek_v4", temper.HyperConnection(temper.preset("mhc", num_streams=1, dim=6)))
    with pytest.raises(TypeError, match="HyperConnection"):
        export_foreign("deepseek_v4", torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="mapping"):
        load_foreign("deepseek_v4", [1], num_streams=4, dim=6)
    with pytest.raises(ValueError, match="a key of state_dict is 3; expected names"):
        load_foreign("deepseek_v4", {3: torch.ones(2)}, num_streams=4, dim=6)
    with pytest.raises(ValueError, match="num_streams is 0"):
        load_foreign("hyper_conn.kromhc", {}, num_streams=0, dim=8)
