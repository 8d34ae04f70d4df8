"""Presets to the parameter, overrides, configs that survive JSON, and what is refused."""

import json
import subprocess
import sys

import pytest
import torch

import temper
from temper.registry import check_int

# SPEC section 5: per site and in 24 sites, at D = 768.
TABLE = {
    "residual": {4: (0, 0), 8: (0, 0)},
    "mhc": {4: (76_827, 1_843_848), 8: (497_747, 11_945_928)},
    "mhc-lite": {4: (101_411, 2_433_864), 8: (247_870_867, 5_948_900_808)},
    "kromhc": {4: (39_951, 958_824), 8: (141_337, 3_392_088)},
    "temper-cp": {4: (7_763, 186_312), 8: (15_667, 376_008)},
    "temper-tucker": {4: (30_995, 743_880), 8: (80_579, 1_933_896)},
}


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("num_streams", [4, 8])
def test_the_table_of_the_paper(name, num_streams):
    count = temper.count_parameters(temper.preset(name, num_streams=num_streams, dim=768))
    assert (count, 24 * count) == TABLE[name][num_streams]


@pytest.mark.parametrize("num_streams", [2, 4, 8, 16])
def test_the_counts_of_the_paper_as_formulas(num_streams):
    n, d = num_streams, 768
    shared = n * d + 3 + 2 * n + n * n
    r = n // 2
    cp = temper.preset("temper-cp", num_streams=n, dim=d)
    assert temper.count_parameters(cp) - shared == 3 * d * r + 7 * n * r
    r_n, r_d = 2, (12 if n == 4 else 4 * n)
    tucker = temper.preset("temper-tucker", num_streams=n, dim=d)
    assert temper.count_parameters(tucker) - shared == 7 * n * r_n + 3 * d * r_d + 2 * r_n**2 * r_d + r_n**3 * r_d
    mhc = temper.preset("mhc", num_streams=n, dim=d)
    assert temper.count_parameters(mhc) - shared == d * (n**3 + 2 * n**2)


def test_the_identity_mixer_leaves_res_without_parameters():
    config = temper.preset("mhc-identity", num_streams=4, dim=768)
    assert (config.res, config.heads) == (None, ("pre", "post"))
    assert temper.count_parameters(config) == 768 * 4 + 2 * (768 * 4 * 4 + 4 + 1) == 27_658
    assert temper.RouterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    # In any preset, whatever it says of res; only a generator that is asked for by name is too much.
    assert temper.preset("mhc", num_streams=4, dim=768, mixer="identity") == config
    assert temper.preset("temper-tucker-res", num_streams=4, dim=768, mixer="identity") == config
    assert temper.preset("mhc-identity", num_streams=4, dim=768, generator="cp", rank=3).pre.options["rank"] == 3
    with pytest.raises(
        ValueError, match=r"res is Choice\('cp'\); the identity mixer takes no logits, so expected None"
    ):
        temper.preset("mhc-identity", num_streams=4, dim=768, res="cp")
    assert temper.preset("mhc-identity", num_streams=4, dim=768, mixer="sinkhorn").heads == ("pre", "res", "post")
    with pytest.raises(ValueError, match="has no generator 'res'"):
        temper.HyperConnection(config).set_generators(res=temper.Generator.named("dense")((4, 768), (4,)))


def ranks(name, num_streams, dim=768):
    config = temper.preset(name, num_streams=num_streams, dim=dim)
    return [getattr(config, head).options.get("rank") for head in ("pre", "res", "post")]


def test_default_ranks():
    assert ranks("temper-cp", 4) == [2, 2, 2]
    assert ranks("temper-cp", 2) == ranks("temper-cp", 3) == [1, 1, 1]
    assert ranks("temper-tucker", 4) == [(2, 12, 2), (2, 12, 2, 2), (2, 12, 2)]
    assert ranks("temper-tucker", 8) == [(2, 32, 2), (2, 32, 2, 2), (2, 32, 2)]
    assert ranks("temper-tucker", 6) == [(2, 24, 2), (2, 24, 2, 2), (2, 24, 2)]
    assert ranks("temper-tt", 4) == [(3, 4), (3, 4, 4), (3, 4)]
    assert ranks("temper-tt", 8) == [(4, 8), (4, 8, 8), (4, 8)]
    assert ranks("temper-tucker", 8, dim=5)[0] == (2, 5, 2)
    assert ranks("temper-tucker-res", 4) == [None, (2, 12, 2, 2), None]


def test_a_frozen_core_is_not_counted_and_both_numbers_are_to_be_had():
    config = temper.preset("temper-tucker-frozen", num_streams=4, dim=768)
    assert temper.count_parameters(config) == 30_995 - 2 * 2 * 12 * 2 - 2 * 12 * 2 * 2
    assert temper.count_parameters(config, include_frozen=True) == 30_995


def test_the_unpublished_presets_have_fewer_parameters():
    def count(name):
        return temper.count_parameters(temper.preset(name, num_streams=8, dim=768))

    assert count("temper-cp-krom") < count("temper-cp")
    assert count("temper-tucker-krom") < count("temper-tucker")
    assert count("temper-slim") == count("temper-cp-krom") - 8 * 768


def test_overrides_reach_every_part_that_has_the_option():
    config = temper.preset("temper-tucker-res", num_streams=4, dim=32, rank=(1, 5), init_std=0.1, iters=7)
    assert config.res.options["rank"] == (1, 5, 1, 1)
    assert "rank" not in config.pre.options
    assert config.pre.options["init_std"] == config.res.options["init_std"] == 0.1
    assert config.mixer.options["iters"] == 7


def test_overrides_of_whole_parts():
    config = temper.preset("temper-tucker-res", num_streams=4, dim=32, generator="cp", mixer="kronecker", gain="none")
    assert {config.pre.name, config.res.name, config.post.name} == {"cp"}
    assert config.mixer.name == "kronecker"
    one = temper.preset(
        "mhc", num_streams=4, dim=32, res=temper.Choice("tt", rank=2), mixer={"name": "sinkhorn", "iters": 3}
    )
    assert (one.pre.name, one.res.name) == ("dense", "tt")
    assert one.mixer.options["iters"] == 3
    both = temper.preset("mhc", num_streams=4, dim=32, generator="cp", res="dense")
    assert (both.pre.name, both.res.name) == ("cp", "dense")


def test_an_explicit_rank_wins_and_a_fraction_is_resolved():
    config = temper.preset("temper-cp", num_streams=4, dim=768, rank=32)
    assert config.res.options["rank"] == 32
    share = temper.preset("temper-cp", num_streams=4, dim=768, rank=0.05)
    assert share.res.options["rank"] == int(0.05 * 4 * 768 * 16) // (4 + 768 + 8)


@pytest.mark.parametrize("name", temper.PRESETS)
@pytest.mark.parametrize("num_streams", [1, 2, 3, 4, 6, 8])
def test_a_config_survives_json_and_is_hashable(name, num_streams):
    config = temper.preset(name, num_streams=num_streams, dim=24)
    again = temper.RouterConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "temper-tuker"}, "unknown preset 'temper-tuker'. Did you mean 'temper-tucker'"),
        ({"name": "mhc", "mixer": "sinkhron"}, "unknown mixer 'sinkhron'. Did you mean 'sinkhorn'"),
        ({"name": "mhc", "generator": "tuker"}, "unknown generator 'tuker'. Did you mean 'tucker'"),
        ({"name": "mhc", "gain": "fulll"}, "unknown gain 'fulll'. Did you mean 'full'"),
        ({"name": "mhc", "norm": "flatt"}, "unknown norm 'flatt'"),
        ({"name": "mhc", "gates": "sigmoyd"}, "unknown gates 'sigmoyd'. Did you mean 'sigmoid'"),
        ({"name": "mhc", "rank": 2}, "unknown option of the preset mhc 'rank'"),
        ({"name": "residual", "rank": 2}, "unknown option of the preset residual 'rank'"),
        ({"name": "mhc", "mixer": {"name": "sinkhorn", "iter": 3}}, "unknown option of the sinkhorn mixer 'iter'. Did"),
        ({"name": "mhc", "num_streams": 0}, "num_streams is 0"),
        ({"name": "residual", "num_streams": 0}, "num_streams is 0"),
        ({"name": "mhc", "num_streams": 4.0}, "num_streams is 4.0"),
        ({"name": "mhc", "dim": 0}, "dim is 0"),
        ({"name": "mhc", "norm_eps": -1.0}, "norm_eps is -1.0"),
        ({"name": "mhc", "pre_eps": float("nan")}, "pre_eps is nan"),
        ({"name": "mhc", "mixer": None}, "mixer missing"),
        ({"name": "temper-tucker", "rank": (5, 3)}, "tucker rank 5 of the stream mode"),
        ({"name": "hc", "mixer": "birkhoff"}, "per-stream generator makes one logit per stream"),
    ],
)
def test_what_is_refused_and_why(arguments, message):
    name = arguments.pop("name")
    with pytest.raises(ValueError, match=message):
        temper.preset(name, **{"num_streams": 4, "dim": 32, **arguments})


def test_wrong_types_and_unknown_fields():
    with pytest.raises(TypeError, match="expected a name"):
        temper.preset("mhc", num_streams=4, dim=32, mixer=3)
    with pytest.raises(ValueError, match=r"unknown router option 'streams'\. Did you mean 'num_streams'"):
        temper.RouterConfig.from_dict({"streams": 4, "dim": 32})
    with pytest.raises(TypeError, match="RouterConfig"):
        temper.count_parameters("mhc")


def test_counting_allocates_nothing():
    # 6 * 10^18 parameters would be noticed.
    assert temper.count_parameters(temper.preset("mhc-lite", num_streams=16, dim=768)) > 2 * 10**17


def test_registered_inside_a_test_and_usable_everywhere():
    class Circulant(temper.Mixer, name="circulant"):
        """res = a softmax-weighted sum of the N cyclic shifts: exactly doubly stochastic."""

        row_stochastic = column_stochastic = "exact"

        @classmethod
        def logit_shape_for(cls, num_streams):
            return (num_streams,)

        def initial_bias(self):
            return torch.full(self.logit_shape, -8.0).index_fill(0, torch.tensor(0), 0.0)

        def mix(self, logits):
            weights = logits.softmax(-1)
            shifts = torch.arange(self.num_streams)
            return weights[..., (shifts[:, None] - shifts) % self.num_streams]

    try:
        config = temper.preset("temper-cp", num_streams=5, dim=8, mixer="circulant")
        hc = temper.HyperConnection(config, branch=torch.nn.Linear(8, 8))
        streams = torch.randn(2, 3, 5, 8)
        res = hc.route(streams).res
        for axis in (-1, -2):
            torch.testing.assert_close(res.sum(axis), torch.ones(2, 3, 5))
        assert hc(streams).shape == streams.shape
        assert temper.count_parameters(config) == sum(
            p.numel() for key, p in hc.named_parameters() if not key.startswith("branch")
        )
        assert temper.cost(config, 10).parameters == temper.count_parameters(config)
        assert temper.RouterConfig.from_dict(config.to_dict()) == config
        with pytest.raises(ValueError, match="circulant"):
            temper.preset("mhc", num_streams=4, dim=8, mixer="circulannt")
        with pytest.raises(ValueError, match="already belongs to"):
            type("Other", (temper.Mixer,), {}, name="circulant")
    finally:
        del temper.Mixer.members["circulant"]


def test_a_preset_does_not_import_the_compiler():
    # Drawing on the meta device would: more than a second of processor time, for nothing.
    code = "import sys, temper; temper.preset('temper-cp', num_streams=4, dim=8); print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(("family", "lacked"), [(temper.Generator, "shapes"), (temper.Mixer, "logit_shape_for")])
def test_a_part_that_lacks_a_method_says_which(family, lacked):
    class Unfinished(family):
        pass

    with pytest.raises(NotImplementedError, match=rf"Unfinished lacks `{lacked}`; docs/adding-a-{family.family}\.md"):
        Unfinished.shapes((4, 6), (4,)) if family is temper.Generator else Unfinished(4)


@pytest.mark.parametrize("value", [0, 9, True, 2.0, "3", None, 10**500])
def test_one_check_of_whole_numbers(value):
    assert check_int("size", 8, 1, 8) == 8
    with pytest.raises(ValueError, match=r"^size is .{1,100}; expected a whole number >= 1 and <= 8$"):
        check_int("size", value, 1, 8)
