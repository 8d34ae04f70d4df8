"""Three ways to put a hyper-connection around a branch of your own; all give the same streams."""

import torch
from torch import nn

import temper

torch.manual_seed(0)
config = temper.preset("temper-tucker", num_streams=4, dim=64)
mlp = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

# 1. As a wrapper: the branch belongs to the module.
site = temper.HyperConnection(config, layer_index=0, branch=mlp)
streams = temper.expand_streams(torch.randn(2, 10, 64), config.num_streams)
wrapped = site(streams)

# 2. By hand: you call the branch.
x, state = site.begin(streams)
by_hand = site.finish(state, mlp(x))


# 3. As a decorator: a function of x becomes a function of streams.
@site.decorate
def branch(x: torch.Tensor) -> torch.Tensor:
    return mlp(x)


assert torch.equal(wrapped, by_hand)
assert torch.equal(wrapped, branch(streams))

# What every token decided, laid open.
routing = site.route(streams)
print(f"streams {tuple(streams.shape)} -> {tuple(wrapped.shape)} -> {tuple(temper.reduce_streams(wrapped).shape)}")
print(f"added parameters: {temper.count_parameters(config):,}")
print(f"rows of res sum to {routing.res[0, 0].sum(-1).tolist()}")
