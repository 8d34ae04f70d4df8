"""`temper completion`: shell scripts that complete commands, options and their values."""

from __future__ import annotations

import shlex
from typing import Annotated, Literal

import tyro

from temper_lab.cli.options import Option, recipe_names, usage


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]) -> None:
    """Print a script that lets a shell complete commands, options and their values.

        eval "$(temper completion bash)"
        eval "$(temper completion zsh)"
        temper completion fish | source

    Put the line into ~/.bashrc, ~/.zshrc (after compinit) or fish's config.fish to keep it.

    Args:
        shell: The shell to print a script for.
    """
    print(script(shell))


def script(shell: str) -> str:
    """The script of a shell."""
    return _fish() if shell == "fish" else _bash(is_zsh=shell == "zsh")


def _commands() -> dict[str, tuple[Option, ...]]:
    from temper_lab.cli import COMMANDS, function_of

    return {name: usage(*function_of(name)).options for name in COMMANDS}


def _choices(option: Option) -> tuple[str, ...]:
    return tuple(recipe_names()) if option.name == "recipe" else option.choices


def _bash(is_zsh: bool) -> str:
    from temper_lab.cli import COMMANDS

    commands = _commands()
    groups: dict[str, list[str]] = {}
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        groups.setdefault(first, []).extend([second] if second else [])
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if is_zsh else []
    lines += [
        "_temper() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
        '    local command="${COMP_WORDS[1]}" words=""',
        "    COMPREPLY=()",
        "    if [ $COMP_CWORD -eq 1 ]; then",
        f"        words={shlex.quote(' '.join([*groups, 'help', '--help', '--version']))}",
        '        COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "        return",
        "    fi",
        '    case "$command" in',
    ]
    several = [name for name, members in groups.items() if members]
    lines += [
        f"        {'|'.join(several)})",
        "            if [ $COMP_CWORD -eq 2 ]; then",
        '                case "$command" in',
        *(f"                    {name}) words={shlex.quote(' '.join(groups[name]))} ;;" for name in several),
        "                esac",
        '                COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "                return",
        "            fi",
        '            command="$command ${COMP_WORDS[2]}" ;;',
        f"        help) words={shlex.quote(' '.join(groups))} ;;",
        "    esac",
        # The values of the option just typed take precedence over the list of options.
        '    case "$command $before" in',
    ]
    for name, options in commands.items():
        for option in options:
            if values := _choices(option):
                lines.append(
                    f"        {shlex.quote(f'{name} --{option.name}')}) words={shlex.quote(' '.join(values))} ;;"
                )
    lines += ["    esac", '    if [ -z "$words" ]; then', '        case "$command" in']
    for name, options in commands.items():
        flags = [flag for option in options if not option.is_positional for flag in option.flags]
        places = [value for option in options if option.is_positional for value in option.choices]
        lines.append(f"            {shlex.quote(name)}) words={shlex.quote(' '.join([*places, *flags, '--help']))} ;;")
    lines += [
        "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _temper temper",
    ]
    return "\n".join(lines)


def _fish() -> str:
    from temper_lab.cli import COMMANDS

    commands = _commands()
    seen: set[str] = set()
    lines = ["complete -c temper -n __fish_use_subcommand -l version -d 'print the version'"]
    for name, options in commands.items():
        first, _, second = name.partition(" ")
        text = shlex.quote(COMMANDS[name][0])
        if first not in seen:
            seen.add(first)
            about = text if not second else shlex.quote(f"{first} ...")
            lines.append(f"complete -c temper -f -n __fish_use_subcommand -a {first} -d {about}")
        when = f"__fish_seen_subcommand_from {first}"
        if second:
            others = " ".join(other.partition(" ")[2] for other in COMMANDS if other.startswith(f"{first} "))
            lines.append(
                f"complete -c temper -f -n '{when}; and not __fish_seen_subcommand_from {others}' -a {second} -d {text}"
            )
            when += f"; and __fish_seen_subcommand_from {second}"
        for option in options:
            values = " ".join(_choices(option))
            follows = f" -x -a {shlex.quote(values)}" if values else "" if option.is_flag else " -r"
            if option.is_positional:
                lines.append(f"complete -c temper -n '{when}'{follows.replace(' -x', ' -f').replace(' -r', '')}")
                continue
            about = shlex.quote(option.help.split(". ")[0].rstrip("."))
            lines += [f"complete -c temper -n '{when}' -l {flag[2:]}{follows} -d {about}" for flag in option.flags]
    return "\n".join(lines)
