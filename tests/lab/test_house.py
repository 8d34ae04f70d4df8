"""The layout of the lab: few source files run in a training, and their names are different."""

import json
import subprocess
import sys
from pathlib import Path

import temper_lab

LAB = Path(temper_lab.__file__).parent
MAX_FILES = 45

# Functions count, and not the bodies and comprehensions of modules and classes, which run when they are imported.
TRACE = """
import inspect, json, sys, threading
from pathlib import Path

# First, because a profile makes them slow.
import numpy, pyarrow.parquet, tokenizers, torch._dynamo, tyro

files = set()

def watch(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.endswith(("comp>", "expr>")):
        files.add(code.co_filename)

threading.setprofile(watch)
sys.setprofile(watch)
from temper_lab.cli import main
code = main(sys.argv[2:])
sys.setprofile(None)
source = Path(sys.argv[1])
found = sorted(str(Path(name).relative_to(source)) for name in files if Path(name).is_relative_to(source))
print(json.dumps({"code": code, "files": found}))
"""


def test_a_training_of_two_steps_runs_through_few_files(tiny, tmp_path):
    words = ["train", "--recipe", str(tiny), "--out", str(tmp_path / "run"), "--train.steps", "2"]
    done = subprocess.run(
        [sys.executable, "-c", TRACE, str(LAB.parent), *words], capture_output=True, text=True, timeout=300
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0, done.stderr
    # Both packages, and the thread that loads data.
    assert {"temper/router.py", "temper_lab/train/trainer.py", "temper_lab/data/reader.py"} <= set(found["files"])
    assert len(found["files"]) <= MAX_FILES, found["files"]


def test_a_module_name_occurs_once():
    names = [path.stem for path in LAB.rglob("*.py") if path.stem != "__init__"]
    assert {name for name in names if names.count(name) > 1} == set()
