"""results.json: the dataclasses, the published schema and the files that are committed agree."""

import json
import runpy
from dataclasses import fields
from pathlib import Path

import pytest
from studies import full_study, loaded, results, run_entry

from temper_lab.study import gather
from temper_lab.study.results import FORMAT, Results, Run, schema

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "docs" / "results.schema.json"
FILES = sorted(
    path
    for folder in ("docs/results", "tests/lab/fixtures")
    for path in (ROOT / folder).rglob("*.json")
    if FORMAT in path.read_text(encoding="utf-8")[:100]
)
TYPES = {"object": dict, "array": list, "string": str, "number": int | float, "integer": int, "null": type(None)}


def errors(value, rule, whole, where="results"):
    """Where a value is not as a schema says: the keywords that ours has, and no others."""
    known = {"$schema", "title", "$defs", "description", "format", "$ref", "anyOf", "const", "enum", "type", "items"}
    assert set(rule) <= known | {"properties", "required", "minimum"}, where
    if "$ref" in rule:
        yield from errors(value, whole["$defs"][rule["$ref"].removeprefix("#/$defs/")], whole, where)
    if "anyOf" in rule and all([*errors(value, option, whole, where)] for option in rule["anyOf"]):
        yield where
    if ("const" in rule and value != rule["const"]) or ("enum" in rule and value not in rule["enum"]):
        yield where
    names = rule.get("type", [])
    kinds = [TYPES[name] for name in ([names] if isinstance(names, str) else names)]
    if kinds and (isinstance(value, bool) or not any(isinstance(value, kind) for kind in kinds)):
        yield where
    elif isinstance(value, dict):
        yield from (f"{where} lacks {name}" for name in rule.get("required", []) if name not in value)
        for name, inner in rule.get("properties", {}).items():
            if name in value:
                yield from errors(value[name], inner, whole, f"{where}.{name}")
    elif isinstance(value, list) and "items" in rule:
        for place, entry in enumerate(value):
            yield from errors(entry, rule["items"], whole, f"{where}[{place}]")
    elif isinstance(value, int | float) and value < rule.get("minimum", value):
        yield where


def wrong(value):
    whole = json.loads(SCHEMA.read_text())
    return list(errors(value, whole, whole))


def test_the_published_schema_is_that_of_the_dataclasses():
    assert json.loads(SCHEMA.read_text()) == schema(), "python -m temper_lab.study.results > docs/results.schema.json"
    assert set(schema()["$defs"]["Run"]["properties"]) == {field.name for field in fields(Run)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_committed_file_is_read_and_follows_the_schema(path):
    content = json.loads(path.read_text())
    assert wrong(content) == []
    found = Results.read(path)
    assert len(found.runs) == len(content["runs"]) > 0
    assert wrong(json.loads(json.dumps(found.to_dict()))) == []


def test_what_is_written_is_read_again(tmp_path):
    made = loaded(full_study())
    path = made.write(tmp_path)
    assert Results.read(tmp_path) == Results.read(path) == made
    content = json.loads(path.read_text())
    assert wrong(content) == []
    raw = json.loads(json.dumps(full_study()))
    for name in set(raw) - {"runs", "cost"}:
        assert content[name] == raw[name]
    for before, after in zip(raw["runs"], content["runs"], strict=True):
        assert {name: after[name] for name in before if name not in ("parameters", "core")} == {
            name: value for name, value in before.items() if name not in ("parameters", "core")
        }


def test_the_schema_refuses_what_the_reader_refuses():
    good = results([run_entry("mhc")])
    assert wrong(json.loads(json.dumps(good))) == []
    for name, bad in (("status", "done"), ("key", None), ("streams", -1), ("val", {"step": ["a"]}), ("train", [])):
        raw = json.loads(json.dumps(good))
        raw["runs"][0][name] = bad
        assert wrong(raw), name
        with pytest.raises(ValueError, match=r"run 0 \(.*\) in the results"):
            Results.from_dict(raw)
    assert wrong(good | {"format": "temper-results-0"})
    with pytest.raises(ValueError, match="expected 'temper-results-1'"):
        Results.from_dict(good | {"format": "temper-results-0"})


def test_what_a_newer_version_adds_is_left_out_and_what_an_older_lacks_is_empty():
    raw = results([run_entry("mhc") | {"colour": "blue"}])
    for name in ("vary", "options", "timing", "core", "routing", "flops_per_token"):
        raw["runs"][0].pop(name)
    (run,) = loaded(raw | {"mood": "good"}).runs
    assert (run.settings, run.timing, run.mixing("composite_gain"), run.core_tasks) == ((), None, (), {})
    assert gather._routing([{"step": 1, "composite_gain": 1.0}, {"step": 2}]).curve("composite_gain") == ((1, 1.0),)
    raw["runs"][0]["val"]["bpb"].pop()
    with pytest.raises(ValueError, match="the curve of bpb has another number of steps than of values"):
        loaded(raw)


def test_a_small_copy_has_means_of_the_training_loss_and_is_read_again(tmp_path):
    made = loaded(full_study())
    small = made.small(40)
    path = small.write(tmp_path, "copy.json")
    assert Results.read(path) == small
    assert small.small(40) == small
    for before, after in zip(made.runs, small.runs, strict=True):
        assert (after.val, after.final) == (before.val, before.final)
        if before.is_finished:
            assert len(after.train.step) == 40
            assert after.train.step[:2] == (3, 6)
            assert after.train.loss[1] == pytest.approx(sum(before.train.loss[3:6]) / 3, abs=1e-5)
            assert after.train.step[-1] == before.train.step[-1]


def test_a_study_is_written_into_the_docs(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr("temper_lab.report.plots_mpl.draw_to", lambda chart, *paths: drawn.extend(paths))
    out = tmp_path / "docs"
    loaded(full_study()).write(tmp_path)
    monkeypatch.setattr("sys.argv", ["results.py", str(tmp_path), "--out", str(out), "--prefix", "lr-"])
    runpy.run_path(str(ROOT / "benchmarks" / "results.py"), run_name="__main__")
    assert {"lr-curves.png", "lr-claims.png", "lr-forest-mhc.png"} <= {path.name for path in drawn}
    names = {path.name for path in out.iterdir()}
    assert names == {f"lr-{name}.csv" for name in ("main", "significance", "claims", "claim-tests", "cost")} | {
        "lr-made-up.json"
    }
    assert Results.read(out / "lr-made-up.json").runs
    assert "runs finished" in capsys.readouterr().out
