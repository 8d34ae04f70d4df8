"""One run of a study as a process of its own: `python -m temper_lab.study.worker FOLDER KEY THREADS [MODULE ..]`.

Its standard input is a pipe without data. The pipe is closed when the study wants the run to stop, and when the study
has ended for any reason.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path


def main(folder: Path, key: str, threads: int, modules: Sequence[str] = ()) -> int:
    """Trains or continues the run, after importing some modules; returns the exit code."""
    # Runs before slow imports.
    threading.Thread(target=_stop_when_closed, daemon=True).start()

    from temper_lab import plugins
    from temper_lab.study.grid import run_folder
    from temper_lab.study.spec import Study
    from temper_lab.train.trainer import train

    try:
        with plugins.imported(modules):
            study = Study.read(folder)
            cell = next((cell for cell in study.cells if cell.key == key), None) if study else None
            if study is None or cell is None:
                raise ValueError(f"{folder} is no study with a run {key}")
            run = run_folder(folder, cell)
            recipe = study.recipe_of(cell, folder, threads)
            return train(recipe, run.path, resume=run.is_run, recipe_name=study.name, data=study.data)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _stop_when_closed() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
