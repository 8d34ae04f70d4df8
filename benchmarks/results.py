"""Writes a study, finished or not, into docs/results: figures (PNG), tables (CSV) and a small copy of results.json.

    python benchmarks/results.py runs/study
    python benchmarks/results.py runs/lr --prefix lr-

Everything is computed from the study's results.json, so `temper report docs/results/NAME.json` makes the same again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from temper_lab.io import atomic_write
from temper_lab.report.plots_mpl import draw_to
from temper_lab.report.table import as_csv
from temper_lab.report.write import compute
from temper_lab.study.results import Results

TABLES = ("main", "significance", "claims", "claim-tests", "cost")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("study", type=Path, help="the folder of a study, or a results.json")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "results")
    parser.add_argument("--prefix", default="", help="of the names of all files, such as lr-")
    arguments = parser.parse_args()
    results = Results.read(arguments.study)
    small, out = results.small(), arguments.out
    # What is drawn is what the copy holds.
    content = compute(small)
    out.mkdir(parents=True, exist_ok=True)
    written = [small.write(out, f"{arguments.prefix}{results.study}.json")]
    for name in TABLES:
        if name in content.tables and content.tables[name].rows:
            written.append(out / f"{arguments.prefix}{name}.csv")
            atomic_write(written[-1], as_csv(content.tables[name]))
    for chart in content.charts.values():
        written.append(out / f"{arguments.prefix}{chart.name}.png")
        draw_to(chart, written[-1])
    finished = sum(run.is_finished for run in results.runs)
    print("\n".join(content.lines))
    print(f"{finished} of {len(results.runs)} runs finished; {len(written)} files in {out}:")
    print(" ".join(sorted(path.name for path in written)))
    if stale := sorted(path.name for path in out.iterdir() if path not in written):
        print(f"not of this study: {' '.join(stale)}")


if __name__ == "__main__":
    main()
