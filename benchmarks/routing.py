"""What a site costs today, as ratios within one interleaved run: `make bench`.

The work is one block pair (attention and MLP) with plain residual adds, and the same pair with a
hyper-connection around each branch; forward and backward, one thread. Variants take turns, so that what else the
machine does hits all of them; medians and the spread of the middle half are reported. Outputs and gradients are
checked against the pieces laid open (`route`, `read`, `write`) before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import temper


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.heads = max(1, width // 128)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(F.rms_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square())


class Pair(nn.Module):
    def __init__(self, branches: list[nn.Module], name: str, num_streams: int, width: int) -> None:
        super().__init__()
        config = temper.preset(name, num_streams=num_streams, dim=width)
        self.num_streams = config.num_streams
        self.sites = nn.ModuleList(
            temper.HyperConnection(config, layer_index=index, branch=branch) for index, branch in enumerate(branches)
        )

    def forward(self, streams: Tensor) -> Tensor:
        for site in self.sites:
            streams = site(streams)
        return streams


def check(pair: Pair, streams: Tensor) -> None:
    """Refuses to go on if the fused way and the open way disagree."""

    def laid_open(streams: Tensor) -> Tensor:
        for site in pair.sites:
            routing = site.route(streams)
            streams = site.write(streams, site.branch(site.read(streams, routing)), routing)
        return streams

    grads = [torch.autograd.grad(run(streams).sin().sum(), streams)[0] for run in (pair, laid_open)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def seconds(pair: Pair, streams: Tensor) -> float:
    start = time.perf_counter()
    pair(streams).square().mean().backward()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["mhc", "kromhc", "temper-cp", "temper-tucker"])
    parser.add_argument("--streams", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    branches = [Attention(arguments.width), MLP(arguments.width)]
    variants = {"residual": Pair(branches, "residual", 1, arguments.width)}
    for name in arguments.methods:
        for n in arguments.streams:
            variants[f"{name} N={n}"] = Pair(branches, name, n, arguments.width)
    inputs = {}
    for name, pair in variants.items():
        inputs[name] = torch.randn(1, arguments.tokens, pair.num_streams, arguments.width, requires_grad=True)
        check(pair, inputs[name])
    times: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(arguments.rounds + 1):
        for name, pair in variants.items():
            elapsed = seconds(pair, inputs[name])
            # The first round warms up.
            if index:
                times[name].append(elapsed)
        print(f"\rround {index}/{arguments.rounds}", end="", file=sys.stderr)
    print(file=sys.stderr)
    setting = f"width {arguments.width}, {arguments.tokens} tokens, {arguments.rounds} rounds, 1 thread"
    print(f"{setting}, torch {torch.__version__}")
    print(f"{'variant':24s} {'ms':>8s} {'ratio':>7s}   middle half of the ratios")
    for name, values in times.items():
        ratios = sorted(value / base for value, base in zip(values, times["residual"], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        middle = statistics.median(ratios)
        print(f"{name:24s} {1000 * statistics.median(values):8.1f} {middle:7.3f}   {low:.3f} .. {high:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
