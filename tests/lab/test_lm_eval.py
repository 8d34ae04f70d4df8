"""lm-eval scores an exported model through its own `hf` model, and its numbers are ours."""

import json

import pytest
import torch

from temper_lab.engine import generate
from temper_lab.interop.export import export
from temper_lab.model import GPT, ModelConfig
from temper_lab.tokenizer import Tokenizer

pytest.importorskip("transformers", reason="lm-eval reads models through transformers, which is not installed")
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm_eval[hf]'")
# What other people's packages warn of is not for us to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

QUESTIONS = [
    {"question": f"the {noun} of this union have seen", "choices": ["peace", "war with courage", "laws"], "answer": 1}
    for noun in ("people", "states", "congress", "laws", "courage", "war", "peace")
]
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}]
"""
GENERATE = """
task: tiny_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[1]}}}}"
generation_kwargs: {{until: ["no such text"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def lab(corpus_folder):
    tokenizer = Tokenizer.train((path.read_text() for path in sorted(corpus_folder.iterdir())), 300)
    torch.manual_seed(0)
    model = GPT(ModelConfig(2, tokenizer.vocab_size, 64, head_dim=32, preset="temper-cp", num_streams=4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def results(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm_eval")
    export(*lab, folder / "model")
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    paths = {"data": folder / "questions.jsonl", "cache": folder / "cache"}
    (folder / "tasks").mkdir()
    for name, text in (("choice", CHOICE), ("text", GENERATE)):
        (folder / "tasks" / f"{name}.yaml").write_text(text.format(**paths))
    return lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "model"), "trust_remote_code": True, "add_bos_token": True},
        tasks=["tiny_choice", "tiny_text"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        batch_size=3,
        device="cpu",
        bootstrap_iters=0,
    )


@torch.no_grad()
def test_log_likelihoods_and_accuracy(lab, results):
    model, tokenizer = lab

    def score(question, choice):
        start = len(tokenizer.encode(question, bos=True))
        ids = torch.tensor([tokenizer.encode(f"{question} {choice}", bos=True)])
        return model.loss(ids[:, :-1], ids[:, 1:], reduction="none")[0, start - 1 :].sum().neg()

    is_right = []
    samples = sorted(results["samples"]["tiny_choice"], key=lambda sample: sample["doc_id"])
    for item, sample in zip(QUESTIONS, samples, strict=True):
        ours = torch.stack([score(item["question"], choice) for choice in item["choices"]])
        # Logits are float32 in both; a sum of a few logarithms of size 5 differs in the last digits.
        theirs = torch.tensor([float(response[0][0]) for response in sample["resps"]])
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
        is_right.append(ours.argmax().item() == item["answer"])
    assert results["results"]["tiny_choice"]["acc,none"] == pytest.approx(sum(is_right) / len(is_right))


def test_texts(lab, results):
    model, tokenizer = lab
    prompts = [tokenizer.encode(item["question"], bos=True) for item in QUESTIONS]
    # Of different lengths, so that lm-eval pads them.
    assert len({len(prompt) for prompt in prompts}) > 1
    ours = generate(model, prompts, max_new_tokens=6, temperature=0, stop=tokenizer.bos)
    samples = sorted(results["samples"]["tiny_text"], key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0] for sample in samples] == [tokenizer.decode(row) for row in ours]
