"""CORE the plain way: one prompt at a time, all logits, nothing shared with the product but the model it is given.

`evaluate(folder, label, encode, forward, limit, max_per_task)` gives a bool per item.
"""

import csv
import json
import random
from pathlib import Path

import torch
import yaml


def tasks(folder):
    """The entries of core.yaml whose items are there."""
    entries = yaml.safe_load((Path(folder) / "core.yaml").read_text())["icl_tasks"]
    return [entry for entry in entries if (Path(folder) / "eval_data" / entry["dataset_uri"]).exists()]


def baseline(folder, label):
    with open(Path(folder) / "eval_meta_data.csv", newline="") as file:
        return next(float(line["Random baseline"]) / 100 for line in csv.DictReader(file) if line["Eval Task"] == label)


@torch.no_grad()
def evaluate(folder, entry, encode, forward, limit, max_per_task):
    """
    Args:
        encode: a text to ids with BOS.
        forward: ids (1, T) to logits (1, T, V).
    """
    with open(Path(folder) / "eval_data" / entry["dataset_uri"], encoding="utf-8") as file:
        data = [json.loads(line) for line in file]
    random.Random(1337).shuffle(data)
    data = data[:max_per_task]
    correct = []
    for index, item in enumerate(data):
        others = [other for other in range(len(data)) if other != index]
        chosen = random.Random(1234 + index).sample(others, entry["num_fewshot"][0])
        shots = [data[other] for other in chosen]
        correct.append(ask(entry, item, shots, encode, forward, limit))
    return correct


def ask(entry, item, shots, encode, forward, limit):
    delimiter = entry.get("continuation_delimiter", " ")
    before = ""
    if entry["icl_task_type"] == "multiple_choice":
        for shot in shots:
            before += f"{shot['query']}{delimiter}{shot['choices'][shot['gold']]}\n\n"
        prompts = [encode(f"{before}{item['query']}{delimiter}{choice}") for choice in item["choices"]]
        start = 0
        while all(len(ids) > start for ids in prompts) and len({ids[start] for ids in prompts}) == 1:
            start += 1
        return best(prompts, [start] * len(prompts), forward, limit) == item["gold"]
    if entry["icl_task_type"] == "schema":
        for shot in shots:
            before += f"{shot['context_options'][shot['gold']]}{delimiter}{shot['continuation']}\n\n"
        prompts = [encode(f"{before}{context}{delimiter}{item['continuation']}") for context in item["context_options"]]
        length = 0
        while all(len(ids) > length for ids in prompts) and len({ids[-1 - length] for ids in prompts}) == 1:
            length += 1
        return best(prompts, [len(ids) - length for ids in prompts], forward, limit) == item["gold"]
    for shot in shots:
        before += f"{shot['context'].strip()}{delimiter}{shot['continuation']}\n\n"
    without = f"{before}{item['context'].strip()}{delimiter}"
    whole, first = encode(without + item["continuation"]), encode(without.strip())
    assert whole[: len(first)] == first
    logits, ids, start = span(whole, len(first), forward, limit)
    return logits.argmax(-1).tolist() == ids[start:]


def best(prompts, starts, forward, limit):
    losses = []
    for prompt, begin in zip(prompts, starts, strict=True):
        logits, ids, start = span(prompt, begin, forward, limit)
        nats = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[start:]), reduction="none")
        losses.append(nats.mean().item() if len(nats) else float("inf"))
    return min(range(len(losses)), key=losses.__getitem__)


def span(ids, start, forward, limit):
    """The logits that predict the span, the ids that were read, and where the span starts in them."""
    if len(ids) > limit:
        ids, start = ids[-limit:], start - (len(ids) - limit)
    start = max(start, 1)
    return forward(torch.tensor([ids]))[0][start - 1 : len(ids) - 1], ids, start
