"""A small routed transformer memorizes the Zen of Python, beside a plain residual one.

All methods see the same batches in the same order, and their branches start from the same weights.

    python examples/toy_network.py --out toy
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import temper

with contextlib.redirect_stdout(io.StringIO()):
    import this

METHODS = ["residual", "mhc", "temper-cp", "temper-tucker"]
WIDTH, HEADS, BLOCKS, BATCH, TIME = 64, 4, 2, 16, 32
TEXT = codecs.decode(this.s, "rot13")
ALPHABET = sorted(set(TEXT))
DATA = torch.tensor([ALPHABET.index(letter) for letter in TEXT])
PROMPT = "Beautiful is better than ugly"


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
        self.embedding, self.place = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(TIME, WIDTH)
        branches: list[nn.Module] = []
        for _ in range(BLOCKS):
            mlp = (nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            branches += [Attention(), nn.Sequential(*mlp)]
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET)))
        # Sites last: the rest then starts from the same random numbers whatever the method.
        self.sites = nn.ModuleList(
            temper.HyperConnection(config, layer_index=index, branch=branch) for index, branch in enumerate(branches)
        )

    def forward(self, ids: Tensor) -> Tensor:
        streams = temper.expand_streams(self.embedding(ids) + self.place.weight[: ids.shape[1]], self.num_streams)
        for site in self.sites:
            streams = site(streams)
        return self.head(temper.reduce_streams(streams))


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Letters (BATCH, TIME) and the letters after them."""
    starts = torch.randint(len(DATA) - TIME, (BATCH, 1), generator=generator)
    rows = DATA[starts + torch.arange(TIME + 1)]
    return rows[:, :-1], rows[:, 1:]


def recite(network: Network, letters: int = 60) -> str:
    """What the network says after the prompt, the likeliest letter each time."""
    ids = [ALPHABET.index(letter) for letter in PROMPT]
    for _ in range(letters):
        ids.append(network(torch.tensor([ids[-TIME:]]))[0, -1].argmax().item())
    return "".join(ALPHABET[index] for index in ids[len(PROMPT) :])


class Run:
    """One method in training; `step` takes one step and remembers its loss and time."""

    def __init__(self, name: str, num_streams: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.name, self.config = name, temper.preset(name, num_streams=num_streams, dim=WIDTH)
        self.network = Network(self.config)
        self.optimizer = torch.optim.AdamW(temper.param_groups(self.network, lr=2e-3))
        self.data = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        start = time.perf_counter()
        ids, answers = batch(self.data)
        loss = F.cross_entropy(self.network(ids).flatten(0, 1), answers.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)

    def result(self) -> dict[str, Any]:
        with torch.no_grad():
            says = recite(self.network)
        return {
            "method": self.name,
            "added_parameters": 2 * BLOCKS * temper.count_parameters(self.config),
            "losses": self.losses,
            "says": says,
            "ms_per_step": 1000 * statistics.median(self.seconds),
        }


def draw(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from temper_lab.report.palette import DASHES, styles_of
    from temper_lab.report.plots_mpl import save

    figure, axes = plt.subplots(figsize=(7, 4))
    looks = styles_of(result["method"] for result in results)
    for result in results:
        losses = torch.tensor(result["losses"])
        window = max(1, len(losses) // 40)
        smooth = losses.unfold(0, window, 1).mean(-1)
        look = looks[result["method"]]
        shape = {"color": look.color, "linestyle": DASHES[look.dash]}
        axes.plot(range(window, len(losses) + 1), smooth, label=result["method"], **shape)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (running mean)")
    axes.set_title("The Zen of Python by heart, same batches for every method", fontsize=11)
    axes.grid(True, alpha=0.25)
    axes.legend(frameon=False)
    save(figure, path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("toy"), help="folder for toy.json and toy.png (default: toy)")
    parser.add_argument("--steps", type=int, default=400, help="training steps per method (default: 400)")
    parser.add_argument("--streams", type=int, default=4, help="residual streams N (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; expected at least 1")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    torch.set_num_threads(1)
    console = Console()
    runs = [Run(name, arguments.streams, arguments.seed) for name in METHODS]
    columns = (TextColumn("{task.description:>14}"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks = [bars.add_task(name, total=arguments.steps, loss=float("nan")) for name in METHODS]
        # The methods take turns, so that what else the machine does slows all of them alike.
        for _ in range(arguments.steps):
            for run, task in zip(runs, tasks, strict=True):
                run.step()
                bars.update(task, advance=1, loss=run.losses[-1])
    results = [run.result() for run in runs]
    title = f"Learning by heart, {arguments.steps} steps, N = {arguments.streams}, seed {arguments.seed}"
    table = Table(title=title, title_justify="left")
    for column in ("method", "added parameters", "first loss", "last loss", "ms per step"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=column == "method")
    for result in results:
        losses = result["losses"]
        last = sum(losses[-20:]) / len(losses[-20:])
        cells = [f"{result['added_parameters']:,}", f"{losses[0]:.3f}", f"{last:.3f}"]
        table.add_row(result["method"], *cells, f"{result['ms_per_step']:.1f}")
    console.print(table)
    for result in results:
        console.print(f"{result['method']:>14}: {PROMPT}[bold]{result['says']!r}[/bold]", highlight=False)
    console.print("One seed on a toy shows that routing works and learns, not which method is better.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(results, arguments.out / "toy.png")
    (arguments.out / "toy.json").write_text(json.dumps(results))
    console.print(f"figure: {arguments.out / 'toy.png'}")


if __name__ == "__main__":
    main()
