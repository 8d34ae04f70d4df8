"""A small routed transformer learns to recall, beside a plain residual one.

Every sequence is a list of key-value pairs and one key again; the answer is the value that came with
it. All methods see the same batches in the same order and start from the same weights.

    python examples/toy_network.py --out demo
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import temper

METHODS = ["residual", "mhc", "temper-cp", "temper-tucker"]
KEYS, PAIRS, WIDTH, HEADS, BLOCKS, BATCH = 16, 6, 64, 4, 2, 64
TIME = 2 * PAIRS + 1


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, _ = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, time_, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Network(nn.Module):
    """Embedding, 2 x (attention, MLP) with a hyper-connection around each branch, head."""

    def __init__(self, config: temper.RouterConfig) -> None:
        super().__init__()
        self.num_streams = config.num_streams
        self.embedding, self.place = nn.Embedding(2 * KEYS, WIDTH), nn.Embedding(TIME, WIDTH)
        branches: list[nn.Module] = []
        for _ in range(BLOCKS):
            mlp = (nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            branches += [Attention(), nn.Sequential(*mlp)]
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, KEYS))
        # Sites last: the rest then starts from the same random numbers whatever the method.
        self.sites = nn.ModuleList(
            temper.HyperConnection(config, layer_index=index, branch=branch) for index, branch in enumerate(branches)
        )

    def forward(self, ids: Tensor) -> Tensor:
        streams = temper.expand_streams(self.embedding(ids) + self.place.weight, self.num_streams)
        for site in self.sites:
            streams = site(streams)
        return self.head(temper.reduce_streams(streams)[:, -1])


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences (BATCH, TIME) and the value to recall."""
    keys = torch.rand(BATCH, KEYS, generator=generator).argsort(-1)[:, :PAIRS]
    values = torch.randint(KEYS, (BATCH, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (BATCH, 1), generator=generator)
    pairs = torch.stack([keys, KEYS + values], -1).flatten(1)
    return torch.cat([pairs, keys.gather(1, asked)], 1), values.gather(1, asked).squeeze(1)


def train(name: str, num_streams: int, steps: int, seed: int, progress) -> dict[str, object]:
    """Trains one method; `progress(step, loss)` is called after every step."""
    torch.manual_seed(seed)
    config = temper.preset(name, num_streams=num_streams, dim=WIDTH)
    network = Network(config)
    optimizer = torch.optim.AdamW(temper.param_groups(network, lr=2e-3))
    data = torch.Generator().manual_seed(seed)
    losses, start = [], time.perf_counter()
    for step in range(steps):
        ids, answers = batch(data)
        loss = F.cross_entropy(network(ids), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        progress(step + 1, losses[-1])
    seconds = (time.perf_counter() - start) / steps
    with torch.no_grad():
        held_out = [batch(data) for _ in range(16)]
        hits = [(network(ids).argmax(-1) == answers).float().mean().item() for ids, answers in held_out]
    return {
        "method": name,
        "added_parameters": 2 * BLOCKS * temper.count_parameters(config),
        "losses": losses,
        "accuracy": sum(hits) / len(hits),
        "ms_per_step": 1000 * seconds,
    }


def draw(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from temper_lab.figures import save

    figure, axes = plt.subplots(figsize=(7, 4))
    for result in results:
        losses = torch.tensor(result["losses"])
        window = max(1, len(losses) // 40)
        smooth = losses.unfold(0, window, 1).mean(-1)
        axes.plot(range(window, len(losses) + 1), smooth, label=result["method"])
    axes.set_xlabel("step")
    axes.set_ylabel("loss (running mean)")
    axes.set_title("Recalling one of six pairs, same batches for every method", fontsize=11)
    axes.grid(True, alpha=0.25)
    axes.legend(frameon=False)
    save(figure, path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for toy.json and toy.png (default: demo)"
    )
    parser.add_argument("--steps", type=int, default=600, help="training steps per method (default: 600)")
    parser.add_argument("--streams", type=int, default=4, help="residual streams N (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; expected at least 1")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    console = Console()
    results = []
    columns = (TextColumn("{task.description:>14}"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks = {name: bars.add_task(name, total=arguments.steps, loss=float("nan"), start=False) for name in METHODS}
        for name, task in tasks.items():
            bars.start_task(task)

            def progress(step: int, loss: float, task=task) -> None:
                bars.update(task, completed=step, loss=loss)

            results.append(train(name, arguments.streams, arguments.steps, arguments.seed, progress))
    table = Table(
        title=f"Recall after {arguments.steps} steps, N = {arguments.streams}, one seed", title_justify="left"
    )
    for column in ("method", "added parameters", "first loss", "last loss (mean of 20)", "accuracy", "ms per step"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for result in results:
        losses = result["losses"]
        last = sum(losses[-20:]) / len(losses[-20:])
        cells = [f"{result['added_parameters']:,}", f"{losses[0]:.3f}", f"{last:.3f}", f"{result['accuracy']:.1%}"]
        table.add_row(result["method"], *cells, f"{result['ms_per_step']:.1f}")
    console.print(table)
    console.print("One seed on a toy says that routing works and learns, not which method is better.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(results, arguments.out / "toy.png")
    (arguments.out / "toy.json").write_text(json.dumps(results))
    console.print(f"figure: {arguments.out / 'toy.png'}")


if __name__ == "__main__":
    main()
