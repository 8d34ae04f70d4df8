"""A model and its tokenizer as a folder for transformers, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import temper
from temper.registry import unknown
from temper_lab import plugins
from temper_lab.interop.nanochat import to_nanochat
from temper_lab.io import atomic_dir, check_finite, entry
from temper_lab.model import GPT
from temper_lab.tokenizer import Tokenizer
from temper_lab.train import checkpoint, run_dir
from temper_lab.train.run_dir import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Score(NamedTuple):
    """Validation bits per byte of a run, and the step they were measured at."""

    bpb: float
    step: int


def export(model: GPT, tokenizer: Tokenizer, out: str | Path, *, to: str = "hf", score: Score | None = None) -> Path:
    """Writes weights, configuration, generation settings, tokenizer and a model card into a new folder.

    Args:
        to: "hf" for `temper_lab.interop.hf.TemperForCausalLM`, which holds any preset, or "nanochat" for
            transformers' own `NanoChatForCausalLM`, which holds the residual preset.
        score: for the model card, if it is known.
    """
    out = Path(out).absolute()
    check_out(out)
    if to not in TARGETS:
        raise unknown("target of an export", to, TARGETS)
    from temper_lab.interop.hf import fast_tokenizer

    check_finite(model.state_dict(), "the model")
    hf_model, hf_tokenizer = TARGETS[to](model, tokenizer), fast_tokenizer(tokenizer, context=model.config.context)
    # Whatever is not said in a batch is padding, and any token will do for that.
    hf_model.generation_config.pad_token_id = tokenizer.bos
    with atomic_dir(out) as work:
        hf_model.save_pretrained(work)
        hf_tokenizer.save_pretrained(work)
        (work / "README.md").write_text(card(model, to=to, score=score), encoding="utf-8")
    return out


def check_out(out: Path) -> None:
    """Raises ValueError for a folder that is taken."""
    if out.exists():
        raise ValueError(f"{out} exists; expected a new folder for the export")


def score_of(path: Path) -> Score | None:
    """The last validation score of the model that `load` reads from a run; None where there is none."""
    run = RunFolder(path)
    if not run.is_run:
        return None
    rows = run_dir.read_log(run.metrics)
    if not (path / "model").is_dir():
        found, _ = checkpoint.latest(run.checkpoints)
        rows = [row for row in rows if found is not None and row["step"] <= found.step]
    last = next((row for row in reversed(rows) if "val_bpb" in row), None)
    return None if last is None else Score(entry(last, "val_bpb", float, run.metrics), last["step"])


def card(model: GPT, *, to: str = "hf", score: Score | None = None) -> str:
    """The README.md of an exported model: method, size, score and how to load it."""
    config, routing, counts = model.config, model.config.routing(), model.num_parameters()
    streams = "one residual stream" if routing.is_residual else f"{config.num_streams} residual streams"
    rows = [("method", f"`{config.method}`, {streams}")]
    if not routing.is_residual:
        heads = ", ".join(f"{head} {getattr(routing, head).name}" for head in routing.heads)
        rows += [("generators", heads), ("mixer", routing.mixer.name if routing.mixer else "none")]
    rows += [
        ("parameters", f"{counts['total']:,}"),
        ("of these routing", f"{counts['routing']:,}"),
        ("layers, width, heads", f"{config.num_layers}, {config.dim}, {config.num_heads}"),
        ("context", f"{config.context:,} tokens"),
        ("vocabulary", f"{config.vocab_size:,} tokens"),
        ("validation bits per byte", "not known" if score is None else f"{score.bpb:.4f} at step {score.step:,}"),
    ]
    is_temper = to == "hf"
    trust = ", trust_remote_code=True" if is_temper else ""
    needs = (
        f"It needs the `temper` hyper-connections library {temper.__version__} with its lab (in its source folder:\n"
        "`pip install '.[lab,hf]'`). The two Python files in this folder only import it, which is what\n"
        "`trust_remote_code=True` is for.\n"
        if is_temper
        else "It needs nothing but transformers.\n"
    )
    if modules := plugins.modules_of(config.to_dict()):
        lines = "\n".join(f"import {name}" for name in modules)
        needs += "\nIts parts come from another package, to be imported first (`--import` of the `temper` command):\n"
        needs += f"\n```python\n{lines}\n```\n"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- hyper-connections
- temper
---

# A language model with {streams}

Pretrained with the TEMPER lab.

| | |
|---|---|
{chr(10).join(f"| {name} | {value} |" for name, value in rows)}

## How to load it

{needs}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

folder = "."  # this folder, or its name on the hub
model = AutoModelForCausalLM.from_pretrained(folder{trust})
tokenizer = AutoTokenizer.from_pretrained(folder)
generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
print(generate("The people", max_new_tokens=20))
```

```
lm_eval --model hf --model_args pretrained=.{",trust_remote_code=True" if is_temper else ""} --tasks lambada_openai
```

It is a base model: it continues text, and was not tuned to follow instructions.
"""


def _temper(model: GPT, tokenizer: Tokenizer) -> PreTrainedModel:
    from temper_lab.interop.hf import TemperForCausalLM

    return TemperForCausalLM.from_gpt(model, bos_token_id=tokenizer.bos, eos_token_id=tokenizer.bos)


def _nanochat(model: GPT, tokenizer: Tokenizer) -> PreTrainedModel:
    from transformers import NanoChatForCausalLM

    config, state = to_nanochat(model, bos_token_id=tokenizer.bos)
    hf_model = NanoChatForCausalLM(config)
    hf_model.load_state_dict(state, assign=True)
    return hf_model


TARGETS: dict[str, Callable[[GPT, Tokenizer], PreTrainedModel]] = {"hf": _temper, "nanochat": _nanochat}
