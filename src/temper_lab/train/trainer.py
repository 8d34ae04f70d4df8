"""A run: a recipe in, a run folder with a trained model out, step after step on every process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from temper import observe
from temper_lab import engine, plugins
from temper_lab.console import Bar, StopSignal, duration, keep_freed_memory, peak_memory, size, tell, waiting
from temper_lab.data import Corpus, DataFingerprint, Loader, validation_batches
from temper_lab.distributed import ParallelModel, World, precision, process_group
from temper_lab.eval import bits_per_byte
from temper_lab.io import entry, recover
from temper_lab.model import GPT
from temper_lab.optim import Optimizers
from temper_lab.recipe import Recipe
from temper_lab.tokenizer import FILE_NAME, Tokenizer
from temper_lab.train import checkpoint, model_dir, plan, run_dir, shards
from temper_lab.train.model_dir import load
from temper_lab.train.plan import corpus_of, plan_batch
from temper_lab.train.run_dir import JsonlLog, RunFolder, TensorBoard

# Validation tokens for the measures of mixing, rounded up to whole rows: a few percent of a validation.
MIXING_TOKENS = 256


class Trainer:
    """The model, optimizers, loaders and files of one process of a run."""

    def __init__(
        self, recipe: Recipe, folder: RunFolder, world: World, corpus: Corpus, tokenizer: Tokenizer, stop: StopSignal
    ) -> None:
        self.recipe, self.folder, self.world, self.stop = recipe, folder, world, stop
        self.step = 0
        self.best_bpb: float | None = None
        # The step and the result of the last validation.
        self._bpb: tuple[int, float] | None = None
        self._files: list[Any] = []
        # The checkpoint that is being written while training goes on, and the processes' line for it.
        self._saving: shards.Saving | None = None
        self._save_group: dist.ProcessGroup | None = None
        self.loaders: dict[int, Loader] = {}
        settings, data = recipe.train, recipe.data
        self.batch = plan.plan_batch(recipe, world.size)
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
        # Seeded, so that weights are the same on every process and in every precision.
        torch.manual_seed(settings.seed)
        model = GPT(self.config).to(device=world.device, dtype=dtype)
        torch.manual_seed(settings.seed + world.rank)
        self.parallel = ParallelModel(
            model, world, parallel=settings.parallel, replicas=settings.replicas, compile=settings.compile
        )
        self.optimizers = Optimizers.build(
            model, recipe.optim, batch_tokens=settings.batch_tokens, width=self.config.dim
        )
        for shard in range(world.rank, self.batch.num_shards, world.size):
            self.loaders[shard] = Loader(
                corpus,
                self.tokenizer,
                split="train",
                rows=self.batch.device_batch_size,
                context=self.config.context,
                rank=shard,
                world=self.batch.num_shards,
                seed=settings.seed,
                cut_long=data.cut_long,
                in_memory_mb=data.in_memory_mb,
                shuffle_mb=data.shuffle_mb,
            )
        self.val_batches = validation_batches(
            corpus,
            self.tokenizer,
            settings.device_batch_size,
            self.config.context,
            settings.val_batches,
            cut_long=data.cut_long,
            is_shown=world.is_rank0,
        )
        self._resume()
        if world.is_rank0:
            self.metrics = self._open(JsonlLog(folder.metrics, self.step))
            self.timing = self._open(JsonlLog(folder.path / "timing.jsonl", self.step))
            self.samples = self._open(JsonlLog(folder.path / "samples.jsonl", self.step))
            self.board = None
            if settings.tensorboard:
                self.board = self._open(TensorBoard(folder.path / "tensorboard", self.step))

    def _open(self, file: Any) -> Any:
        self._files.append(file)
        return file

    def say(self, text: str) -> None:
        if self.world.is_rank0:
            tell(text)

    def run(self) -> bool:
        """Trains until the last step, or until a stop signal; whether it is finished."""
        settings = self.recipe.train
        if self.step < settings.steps:
            for loader in self.loaders.values():
                loader.prepare(is_shown=self.world.is_rank0)
            num_micro_batches = self.batch.num_micro_batches // self.world.size
            self.say(
                plan.measured(
                    self._warm_up, self.recipe, self.world.device, num_micro_batches, settings.steps - self.step
                )
            )
            if not self._loop():
                return False
            self.save()
            self.wait()
        self.save_model(self.folder.path / "model")
        best = "" if self.best_bpb is None else f", best validation bpb {self.best_bpb:.4f}"
        self.say(f"finished {self.step:,} steps{best}; the model is in {self.folder.path / 'model'}")
        return True

    def _loop(self) -> bool:
        settings, total = self.recipe.train, self.recipe.train.steps
        first, start = self.step, time.perf_counter()
        with Bar("training", total, done=self.step, is_shown=self.world.is_rank0) as bar:
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
                # Includes validation and saving, unlike tokens per second.
                left = (total - self.step) * (time.perf_counter() - start) / (self.step - first)
                bar.update(self.step, self._words(line, seconds, left), is_notable=is_notable)
                if settings.sample_tokens and (is_last or _is_due(self.step, settings.sample_every)):
                    self._sample(bar)
                if is_last:
                    break
                if is_stopped:
                    path = self.save()
                    self.wait()
                    bar.say(f"stopped at step {self.step}; the checkpoint is {path}")
                    bar.say(f"continue with: {self.folder.resume_command(self.world.size)}")
                    return False
                if _is_due(self.step, settings.save_every):
                    self.save()
        return True

    def _micro_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches of this process for one step, shard after shard."""
        for loader in self.loaders.values():
            for _ in range(self.batch.grad_accum_steps):
                ids, targets = next(loader)
                yield ids.to(self.world.device, non_blocking=True), targets.to(self.world.device, non_blocking=True)

    def _warm_up(self) -> None:
        """Runs a forward and backward pass without effect, so that DDP arranges its buckets before the first step."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch.device_batch_size, self.config.context)
        ids = torch.randint(self.config.vocab_size, shape, generator=generator).to(self.world.device)
        with self.autocast():
            # Copied, because the same tensor in both places would cause another compilation.
            loss = self.parallel.module(ids, targets_BT=ids.clone())
        loss.backward()
        self.parallel.plain.zero_grad(set_to_none=True)

    def _update(self) -> tuple[dict[str, Any], bool]:
        """Runs one step; gives its metrics, and whether any process received a stop signal."""
        num_micro_batches = self.batch.num_micro_batches // self.world.size
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for index, (ids, targets) in enumerate(self._micro_batches(), 1):
            with self.parallel.micro_batch(is_last=index == num_micro_batches):
                with self.autocast():
                    loss = self.parallel.module(ids, targets_BT=targets)
                (loss / num_micro_batches).backward()
            total += loss.detach()
        mean, num_stops = self.world.sum(float(total) / self.batch.num_micro_batches, float(self.stop.number > 0))
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
        return {"step": number, "loss": mean, "lr": lr, "grad_norm": norm}, num_stops > 0

    def _validate(self) -> dict[str, float]:
        result = bits_per_byte(
            self.parallel.module, self.val_batches, self.tokenizer.token_bytes, world=self.world, autocast=self.autocast
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
        """Measures of mixing and stream similarity on some validation tokens; empty for a single stream."""
        model = self.parallel.plain
        if model.num_streams == 1:
            return {}
        # Sharded models communicate in every pass, so every process does this, on the same rows.
        rows = slice(max(1, MIXING_TOKENS // self.config.context))
        ids, targets = (part[rows].to(self.world.device) for part in self.val_batches[0])
        # Observers would cause another compilation.
        eager = torch.compiler.set_stance("force_eager") if self.recipe.train.compile else nullcontext()
        with eager, self.autocast(), observe(model) as observation:
            model(ids, targets_BT=targets, reduction="none")
        sites = observation.reports()
        forward, backward = sites[-1].composite_forward_gain, sites[-1].composite_backward_gain
        assert forward is not None
        assert backward is not None
        return {
            "res_off_diagonal": statistics.fmean(site.off_diagonal for site in sites),
            "composite_gain": forward,
            "composite_backward_gain": backward,
            "stream_similarity": statistics.fmean(site.stream_similarity for site in sites),
        }

    def _log(self, line: dict[str, Any], seconds: float) -> None:
        if not self.world.is_rank0:
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
        with self.parallel.alone() as model:
            if model is None:
                return
            # A long prompt is cut to leave half of the context for the continuation.
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
        """Writes a checkpoint, shards in the background; every process has to call this, and at the end `wait`."""
        self.wait()
        tensors, description = self.optimizers.state_dict()
        model = self.parallel.state_dict()
        loaders: dict[int, Any] = {}
        for part in self.world.gather({shard: loader.state_dict() for shard, loader in self.loaders.items()}):
            loaders |= part
        state = {
            "step": self.step,
            "recipe": self.recipe.to_dict(),
            # Only a validation of this step counts, or keep_best would keep the wrong checkpoint.
            "metrics": {"val_bpb": self._bpb[1]} if self._bpb and self._bpb[0] == self.step else {},
            "best_bpb": self.best_bpb,
            "optimizer": description,
            "loaders": [loaders[shard] for shard in range(self.batch.num_shards)],
            "rng": self.world.gather(checkpoint.rng_state()),
            "versions": run_dir.versions(),
        }
        folder, keep = self.folder.checkpoints, self._kept()

        def sync() -> None:
            for file in (self.metrics, self.timing, self.samples):
                file.sync()

        self.world.on_rank0(sync)
        if self.parallel.is_sharded:
            self._save_group = self._save_group or dist.new_group(backend="gloo")
            both = {f"model.{name}": tensor for name, tensor in model.items()}
            both |= {f"optimizer.{name}": tensor for name, tensor in tensors.items()}
            opening = checkpoint.writing(folder, self.step, state, **keep)
            self._saving = shards.save(both, opening, checkpoint.fingerprint, self._save_group)
            return checkpoint.path_of(folder, self.step)
        return self.world.on_rank0(
            lambda: checkpoint.save(folder, self.step, model=model, optimizer=tensors, state=state, **keep)
        )

    def wait(self) -> None:
        """Returns when the last checkpoint is on disk, or raises why it is not."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.wait()
        except Exception:
            # The first process says why; the others leave without repeating it.
            if not self.world.is_rank0:
                raise SystemExit(1) from None
            raise

    def _kept(self) -> dict[str, Any]:
        """Which checkpoints to keep."""
        settings = self.recipe.train
        return {"keep_last": settings.keep_last, "keep_best": "val_bpb" if settings.keep_best else None}

    def save_model(self, path: Path) -> None:
        """Writes the model folder; every process has to call this."""
        tensors = {name: _single(value) for name, value in self.parallel.gather().items()}
        files = {FILE_NAME: self.folder.path / FILE_NAME}
        self.world.on_rank0(lambda: model_dir.save_model(path, self.config.to_dict(), tensors, files))

    def _resume(self) -> None:
        """Continues from the newest complete checkpoint, if there is one."""
        found, skipped = self.world.on_rank0(lambda: checkpoint.latest(self.folder.checkpoints))
        for message in skipped:
            self.say(message)
        if found is None:
            if skipped:
                self.say("no complete checkpoint is left; starting from the beginning")
            if start := self.recipe.train.start:
                self.parallel.load_state_dict(load(start)[0].state_dict())
                self.say(f"starting with the weights of {start}")
            return
        state, where = found.state, found.path / "state.json"
        try:
            versions, rng = entry(state, "versions", dict, where), entry(state, "rng", list, where)
            self.parallel.load_state_dict(found.model(self.parallel.state_dict()))
            optimizer = found.optimizer(self.optimizers.state_dict()[0])
            self.optimizers.load_state_dict(optimizer, state["optimizer"])
            if len(entry(state, "loaders", list, where)) != self.batch.num_shards:
                raise ValueError(
                    f"it was trained on {len(state['loaders'])} shards of the data, not {self.batch.num_shards}"
                )
            for shard, loader in self.loaders.items():
                loader.load_state_dict(state["loaders"][shard])
            if self.world.rank < len(rng):
                checkpoint.set_rng_state(rng[self.world.rank])
            self.step = found.step
            self.best_bpb = None if state.get("best_bpb") is None else entry(state, "best_bpb", float, where)
        # The state is that of many parts, which raise different errors for a bad one.
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
            raise ValueError(f"cannot resume from {found.path}: {error}") from error
        # A kill may have come between the last save and the removal of what it made superfluous.
        self.world.on_rank0(lambda: checkpoint.prune(self.folder.checkpoints, self.step, **self._kept()))
        self.say(f"resumed from {found.path}")
        now = {**run_dir.versions(), "processes": self.world.size}
        for name, before in {**versions, "processes": len(rng)}.items():
            if now.get(name) != before:
                self.say(f"note: {name} was {before}, is {now.get(name)}: the last bits may differ")

    def close(self) -> None:
        # What went wrong before is what matters.
        with suppress(Exception, SystemExit):
            self.wait()
        self.parallel.close()
        for loader in self.loaders.values():
            loader.close()
        for file in self._files:
            file.close()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _single(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.float64 else value


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    recipe_name: str = "recipe",
    data: DataFingerprint | None = None,
) -> int:
    """Trains in a folder, or resumes there; returns 0 when finished, 128 + the signal when interrupted.

    Args:
        data: the data that the run has to have; by default those that there are.
    """
    folder = RunFolder(Path(out))
    stop = StopSignal()
    keep_freed_memory()
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    with process_group(recipe.train.device) as world, ExitStack() as stack:
        # Errors that can be found before the folder exists.
        plan_batch(recipe, world.size)
        with torch.device("meta"):
            GPT(recipe.model)
        corpus = corpus_of(recipe.data)
        if recipe.tokenizer.path:
            Tokenizer.load(recipe.tokenizer.path)
        if recipe.train.start and not resume:
            _check_start(recipe)

        def claim() -> None:
            here = DataFingerprint.of(corpus)
            if data is not None and (changes := data.changes(here)):
                raise ValueError(
                    f"the data are not those of the study any more: {'; '.join(changes)}. Restore them first"
                )
            folder.begin(resume=resume)
            stack.enter_context(folder.claimed())
            recover(folder.path)
            recover(folder.checkpoints)
            if resume:
                refuse_changes(folder, recipe, here)
            about = {"recipe_name": recipe_name, "recipe": recipe.to_dict(), "seed": recipe.train.seed}
            about |= {"method": recipe.model.method, "imports": plugins.modules_of(recipe.model.to_dict())}
            about |= {"versions": run_dir.versions(), "processes": world.size}
            new = {"started": run_dir.now(), "best_bpb": None, "step": 0, "data": here.to_dict()}
            started = {} if resume else new
            folder.write(**about, **started, status="running", error=None)

        world.on_rank0(claim)
        trainer: Trainer | None = None
        try:
            trainer = Trainer(recipe, folder, world, corpus, _tokenizer(recipe, folder, world, corpus), stop)
            is_finished = trainer.run()
            code = 0 if is_finished else 128 + (stop.number or 2)
            ending: dict[str, Any] = {"status": "finished" if is_finished else "interrupted"}
        except BaseException as error:
            is_stop = isinstance(error, KeyboardInterrupt)
            ending = {"status": "interrupted" if is_stop else "failed", "error": str(error) or type(error).__name__}
            raise
        finally:
            if trainer is not None:
                trainer.close()
                ending |= {"step": trainer.step, "best_bpb": trainer.best_bpb}
            if world.is_rank0:
                folder.write(**ending, ended=run_dir.now())
            # torchrun ends all processes when one fails, but rank 0 still has to report the error.
            if world.size == 1:
                stop.forget()
    return code


def _check_start(recipe: Recipe) -> None:
    start = recipe.train.start
    model, tokenizer = load(start)
    there, here = model.config.to_dict(), recipe.model.with_(vocab_size=tokenizer.vocab_size).to_dict()
    differing = [
        f"{name} is {there.get(name)!r} there, {here.get(name)!r} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
    if differing:
        raise ValueError(f"train.start {start} holds another model than the recipe: {'; '.join(differing)}")
    if not recipe.tokenizer.path or Tokenizer.load(recipe.tokenizer.path).fingerprint != tokenizer.fingerprint:
        raise ValueError(f"train.start {start} was trained with a tokenizer of its own: --tokenizer.path {start}")


def refuse_changes(folder: RunFolder, recipe: Recipe, here: DataFingerprint) -> None:
    """Raises ValueError if a run has another recipe or other data."""
    before = Recipe.from_dict(folder.recipe(), str(folder.path))
    # Threads, processes and the tokenizer's location are not part of a recipe; the tokenizer's content is.
    ignoring = ["train.threads", "train.parallel", "train.replicas"]
    if _is_same_tokenizer(folder.path / FILE_NAME, recipe.tokenizer.path):
        ignoring.append("tokenizer.path")
    if changes := before.changes(recipe, ignoring):
        raise ValueError(f"{folder.path} is a run of another recipe, so it is not resumed: {'; '.join(changes)}")
    # The data of a run from before they were recorded are compared with those of its checkpoint, by the loader.
    if (data := folder.data()) and (changes := data.changes(here)):
        raise ValueError(
            f"{folder.path} was trained on other data, so it is not resumed: {'; '.join(changes)}. Restore them, or "
            "start again in a new folder"
        )


def _is_same_tokenizer(mine: Path, other: str) -> bool:
    if not other:
        return False
    # A run without a tokenizer was killed before its first step.
    if not mine.is_file():
        return True
    return Tokenizer.load(mine).fingerprint == Tokenizer.load(other).fingerprint


def train_tokenizer(corpus: Corpus, vocab_size: int, max_chars: int = 0, *, is_shown: bool = True) -> Tokenizer:
    """Trains a tokenizer on the training documents of a corpus, with a progress bar."""
    with waiting(f"tokenizer: {vocab_size:,} tokens from {corpus.name}", is_shown=is_shown) as describe:

        def texts() -> Iterator[str]:
            seen = 0
            for text in corpus.texts("train"):
                yield text
                seen += len(text)
                describe(f"{seen / 1e6:,.0f}M characters read")
                if 0 < max_chars <= seen:
                    return

        return Tokenizer.train(texts(), vocab_size)


def _tokenizer(recipe: Recipe, folder: RunFolder, world: World, corpus: Corpus) -> Tokenizer:
    """Loads the tokenizer in the run's folder, which rank 0 writes."""

    def make() -> None:
        if (folder.path / FILE_NAME).exists():
            return
        if recipe.tokenizer.path:
            Tokenizer.load(recipe.tokenizer.path).save(folder.path)
        else:
            train_tokenizer(corpus, recipe.model.vocab_size, recipe.tokenizer.train_chars).save(folder.path)

    world.on_rank0(make)
    return Tokenizer.load(folder.path)
