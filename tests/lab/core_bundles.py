"""Small bundles, and models of which everything is known."""

import csv
import json
import os
import random
from pathlib import Path

import torch
import yaml

from temper_lab.model import GPT, ModelConfig

REPO = Path(__file__).parents[2]
SHARED = Path(os.environ.get("TEMPER_SHARED", REPO.parent / "shared"))
PUBLIC = SHARED / "data" / "core"
TEXT = "people union peace war courage congress laws states nation year great citizens power treaty trade"
WORDS = TEXT.split()

ENTRIES = [
    {
        "label": "arc_easy",
        "dataset_uri": "knowledge/arc_easy.jsonl",
        "num_fewshot": [3],
        "icl_task_type": "multiple_choice",
        "continuation_delimiter": "\nAnswer: ",
    },
    {
        "label": "winograd",
        "dataset_uri": "language/winograd.jsonl",
        "num_fewshot": [1],
        "icl_task_type": "schema",
    },
    {
        "label": "squad",
        "dataset_uri": "reading/squad.jsonl",
        "num_fewshot": [2],
        "icl_task_type": "language_modeling",
    },
    {
        "label": "coqa",
        "dataset_uri": "reading/coqa.jsonl",
        "num_fewshot": [0],
        "icl_task_type": "language_modeling",
    },
]
BASELINES = {"arc_easy": "25", "winograd": "50", "squad": "0", "coqa": "0"}


def text(rng, low, high):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def make_items(kind, count, rng):
    for _ in range(count):
        if kind == "multiple_choice":
            yield {
                "query": f"Question: {text(rng, 3, 12)}?",
                "choices": [text(rng, 1, 4) for _ in range(4)],
                "gold": rng.randrange(4),
            }
        elif kind == "schema":
            first = text(rng, 3, 8)
            options = [f"{first} {word}" for word in rng.sample(WORDS, 2)]
            yield {"context_options": options, "continuation": f"{text(rng, 2, 5)}.", "gold": rng.randrange(2)}
        else:
            yield {"context": f" {text(rng, 4, 12)} ", "continuation": text(rng, 1, 2)}


def write_bundle(folder, *, count=12, entries=ENTRIES, baselines=BASELINES, lacking=("coqa",)):
    """A bundle of random items; those of some tasks are not there."""
    rng = random.Random(5)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": list(entries)}))
    with open(folder / "eval_meta_data.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Eval Task", "Task Category", "Random baseline", "Description"])
        writer.writerows([label, "any", value, 'a text, with "quotes"'] for label, value in baselines.items())
    for entry in entries:
        if entry["label"] not in lacking:
            path = folder / "eval_data" / entry["dataset_uri"]
            path.parent.mkdir(parents=True, exist_ok=True)
            items = make_items(entry["icl_task_type"], count, rng)
            path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder


def random_gpt(vocab_size, context, *, preset="temper-cp", depth=2, seed=0):
    """A model with an opinion: the branches and the head of a new one say nothing."""
    torch.manual_seed(seed)
    config = ModelConfig(depth=depth, vocab_size=vocab_size, context=context, head_dim=32, preset=preset, num_streams=2)
    model = GPT(config).eval()
    with torch.no_grad():
        model.head.weight.normal_(std=0.1)
        for block in model.blocks:
            block.attention.out.weight.normal_(std=0.1)
            block.mlp.down.weight.normal_(std=0.1)
    return model


class Knower:
    """A model with a token per character that expects exactly the continuations it was taught."""

    notes = ()
    bos = 0

    def __init__(self, texts, *, limit=10_000, can_share=False, pass_cost=0):
        self.limit, self.can_share, self.max_tokens, self.pass_cost = limit, can_share, 4096, pass_cost
        self.next = {}
        self.tokens_read = 0
        for ids in self.encode(texts):
            for end in range(1, len(ids)):
                self.next[tuple(ids[:end])] = ids[end]

    def encode(self, texts):
        return [[self.bos, *(min(ord(char), 255) for char in text)] for text in texts]

    def remember(self, prefix_BP, repeats, room):
        self.tokens_read += prefix_BP.numel()
        return [row for row, count in zip(prefix_BP.tolist(), repeats, strict=True) for _ in range(count)]

    def logits(self, ids_RT, rows, columns, memory=None):
        self.tokens_read += ids_RT.numel()
        before = memory or [[]] * len(ids_RT)
        logits = torch.zeros(len(rows), 256)
        for place, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            known = self.next.get((*before[row], *ids_RT[row, : column + 1].tolist()))
            if known is not None:
                logits[place, known] = 10.0
        # In two parts: whoever adds them up must not care.
        yield from (part for part in logits.split(max(1, len(logits) // 2)) if len(part))

    def fingerprint(self):
        return "knower"
