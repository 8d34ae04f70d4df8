"""A wrapped Llama under everything that shards, checkpoints and compiles; every process runs this file.

    python trainers.py FOLDER SCENARIO...    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them

Rank 0 writes what it found to FOLDER/found.pt.
"""

import copy
import functools
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import temper

WRAPPERS = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_orig_mod.")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make(seed: int = 0) -> nn.Module:
    return copy.deepcopy(_made(seed))


@functools.cache
def _made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = temper.wrap(transformers.LlamaForCausalLM(config), "model.layers.*", preset="temper-tucker", num_streams=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(step))


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        found[name] = whole(parameter.grad)
    return found


def step(model: nn.Module, rows: torch.Tensor, world: int = 1) -> float:
    """The mean loss over all processes, with a backward pass."""
    loss = model(rows, labels=rows, use_cache=False).loss
    loss.backward()
    loss = loss.detach().float()
    if world > 1:
        dist.all_reduce(loss)
    return loss.item() / world


def shard(model: nn.Module, **options) -> nn.Module:
    for block in model.model.layers:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def checkpointed(model: nn.Module, kind: CheckpointImpl) -> nn.Module:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda block: checkpoint_wrapper(block, checkpoint_impl=kind),
        check_fn=lambda module: isinstance(module, LlamaDecoderLayer),
    )
    return model


def fsdp1(**options) -> nn.Module:
    policy = ModuleWrapPolicy({LlamaDecoderLayer})
    return FullyShardedDataParallel(make(), auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def with_sites_apart(model: nn.Module) -> nn.Module:
    """Blocks in bfloat16, their sites in float32."""
    for block in model.model.layers:
        fully_shard(block.hyper_connections)
    return shard(model, mp_policy=HALF)


def compiled(model: nn.Module) -> nn.Module:
    for block in model.model.layers:
        block.compile(fullgraph=True, backend="aot_eager")
    return model


def reentrant(model: nn.Module, is_on: bool) -> nn.Module:
    model.train().gradient_checkpointing_enable({"use_reentrant": is_on})
    return model


SCENARIOS = {
    "blocks": lambda: shard(make()),
    "kept": lambda: shard(make(), reshard_after_forward=False),
    "root": lambda: fully_shard(make()),
    "mixed": lambda: shard(make(), mp_policy=HALF),
    "sites apart": lambda: with_sites_apart(make()),
    "reentrant": lambda: shard(reentrant(make(), True)),
    "not reentrant": lambda: shard(reentrant(make(), False)),
    "checkpoint_wrapper": lambda: shard(checkpointed(make(), CheckpointImpl.NO_REENTRANT)),
    "checkpoint_wrapper reentrant": lambda: shard(checkpointed(make(), CheckpointImpl.REENTRANT)),
    "recompute": lambda: shard(temper.recompute(make())),
    "fsdp1": lambda: fsdp1(use_orig_params=True),
    "fsdp1 flat": lambda: fsdp1(use_orig_params=False),
    "compiled": lambda: shard(compiled(make())),
}


def run(name: str, rank: int, world: int) -> dict:
    model = SCENARIOS[name]()
    rows = batch(0).chunk(world)[rank]
    found = {"loss": step(model, rows, world)}
    if name == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found["gradients"] = {key: value.clone() for key, value in gradients(model).items()}
    elif name != "fsdp1 flat":
        found["gradients"] = gradients(model)
    if name == "compiled":
        return found
    with torch.inference_mode():
        logits = model.eval()(rows, use_cache=False).logits.float()
    parts = [torch.empty_like(logits) for _ in range(world)]
    dist.all_gather(parts, logits)
    return found | {"logits": torch.cat(parts)}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # With the usual eps a gradient that is all rounding error would move its parameter by the whole learning rate.
    return torch.optim.AdamW(temper.param_groups(model, lr=1e-2, weight_decay=0.1), eps=1e-3, foreach=False)


def train(model, optimizer, steps, rank: int = 0, world: int = 1) -> list[float]:
    losses = []
    for index in steps:
        losses.append(step(model, batch(index).chunk(world)[rank], world))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save(model, optimizer, folder: Path, **options) -> None:
    states = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder, **options)


def load(model, optimizer, folder: Path, **options) -> None:
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder, **options)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def resume(folder: Path, rank: int, world: int) -> dict:
    """Trains, saves, trains on; and goes on from what one process has saved."""
    model = shard(make())
    optimizer = optimizer_of(model)
    losses = train(model, optimizer, range(2), rank, world)
    save(model, optimizer, folder / "two")
    losses += train(model, optimizer, range(2, 4), rank, world)
    state = {name: whole(value) for name, value in model.state_dict().items()}
    if rank == 0:
        # As a user would who wants a folder for everybody: the whole state into `save_pretrained`.
        model.save_pretrained(folder / "hub", state_dict=dict(state))
    other = shard(make(seed=1))
    optimizer = optimizer_of(other)
    load(other, optimizer, folder / "one")
    return {"losses": losses, "again": train(other, optimizer, range(2, 4), rank, world), "state": state}


def on_meta(rank: int) -> dict:
    """Built without memory, sharded, materialised: the sites have values, and reset to those of one process."""
    with torch.device("meta"):
        model = temper.wrap(
            transformers.LlamaForCausalLM(make().config), "model.layers.*", preset="temper-tucker", num_streams=4
        )
    shard(model).to_empty(device="cpu")
    site = model.model.layers[1].hyper_connections[0]
    first = {name: whole(value).clone() for name, value in site.state_dict().items()}
    torch.manual_seed(5)
    site.reset_parameters()
    return {"first": first, "reset": {name: whole(value) for name, value in site.state_dict().items()}}


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    special = {"resume": lambda: resume(folder, rank, world), "meta": lambda: on_meta(rank)}
    found = {name: special[name]() if name in special else run(name, rank, world) for name in names}
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
