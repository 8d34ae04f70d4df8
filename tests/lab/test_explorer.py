"""What a model did with a text, and what of it goes into a page."""

import base64
import json
import math
import re
import struct
from dataclasses import replace

import pytest
import torch
from explorer_models import TEXT, saved, small_model, tokenizer_of

import temper
from temper_lab.cli import main
from temper_lab.explorer import embed, tab, trace
from temper_lab.explorer.trace import ALWAYS, TOKENS, default_texts, passage, pieces, summary
from temper_lab.model.functional import rms_norm
from temper_lab.study.results import Results
from temper_lab.tokenizer import SPLIT_PATTERN


@pytest.fixture(scope="module")
def tokenizer(corpus_texts):
    return tokenizer_of(corpus_texts)


def by_hand(model, ids):
    """Streams and routing of every site by `route`, `read` and `write`, and the logits."""
    streams = temper.expand_streams(rms_norm(model.embedding(ids)), model.num_streams)
    seen = []
    for block in model.blocks:
        for site, branch in (
            (block.attention_site, lambda x, block=block: block.attention(rms_norm(x), model.rotary(ids.shape[1]))),
            (block.mlp_site, lambda x, block=block: block.mlp(rms_norm(x))),
        ):
            routing = site.route(streams)
            seen.append((streams[0], temper.Routing(*(part[0] for part in routing))))
            streams = site.write(streams, branch(site.read(streams, routing)), routing)
    return seen, model.logits(rms_norm(temper.reduce_streams(streams)))[0]


@pytest.mark.parametrize(("preset", "num_streams"), [("temper-tucker", 4), ("hc", 3), ("kromhc", 8), ("residual", 1)])
def test_a_trace_is_what_route_says(tokenizer, preset, num_streams):
    model = small_model(tokenizer, preset, num_streams, depth=2).double()
    traced = trace(model, tokenizer, TEXT)
    ids = torch.tensor([tokenizer.encode(TEXT, bos=True)])
    assert traced.ids == ids[0].tolist()
    assert "".join(traced.pieces[1:]) == TEXT
    with torch.no_grad():
        seen, logits = by_hand(model, ids)
    composite = torch.eye(model.num_streams, dtype=torch.float64)
    names = ["attention 0", "mlp 0", "attention 1", "mlp 1"]
    for name, site, (streams, routing) in zip(names, traced.sites, seen, strict=True):
        assert site.name == name
        for mine, other in zip(site.routing, routing, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
        composite = routing.res @ composite
        torch.testing.assert_close(site.composite, composite, rtol=1e-12, atol=1e-12)
        for row, column, matrix in (
            (site.forward_gain, site.backward_gain, routing.res),
            (site.composite_forward_gain, site.composite_backward_gain, composite),
        ):
            torch.testing.assert_close(row, torch.linalg.matrix_norm(matrix, math.inf))
            torch.testing.assert_close(column, torch.linalg.matrix_norm(matrix, 1))
        torch.testing.assert_close(site.row_error, (routing.res.sum(2) - 1).abs().amax(1), rtol=0, atol=1e-12)
        torch.testing.assert_close(site.column_error, (routing.res.sum(1) - 1).abs().amax(1), rtol=0, atol=1e-12)
        pairs = [
            torch.cosine_similarity(streams[:, a], streams[:, b], dim=-1)
            for a in range(streams.shape[1])
            for b in range(a)
        ]
        mean = torch.stack(pairs).mean(0) if pairs else torch.ones(len(streams), dtype=torch.float64)
        torch.testing.assert_close(site.stream_similarity, mean)
    nats = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    assert traced.surprise[0] is None
    assert traced.surprise[1:] == pytest.approx((nats / math.log(2)).tolist())


def test_what_is_packed_is_in_the_order_that_the_page_reads(tokenizer):
    traced = trace(small_model(tokenizer, "mhc", 3), tokenizer, "the people")
    packed, count = traced.packed(), len(traced.ids)
    assert packed.dtype == torch.float32
    assert packed.numel() == 2 * count * (3 + 9 + 3 + 1)
    second = packed[packed.numel() // 2 :]
    assert torch.equal(second[count * 3 + 9 : count * 3 + 18].view(3, 3), traced.sites[1].routing.res[1])
    assert torch.equal(second[-count:], traced.sites[1].stream_similarity.float())


def test_short_and_long_and_broken_texts(tokenizer):
    model = small_model(tokenizer, context=8)
    empty = trace(model, tokenizer, "")
    assert (empty.pieces, empty.surprise, empty.is_cut) == (["<|bos|>"], [None], False)
    long = trace(model, tokenizer, TEXT)
    assert long.is_cut
    assert len(long.ids) == len(long.surprise) == long.sites[0].routing.pre.shape[0] == 8
    assert pieces(tokenizer, tokenizer.encode("\u6771")) == ["<0xE6>", "<0x9D>", "<0xB1>"]
    with pytest.raises(ValueError, match="no UTF-8 form"):
        trace(model, tokenizer, "\ud800")


def test_a_summary_is_over_all_tokens_of_all_texts(tokenizer):
    traces = [trace(small_model(tokenizer), tokenizer, text) for text in ("the people", TEXT)]
    row = summary(traces)[1]
    both = torch.cat([each.sites[1].routing.pre for each in traces])
    assert row["name"] == "mlp 0"
    assert row["pre"] == pytest.approx(both.mean(0).tolist())
    assert row["column_error"] == pytest.approx(max(each.sites[1].column_error.max().item() for each in traces))


def test_patterns_for_javascript():
    translated = embed.javascript_pattern(SPLIT_PATTERN)
    assert translated.startswith("'(?:[sS\u017fdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|")
    assert r"\s" not in translated
    for unknown in (r"a++", r"a?+b", r"a{1,2}+", r"(?>a)", r"(?<=a)b", r"(?i)a", r"\h", r"(?i:a(b))", r"[a&&b]"):
        assert embed.javascript_pattern(unknown) is None, unknown


def test_a_model_that_the_page_cannot_run_says_why(tokenizer, monkeypatch):
    assert embed.refusal(small_model(tokenizer), tokenizer) is None
    content = json.loads(tokenizer.to_json())
    for change, said in (
        ({"ignore_merges": True}, "ignore_merges"),
        ({"end_of_word_suffix": "</w>"}, "end_of_word_suffix"),
    ):
        other = {**content, "model": {**content["model"], **change}}
        with monkeypatch.context() as patched:
            patched.setattr(type(tokenizer), "to_json", lambda self, other=other: json.dumps(other))
            assert said in embed.refusal(small_model(tokenizer), tokenizer)
    monkeypatch.setattr(embed, "MIXERS", ("birkhoff",))
    assert embed.refusal(small_model(tokenizer), tokenizer) == "the page does not know the mixer sinkhorn"


@pytest.mark.parametrize("short", [False, True])
def test_weights_as_bytes(tokenizer, short):
    weights = embed.tensors(small_model(tokenizer))
    table, encoded = embed.encode(weights, short=short)
    raw, start = base64.b64decode(encoded), 0
    for entry, (name, tensor) in zip(table, weights.items(), strict=True):
        assert (entry["name"], entry["size"]) == (name, tensor.numel())
        is_short = short and "site" not in name and name not in ("cos", "sin")
        assert entry["rows"] == (len(tensor) if is_short else None)
        values = torch.tensor(struct.unpack_from(f"<{tensor.numel()}{'h' if is_short else 'f'}", raw, start))
        start += -(-tensor.numel() * (2 if is_short else 4) // 4) * 4
        if not is_short:
            assert torch.equal(values.float(), tensor.flatten())
            continue
        scales = torch.tensor(struct.unpack_from(f"<{len(tensor)}f", raw, start))
        start += 4 * len(tensor)
        error = (values.view(tensor.shape).double() * scales[:, None].double() - tensor).abs()
        # Half a unit, and what float32 leaves of a quotient of 32767.
        assert (error <= 0.503 * tensor.abs().amax(1, keepdim=True) / 32767).all()
    assert start == len(raw)
    assert len(encoded) == embed.encoded_size(weights, short=short)


def test_weights_are_shortened_only_where_nobody_could_tell(tokenizer):
    model = small_model(tokenizer, "kromhc")
    traces = [trace(model, tokenizer, TEXT)]
    assert embed.can_be_short(model, tokenizer, traces)
    with torch.no_grad():
        # One entry so large that the others of its row are rounded away, times a feature that is always zero.
        model.blocks[0].attention.value.weight[0] = 0
        model.blocks[0].attention.out.weight[:, 0] = 3e4
    traces = [trace(model, tokenizer, TEXT)]
    assert not embed.can_be_short(model, tokenizer, traces)
    assert torch.equal(embed.shorten(torch.zeros(2, 3))[0], torch.zeros(2, 3, dtype=torch.int16))


def test_passages_of_validation_documents(tokenizer, tiny, tmp_path, corpus_texts):
    document = "One short sentence. " * 40
    found = passage(document, tokenizer)
    assert found.startswith("One short")
    assert found in document
    assert TOKENS // 2 < len(tokenizer.encode(found)) <= TOKENS
    run = tmp_path / "run"
    assert (
        main(["train", "--recipe", str(tiny), "--out", str(run), "--train.steps", "1", "--train.sample-tokens", "0"])
        == 0
    )
    texts = default_texts(run, tokenizer)
    assert texts[0] == ALWAYS
    assert 1 < len(texts) <= 4
    assert all(any(text in document for document in corpus_texts) for text in texts[1:])
    content = json.loads((run / "run.json").read_text())
    content["recipe"]["data"]["corpus"] = str(tmp_path / "gone")
    (run / "run.json").write_text(json.dumps(content))
    assert default_texts(run, tokenizer) == [ALWAYS]
    assert default_texts(tmp_path, tokenizer) == [ALWAYS]


def content_of(html):
    return json.loads(re.search(r'id="explorer-data">(.*?)</script>', html, re.DOTALL)[1])


def run_of(key, preset, streams, seed, status="finished"):
    parameters = {"total": 1, "added": 7763, "frozen": 0}
    final = {"train_loss": 1.0, "val_loss": 1.0, "bpb": 1.5}
    return {
        "key": key,
        "method": preset,
        "preset": preset,
        "label": preset,
        "streams": streams,
        "seed": seed,
        "status": status,
        "parameters": parameters,
        "final": final,
    }


@pytest.fixture(scope="module")
def study(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("study")
    runs = [
        run_of("mhc-n4-s1", "mhc", 4, 1),
        run_of("mhc-n4-s0", "mhc", 4, 0),
        run_of("mhc-n2-s0", "mhc", 2, 0),
        run_of("residual-n1-s0", "residual", 1, 0),
        run_of("hc-n2-s0", "hc", 2, 0, "failed"),
        run_of("temper-cp-n2-s0", "temper-cp", 2, 0),
    ]
    for run in runs:
        model = small_model(tokenizer, run["preset"], run["streams"])
        saved(model, tokenizer, folder / "runs" / run["key"] / "model")
        (folder / "runs" / run["key"] / "run.json").write_text(json.dumps({"format": "temper-run-1"}))
    methods = ["residual", "mhc", "hc", "temper-cp"]
    content = {"format": "temper-results-1", "methods": methods, "streams": [2, 4], "runs": runs}
    return folder, Results.from_dict(content)


def test_the_tab_of_a_study(study):
    folder, results = study
    made = tab(folder, results)
    content = content_of(made.html)
    assert [model["title"] for model in content["models"]] == [
        "mhc, N = 2",
        "temper-cp, N = 2",
        "residual, N = 1",
        "mhc, N = 4",
    ]
    assert [model["streams"] for model in content["models"]] == [2, 2, 1, 4]
    assert "mhc-n4-s0" in content["models"][3]["command"]
    assert "1.500 bits per byte" in content["models"][0]["facts"]
    assert all(model["live"] for model in content["models"])
    assert not any(entry["rows"] for model in content["models"] for entry in model["live"]["table"])
    assert len(content["tokenizers"]) == 1
    assert made.html.count("octet-stream") == 4
    # The study's own order of N decides which is the first.
    other = content_of(tab(folder, replace(results, streams=(4, 2)), trace_megabytes=0).html)["models"]
    assert [model["title"] for model in other] == ["mhc, N = 4", "residual, N = 1"]
    # Other N only where there is room for their texts.
    assert len(content_of(tab(folder, results, trace_megabytes=0).html)["models"]) == 3


def test_a_budget_is_kept_by_shorter_weights_and_then_by_leaving_models_out(study):
    folder, results = study
    sizes = []
    for megabytes in (0.8, 0.4, 0):
        html = tab(folder, results, live_megabytes=megabytes).html
        models = content_of(html)["models"]
        blocks = re.findall(r"octet-stream;base64\" id=\"[\w-]+\">([^<]*)", html)
        assert sum(map(len, blocks)) <= megabytes * 1e6
        sizes.append(len(blocks))
        for model in models:
            if model["live"] is None:
                assert model["why"].startswith("there was no room in the page for its weights")
            else:
                assert any(entry["rows"] for entry in model["live"]["table"])
            assert model["command"].startswith("temper inspect --run ")
    assert sizes[0] > sizes[1] > sizes[2] == 0


def test_a_study_without_models_has_no_tab_and_a_damaged_one_is_left_out(study, tmp_path, capsys):
    folder, results = study
    assert tab(tmp_path, results) is None
    assert tab(folder, replace(results, runs=())) is None
    run = results.runs[0]
    (tmp_path / "runs" / run.key / "model").mkdir(parents=True)
    assert tab(tmp_path, results) is None
    assert "not in the explorer" in capsys.readouterr().err


def test_no_text_can_end_the_block_it_is_in(study, tmp_path, capsys):
    folder, _ = study
    text = "</script><script>alert(1)</script><!-- \u2028 &amp;"
    out = tmp_path / "inspect.html"
    assert main(["inspect", "--run", str(folder / "runs/mhc-n2-s0/model"), "--text", text, "--out", str(out)]) == 0
    html = out.read_text(encoding="utf-8")
    assert content_of(html)["texts"][0]["text"] == text
    assert "alert(1)</script>" not in html
    assert "attention 0" in capsys.readouterr().out


def test_inspect_as_json_is_the_trace(study, tmp_path, monkeypatch, capsys, tokenizer):
    monkeypatch.chdir(tmp_path)
    path = study[0] / "runs/mhc-n4-s0"
    words = ["inspect", "--run", str(path), "--text", TEXT, "--text", "the people"]
    assert main([*words, "--json", "-"]) == 0
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert list(tmp_path.iterdir()) == []
    model = small_model(tokenizer, "mhc", 4)
    expected = [trace(model, tokenizer, text).to_dict() for text in (TEXT, "the people")]
    assert content["models"][0]["traces"] == json.loads(json.dumps(expected))
    assert content["models"][0]["method"] == "mhc"
    assert main([*words, "--json", "trace.json", "--out", "pages/a.html"]) == 0
    assert json.loads((tmp_path / "trace.json").read_text()) == content
    shown = capsys.readouterr().out
    assert "mhc-n4-s0 (mhc): " in shown
    assert "2 texts" in shown
    assert "page: pages/a.html" in shown
    assert main(["inspect", "--run", str(path)]) == 0
    assert (tmp_path / "inspect.html").is_file()


def test_several_models_and_one_stream(study, tmp_path, capsys):
    runs = study[0] / "runs"
    out = tmp_path / "both.html"
    words = ["--run", str(runs / "mhc-n4-s0"), "--run", str(runs / "residual-n1-s0"), "--text", TEXT]
    assert main(["inspect", *words, "--out", str(out)]) == 0
    assert "one stream, no routing" in capsys.readouterr().out
    assert [model["title"] for model in content_of(out.read_text())["models"]] == ["mhc-n4-s0", "residual-n1-s0"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--text", "the people"], 2, "--run is missing"),
        (["--run", "nowhere"], 1, "there is no model folder nowhere"),
        (["--run", "{run}", "--live-megabytes", "-1"], 1, "--live-megabytes is -1.0; expected 0 or more"),
        (["--run", "{run}", "--out", "."], 1, "expected the name of a file"),
    ],
)
def test_what_inspect_refuses(study, tmp_path, monkeypatch, capsys, words, code, said):
    monkeypatch.chdir(tmp_path)
    words = [word.format(run=study[0] / "runs/mhc-n2-s0") for word in words]
    assert main(["inspect", *words]) == code
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
