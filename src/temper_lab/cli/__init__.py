"""The `temper` command."""

from __future__ import annotations

import collections.abc
import difflib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tyro

from temper_lab.console import visible

EXTRA = "the `temper` command needs the lab: pip install 'temper-hc[lab]'"

# Name, description, and the module with a function of this name. Only the module of the command that runs is imported.
COMMANDS = {
    "train": ("pretrain a model from a recipe, or resume a run", "temper_lab.cli.train"),
    "compare": ("train methods side by side, or continue a study", "temper_lab.cli.compare"),
    "sample": ("generate text from a prompt", "temper_lab.cli.trained"),
    "inspect": ("show how every token's streams are read, mixed, written", "temper_lab.cli.pages"),
    "eval bpb": ("measure a model's bits per byte on a corpus", "temper_lab.cli.evaluate"),
    "compress": ("give a trained model fewer routing parameters", "temper_lab.cli.trained"),
    "export": ("write a model for transformers", "temper_lab.cli.trained"),
    "upcycle": ("give a pretrained model several streams", "temper_lab.cli.trained"),
    "eval core": ("measure a model's accuracy on the 22 tasks of CORE", "temper_lab.cli.evaluate"),
    "report": ("turn a study into a page, figures and tables", "temper_lab.cli.pages"),
    "runs": ("list runs with their status and best bpb", "temper_lab.cli.runs"),
    "data info": ("count a corpus, and measure how mixed its batches are", "temper_lab.cli.data"),
    "data download": ("download ClimbMix or the books", "temper_lab.cli.data"),
    "data check": ("verify a copy of the books by SHA-256", "temper_lab.cli.data"),
    "tokenizer train": ("train a tokenizer on a corpus", "temper_lab.cli.data"),
    "tokenizer info": ("describe a tokenizer and its bytes per token", "temper_lab.cli.data"),
    "theory": ("compare the theory's bounds with measurements", "temper_lab.cli.evaluate"),
    "bench": ("measure what every method costs in time and memory", "temper_lab.cli.bench"),
    "gpu-check": ("check the GPU kernels on this GPU, then time them", "temper_lab.cli.gpu_check"),
    "params": ("count the parameters that every method adds", "temper_lab.cli.params"),
    "completion": ("print the completion script of bash, zsh or fish", "temper_lab.cli.completion"),
}

# The modules whose commands build models, and take `--import`.
BUILDERS = {
    f"temper_lab.cli.{name}" for name in ("train", "compare", "trained", "evaluate", "pages", "bench", "params")
}

EXAMPLES = """\
a first minute:

  temper train --recipe cpu-smoke --out runs/smoke
  temper runs runs
  temper sample --model runs/smoke --prompt "The people"
  temper eval bpb --model runs/smoke --corpus sotu

`temper help COMMAND` explains each. --debug, anywhere, shows where an error comes from.
Exit codes: 0 done, 1 failed, 2 not understood, 130 interrupted by Ctrl-C (128 + the number of any other signal)."""

# Our own messages are shorter; those of libraries may come with pages of context.
MAX_MESSAGE = 2_000

# Limits of integers on the command line.
MAX_WHOLE, MAX_DIGITS = 1 << 63, 40

# Options by their former names.
RENAMED = {"--data.shares": "--data.num-shards", "--train.rows": "--train.device-batch-size"}


class UsageError(ValueError):
    """An option that is missing, or that there is not: exit code 2, as from the option parser."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. An error goes to stderr in one line, and the exit code is then not zero."""
    # Streams may be closed from the start: no file that is opened later may take the place of one.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open as long as the process
    code = _run(list(sys.argv[1:] if arguments is None else arguments))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            # What is left in there would fail once more at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            # A reader (head, less) may close the pipe; a full disk is another matter.
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                print(f"error: the output could not be written: {error.strerror}", file=sys.stderr)
                code = code or 1
    return code


def _run(words: list[str]) -> int:
    is_debugged = "--debug" in words
    try:
        return _command([word for word in words if word != "--debug"])
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BaseException as error:
        # The option parser's SystemExit gets past this; a panic of a library in Rust, which is no Exception, does not.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if is_debugged:
            traceback.print_exc()
        rank = os.environ.get("RANK", "0")
        print(f"error{'' if rank == '0' else f' (process {rank})'}: {_message(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _command(words: list[str]) -> int:
    if words in (["--version"], ["-V"]):
        print(f"temper {version()}")
        return 0
    # Looked up without importing them, which would slow --help down.
    if missing := [name for name in ("rich", "tyro") if importlib.util.find_spec(name) is None]:
        print(f"error: {EXTRA} (no module {missing[0]!r} here)", file=sys.stderr)
        return 2
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    name = next((" ".join(words[:count]) for count in (1, 2) if " ".join(words[:count]) in COMMANDS), None)
    if name is None:
        return _guide(words)
    words = words[len(name.split()) :]
    if {"--help", "-h"} & set(words):
        from temper_lab.cli.options import show, usage

        print(show(name, usage(*function_of(name)), value_of(words, "recipe")), end="")
        return 0
    return _call(name, words)


def version() -> str:
    """The package's version, found without importing the package and with it torch."""
    text = (Path(__file__).parents[2] / "temper" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def function_of(name: str) -> tuple[str, str]:
    """The module of a command, and the name of its function there."""
    return COMMANDS[name][1], name.replace(" ", "_").replace("-", "_")


def value_of(words: Sequence[str], option: str) -> str | None:
    """The value that the raw arguments give for an option, before they are parsed."""
    found = None
    for index, word in enumerate(words):
        if word == f"--{option}" and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith(f"--{option}="):
            found = word.partition("=")[2]
    return found


def _message(error: BaseException) -> str:
    """The message of an error in one line."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        text = ": ".join([*names, error.strerror])
    # Torch appends a C++ stack trace.
    text = text.split("\nException raised from")[0].split("\nC++ CapturedTraceback")[0]
    text = " ".join(text.split())
    # A file name need not be valid UTF-8, nor harmless to a terminal.
    text = visible(text.encode(errors="replace").decode())
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"
    if isinstance(error, RuntimeError) and re.search(r"gloo.*Connection (closed|reset) by peer", text):
        return "another process of this run was lost; torchrun --max-restarts resumes a run from its newest checkpoint"
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "out of memory" in text:
        return f"not enough memory for this{f' ({text})' if text else ''}"
    if "Storage size calculation overflowed" in text:
        return f"a tensor of this size cannot exist ({text})"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply"
    if isinstance(error, ValueError | TypeError | OSError | FloatingPointError | ModuleNotFoundError):
        return text or type(error).__name__
    return f"{type(error).__name__}{f': {text}' if text else ''} (unexpected; --debug shows where it comes from)"


def _call(name: str, words: list[str]) -> int:
    import tyro

    _refuse_old_names(words)
    where, title = function_of(name)
    with ExitStack() as stack:
        if where in BUILDERS:
            from temper_lab import plugins

            words, modules = _take_all(words, "import")
            stack.enter_context(plugins.imported(modules))
        module = importlib.import_module(where)
        function = getattr(module, title)
        # Where options depend on the arguments, the command's module has `prepare`.
        if prepare := getattr(module, "prepare", None):
            function = prepare(words)
        return tyro.cli(function, prog=f"temper {name}", args=words, registry=registry()) or 0


def registry() -> tyro.constructors.ConstructorRegistry:
    """The tyro rules for tables (`--model.router '{"rank": 8}'`) and for integers."""
    import tyro

    known = tyro.constructors.ConstructorRegistry()

    @known.primitive_rule
    def table(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type_origin is not collections.abc.Mapping:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda words: _table(words[0]),
            is_instance=lambda value: isinstance(value, Mapping),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    @known.primitive_rule
    def whole(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if info.type is not int:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda words: _whole(words[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )

    return known


def _table(text: str) -> dict[str, Any]:
    from temper_lab.io import brief, parse_json

    value = parse_json(text, brief(text))
    if not isinstance(value, dict):
        raise ValueError(f"{brief(text)} is not a table; expected JSON such as '{{\"rank\": 8}}'")
    return value


def _whole(text: str) -> int:
    # A longer number fits neither a tensor nor a float, and every use of it would fail with a different message.
    value = int(text) if len(text) <= MAX_DIGITS else MAX_WHOLE
    if not -MAX_WHOLE < value < MAX_WHOLE:
        raise ValueError(f"{text[:40]} has more than 63 bits")
    return value


def _refuse_old_names(words: Sequence[str]) -> None:
    """Raises UsageError for an option that has another name now."""
    for word in words:
        given = word.partition("=")[0].replace("_", "-")
        if given in RENAMED:
            raise UsageError(f"{given} is now called {RENAMED[given]}")


def _take_all(words: list[str], option: str) -> tuple[list[str], list[str]]:
    """The arguments without those of an option that may be repeated, and its values."""
    rest: list[str] = []
    values: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word == f"--{option}":
            values.append(next(waiting, ""))
        elif word.startswith(f"--{option}="):
            values.append(word.partition("=")[2])
        else:
            rest.append(word)
    return rest, values


def _guide(words: list[str]) -> int:
    """Prints the list of commands, to stderr and with exit code 2 if an unknown command was given."""
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
