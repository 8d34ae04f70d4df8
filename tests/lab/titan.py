"""torchtitan's llama3 debug model with hyper-connections on two processes; every process runs this file.

    python titan.py FOLDER SCENARIO...    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them

torchtitan's trainer needs CUDA. What runs here is all its own but the trainer: blocks, sharding, FSDP2, activation
checkpointing, pipeline and adapter. Flex attention has no backward pass on a CPU, so that SDPA replaces it. Rank 0
writes what it found to FOLDER/found.pt.
"""

import contextlib
import dataclasses
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchtitan.distributed.parallel_dims as parallel_dims
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.full_dtensor import parallelize_inputs
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from temper_lab.interop.torchtitan import with_streams

# torchtitan asks for CUDA where there is no accelerator.
parallel_dims.device_type = "cpu"

LENGTH, ROWS, LAYERS = 8, 4, 3
COMPILED = CompileConfig(enable=True, components=["model"], backend="aot_eager")
OPTIONS = {"preset": "temper-tucker", "num_streams": 4}


def on_cpu(spec):
    """A debug model that a CPU can train, with fewer layers."""
    del spec.model.layers[LAYERS:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=LENGTH)
    return spec


def make_spec():
    return with_streams(on_cpu(model_registry("debugmodel")), **OPTIONS)


def make(spec) -> nn.Module:
    torch.manual_seed(0)
    model = spec.model.build()
    model.init_states()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(2048, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over tokens by the number of all tokens, as the trainer has it."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (ROWS * LENGTH)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name.replace("_checkpoint_wrapped_module.", ""): whole(parameter.grad) for name, parameter in named}


def alone() -> dict:
    model, (tokens, labels) = make(make_spec()), batch()
    logits = model(tokens)
    logits.retain_grad()
    loss = loss_of(logits, labels)
    loss.backward()
    found = {"loss": loss.item(), "gradients": gradients(model), "state": model.state_dict()}
    return found | {"logits": logits.detach(), "logits grad": logits.grad}


def dims(backend: str, **degrees: int) -> parallel_dims.ParallelDims:
    set_spmd_backend(backend)
    sizes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1} | degrees
    return parallel_dims.ParallelDims(**sizes, world_size=dist.get_world_size(), spmd_backend=backend)


def settings(spec, parallel, **changes) -> dict:
    """What the trainer hands to parallelize_fn and pipelining_fn, after it has updated the model's configuration."""
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=parallel.dp_shard,
        tensor_parallel_degree=parallel.tp,
        pipeline_parallel_degree=parallel.pp,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=2,
        spmd_backend=parallel.spmd_backend,
    )
    spec.model.update_from_config(config=types.SimpleNamespace(parallelism=parallelism))
    given = {
        "parallel_dims": parallel,
        "training": TrainingConfig(mixed_precision_param="float32", local_batch_size=ROWS),
        "parallelism": parallelism,
        "compile_config": CompileConfig(enable=False),
        "ac_config": None,
        "dump_folder": "",
    }
    return given | changes


def parallelized(spec, parallel, model=None, **changes) -> nn.Module:
    options = settings(spec, parallel, **changes)
    return summing(spec.parallelize_fn(make(spec) if model is None else model, **options))


def summing(model: nn.Module) -> nn.Module:
    """Gradients are added by the one operation for it that gloo has."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def seen_by(model: nn.Module, layer: str) -> list[torch.Size]:
    """The shapes of what a layer is given on this process."""
    seen: list[torch.Size] = []
    model.layers[layer].register_forward_pre_hook(
        lambda _, args: seen.append(getattr(args[0], "_local_tensor", args[0]).shape)
    )
    return seen


def fsdp(backend: str, folder: Path | None = None, **changes) -> dict:
    """Every block sharded over two processes, each with half of the rows."""
    spec, parallel = make_spec(), dims(backend, dp_shard=2)
    model = parallelized(spec, parallel, **changes)
    tokens, labels = (part.chunk(2)[dist.get_rank()] for part in batch())
    if folder is not None:
        dcp.save(model.state_dict(), checkpoint_id=folder / "checkpoint")
    if backend == "full_dtensor":
        tokens, _, _ = parallelize_inputs(parallel, tokens, labels, {})
    logits = model(tokens)
    loss = loss_of(logits.to_local() if backend == "full_dtensor" else logits, labels)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return {"loss": total.item(), "gradients": gradients(model)}


def sequence_parallel(backend: str) -> dict:
    """Streams sharded along the sequence over two processes, matrices along their features."""
    spec, parallel = make_spec(), dims(backend, tp=2)
    model = parallelized(spec, parallel)
    seen = seen_by(model, "1")
    tokens, labels = batch()
    given = parallelize_inputs(parallel, tokens, labels, {})[0] if backend == "full_dtensor" else tokens
    loss = loss_of(whole(model(given)), labels)
    loss.backward()
    return {"loss": loss.item(), "gradients": gradients(model), "streams": list(seen[0])}


def sequence_parallel_types(expected: dict) -> dict:
    """The same with torchtitan's default backend, without FSDP, which needs a later torch for it.

    FSDP would add up the gradients of replicated parameters.
    """
    spec, parallel = make_spec(), dims("spmd_types", tp=2)
    settings(spec, parallel)
    model = make(spec)
    model.parallelize(parallel)
    seen = seen_by(model, "1")
    tokens, labels = batch()
    annotate_input_spmd_types(parallel, tokens, labels, {})
    with get_spmd_context(parallel_dims=parallel)():
        logits = model(tokens)
        part = expected["logits grad"].chunk(2, dim=-1)[dist.get_rank()]
        logits.backward(part)
    parts = [torch.empty_like(logits) for _ in range(2)]
    dist.all_gather(parts, logits.detach().contiguous())
    found = {}
    for name, parameter in model.named_parameters():
        if "hyper_connections" in name:
            dist.all_reduce(parameter.grad)
            found[name] = parameter.grad
    return {"logits": torch.cat(parts, dim=-1), "gradients": found, "streams": list(seen[0])}


def pipeline() -> dict:
    """Two stages; the second one is given streams."""
    spec, parallel = make_spec(), dims("partial_dtensor", pp=2)
    options = settings(spec, parallel)
    schedule, parts, first, last = spec.pipelining_fn(
        make(spec),
        **options,
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=lambda logits, labels: (loss_of(logits, labels), {}),
    )
    assert len(parts) == 1
    model = summing(parts[0])
    seen = [] if first else seen_by(model, next(iter(model.layers)))
    tokens, labels = batch()
    losses: list[torch.Tensor] = []
    if first:
        schedule.step(tokens)
    else:
        assert last
        schedule.step(target=labels, losses=losses)
    mine = {"gradients": gradients(model), "layers": list(model.layers), "streams": [list(shape) for shape in seen]}
    mine["loss"] = sum(loss.item() for loss in losses)
    both: list[dict] = [{}, {}]
    dist.all_gather_object(both, mine)
    return {
        "loss": both[1]["loss"],
        "gradients": both[0]["gradients"] | both[1]["gradients"],
        "streams": both[1]["streams"][-1],
        "layers": [stage["layers"] for stage in both],
    }


def meta() -> dict:
    """Built without memory, sharded, and only then initialized."""
    spec, parallel = make_spec(), dims("partial_dtensor", dp_shard=2)
    settings(spec, parallel)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model = parallelized(spec, parallel, model)
    torch.manual_seed(0)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        # Processes that have drawn different numbers.
        torch.rand(1 + dist.get_rank())
        model.init_states()
    return {name: whole(value) for name, value in model.state_dict().items()}


SCENARIOS = {
    "fsdp": lambda folder, _: fsdp("partial_dtensor", folder),
    "fsdp, recomputed": lambda *_: fsdp("partial_dtensor", ac_config=FullAC.Config()),
    "fsdp, compiled": lambda *_: fsdp("partial_dtensor", compile_config=COMPILED),
    "fsdp, full_dtensor": lambda *_: fsdp("full_dtensor"),
    "sequence parallel": lambda *_: sequence_parallel("partial_dtensor"),
    "sequence parallel, full_dtensor": lambda *_: sequence_parallel("full_dtensor"),
    "sequence parallel, spmd_types": lambda _, expected: sequence_parallel_types(expected),
    "pipeline": lambda *_: pipeline(),
    "meta": lambda *_: meta(),
}


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"alone": alone()}
    for name in names:
        found[name] = SCENARIOS[name](folder, found["alone"])
    if dist.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
