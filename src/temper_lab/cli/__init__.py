"""The `temper` command."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

EXTRA = "the `temper` command needs the lab: pip install 'temper-hc[lab]'"

# Name, what it does, and the module that has a function of its last word. Only the module that runs is imported.
COMMANDS = {
    "train": ("pretrain a model from a recipe, or resume a run", "temper_lab.cli.train"),
    "compare": ("train methods side by side, or continue a study", "temper_lab.cli.compare"),
    "sample": ("let a model continue a prompt", "temper_lab.cli.sample"),
    "inspect": ("see how every token's streams are read, mixed and written", "temper_lab.cli.inspect"),
    "eval bpb": ("bits per byte of a model on a corpus", "temper_lab.cli.eval"),
    "compress": ("give a trained model fewer routing parameters", "temper_lab.cli.compress"),
    "export": ("write a model for transformers", "temper_lab.cli.export"),
    "upcycle": ("give a pretrained model several streams", "temper_lab.cli.upcycle"),
    "eval core": ("accuracy of a model in the 22 tasks of CORE", "temper_lab.cli.core"),
    "report": ("make the page, figures and tables of a study", "temper_lab.cli.report"),
    "runs": ("list runs with their status and best bpb", "temper_lab.cli.runs"),
    "data info": ("what a corpus holds, and how mixed its batches are", "temper_lab.cli.data"),
    "data download": ("bring ClimbMix or the books into a folder", "temper_lab.cli.data"),
    "data check": ("compare a folder of the books with their SHA-256", "temper_lab.cli.data"),
    "tokenizer train": ("train a tokenizer on a corpus", "temper_lab.cli.tokenizer"),
    "tokenizer info": ("what a tokenizer holds, and its bytes per token", "temper_lab.cli.tokenizer"),
    "theory": ("ranks and bounds of a model beside what is measured", "temper_lab.cli.theory"),
    "bench": ("measure what every method costs in time and memory", "temper_lab.cli.bench"),
    "gpu-check": ("check the GPU kernels on this GPU, then time them", "temper_lab.cli.gpu_check"),
    "params": ("count the parameters that every method adds", "temper_lab.cli.params"),
}

EXAMPLES = """\
a first minute:

  temper train --recipe cpu-smoke --out runs/smoke
  temper runs runs
  temper sample --model runs/smoke --prompt "The people"
  temper eval bpb --model runs/smoke --corpus sotu

`temper COMMAND --help` explains each. --debug, anywhere, shows where an error comes from.
Exit codes: 0 done, 1 failed, 2 not understood, 130 interrupted by Ctrl-C (128 + the number of any other signal)."""

# Longer than any message of ours; others come with pages of context.
MAX_MESSAGE = 2_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; what went wrong goes to stderr in one line, with a non-zero exit code."""
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
    except ModuleNotFoundError as missing:
        print(f"error: {EXTRA} (no module {missing.name!r} here)", file=sys.stderr)
        return 2
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_debugged = "--debug" in words
    words = [word for word in words if word != "--debug"]
    name = next((" ".join(words[:count]) for count in (1, 2) if " ".join(words[:count]) in COMMANDS), None)
    if name is None:
        return _guide(words)
    try:
        return _call(name, words[len(name.split()) :])
    except BrokenPipeError:
        # Whoever was reading (head, less) has had enough.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    # Nothing gets past here but the exit of the option parser.
    except Exception as error:
        if is_debugged:
            traceback.print_exc()
        rank = os.environ.get("RANK", "0")
        print(f"error{'' if rank == '0' else f' (process {rank})'}: {_message(error)}", file=sys.stderr)
        return 1


def _message(error: Exception) -> str:
    """An error in one line for people."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        text = ": ".join([*names, error.strerror])
    # Torch appends the stack of its own language.
    text = text.split("\nException raised from")[0].split("\nC++ CapturedTraceback")[0]
    text = " ".join(text.split())
    # File names need not be text.
    text = text.encode(errors="replace").decode()
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        return f"not enough memory for this{f' ({text})' if text else ''}"
    if "Storage size calculation overflowed" in text:
        return f"a tensor of this size cannot exist ({text})"
    if isinstance(error, RecursionError):
        return "something here is nested too deeply to be read"
    if isinstance(error, ValueError | TypeError | OSError | FloatingPointError | ModuleNotFoundError):
        return text or type(error).__name__
    return f"{type(error).__name__}{f': {text}' if text else ''} (unexpected; --debug shows where it comes from)"


def _call(name: str, words: list[str]) -> int:
    import tyro

    module = importlib.import_module(COMMANDS[name][1])
    function, options = getattr(module, name.split()[-1].replace("-", "_")), {}
    # A command whose options depend on its arguments says so itself.
    if prepare := getattr(module, "prepare", None):
        function, options = prepare(words)
    return tyro.cli(function, prog=f"temper {name}", args=words, **options) or 0


def _guide(words: list[str]) -> int:
    """The list of commands; to stderr with an exit code of 2 if something else was asked for."""
    group = words[0] if words else ""
    wanted = [name for name in COMMANDS if name.startswith(f"{group} ")]
    is_asked = not words or (words[-1] in ("-h", "--help") and (len(words) == 1 or bool(wanted)))
    out = sys.stdout if is_asked and words else sys.stderr
    if not is_asked and not (wanted and len(words) == 1):
        given = " ".join(words[:2] if wanted else words[:1])
        near = difflib.get_close_matches(given, COMMANDS, n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
        print(f"error: unknown command `{given}`.{hint}\n", file=out)
    print(
        "usage: temper COMMAND [OPTIONS]\n\nHyper-connections with tensorized routing: count, train and study.\n",
        file=out,
    )
    for name in wanted or COMMANDS:
        print(f"  {name:<16} {COMMANDS[name][0]}", file=out)
    print(f"\n{EXAMPLES}", file=out)
    return 0 if out is sys.stdout else 2
