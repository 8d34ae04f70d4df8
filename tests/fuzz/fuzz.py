"""A fuzzer of every file that the lab reads and every option of every command.

A case is a command and some files in a folder that is made for it. It runs in a forked process with limits, and has to
end as everything ends here: with an exit code of ours, at most one line of an error, and nothing half-written.

    python tests/fuzz/fuzz.py --cases 10000 --seed 0
    python tests/fuzz/fuzz.py --seed 0 --only 1234        one case again, with all it said

A case is decided by the seed and its number. What fails is written into tests/fuzz/corpus, which the tests run.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "lab")]

from mutate import mutated, strange_value  # noqa: E402

CORPUS = HERE / "corpus"
CPU_SECONDS, WALL_SECONDS, MAX_MEMORY = 30, 240, 2 << 30
CODES = (0, 1, 2)
# Runs and studies, which keep what they have done when they fail; and what no command may touch.
GROWING = ("run/", "checkpoints/", "spread/", "done/", "study/")
THEIRS = ("out/others/theirs",)


@dataclass
class Case:
    """A command, with {root} for the folder that it works in, and what is changed there before.

    Args:
        trees: parts of the base that it needs; "a:b" is the part a, under the name b.
        files: contents by path.
        writes: where it may write; everything else has to stay as it is.
        variables: of the environment.
    """

    name: str
    words: list[str]
    trees: tuple[str, ...] = ()
    files: dict[str, bytes] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        files = {path: base64.b64encode(content).decode() for path, content in self.files.items()}
        return json.dumps({**vars(self), "files": files}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Case:
        content = json.loads(text)
        content["files"] = {path: base64.b64decode(data) for path, data in content["files"].items()}
        return cls(**{**content, "trees": tuple(content["trees"]), "writes": tuple(content["writes"])})


MODEL = ("sample", "--model", "{root}/model", "--max-tokens", "1")
BPB = ("--corpus", "{root}/corpus", "--batches", "1", "--rows", "1", "--context", "16")
CORE = ("eval", "core", "--model", "{root}/model", "--bundle", "{root}/bundle", "--max-per-task", "4")
AGAIN = ("compare", "--out", "{root}/done", "--no-cost", "--jobs", "1")
TRAIN = ("train", "--recipe", "{root}/tiny.toml")
DRY = (*TRAIN, "--dry-run")
COUNT = ("bench", "--count", "--streams", "2", "--methods", "temper-cp")
# Files that a variable names.
VARIABLES = {"tiles.json": {"TEMPER_TILES": "{root}/tiles.json"}}

# File, the trees that a command needs, the command, and where it writes.
TARGETS: list[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    ("model/config.json", ("model",), MODEL, ()),
    ("model/model.safetensors", ("model",), MODEL, ()),
    ("model/tokenizer.json", ("model",), MODEL, ()),
    ("model/tokenizer.json", ("model",), ("tokenizer", "info", "--path", "{root}/model", "--text", "the law"), ()),
    ("model/config.json", ("model",), ("export", "--model", "{root}/model", "--out", "{root}/out"), ("out",)),
    (
        "model/config.json",
        ("model",),
        ("upcycle", "--model", "{root}/model", "--streams", "4", "--preset", "temper-cp", "--out", "{root}/out"),
        ("out",),
    ),
    ("model/config.json", ("model", "corpus"), ("eval", "bpb", "--model", "{root}/model", *BPB), ()),
    ("run/run.json", ("run",), ("runs", "{root}"), ()),
    ("run/metrics.jsonl", ("run",), ("runs", "{root}", "--json"), ()),
    ("run/run.json", ("run", "corpus"), ("train", "--out", "{root}/run", "--resume"), ("run",)),
    ("run/metrics.jsonl", ("run", "corpus"), ("train", "--out", "{root}/run", "--resume"), ("run",)),
    *(
        (f"run/{name}", ("run", "corpus"), ("train", "--out", "{root}/run", "--resume"), ("run",))
        for name in ("tokenizer.json", "timing.jsonl", "samples.jsonl", "best/config.json")
    ),
    ("run/run.json", ("checkpoints",), ("sample", "--model", "{root}/checkpoints", "--max-tokens", "1"), ()),
    ("checkpoints/run.json", ("checkpoints",), ("sample", "--model", "{root}/checkpoints", "--max-tokens", "1"), ()),
    (
        "checkpoints/checkpoints/step-000002/manifest.json",
        ("checkpoints", "corpus"),
        ("train", "--out", "{root}/checkpoints", "--resume"),
        ("checkpoints",),
    ),
    (
        "checkpoints/checkpoints/step-000002/state.json",
        ("checkpoints", "corpus"),
        ("train", "--out", "{root}/checkpoints", "--resume"),
        ("checkpoints",),
    ),
    *(
        (
            f"checkpoints/checkpoints/step-000002/{name}.safetensors",
            ("checkpoints", "corpus"),
            ("train", "--out", "{root}/checkpoints", "--resume"),
            ("checkpoints",),
        )
        for name in ("model", "optimizer")
    ),
    *(
        (
            f"spread/checkpoints/step-000002/{name}",
            ("spread", "corpus"),
            ("train", "--out", "{root}/spread", "--resume"),
            ("spread",),
        )
        for name in ("shards.json", "shard-00000.safetensors", "manifest.json")
    ),
    (
        "spread/checkpoints/step-000002/shards.json",
        ("spread",),
        ("sample", "--model", "{root}/spread", "--max-tokens", "1"),
        (),
    ),
    ("study/study.json", ("study", "corpus"), ("compare", "--out", "{root}/study", "--dry-run"), ()),
    *((f"done/{name}", ("done",), AGAIN, ("done",)) for name in ("study.json", "results.json")),
    (
        "known.json",
        ("done", "known.json"),
        ("compare", "--out", "{root}/done", "--dry-run", "--known", "{root}/known.json"),
        (),
    ),
    *(
        (f"done/runs/residual-n1-s0/{name}", ("done",), AGAIN, ("done",))
        for name in ("run.json", "metrics.jsonl", "timing.jsonl", "core.json")
    ),
    (
        "done/runs/temper-cp-n2-s0/model/config.json",
        ("done",),
        ("report", "{root}/done", "--out", "{root}/out", "--json"),
        ("out",),
    ),
    ("study/results.json", ("study",), ("report", "{root}/study", "--out", "{root}/out"), ("out",)),
    ("tiny.toml", ("tiny.toml", "corpus"), DRY, ()),
    ("tiny.toml", ("tiny.toml", "corpus"), ("compare", *DRY[1:]), ()),
    (
        "claims.toml",
        ("claims.toml", "tiny.toml", "corpus"),
        ("compare", "--recipe", "{root}/claims.toml", *DRY[3:]),
        (),
    ),
    ("tiny.toml", ("claims.toml", "tiny.toml", "corpus"), ("compare", "--recipe", "{root}/claims.toml", *DRY[3:]), ()),
    ("tiny.toml", ("tiny.toml",), ("train", "--recipe", "{root}/tiny.toml", "--help"), ()),
    ("tiles.json", ("tiles.json",), COUNT, ()),
    ("corpus/00.txt", ("corpus",), ("data", "info", "--corpus", "{root}/corpus"), ()),
    ("lines/a.jsonl", ("lines",), ("data", "info", "--corpus", "{root}/lines"), ()),
    ("shards/a.parquet", ("shards",), ("data", "info", "--corpus", "{root}/shards"), ()),
    ("bundle/core.yaml", ("model", "bundle"), CORE, ()),
    ("bundle/eval_meta_data.csv", ("model", "bundle"), CORE, ()),
    ("bundle/eval_data/reading/squad.jsonl", ("model", "bundle"), CORE, ()),
    ("bundle.zip", ("model", "bundle.zip"), (*CORE[:5], "{root}/bundle.zip", *CORE[6:]), ()),
    ("llama/config.json", ("llama", "corpus"), ("eval", "bpb", "--model", "{root}/llama", *BPB), ()),
    ("llama/model.safetensors", ("llama", "corpus"), ("eval", "bpb", "--model", "{root}/llama", *BPB), ()),
    ("llama/tokenizer.json", ("llama", "corpus"), ("eval", "bpb", "--model", "{root}/llama", *BPB), ()),
    *(
        (f"llama/{name}", ("llama", "corpus"), ("eval", "bpb", "--model", "{root}/llama", *BPB), ())
        for name in ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "chat_template.json")
    ),
    *(
        (f"deepseek/{name}", ("deepseek", "corpus"), ("eval", "bpb", "--model", "{root}/deepseek", *BPB), ())
        for name in ("temper.json", "config.json", "temper.safetensors", "generation_config.json")
    ),
    (
        "llama/config.json",
        ("llama",),
        ("upcycle", "--model", "{root}/llama", "--streams", "2", "--out", "{root}/out"),
        ("out",),
    ),
    (
        "sharded/model.safetensors.index.json",
        ("sharded", "corpus"),
        ("eval", "bpb", "--model", "{root}/sharded", *BPB),
        (),
    ),
    ("upcycled/config.json", ("upcycled", "corpus"), ("eval", "bpb", "--model", "{root}/upcycled", *BPB), ()),
    ("exported/config.json", ("exported", "corpus"), ("eval", "bpb", "--model", "{root}/exported", *BPB), ()),
    ("exported/config.json", ("exported",), ("theory", "--model", "{root}/exported", "--text", "the law of peace"), ()),
    ("model/config.json", ("model",), ("inspect", "--run", "{root}/model", "--text", "law", "--json", "-"), ()),
    ("small/config.json", ("small",), ("inspect", "--run", "{root}/small", "--text", "law", "--json", "-"), ()),
    ("small/model.safetensors", ("small", "corpus"), ("eval", "bpb", "--model", "{root}/small", *BPB), ()),
    ("model/config.json", ("model",), ("theory", "--model", "{root}/model", "--text", "the law of peace"), ()),
]

# A command with options that make it quick, for strange values of all its other options.
COMMANDS: list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    (DRY, ("tiny.toml", "corpus"), ()),
    ((*DRY, "--gpu", "H100", "--gpus-per-node", "1"), ("tiny.toml", "corpus"), ()),
    (("compare", *DRY[1:]), ("tiny.toml", "corpus"), ()),
    (MODEL, ("model",), ()),
    (("inspect", "--run", "{root}/model", "--text", "the law", "--out", "{root}/out.html"), ("model",), ("out.html",)),
    (("eval", "bpb", "--model", "{root}/model", *BPB), ("model", "corpus"), ()),
    (("export", "--model", "{root}/model", "--out", "{root}/out"), ("model",), ("out",)),
    # Over something that is there.
    (("export", "--model", "{root}/model", "--out", "{root}/out"), ("model", "exported:out"), ("out",)),
    (
        ("upcycle", "--model", "{root}/model", "--streams", "4", "--preset", "temper-cp", "--out", "{root}/out"),
        ("model",),
        ("out",),
    ),
    (
        ("compress", "--model", "{root}/model", "--out", "{root}/out", "--rank", "2", *BPB),
        ("model", "corpus"),
        ("out",),
    ),
    (CORE, ("model", "bundle"), ()),
    (("report", "{root}/study", "--out", "{root}/out"), ("study",), ("out",)),
    (("runs", "{root}"), ("run",), ()),
    (("data", "info", "--corpus", "{root}/corpus"), ("corpus",), ()),
    (
        ("data", "download", "--shards", "1", "--folder", "{root}/out", "--source", "{root}/shards"),
        ("shards",),
        ("out",),
    ),
    (
        ("tokenizer", "train", "--out", "{root}/out", "--corpus", "{root}/corpus", "--vocab-size", "300"),
        ("corpus",),
        ("out",),
    ),
    (("tokenizer", "info", "--path", "{root}/model"), ("model",), ()),
    (("theory", "--model", "{root}/model", "--text", "the law of peace"), ("model",), ()),
    (("params", "--streams", "2"), (), ()),
    (("params", "--streams", "2", "--json"), (), ()),
    (COUNT, (), ()),
    (("compare", "--out", "{root}/done", "--no-cost", "--jobs", "1"), ("done", "known.json"), ("done",)),
    (("gpu-check", "--out", "{root}/out"), (), ("out",)),
    (("data", "check", "--folder", "{root}/corpus"), ("corpus",), ()),
    (("compare", "--out", "{root}/done", "--dry-run"), ("done",), ()),
    (("compare", *DRY[1:], "--vary", "optim.matrix_lr=0.1,0.2"), ("tiny.toml", "corpus", "done"), ()),
    (("completion", "bash"), (), ()),
]
# Of options that take neither numbers nor names, beside the values that any option gets.
VALUES = {
    "--vary": (
        "train.steps=1,2",
        "train.steps=" + ",".join(map(str, range(2_000))),
        "optim.matrix_lr=" + "0.1," * 30_000,
        "optim.matrix_lr=nan,inf,1e400",
        "model.depth=1,1e9," + "9" * 400,
        "train.steps=[[1]]",
        "train.steps=" + "[" * 5000,
        "model.depth=",
        "=1",
        "train.prompts=[",
        "data.corpus=/etc",
        "model.preset=mhc",
        "train.start=/etc/passwd",
        "model.softcap=\x1b[2J,1",
    ),
    "--known": ("{root}/done/results.json", "{root}/done", "{root}/tiny.toml", "{root}"),
    "--import": ("os.path", "nothing.there", "..", "a b", "sys;x"),
    "--methods": ("temper-cp:rank=" + "9" * 400, "mhc:x=[", "temper-cp:rank=1e9", "mhc," * 3000, "temper-tt:rank=0x0"),
    "--seeds": ("1 " * 10, "0"),
    "--sites": ("[0]", "0,1,x"),
    "--text": ("\x1b]0;x\x07", "a" * 100_000),
    "--prompt": ("\x1b]0;x\x07", "<|bos|>" * 1000),
}
# Where something is to be written: new, there already, of another kind, impossible; all of it in a folder of its own.
PLACES = (
    "{root}/out",
    "{root}/out/",
    "{root}/out/new/deep/er",
    "{root}/out/file",
    "{root}/out/file/below",
    "{root}/out/others",
    "{root}/out/empty",
    "{root}/out/link",
    "{root}/out/nowhere",
    "{root}/out/link/x.svg",
    "{root}/out/x.png",
    "{root}/out/x.unknown",
    "{root}/out/" + "n" * 255,
    "{root}/out/" + "n" * 256,
    "{root}/out/" + "d/" * 3000,
    "{root}/out/\udcff",
    "{root}/out/\n[/]\x1b]0;x\x07",
    "out/..",
    "/proc/x",
    "/proc/self/mem",
)
PLACED = ("--out", "--plot", "--folder", "--json")
VALUES |= dict.fromkeys(PLACED, PLACES)
VALUES |= {
    "--source": (
        "{root}/shards",
        "{root}/tiny.toml",
        "{root}",
        "/dev/null",
        "x",
        "",
        "http://127.0.0.1:1",
        "file:///etc",
    ),
    "--download": (
        "nonsense",
        "file:///etc/passwd",
        "http://127.0.0.1:1/x",
        "http://[",
        "https://",
        "ftp://x/y",
        "x\ny",
    ),
    "--sha256": ("x", "0" * 64, "f" * 65, ""),
    "--recipe": ("{root}", "{root}/tiny.toml", "/dev/null", "/dev/zero", "/proc/self/mem", "../x", "\n", "n" * 5000),
}
# What runs a program that it names, starts a thread for each number, or compiles for a minute.
# With --no-count `bench` measures, which takes minutes.
SLOW = {"--launch", "--train.threads", "--train.compile", "--core", "--help", "--count", "--no-count"}


def case_of(base: Path, seed: int, number: int) -> Case:
    """The case of a number, always the same."""
    rng = random.Random(f"{seed}/{number}")
    kind = number % (len(TARGETS) + len(COMMANDS))
    if kind < len(TARGETS):
        path, trees, words, writes = TARGETS[kind]
        source = base / path
        # A file that need not be there.
        content = source.read_bytes() if source.is_file() else b"{}"
        files = {path: mutated(content, source.suffix, rng)}
        if "step-0" in path and rng.random() < 0.7:
            files |= _fitting_manifest(base, path, files[path])
        return Case(f"{seed}-{number}", list(words), trees, files, writes, VARIABLES.get(path, {}))
    words, trees, writes = COMMANDS[kind - len(TARGETS)]
    options = [option for option in options_of(words) if option not in SLOW]
    extra: list[str] = []
    files: dict[str, bytes] = {}
    for option in rng.sample(options, min(len(options), rng.choice((1, 1, 1, 2, 3)))):
        own = VALUES.get(option)
        count = rng.choice((1, 1, 1, 1, 0, 2))
        if option in PLACED:
            # Nothing else: what is written has to stay in the folder.
            extra += [option, rng.choice(PLACES)]
            files |= {
                "out/file": b"theirs",
                "out/others/theirs": b"theirs",
                "out/empty/": b"",
                "out/link": b"-> others",
            }
            files["out/nowhere"] = b"-> /nowhere/at/all"
            trees, writes = tuple(tree for tree in trees if not tree.endswith(":out")), (*writes, "out")
            continue
        extra += [
            option,
            *(rng.choice(own) if own and rng.random() < 0.7 else strange_value(rng) for _ in range(count)),
        ]
    return Case(f"{seed}-{number}", [*words, *extra], trees, files, writes)


def _fitting_manifest(base: Path, path: str, content: bytes) -> dict[str, bytes]:
    """A manifest whose checksum fits the changed file, so that the file itself is what is read."""
    import hashlib

    place = Path(path).parent / "manifest.json"
    if path.endswith("manifest.json"):
        return {}
    manifest = json.loads((base / place).read_text())
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"][Path(path).name] = entry
    return {str(place): json.dumps(manifest).encode()}


_known: dict[tuple[str, ...], list[str]] = {}


def options_of(words: tuple[str, ...]) -> list[str]:
    """The options that a command has, from its own help."""
    from temper_lab.cli import COMMANDS as KNOWN

    name = next(name.split() for name in KNOWN if words[: len(name.split())] == tuple(name.split()))
    key = tuple(name)
    if key not in _known:
        extra = ["--recipe", "cpu-smoke"] if name[0] in ("train", "compare") else []
        text = _forked(lambda: _main([*name, *extra, "--help"]))[1]
        _known[key] = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", text)))
    return _known[key]


def _main(words: list[str]) -> int:
    from temper_lab.cli import main

    return main(words)


def _forked(
    action: Callable[[], int], folder: Path | None = None, variables: dict[str, str] | None = None
) -> tuple[int, str, resource.struct_rusage, float]:
    """Exit code (minus the signal), what was said, what it took, and seconds of an action in a process of its own."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        start, pid = time.monotonic(), os.fork()
        if pid == 0:
            code = 70
            try:
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                # Whoever runs this may have put something else there.
                sys.stdout, sys.stderr = (os.fdopen(number, "w", errors="backslashreplace") for number in (1, 2))
                os.environ |= ENVIRONMENT | (variables or {})
                os.chdir(folder or "/")
                resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_AS, (4 * MAX_MEMORY, 4 * MAX_MEMORY))
                code = action()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    try:
                        stream.flush()
                    except Exception:
                        code = 71
                os._exit(code)
        status, usage = _awaited(pid, start)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), said.read(), usage, time.monotonic() - start


def _awaited(pid: int, start: float) -> tuple[int, resource.struct_rusage]:
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return status, usage
        if time.monotonic() - start > WALL_SECONDS:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.002)


def problems_of(case: Case, base: Path) -> tuple[list[str], str]:
    """What is wrong with how a case ended, and all that it said."""
    with tempfile.TemporaryDirectory(prefix="temper-fuzz-") as name:
        root = Path(name)
        for tree in case.trees:
            source, target = base / tree.partition(":")[0], root / tree.rpartition(":")[2]
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        for path, content in case.files.items():
            _put(root / path, content, is_folder=path.endswith("/"))
        # Recipes name the corpus of the base.
        recipes = ("tiny.toml", "run/run.json", "checkpoints/run.json", "spread/run.json", "study/study.json")
        for path in map(root.joinpath, recipes):
            if path.is_file() and str(path.relative_to(root)) not in case.files:
                path.write_bytes(path.read_bytes().replace(str(base).encode(), str(root).encode()))
        words = [word.replace("{root}", str(root)) for word in case.words]
        before = dict(_contents(root))
        variables = {name: value.replace("{root}", str(root)) for name, value in case.variables.items()}
        code, said, usage, seconds = _forked(lambda: _main(words), root, variables)
        after = dict(_contents(root))
    found = []
    if code not in CODES:
        found.append(f"hang: {CPU_SECONDS} s" if code in (-signal.SIGXCPU, -signal.SIGKILL) else f"exit code {code}")
    if "Traceback" in said or "(unexpected;" in said or "panicked" in said:
        found.append("traceback")
    errors = [line for line in said.splitlines() if line.startswith("error")]
    if code == 1 and (len(errors) != 1 or len(errors[0]) > 2_200) and case.words[0] != "compare":
        found.append(f"{len(errors)} lines of errors")
    if usage.ru_maxrss * 1024 > MAX_MEMORY:
        found.append(f"{usage.ru_maxrss / 2**20:.1f} GB")
    if seconds > WALL_SECONDS:
        found.append("hang")
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    allowed = tuple(case.writes)
    if foreign := [path for path in changed if not path.startswith(allowed or ("\0",))]:
        found.append(f"changed {foreign[:3]}")
    lost = [path for path in changed if path in before and (path in THEIRS or (code and not path.startswith(GROWING)))]
    if lost:
        found.append(f"lost {lost[:3]}")
    parts = [path for path in after if ".tmp-" in path or path.endswith(".part")]
    # A command writes all of its files or none.
    new = [path for path in changed if path in after]
    parts += [path for path in new if code and not path.startswith(GROWING) and not path.endswith(".partial")]
    parts += [path for path in new if not _is_whole(path, after[path])]
    if parts:
        found.append(f"half-written {sorted(set(parts))[:3]}")
    return found, f"$ temper {' '.join(case.words)[:2000]}\n{said[-3000:]}"


def _put(path: Path, content: bytes, *, is_folder: bool) -> None:
    """A file, a folder or a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if is_folder:
        path.mkdir()
    elif content.startswith(b"-> "):
        path.symlink_to(os.fsdecode(content[3:]))
    else:
        path.write_bytes(content)


def _is_whole(path: str, content: bytes) -> bool:
    """Whether a file that was written has its end."""
    try:
        match Path(path).suffix:
            case ".json":
                json.loads(content)
            case ".jsonl":
                return all(isinstance(json.loads(line), dict) for line in content.splitlines())
            case ".safetensors":
                length = int.from_bytes(content[:8], "little")
                header = json.loads(content[8 : 8 + length])
                ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
                return len(content) == 8 + length + max(ends, default=0)
            case ".html":
                return content.rstrip().endswith(b"</html>")
    except (ValueError, RecursionError):
        return False
    return True


def _contents(root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name != ".lock":
            yield str(path.relative_to(root)), path.read_bytes()


def make_base(folder: Path) -> Path:
    """Everything that cases are made from: a run, a model, a study, corpora, a bundle, a model of transformers."""

    def make() -> int:
        import base_files

        base_files.make(folder)
        return 0

    global CPU_SECONDS
    limit, CPU_SECONDS = CPU_SECONDS, 600
    # In a process of its own: threads that it started would be missing in every fork.
    code, said, _, _ = _forked(make)
    CPU_SECONDS = limit
    if code:
        raise RuntimeError(f"the base could not be made:\n{said}")
    return folder


def prepare() -> None:
    """Imports everything, once."""
    import importlib
    import pkgutil

    import temper_lab

    for module in pkgutil.walk_packages(temper_lab.__path__, "temper_lab."):
        # Integrations need the package that they integrate with.
        if not module.name.endswith("__main__") and ".interop." not in module.name:
            importlib.import_module(module.name)
    # Imported late by others, every time for a second.
    importlib.import_module("matplotlib.backends.backend_svg")
    importlib.import_module("transformers.models.llama.modeling_llama")


def warm(base: Path) -> None:
    """Imports what the commands import while they run, which would be most of the time of every case."""
    import importlib

    global _main
    run, wanted = _main, base / "modules"

    def noting(words: list[str]) -> int:
        before = set(sys.modules)
        try:
            return run(words)
        finally:
            with wanted.open("a") as file:
                file.writelines(f"{name}\n" for name in sys.modules.keys() - before)

    _main = noting
    kinds = {(words, trees) for _, trees, words, _ in TARGETS} | {(words, trees) for words, trees, _ in COMMANDS}
    for words, trees in sorted(kinds):
        problems_of(Case("warm", list(words), trees), base)
    _main = run
    for name in sorted(set(wanted.read_text().split())):
        # Some are made by others, under names that cannot be imported.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def checked(number: int, base: Path, seed: int) -> tuple[int, Case, list[str], str]:
    """A case by its number, and what is wrong with it."""
    case = case_of(base, seed, number)
    return number, case, *problems_of(case, base)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="cases at a time")
    parser.add_argument("--only", type=int, help="run one case and show what it says")
    parser.add_argument("--keep", action="store_true", help="write what fails into the corpus")
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    prepare()
    failed = 0
    numbers = range(arguments.first, arguments.first + arguments.cases)
    if arguments.only is not None:
        numbers = range(arguments.only, arguments.only + 1)
    with tempfile.TemporaryDirectory(prefix="temper-fuzz-base-") as name:
        base = make_base(Path(name))
        warm(base)
        check = partial(checked, base=base, seed=arguments.seed)
        # Forked, so that all share what is imported.
        with ProcessPoolExecutor(arguments.jobs, get_context("fork")) as pool:
            for count, (number, case, found, said) in enumerate(pool.map(check, numbers), 1):
                if arguments.only is not None:
                    print(said)
                if found:
                    failed += 1
                    print(f"case {number}: {'; '.join(found)}\n{said}\n", flush=True)
                    if arguments.keep:
                        (CORPUS / f"{case.name}.json").write_text(case.to_json())
                if count % 200 == 0:
                    print(f"{count:,} cases, {failed} failed", flush=True)
    print(f"seed {arguments.seed}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
