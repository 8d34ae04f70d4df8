"""What the documents say is what the code does: their examples run, their suites pass, their links lead somewhere."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import temper

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


NAMES = {"docs/adding-a-generator.md": "lowrank", "docs/adding-a-mixer.md": "softmax"}


@pytest.mark.parametrize("page", NAMES)
def test_the_example_of_a_new_part_passes_lint_and_its_suite(page, tmp_path):
    source, suite = blocks(page)
    family = page.removeprefix("docs/adding-a-").removesuffix(".md")
    # As files of this repository, where `my_parts` is not among the packages whose imports come last.
    places = {f"src/temper/{family}s/{NAMES[page]}.py": source, f"tests/test_{NAMES[page]}.py": suite}
    for path, text in places.items():
        sorting = ["--ignore", "I001"] if text is suite else []
        for command in (["check", *sorting], ["format", "--check"]):
            ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", path, "-"]
            done = subprocess.run(ruff, input=text, capture_output=True, text=True, cwd=ROOT)
            assert done.returncode == 0, done.stdout
    (tmp_path / "my_parts").mkdir()
    (tmp_path / "my_parts" / f"{NAMES[page]}.py").write_text(source)
    mypy = [sys.executable, "-m", "mypy", f"--cache-dir={ROOT / '.mypy_cache'}"]
    mypy += [f"--config-file={ROOT / 'pyproject.toml'}", str(tmp_path / "my_parts" / f"{NAMES[page]}.py")]
    done = subprocess.run(mypy, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    (tmp_path / f"test_{NAMES[page]}.py").write_text(suite)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 35


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_is_over_120_characters(page):
    long = [number for number, line in enumerate(page.read_text().split("\n"), 1) if len(line) > 120]
    assert not long, f"lines {long}"


def test_the_table_of_the_readme_is_the_library():
    rows = re.findall(
        r"^\| \**`([\w-]+)`\** \|.*?\|.*?\| ([\d,]+) \| ([\d,]+) \|", (ROOT / "README.md").read_text(), re.M
    )
    assert [name for name, _, _ in rows] == list(temper.PRESETS)
    for name, *counts in rows:
        for num_streams, count in zip((4, 8), counts, strict=True):
            config = temper.preset(name, num_streams=num_streams, dim=768)
            assert 24 * temper.count_parameters(config) == int(count.replace(",", "")), name


@pytest.mark.once
def test_the_tutorial_runs_as_written(tmp_path):
    # Python blocks share one process up to the first command, as a reader's session would; commands run in between.
    text = (ROOT / "docs/tutorial.md").read_text()
    parts = re.findall(r"```(python|bash)\n(.*?)```", text, re.DOTALL)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    pending = ""
    for kind, body in [*parts, ("bash", "true")]:
        if kind == "python":
            pending += body
            continue
        for command in ([sys.executable, "-c", pending] if pending else None, ["bash", "-euc", body]):
            if command:
                done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
                assert done.returncode == 0, done.stderr
        pending = ""
    assert (tmp_path / "study/report.html").is_file()
    assert (tmp_path / "people.html").is_file()


def test_nobody_is_told_to_install_somebody_elses_package():
    # `temper` on the package index is an HTML templating package; ours is temper-hc.
    wrong = re.compile(r"pip (install|show|download)[^\n`]*[ '\"]temper(?![\w-])|(?<![\w.])temper\[")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    sources = [ROOT / name for name in files if name.endswith((".py", ".md", ".toml", ".yml"))] or PAGES
    for path in sources:
        if path.name != "test_docs.py":
            assert not wrong.search(path.read_text()), path


def test_the_first_snippet_runs_as_pasted():
    exec(blocks("README.md")[0], {})


@pytest.mark.parametrize("package", ["temper", "temper_lab"])
def test_docstrings_name_their_subject(package):
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    wrong = [
        f"{path}: {text}"
        for path in sorted((ROOT / "src" / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
        if text.split()[0] in ("What", "Of", "How", "Who")
    ]
    assert not wrong, wrong
