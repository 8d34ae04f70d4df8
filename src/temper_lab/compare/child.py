"""One run of a study as a process of its own: `python -m temper_lab.compare.child FOLDER KEY THREADS`.

Its standard input is a pipe that nobody writes to. It is closed when the study wants the run to stop, and when the
study is gone, however it went.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path


def main(folder: Path, key: str, threads: int) -> int:
    """Trains the run, or continues it; the exit code."""
    # Before anything that takes time is imported.
    threading.Thread(target=_stop_when_closed, daemon=True).start()

    from temper_lab.compare.study import Study, run_folder
    from temper_lab.train import train

    try:
        study = Study.read(folder)
        cell = next((cell for cell in study.cells if cell.key == key), None) if study else None
        if study is None or cell is None:
            raise ValueError(f"{folder} is no study with a run {key}")
        run = run_folder(folder, cell)
        recipe = study.recipe_of(cell, folder, threads)
        return train(recipe, run.path, resume=run.is_run, recipe_name=study.name)
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _stop_when_closed() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
