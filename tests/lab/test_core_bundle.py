"""Bundles that are broken, dangerous or far away."""

import copy
import hashlib
import http.server
import io
import shutil
import threading
import zipfile

import pytest
from core_bundles import BASELINES, ENTRIES, write_bundle

from temper_lab.data import DownloadError
from temper_lab.eval.core import bundle as bundles
from temper_lab.eval.core import load_bundle
from temper_lab.eval.core.bundle import download_bundle, open_bundle, unpack


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "core")


def zipped(folder, *, inside="eval_bundle/"):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(folder.rglob("*")):
            file.write(path, inside + path.relative_to(folder).as_posix())
    return out.getvalue()


def test_what_a_bundle_holds(bundle):
    found = load_bundle(bundle)
    assert [task.label for task in found.tasks] == ["arc_easy", "winograd", "squad"]
    assert found.absent == ["coqa"]
    first = found.tasks[0]
    assert (first.kind_name, first.num_shots, first.delimiter, first.baseline) == (
        "multiple_choice",
        3,
        "\nAnswer: ",
        0.25,
    )
    assert found.tasks[1].delimiter == " "
    assert found.baselines == str(bundle / "eval_meta_data.csv")
    # In the order of the bundle, whatever order was asked for.
    assert [task.label for task in load_bundle(bundle, labels=["squad", "arc_easy"]).tasks] == ["arc_easy", "squad"]
    with pytest.raises(ValueError, match=r"unknown task 'arc_esay'.*arc_easy"):
        load_bundle(bundle, labels=["arc_esay"])
    # Asked for by name, a task has to be there.
    with pytest.raises(ValueError, match=r"does not hold eval_data/reading/coqa.jsonl"):
        load_bundle(bundle, labels=["coqa"])
    with pytest.raises(ValueError, match=r"arc_easy: 3 items; .* at least 4"):
        load_bundle(bundle, max_per_task=3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 13 is not JSON"),
        ("[1]", "line 13: expected an object"),
        ('{"query": "a", "choices": ["b", "c"], "gold": 2}', "line 13: 'gold' is 2; expected 0 to 1"),
        ('{"query": "a", "choices": ["b", "c"], "gold": true}', "'gold' is True"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "at least two texts"),
        ('{"query": "a", "choices": ["b", 3], "gold": 0}', "at least two texts"),
        ('{"choices": ["b", "c"], "gold": 0}', "'query' is None; expected a text"),
    ],
)
def test_malformed_lines(bundle, line, said):
    with open(bundle / "eval_data" / "knowledge" / "arc_easy.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"arc_easy.jsonl: line 13") as raised:
        load_bundle(bundle)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_lines_that_are_not_text_and_files_without_lines(bundle):
    path = bundle / "eval_data" / "reading" / "squad.jsonl"
    path.write_bytes(path.read_bytes() + b"\n\xff\xfe\n")
    with pytest.raises(ValueError, match="line 14 is not UTF-8"):
        load_bundle(bundle)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no items"):
        load_bundle(bundle)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is missing"),
        ("Task,Baseline\narc_easy,25\n", "no column 'Eval Task'"),
        ("Eval Task,Random baseline\narc_easy,25\nwinograd,many\n", "the baseline of 'winograd' is 'many'"),
        ("Eval Task,Random baseline\narc_easy,100\n", "the baseline of 'arc_easy' is '100'"),
        ("Eval Task,Random baseline\narc_easy\n", "the baseline of 'arc_easy' is None"),
        ("Eval Task,Random baseline\narc_easy,nan\n", "the baseline of 'arc_easy' is 'nan'"),
        ("Eval Task,Random baseline\narc_easy,25\n", "no row for 'winograd'"),
        (b"\xff\xfe\x00", "is not a table of baselines"),
    ],
)
def test_wrong_baselines(bundle, content, said):
    path = bundle / "eval_meta_data.csv"
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"eval_meta_data.csv") as raised:
        load_bundle(bundle)
    assert said in str(raised.value)


def test_wrong_lists_of_tasks(bundle, tmp_path):
    path = bundle / "core.yaml"
    for content, said in (
        ("a: [", "is not YAML"),
        ("- 1", "no list of tasks"),
        ("icl_tasks: [1]", "task 1: 1; expected a mapping"),
        ("icl_tasks: [{label: a}]", "'dataset_uri' is None"),
        ("icl_tasks: [{label: a, dataset_uri: b, icl_task_type: c}]", "unknown icl_task_type 'c'"),
        ("icl_tasks: [{label: a, dataset_uri: b, icl_task_type: schema}]", "'num_fewshot' is None"),
        (
            "icl_tasks: [{label: a, dataset_uri: ../b, icl_task_type: schema, num_fewshot: [0]}]",
            "expected a path inside eval_data/",
        ),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"core.yaml") as raised:
            load_bundle(bundle)
        assert said in str(raised.value)
    path.unlink()
    with pytest.raises(ValueError, match=r"no core.yaml there"):
        load_bundle(bundle)
    with pytest.raises(ValueError, match="there is no folder"):
        load_bundle(tmp_path / "none")
    nothing = write_bundle(tmp_path / "nothing", lacking=("arc_easy", "winograd", "squad", "coqa"))
    with pytest.raises(ValueError, match="does not hold"):
        load_bundle(nothing)


def test_a_task_that_comes_twice(tmp_path):
    folder = write_bundle(tmp_path / "twice", entries=[*ENTRIES, copy.deepcopy(ENTRIES[0])])
    with pytest.raises(ValueError, match="'arc_easy' comes twice"):
        load_bundle(folder)


def test_the_fingerprint_is_of_what_decides_the_answers(bundle):
    def prints(**options):
        return [task.fingerprint for task in load_bundle(bundle, **options).tasks]

    before = prints()
    assert len(set(before)) == 3
    assert prints(max_per_task=11) != before
    path = bundle / "eval_data" / "reading" / "squad.jsonl"
    path.write_text(path.read_text().replace("a", "A", 1))
    after = prints()
    assert (after[:2], after[2] != before[2]) == (before[:2], True)


def test_a_zip_is_a_bundle(bundle, tmp_path):
    path = tmp_path / "bundle.zip"
    for inside in ("", "eval_bundle/"):
        path.write_bytes(zipped(bundle, inside=inside))
        with open_bundle(path) as folder:
            assert load_bundle(folder).tasks == load_bundle(bundle).tasks
        assert not folder.exists()


@pytest.mark.parametrize("name", ["../evil.txt", "a/../../evil.txt", "/evil.txt", "..\\evil.txt", "C:/evil.txt"])
def test_a_zip_that_leads_out_of_its_folder(bundle, tmp_path, name):
    path, target = tmp_path / "bundle.zip", tmp_path / "deep" / "target"
    path.write_bytes(zipped(bundle))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(name, "evil")
    target.mkdir(parents=True)
    with pytest.raises(ValueError, match="leads out of the archive"):
        unpack(path, target)
    assert not list(target.iterdir())
    assert not list(tmp_path.rglob("evil*"))


def test_a_zip_with_a_link(tmp_path):
    path = tmp_path / "bundle.zip"
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(link, "/etc")
    with pytest.raises(ValueError, match="is a link"):
        unpack(path, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_zip_that_is_too_large(bundle, tmp_path, monkeypatch):
    path = tmp_path / "bundle.zip"
    # As many zeros as it says, in a few kilobytes.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("zeros", bytes(3_000_000))
    monkeypatch.setattr(bundles, "MAX_BYTES", 2_000_000)
    with pytest.raises(ValueError, match=r"3,000,000 bytes when unpacked; .* at most 2,000,000"):
        unpack(path, tmp_path / "target")
    path.write_bytes(zipped(bundle))
    monkeypatch.setattr(bundles, "MAX_FILES", 3)
    with pytest.raises(ValueError, match="files; an evaluation bundle has at most 3"):
        unpack(path, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_zip_that_lies_about_its_size(tmp_path, monkeypatch):
    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", bytes(5000))
    # Both headers say 10 bytes.
    raw = path.read_bytes().replace((5000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="is not a zip that can be unpacked"):
        unpack(path, tmp_path / "target")
    assert sum(file.stat().st_size for file in (tmp_path / "target").rglob("*") if file.is_file()) <= 10


def test_not_a_zip(tmp_path):
    path = tmp_path / "bundle.zip"
    path.write_bytes(b"PK but no more")
    with pytest.raises(ValueError, match="is not a zip that can be unpacked"), open_bundle(path):
        pass


@pytest.fixture
def server(bundle, monkeypatch):
    """Serves a zip; `/short` promises more than it sends."""
    monkeypatch.setenv("no_proxy", "*")
    content = zipped(bundle)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path not in ("/bundle.zip", "/short", "/page"):
                self.send_error(404)
                return
            body = b"<html>" if self.path == "/page" else content
            self.send_response(200)
            self.send_header("Content-Length", str(len(body) + 100 * (self.path == "/short")))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", hashlib.sha256(content).hexdigest()
        running.shutdown()
        thread.join()


def test_download(server, bundle, tmp_path, monkeypatch):
    address, sha256 = server
    folder = tmp_path / "deep" / "got"
    seen = []
    found = download_bundle(
        f"{address}/bundle.zip", folder, sha256=sha256, progress=lambda done, total: seen.append((done, total))
    )
    assert found == sha256
    assert seen[-1][0] == seen[-1][1] > 1000
    assert load_bundle(folder).tasks == load_bundle(bundle).tasks
    assert [path.name for path in folder.parent.iterdir()] == ["got"]
    with pytest.raises(ValueError, match="exists"):
        download_bundle(f"{address}/bundle.zip", folder)

    shutil.rmtree(folder)
    for path, options, said in (
        ("/bundle.zip", {"sha256": "0" * 64}, "SHA-256"),
        ("/short", {}, "ended after"),
        ("/none", {}, "404"),
        ("/page", {}, "not a zip"),
    ):
        with pytest.raises((DownloadError, ValueError), match=said):
            download_bundle(address + path, folder, **options)
        assert not list(folder.parent.iterdir())
    with pytest.raises(ValueError, match="expected http"):
        download_bundle("file:///etc/passwd", folder)
    monkeypatch.setattr(bundles, "MAX_PACKED_BYTES", 100)
    with pytest.raises(DownloadError, match="more than 100 bytes"):
        download_bundle(f"{address}/bundle.zip", folder)
    assert not list(folder.parent.iterdir())


def test_baselines_of_more_tasks_are_no_trouble(tmp_path):
    folder = write_bundle(tmp_path / "core", baselines=BASELINES | {"mmlu": "25"})
    assert len(load_bundle(folder).tasks) == 3
