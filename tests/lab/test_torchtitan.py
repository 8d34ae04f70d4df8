"""Hyper-connections in torchtitan: its own blocks, sharding and pipeline on two processes do what one process does.

`pytest -m slow tests/lab/test_torchtitan.py`, with torchtitan 0.3 installed.
"""

import json
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import start, succeed
from test_distributed import free_ports

pytest.importorskip("torchtitan")
with warnings.catch_warnings():
    # Of torch's own modules, while torchtitan compiles.
    warnings.simplefilter("ignore")
    import titan
    import transformers
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.llama3 import model_registry as llama3
    from torchtitan.models.qwen3 import model_registry as qwen3

    import temper
    from temper_lab.interop import torchtitan as interop

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SHARDED = [name for name in titan.SCENARIOS if name not in ("sequence parallel, spmd_types", "meta")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    # Seconds where nobody else is at work.
    words = (titan.__file__, str(folder), *titan.SCENARIOS)
    succeed([start(*words, RANK=rank, **place) for rank in ("0", "1")], seconds=1200)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return torch.load(folder / "found.pt", weights_only=True)


def check_gradients(result, expected):
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SHARDED)
def test_two_processes_do_what_one_does(name, found):
    result, alone = found[name], found["alone"]
    assert result["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert result["gradients"].keys() == alone["gradients"].keys()
    check_gradients(result["gradients"], alone["gradients"])


@pytest.mark.parametrize("name", [name for name in SHARDED if name.startswith("sequence")])
def test_streams_are_sharded_along_the_sequence(name, found):
    assert found[name]["streams"] == [titan.ROWS, titan.LENGTH // 2, 4, 256]


def test_sequence_parallel_with_the_default_backend(found):
    result, alone = found["sequence parallel, spmd_types"], found["alone"]
    assert result["streams"] == [titan.ROWS, titan.LENGTH // 2, 4, 256]
    torch.testing.assert_close(result["logits"], alone["logits"], rtol=1e-5, atol=1e-5)
    assert len(result["gradients"]) == sum("hyper_connections" in name for name in alone["gradients"])
    check_gradients(result["gradients"], alone["gradients"])


def test_the_second_stage_of_a_pipeline_is_given_streams(found):
    stages = found["pipeline"]["layers"]
    assert all(stages)
    assert [layer for stage in stages for layer in stage] == ["0", "1", "2"]
    assert found["pipeline"]["streams"] == [2, titan.LENGTH, 4, 256]


def test_initial_values_are_those_of_one_process(found):
    torch.manual_seed(0)
    model = titan.make_spec().model.build()
    torch.manual_seed(0)
    model.init_states()
    sites = {name: value for name, value in model.state_dict().items() if "hyper_connections" in name}
    assert sites
    for name, value in sites.items():
        assert torch.equal(value, found["meta"][name]), name
    assert all(value.isfinite().all() for value in found["meta"].values())


def test_a_checkpoint_of_two_processes_loads_into_one(folder, found):
    model = titan.make_spec().model.build()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder / "checkpoint", no_dist=True)
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, found["alone"]["state"][name]), name


@pytest.mark.parametrize("registry", [llama3, qwen3], ids=["llama3", "qwen3"])
def test_one_stream_is_the_model_as_it_was(registry):
    plain = titan.on_cpu(registry("debugmodel"))
    model = titan.make(plain)
    streamed = interop.with_streams(titan.on_cpu(registry("debugmodel")), preset="residual", num_streams=4)
    other = streamed.model.build()
    other.verify_module_protocol()
    other.load_state_dict(model.state_dict())
    tokens, _ = titan.batch()
    assert torch.equal(other(tokens), model(tokens))


def test_a_wrapped_hugging_face_model_computes_the_same():
    """The adapter's names are those of `temper.wrap`."""
    spec = titan.make_spec()
    for layer in spec.model.layers:
        layer.attention.rope.scaling = "none"
    model = titan.make(spec)
    attention, feed_forward = spec.model.layers[0].attention, spec.model.layers[0].feed_forward
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=feed_forward.w1.out_features,
        num_hidden_layers=titan.LAYERS,
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads or attention.n_heads,
        rms_norm_eps=model.norm.eps or torch.finfo(torch.float32).eps,
        rope_parameters={"rope_type": "default", "rope_theta": float(attention.rope.theta)},
        tie_word_embeddings=False,
    )
    wrapped = temper.wrap(transformers.LlamaForCausalLM(config), "model.layers.*", **titan.OPTIONS)
    adapter = spec.state_dict_adapter(spec.model, None)
    adapter.fqn_to_index_mapping = {"model.layers.1.mlp.up_proj.weight": 2, "lm_head.weight": 3}
    theirs = adapter.to_hf(model.state_dict())
    assert adapter.fqn_to_index_mapping["model.layers.1.hyper_connections.0.res.gate"] == 2
    assert theirs.keys() <= adapter.fqn_to_index_mapping.keys() | {key for key in theirs if "hyper" not in key}
    wrapped.load_state_dict(theirs)
    tokens, _ = titan.batch()
    torch.testing.assert_close(wrapped(tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)
    back = adapter.from_hf(theirs)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())


def test_initializers_of_ones_own():
    options = titan.OPTIONS | {"param_init": {"res.gate": torch.nn.init.ones_}}
    model = interop.with_streams(titan.on_cpu(llama3("debugmodel")), **options).model.build()
    model.init_states()
    gates = {name: value.item() for name, value in model.named_parameters() if name.endswith(".gate")}
    assert gates == {name: pytest.approx(1 if name.endswith("res.gate") else 0.01) for name in gates}
    config = interop.with_streams(llama3("debugmodel"), param_init={"gate": torch.nn.init.ones_}).model
    with pytest.raises(ValueError, match="param_init names"):
        config.build()


def test_the_configuration_and_the_override_as_the_trainer_reads_them():
    from torchtitan.config.manager import ConfigManager

    options = ["--module", "temper_lab.interop.torchtitan", "--config", "llama3_debugmodel"]
    config = ConfigManager().parse_args([*options, "--training.steps", "3"])
    groups = config.optimizer.param_groups
    assert [group.optimizer_kwargs["weight_decay"] for group in groups] == [0.0, 0.1]
    json.dumps(config.to_dict())
    name = "temper_lab.interop.torchtitan.hyper_connections"
    wanted = [f'{name}={{"preset": "mhc", "num_streams": 2}}']
    options = ["--module", "llama3", "--config", "llama3_debugmodel", "--override.imports", *wanted]
    plain = ConfigManager().parse_args(options)
    model_config = plain.model_spec.model
    assert len(apply_overrides(plain.override, plain)) == 1
    # The trainer builds the configuration that it held before.
    with torch.device("meta"):
        model = model_config.build()
    model.verify_module_protocol()
    assert model.get_submodule("layers.0.hyper_connections.0").config.num_streams == 2
    with pytest.raises(ValueError, match="has hyper-connections already"):
        apply_overrides(OverrideConfig(imports=[name]), config)


def test_a_wrong_number_of_sites_is_said():
    model = interop.with_streams(titan.on_cpu(llama3("debugmodel")), **titan.OPTIONS, sites=3).model.build()
    with pytest.raises(ValueError, match=r"layers\.0 does not end .* 1 of its 3 sites were not written"):
        model(titan.batch()[0])
