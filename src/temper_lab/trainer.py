"""One process of a run: model, optimizers, loaders and files, step after step."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from temper import observe
from temper_lab import checkpoint, engine, plan
from temper_lab import run as runs
from temper_lab.data import Corpus, Loader, validation_batches
from temper_lab.distributed import Spread, World, precision
from temper_lab.eval import bits_per_byte
from temper_lab.interrupt import StopWish
from temper_lab.io import entry
from temper_lab.load import load
from temper_lab.metrics import Lines, TensorBoard
from temper_lab.model import GPT
from temper_lab.optim import Optimizers
from temper_lab.progress import Bar, duration, peak_memory, size
from temper_lab.recipe import Recipe
from temper_lab.run import RunFolder
from temper_lab.tokenizer import FILE_NAME, Tokenizer

# So many validation tokens, in whole rows, show how streams are mixed: a few percent of a validation.
MIXING_TOKENS = 256


class Trainer:
    """Model, optimizers, loaders and files of one process of a run, at some step of it."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, world: World, corpus: Corpus, tokenizer: Tokenizer, wish: StopWish
    ) -> None:
        self.recipe, self.folder, self.world, self.wish = recipe, folder, world, wish
        self.step = 0
        self.best_bpb: float | None = None
        # The last validation: its step and its result.
        self._bpb: tuple[int, float] | None = None
        self._files: list[Any] = []
        self.loaders: dict[int, Loader] = {}
        settings, data = recipe.train, recipe.data
        self.split = plan.split(recipe, world.size)
        self.tokenizer = tokenizer
        self.config = recipe.model.with_(vocab_size=self.tokenizer.vocab_size)
        if self.config != recipe.model:
            self.say(
                f"the tokenizer has {self.config.vocab_size} tokens, not {recipe.model.vocab_size}: so has the model"
            )
        for line in plan.describe(recipe, self.config, world.size):
            self.say(line)

        if world.device.type == "cuda" and settings.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        dtype, self.autocast = precision(settings.precision, world.device)
        # The same weights on every process and in every precision.
        torch.manual_seed(settings.seed)
        model = GPT(self.config).to(device=world.device, dtype=dtype)
        torch.manual_seed(settings.seed + world.rank)
        self.spread = Spread(model, world, parallel=settings.parallel, compile=settings.compile)
        self.optimizers = Optimizers.build(
            model, recipe.optim, batch_tokens=settings.batch_tokens, width=self.config.dim
        )
        for share in range(world.rank, self.split.shares, world.size):
            self.loaders[share] = Loader(
                corpus,
                self.tokenizer,
                split="train",
                rows=self.split.rows,
                context=self.config.context,
                rank=share,
                world=self.split.shares,
                seed=settings.seed,
                cut_long=data.cut_long,
                in_memory_mb=data.in_memory_mb,
                shuffle_mb=data.shuffle_mb,
            )
        self.val_batches = validation_batches(
            corpus,
            self.tokenizer,
            settings.rows,
            self.config.context,
            settings.val_batches,
            cut_long=data.cut_long,
            is_shown=world.is_first,
        )
        self._resume()
        if world.is_first:
            self.metrics = self._open(Lines(folder.metrics, self.step))
            self.timing = self._open(Lines(folder.path / "timing.jsonl", self.step))
            self.samples = self._open(Lines(folder.path / "samples.jsonl", self.step))
            self.board = None
            if settings.tensorboard:
                self.board = self._open(TensorBoard(folder.path / "tensorboard", self.step))

    def _open(self, file: Any) -> Any:
        self._files.append(file)
        return file

    def say(self, text: str) -> None:
        if self.world.is_first:
            print(text, file=sys.stderr, flush=True)

    def run(self) -> bool:
        """Trains until the last step, or until somebody wishes to stop; whether it is finished."""
        settings = self.recipe.train
        if self.step < settings.steps:
            for loader in self.loaders.values():
                loader.prepare(is_shown=self.world.is_first)
            portions = self.split.num_portions // self.world.size
            self.say(
                plan.measured(self._rehearse, self.recipe, self.world.device, portions, settings.steps - self.step)
            )
            if not self._loop():
                return False
            self.save()
        self.save_model(self.folder.path / "model")
        best = "" if self.best_bpb is None else f", best validation bpb {self.best_bpb:.4f}"
        self.say(f"finished {self.step:,} steps{best}; the model is in {self.folder.path / 'model'}")
        return True

    def _loop(self) -> bool:
        settings, total = self.recipe.train, self.recipe.train.steps
        first, start = self.step, time.perf_counter()
        with Bar("training", total, done=self.step, is_shown=self.world.is_first) as bar:
            while self.step < total:
                began = time.perf_counter()
                line, is_stopped = self._update()
                seconds = time.perf_counter() - began
                is_last = self.step == total
                is_validated = is_last or _is_due(self.step, settings.val_every)
                if is_validated:
                    line |= self._validate()
                self._log(line, seconds)
                is_notable = is_validated or self.step == 1
                # With validation and saving, unlike tokens per second.
                left = (total - self.step) * (time.perf_counter() - start) / (self.step - first)
                bar.update(self.step, self._words(line, seconds, left), is_notable=is_notable)
                if settings.sample_tokens and (is_last or _is_due(self.step, settings.sample_every)):
                    self._sample(bar)
                if is_last:
                    break
                if is_stopped:
                    path = self.save()
                    bar.say(f"stopped at step {self.step}; the checkpoint is {path}")
                    bar.say(f"continue with: {self.folder.resume_command(self.world.size)}")
                    return False
                if _is_due(self.step, settings.save_every):
                    self.save()
        return True

    def _portions(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of this process for one step, share after share."""
        for loader in self.loaders.values():
            for _ in range(self.split.passes):
                ids, targets = next(loader)
                yield ids.to(self.world.device, non_blocking=True), targets.to(self.world.device, non_blocking=True)

    def _rehearse(self) -> None:
        """A forward and backward pass that leaves no trace, but lets DDP settle its buckets before the first step."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.split.rows, self.config.context)
        ids = torch.randint(self.config.vocab_size, shape, generator=generator).to(self.world.device)
        with self.autocast():
            # A copy: one tensor in both places would be compiled apart.
            loss = self.spread.module(ids, targets_BT=ids.clone())
        loss.backward()
        self.spread.plain.zero_grad(set_to_none=True)

    def _update(self) -> tuple[dict[str, Any], bool]:
        """One step: its line of metrics, and whether any process was told to stop."""
        num_portions = self.split.num_portions // self.world.size
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for index, (ids, targets) in enumerate(self._portions(), 1):
            with self.spread.portion(is_last=index == num_portions):
                with self.autocast():
                    loss = self.spread.module(ids, targets_BT=targets)
                (loss / num_portions).backward()
            total += loss.detach()
        mean, wishes = self.world.sum(float(total) / self.split.num_portions, float(self.wish.number > 0))
        number = self.step + 1
        try:
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss is {mean}")
            norm = self.optimizers.step(self.step, self.recipe.train.steps)
        except FloatingPointError as error:
            raise FloatingPointError(
                f"step {number}: {error}. Checkpoints before it are in {self.folder.checkpoints}; "
                "a lower learning rate or another seed may get past it"
            ) from error
        self.step = number
        muon = self.optimizers.muon
        lr = muon.param_groups[0]["lr"] if muon else 0.0
        return {"step": number, "loss": mean, "lr": lr, "grad_norm": norm}, wishes > 0

    def _validate(self) -> dict[str, float]:
        result = bits_per_byte(
            self.spread.module, self.val_batches, self.tokenizer.token_bytes, world=self.world, autocast=self.autocast
        )
        if not math.isfinite(result.bpb):
            raise FloatingPointError(f"step {self.step}: the validation loss is {result.loss}")
        self._bpb = (self.step, result.bpb)
        if self.best_bpb is None or result.bpb < self.best_bpb:
            self.best_bpb = result.bpb
            if self.recipe.train.keep_best:
                self.save_model(self.folder.path / "best")
        return {"val_bpb": result.bpb, "val_loss": result.loss, **self._mixing()}

    @torch.no_grad()
    def _mixing(self) -> dict[str, float]:
        """How much streams are mixed and how alike they are, on some validation tokens; empty for a single stream."""
        model = self.spread.plain
        if model.num_streams == 1:
            return {}
        # Sharded models exchange weights in every pass, so every process does this, on the same rows.
        rows = slice(max(1, MIXING_TOKENS // self.config.context))
        ids, targets = (part[rows].to(self.world.device) for part in self.val_batches[0])
        # Compiled code would be compiled again for the observers.
        eager = torch.compiler.set_stance("force_eager") if self.recipe.train.compile else nullcontext()
        with eager, self.autocast(), observe(model) as observation:
            model(ids, targets_BT=targets, reduction="none")
        sites = observation.reports()
        composite = sites[-1].composite_forward_gain
        assert composite is not None
        return {
            "res_off_diagonal": statistics.fmean(site.off_diagonal for site in sites),
            "composite_gain": composite,
            "stream_similarity": statistics.fmean(site.stream_similarity for site in sites),
        }

    def _log(self, line: dict[str, Any], seconds: float) -> None:
        if not self.world.is_first:
            return
        self.metrics.write(line)
        rate = self.recipe.train.batch_tokens / seconds
        timing = {
            "step": self.step,
            "seconds": seconds,
            "tokens_per_second": rate,
            "memory": peak_memory(self.world.device),
        }
        self.timing.write({**timing, "time": time.time()})
        if self.board is not None:
            self.board.write({**line, "tokens_per_second": rate})

    def _words(self, line: dict[str, Any], seconds: float, left: float) -> str:
        bpb = "" if self._bpb is None else f" bpb {self._bpb[1]:.4f}"
        return (
            f"step {self.step:,}/{self.recipe.train.steps:,} loss {line['loss']:.4f}{bpb} "
            f"{self.recipe.train.batch_tokens / seconds:,.0f} tokens/s ETA {duration(left)} "
            f"{size(peak_memory(self.world.device))}"
        )

    def _sample(self, bar: Bar) -> None:
        settings = self.recipe.train
        with self.spread.alone() as model:
            if model is None:
                return
            # A long prompt leaves half of the context to continue it.
            prompts = [self.tokenizer.encode(text, bos=True)[: self.config.context // 2] for text in settings.prompts]
            rows = engine.generate(
                model,
                prompts,
                max_new_tokens=settings.sample_tokens,
                temperature=0.8,
                top_k=50,
                seed=settings.seed,
                stop=self.tokenizer.bos,
            )
        for prompt, row in zip(settings.prompts, rows, strict=True):
            text = self.tokenizer.decode(row)
            self.samples.write({"step": self.step, "prompt": prompt, "text": text})
            bar.say(f"  {prompt}|{' '.join(text.split())}")

    def save(self) -> Path:
        """Writes a checkpoint; every process has to call this."""
        tensors, description = self.optimizers.state_dict()
        model = self.spread.state_dict()
        loaders: dict[int, Any] = {}
        for part in self.world.gather({share: loader.state_dict() for share, loader in self.loaders.items()}):
            loaders |= part
        state = {
            "step": self.step,
            "recipe": self.recipe.to_dict(),
            # Of this very step, or keep_best would keep the wrong checkpoint.
            "metrics": {"val_bpb": self._bpb[1]} if self._bpb and self._bpb[0] == self.step else {},
            "best_bpb": self.best_bpb,
            "optimizer": description,
            "loaders": [loaders[share] for share in range(self.split.shares)],
            "rng": self.world.gather(checkpoint.rng_state()),
            "versions": runs.versions(),
        }
        settings = self.recipe.train

        def write() -> Path:
            for file in (self.metrics, self.timing, self.samples):
                file.sync()
            return checkpoint.save(
                self.folder.checkpoints,
                self.step,
                model=model,
                optimizer=tensors,
                state=state,
                keep_last=settings.keep_last,
                keep_best="val_bpb" if settings.keep_best else None,
            )

        return self.world.first(write)

    def save_model(self, path: Path) -> None:
        """Writes the model folder; every process has to call this."""
        tensors = {name: _single(value) for name, value in self.spread.state_dict().items()}
        files = {FILE_NAME: self.folder.path / FILE_NAME}
        self.world.first(lambda: checkpoint.save_model(path, self.config.to_dict(), tensors, files))

    def _resume(self) -> None:
        """Continues from the newest complete checkpoint, if there is one."""
        found, skipped = self.world.first(lambda: checkpoint.latest(self.folder.checkpoints))
        for message in skipped:
            self.say(message)
        if found is None:
            if skipped:
                self.say("no complete checkpoint is left; starting from the beginning")
            if start := self.recipe.train.start:
                self.spread.load_state_dict(load(start)[0].state_dict())
                self.say(f"starting with the weights of {start}")
            return
        state, where = found.state, found.path / "state.json"
        try:
            versions, rng = entry(state, "versions", dict, where), entry(state, "rng", list, where)
            self.spread.load_state_dict(found.model())
            self.optimizers.load_state_dict(found.optimizer(), state["optimizer"])
            if len(entry(state, "loaders", list, where)) != self.split.shares:
                raise ValueError(
                    f"it was trained on {len(state['loaders'])} shares of the data, not {self.split.shares}"
                )
            for share, loader in self.loaders.items():
                loader.load_state_dict(state["loaders"][share])
            if self.world.rank < len(rng):
                checkpoint.set_rng_state(rng[self.world.rank])
            self.step = found.step
            self.best_bpb = None if state.get("best_bpb") is None else entry(state, "best_bpb", float, where)
        # Inside are the states of many parts, each of which has its own idea of what is wrong with one.
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
            raise ValueError(f"cannot resume from {found.path}: {error}") from error
        self.say(f"resumed from {found.path}")
        now = {**runs.versions(), "processes": self.world.size}
        for name, before in {**versions, "processes": len(rng)}.items():
            if now.get(name) != before:
                self.say(f"note: {name} was {before}, is {now.get(name)}: the last bits may differ")

    def close(self) -> None:
        self.spread.close()
        for loader in self.loaders.values():
            loader.close()
        for file in self._files:
            file.close()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _single(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.float64 else value
