"""The options of every command, read from its source text, so that help and completion need not import torch."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
WORDS = {"int": "INT", "float": "FLOAT", "str": "STR", "Path": "PATH"}
# The widest text that is still easy to read.
MAX_COLUMNS = 100


@dataclass(frozen=True)
class Option:
    """An option or a positional argument of a command.

    Args:
        name: the name as typed, without dashes.
        choices: the allowed values, if they are limited.
        default: the default as text; None if there is none.
        section: the section of the recipe; empty for the command's own options.
        negative: the name that switches a flag off; empty if there is none.
    """

    name: str
    help: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    default: str | None = None
    section: str = ""
    is_flag: bool = False
    is_positional: bool = False
    negative: str = ""

    @property
    def flags(self) -> list[str]:
        return [f"--{name}" for name in (self.name, self.negative) if name]


IMPORT = Option(
    "import",
    "Import a module with generators or mixers of your own first. Repeat the option for several.",
    metavar="MODULE",
)


@dataclass(frozen=True)
class Usage:
    """The description and the options of a command."""

    description: str
    options: tuple[Option, ...]


@cache
def usage(module: str, function: str) -> Usage:
    """The usage of a command, parsed from the source of its function."""
    from temper_lab.cli import BUILDERS

    found = _usage(module, function)
    return replace(found, options=(*found.options, IMPORT)) if module in BUILDERS else found


def _usage(module: str, function: str) -> Usage:
    tree = _tree(module)
    body = _definition(tree, function)
    prepare = _definition(tree, "prepare")
    inner = prepare and _definition(prepare, "command")
    if inner is not None:
        # The module has its documentation as a constant, and the fields of a recipe as options.
        help_text = _constant(tree, "HELP").replace("{names}", ", ".join(recipe_names()))
        description, about = _documented(help_text)
        return Usage(description, (*_parameters(module, inner, about), *recipe_options()))
    assert isinstance(body, ast.FunctionDef), f"{module} has no function {function}"
    description, about = _documented(ast.get_docstring(body) or "")
    return Usage(description, tuple(_parameters(module, body, about)))


@cache
def recipe_options() -> tuple[Option, ...]:
    """Every field of a recipe as an option."""
    found: list[Option] = []
    _, recipe = _class("temper_lab.recipe", "Recipe")
    for section in _fields(recipe):
        assert isinstance(section.target, ast.Name)
        module, kind = _class("temper_lab.recipe", ast.unparse(section.annotation))
        about = _documented(ast.get_docstring(kind) or "")[1]
        for entry in _fields(kind):
            assert isinstance(entry.target, ast.Name)
            option = _option(module, entry.target.id, entry.annotation, entry.value, about)
            prefix = section.target.id
            negative = f"{prefix}.{option.negative}" if option.negative else ""
            found.append(replace(option, name=f"{prefix}.{option.name}", section=prefix, negative=negative))
    return tuple(found)


def recipe_names() -> list[str]:
    """The built-in recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def show(name: str, found: Usage, recipe: str | None = None) -> str:
    """The help text of a command, with a recipe's values as defaults."""
    values = _recipe_values(recipe) if recipe else {}
    columns = min(MAX_COLUMNS, shutil.get_terminal_size().columns)

    def layout(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=columns)

    positional = "".join(f" [{option.metavar}]" for option in found.options if option.is_positional)
    parser = argparse.ArgumentParser(
        prog=f"temper {name}",
        usage=f"temper {name}{positional} [OPTIONS]",
        description=_filled(found.description, columns),
        formatter_class=layout,
    )
    groups: dict[str, Any] = {"": parser}
    for option in found.options:
        if option.section not in groups:
            title = f"[{option.section}] of the recipe{f' {recipe}' if recipe else ''}"
            groups[option.section] = parser.add_argument_group(title)
        default = values.get(option.name, option.default)
        text = option.help + (f" (default: {default})" if default not in (None, "", '""', "False") else "")
        words = [option.name] if option.is_positional else option.flags
        extra = {"action": "store_true"} if option.is_flag else {"metavar": option.metavar}
        groups[option.section].add_argument(*words, help=text.replace("%", "%%"), **extra)
    return parser.format_help()


def _recipe_values(name: str) -> dict[str, str]:
    """The values of a recipe's file and of its bases, as text."""
    path = RECIPES / f"{name}.toml" if name in recipe_names() else Path(name)
    values: dict[str, str] = {}
    try:
        # Reading a pipe or a device could block.
        content = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if isinstance(base := content.pop("base", None), str):
            values = _recipe_values(base if base in recipe_names() else str(path.parent / base))
    # Help is printed even if the recipe cannot be read; training reports the error.
    except (OSError, ValueError, RecursionError):
        return values
    for section, part in content.items():
        for key, value in part.items() if isinstance(part, Mapping) else ():
            values[f"{section}.{key.replace('_', '-')}"] = _text(value)
    return values


def _filled(text: str, columns: int) -> str:
    """Paragraphs and examples, wrapped to a width."""
    parts = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith("    "):
            parts.append("\n".join(_folded(line, columns) for line in block.splitlines()))
        else:
            parts.append(textwrap.fill(" ".join(block.split()), columns))
    return "\n\n".join(parts)


def _folded(line: str, columns: int) -> str:
    """A command, folded to a width with backslashes."""
    if len(line) <= columns:
        return line
    lines = [""]
    for part in re.split(r" (?=--)", line):
        if lines[-1] and len(lines[-1]) + len(part) + 3 > columns:
            lines[-1] += " \\"
            lines.append("       ")
        lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)


def _parameters(module: str, function: ast.FunctionDef, about: Mapping[str, str]) -> Iterator[Option]:
    arguments = [*function.args.posonlyargs, *function.args.args]
    defaults: list[ast.expr | None] = [None] * (len(arguments) - len(function.args.defaults))
    for argument, default in zip(arguments, [*defaults, *function.args.defaults], strict=True):
        assert argument.annotation is not None
        # The argument for the recipe itself; its fields are the options.
        if argument.arg != "settings":
            yield _option(module, argument.arg, argument.annotation, default, about)


def _option(module: str, name: str, annotation: ast.expr, default: ast.expr | None, about: Mapping[str, str]) -> Option:
    written = name.replace("_", "-")
    marks: Sequence[ast.expr] = ()
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation, *marks = annotation.slice.elts
    said = {
        keyword.arg: ast.literal_eval(keyword.value)
        for mark in marks
        if isinstance(mark, ast.Call)
        for keyword in mark.keywords
    }
    text = ast.unparse(annotation).removesuffix(" | None")
    if text.startswith("tyro.conf.UseAppendAction["):
        text = text[len("tyro.conf.UseAppendAction[") : -1]
    written = said.get("name", written)
    kinds = {ast.unparse(mark) for mark in marks}
    value = _value(module, default)
    is_flag = text == "bool"
    choices: tuple[str, ...] = ()
    if text.startswith("Literal["):
        choices = tuple(map(str, ast.literal_eval(f"({text[8:-1]},)")))
    inner = re.match(r"(?:list|tuple)\[(\w+)", text)
    metavar = said.get("metavar") or WORDS.get(text) or (f"{{{','.join(choices)}}}" if choices else "JSON")
    if inner:
        metavar = f"[{said.get('metavar') or WORDS.get(inner[1], 'STR')} ...]"
    is_paired = is_flag and "tyro.conf.FlagCreatePairsOff" not in kinds
    is_positional = "tyro.conf.Positional" in kinds
    return Option(
        name=written,
        help=about.get(name, ""),
        metavar=written.upper() if is_positional and not choices else metavar,
        choices=choices,
        default=value,
        is_flag=is_flag,
        is_positional=is_positional,
        negative=f"no-{written}" if is_paired else "",
    )


def _value(module: str, default: ast.expr | None) -> str | None:
    """A default as text, if it can be told without running code."""
    if default is None:
        return None
    if isinstance(default, ast.Call) and len(default.args) == 1:
        return _value(module, default.args[0])
    if isinstance(default, ast.Attribute) and isinstance(default.value, ast.Name):
        where, kind = _class(module, default.value.id)
        for entry in _fields(kind):
            if isinstance(entry.target, ast.Name) and entry.target.id == default.attr:
                return _value(where, entry.value)
    try:
        return _text(ast.literal_eval(default))
    except ValueError:
        return None


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    if isinstance(value, Mapping):
        return json.dumps(value)
    if value is None:
        return ""
    return json.dumps(value) if value == "" else str(value)


def _documented(text: str) -> tuple[str, dict[str, str]]:
    """The description in a docstring, and its text for each argument."""
    description, _, rest = cleandoc(text).partition("\nArgs:\n")
    about: dict[str, str] = {}
    names: list[str] = []
    for line in textwrap.dedent(rest).splitlines():
        if head := re.match(r"([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)", line):
            names = head[1].split(", ")
            about |= dict.fromkeys(names, head[2])
        else:
            about |= {name: f"{about[name]} {line.strip()}" for name in names}
    return description.strip(), about


@cache
def _tree(module: str) -> ast.Module:
    parts = module.split(".")
    # Found from the package's folder, without importing anything.
    base = ROOT.parent.joinpath(*parts)
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _definition(tree: ast.AST, name: str) -> ast.FunctionDef | None:
    found = (node for node in ast.iter_child_nodes(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    return next(found, None)


def _class(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """The definition of the class that a name refers to in a module, and the module that defines it."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return _class(node.module, name)
    raise LookupError(f"{module} has no class {name}")


def _fields(kind: ast.ClassDef) -> list[ast.AnnAssign]:
    return [node for node in kind.body if isinstance(node, ast.AnnAssign)]


def _constant(tree: ast.Module, name: str) -> str:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return str(ast.literal_eval(node.value))
    raise LookupError(f"there is no constant {name}")
