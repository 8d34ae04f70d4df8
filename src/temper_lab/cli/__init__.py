"""The `temper` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

EXTRA = "the `temper` command needs the lab: pip install 'temper[lab]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; what went wrong goes to stderr in one line, with a non-zero exit code."""
    try:
        import rich  # noqa: F401
        import tyro
    except ModuleNotFoundError as missing:
        print(f"error: {EXTRA} (no module {missing.name!r} here)", file=sys.stderr)
        return 2
    from temper_lab.cli.params import params

    try:
        tyro.extras.subcommand_cli_from_dict(
            {"params": params},
            prog="temper",
            description="Hyper-connections with tensorized routing: count, compare and study them.",
            args=arguments,
        )
    except BrokenPipeError:
        # Whoever was reading (head, less) has had enough.
        sys.stderr.close()
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0
