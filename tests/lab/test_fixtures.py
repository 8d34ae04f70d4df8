"""A run and a study that were written before the lab was rearranged: they load, resume and are reported."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from temper_lab.cli import main
from temper_lab.study.spec import Study
from temper_lab.train.model_dir import load

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(FIXTURES / "run", tmp_path / "run"))


def test_a_run_resumes_where_it_was(run, capsys):
    expected = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Its newest checkpoint is of step 3 of 6; the last lines of metrics are made again.
    assert main(["train", "--out", str(run), "--resume"]) == 0
    assert "resumed from" in capsys.readouterr().err
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [line["step"] for line in expected] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm"):
        # Other processors round differently, which three steps make larger.
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-3)
    assert main(["runs", str(run.parent)]) == 0


def test_the_models_of_a_study_load_and_it_is_reported(tmp_path, capsys):
    folder = shutil.copytree(FIXTURES / "study", tmp_path / "study")
    study = Study.read(folder)
    assert study is not None
    assert (study.recipe.train.device_batch_size, study.recipe.data.num_shards) == (2, 0)
    for path in (folder / "runs").iterdir():
        model, tokenizer = load(path)
        assert torch.isfinite(model(torch.tensor(tokenizer.encode_batch(["the people"], bos=True)))).all()
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").stat().st_size > 10_000
