"""Building the kernels: on machines without a compiler, with a bad one, with bad caches, and twice at once."""

import _ctypes
import os
import shutil
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import temper
from temper.ops.backend import choose
from temper.ops.cpu import build, operators


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has built nothing yet, with an empty cache in `tmp_path / "cache"`."""
    caches = (build.library, build._identity, operators._kernel)
    monkeypatch.setattr(build, "_warned", False)
    monkeypatch.setenv("TEMPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("TEMPER_BACKEND", raising=False)
    for function in caches:
        function.cache_clear()
    yield tmp_path / "cache"
    for function in caches:
        function.cache_clear()


@pytest.fixture(scope="module")
def built():
    """The real library for float32, from the real cache."""
    return build.library("float")._name


def program(path, lines):
    path.write_text("#!/bin/sh\n" + lines)
    path.chmod(0o755)
    return str(path)


def copying_compiler(tmp_path, library, before=":"):
    """A compiler that takes no time: it copies a library that is there, and writes down that it was asked."""
    return program(
        tmp_path / "copying-c++",
        f"""[ "$1" = --version ] && echo 1 && exit
echo asked >> {tmp_path}/asked
while [ "$1" != -o ]; do shift; done
{before}
cp {library} "$2"
""",
    )


def times_asked(tmp_path):
    return len((tmp_path / "asked").read_text().split()) if (tmp_path / "asked").exists() else 0


def site(num_streams=4, dim=16):
    torch.manual_seed(0)
    return temper.HyperConnection(temper.preset("temper-cp", num_streams=num_streams, dim=dim))


def forward(hc, dtype=torch.float32):
    streams = torch.randn(9, 4, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    x, state = hc.begin(streams)
    return hc.finish(state, x.tanh())


def backend_named(name):
    return next(entry for entry in temper.backends() if entry.name == name)


def assert_falls_back(reason):
    """One warning that says why, whatever is run afterwards, and the result of `fused`."""
    hc = site()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [forward(hc), forward(hc), forward(hc, torch.bfloat16)]
    assert [entry.category for entry in caught] == [RuntimeWarning]
    assert "fused" in str(caught[0].message)
    assert reason in str(caught[0].message)
    with temper.backend("fused"):
        wanted = [forward(hc), forward(hc), forward(hc, torch.bfloat16)]
    assert all(map(torch.equal, results, wanted))


def test_without_a_compiler(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_falls_back("no C++ compiler found")
    assert not backend_named("cpu").available
    assert "no C++ compiler found" in str(backend_named("cpu"))
    assert all(backend_named(name).available for name in ("fused", "naive"))


def test_asking_for_the_kernels_where_there_are_none_is_no_error(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with temper.backend("cpu"):
        assert_falls_back("no C++ compiler found")


def test_a_compiler_that_is_not_there(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "missing-c++"))
    assert_falls_back("missing-c++")
    assert "missing-c++" in str(backend_named("cpu"))


# A library of somebody else: one of Python's own.
BAD = {
    "fails": ("echo 'fatal error: no such thing' >&2; exit 1", "no such thing"),
    "fails without a word": ("exit 3", "3"),
    "writes nothing": ("exit 0", "could not build"),
    "writes garbage": (
        'for last; do :; done; case "$last" in *.so) echo "not a library" > "$last";; esac',
        "could not build",
    ),
    "says what is not UTF-8": ("printf 'error \\377\\376' >&2; exit 1", "error"),
    "makes a library of something else": (
        f'for last; do :; done; case "$last" in *.so) cp {_ctypes.__file__} "$last";; esac',
        "has no function begin",
    ),
    "cannot be run": (None, ""),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_compiler_that_is_of_no_use(fresh, monkeypatch, tmp_path, kind):
    lines, reason = BAD[kind]
    bad = program(tmp_path / "bad-c++", lines or "")
    if lines is None:
        Path(bad).write_bytes(b"\x7fELF and nothing else")
    monkeypatch.setenv("CXX", bad)
    assert_falls_back(reason)
    # Only what was renamed into place may be left, and what cannot be loaded is of no use there either.
    assert not [path for path in fresh.iterdir() if not path.name.startswith("kernels-")]


def test_a_compiler_that_does_not_come_back(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", program(tmp_path / "slow-c++", "exec sleep 60"))
    monkeypatch.setattr(build, "TIMEOUT", 0.2)
    assert_falls_back("timed out")


def test_a_compiler_without_openmp_or_march_native(fresh, monkeypatch, tmp_path, built):
    """The plainest flags are enough."""
    refuse = 'case "$*" in *-fopenmp*|*-march*) exit 1;; esac'
    compiler = copying_compiler(tmp_path, built)
    text = Path(compiler).read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{refuse}\n")
    Path(compiler).write_text(text)
    monkeypatch.setenv("CXX", compiler)
    assert build.library("float") is not None


def test_a_cache_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TEMPER_CACHE", str(tmp_path / "file" / "cache"))
    assert_falls_back("TEMPER_CACHE")
    assert not backend_named("cpu").available


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_cache_without_permission(fresh):
    fresh.mkdir(mode=0o500)
    assert_falls_back("Permission denied")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_cache_that_others_may_write(fresh, mode):
    """Code is loaded from it: anybody could put theirs there."""
    fresh.mkdir()
    fresh.chmod(mode)
    assert_falls_back("somebody else")


def test_a_cache_that_others_may_replace(fresh, tmp_path):
    fresh.mkdir(mode=0o700)
    tmp_path.chmod(0o777)
    assert_falls_back("can be replaced by somebody else")
    tmp_path.chmod(0o700)
    shutil.move(fresh, tmp_path / "elsewhere")
    fresh.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(build.UnavailableError, match="is a link"):
        build.cache_folder()


def test_a_library_that_is_not_ours_alone_is_built_again(fresh, monkeypatch, tmp_path, built):
    monkeypatch.setenv("CXX", copying_compiler(tmp_path, built))
    path = Path(build.library("float")._name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700

    def planted() -> None:
        path.chmod(0o666)

    def linked() -> None:
        path.rename(tmp_path / "library.so")
        path.symlink_to(tmp_path / "library.so")

    def foreign() -> None:
        os.chown(path, 65534, 65534)

    harms = [planted, linked] + ([foreign] if os.getuid() == 0 else [])
    for count, harm in enumerate(harms, 2):
        harm()
        build.library.cache_clear()
        assert build.library("float") is not None
        assert times_asked(tmp_path) == count
        assert path.lstat().st_uid == os.getuid()
        assert stat.S_IMODE(path.lstat().st_mode) == 0o700


def test_a_cache_is_made_for_its_owner_alone(fresh, monkeypatch, tmp_path, built):
    monkeypatch.setenv("CXX", copying_compiler(tmp_path, built))
    assert build.library("float") is not None
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700


def test_without_a_home_the_cache_is_a_temporary_folder(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv("TEMPER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "tmp"))
    assert build.cache_folder().parent == tmp_path / "tmp"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert build.cache_folder() == tmp_path / "home" / "temper"


def test_what_is_in_the_cache_is_not_built_again(fresh, monkeypatch, tmp_path, built):
    monkeypatch.setenv("CXX", copying_compiler(tmp_path, built))
    for _ in range(3):
        build.library.cache_clear()
        assert build.library("float") is not None
    assert times_asked(tmp_path) == 1
    # Other flags, other kernels: the name says what it was made from.
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    build.library.cache_clear()
    assert build.library("float") is not None
    assert times_asked(tmp_path) == 2
    assert len(list(fresh.iterdir())) == 2


def test_another_source_is_another_library(fresh, monkeypatch, tmp_path, built):
    monkeypatch.setenv("CXX", copying_compiler(tmp_path, built))
    shutil.copytree(build.SOURCES, tmp_path / "native")
    assert build.library("float") is not None
    with (tmp_path / "native" / "lanes.h").open("a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "native")
    build.library.cache_clear()
    build._identity.cache_clear()
    assert build.library("float") is not None
    assert len(list(fresh.iterdir())) == 2


def python(code, *words, **environment):
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


LOAD = """
import torch
from temper.ops.cpu import build
import temper
site = temper.HyperConnection(temper.preset("mhc", num_streams=2, dim=4))
x, state = site.begin(torch.ones(3, 2, 4))
assert site.finish(state, x).isfinite().all()
print(build.library("float")._name)
"""


def test_a_damaged_library_is_built_again(fresh, monkeypatch, tmp_path, built):
    compiler = copying_compiler(tmp_path, built)
    monkeypatch.setenv("CXX", compiler)
    path = Path(build.library("float")._name)
    # Loading half a library can end a process, so in one of its own.
    code = """
import sys
from pathlib import Path
from temper.ops.cpu import build
path, whole = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
# As long as it should be with nothing in it, and cut short in several places.
for damaged in (bytes(len(whole)), b"", whole[:100], whole[: len(whole) // 2], whole[:-4096]):
    path.unlink(missing_ok=True)
    path.write_bytes(damaged)
    build.library.cache_clear()
    assert build.library("float")._name == str(path)
    assert path.read_bytes() == whole
"""
    process = python(code, str(path), built, TEMPER_CACHE=str(fresh), CXX=compiler)
    _, errors = process.communicate()
    assert process.returncode == 0, (process.returncode, errors)
    assert times_asked(tmp_path) == 6
    assert list(fresh.iterdir()) == [path]


def test_two_processes_may_fill_an_empty_cache_at_once(tmp_path, built):
    """Each compiler waits for the other to have begun, and writes in two pieces: only a rename can be safe."""
    wait = f'while [ $(wc -l < {tmp_path}/asked) -lt 2 ]; do sleep 0.05; done; head -c 1000 {built} > "$2"; sleep 0.3'
    compiler = copying_compiler(tmp_path, built, wait)
    cache = tmp_path / "cache"
    processes = [python(LOAD, TEMPER_CACHE=str(cache), CXX=compiler) for _ in range(2)]
    deadline = time.monotonic() + 120
    names = []
    for process in processes:
        out, errors = process.communicate(timeout=deadline - time.monotonic())
        assert process.returncode == 0, errors
        names.append(out.strip())
    assert times_asked(tmp_path) == 2
    assert names[0] == names[1]
    assert [str(path) for path in cache.iterdir()] == names[:1]


# Choosing.


def chosen(dtype=torch.float32, preset="temper-cp", **options):
    hc = temper.HyperConnection(temper.preset(preset, num_streams=4, dim=16, **options))
    return choose(torch.zeros(1, 4, 16, dtype=dtype), hc.spec, hc.mixer).name


def test_who_runs_what(monkeypatch):
    monkeypatch.delenv("TEMPER_BACKEND", raising=False)
    assert chosen() == chosen(torch.bfloat16) == "cpu"
    # Half precision that the kernels do not have, and double precision that is for checking.
    assert chosen(torch.float16) == chosen(torch.float64) == "fused"
    assert chosen(tol=1e-3) == "cpu"
    assert chosen(tol=1e-3, eps=1e-3) == chosen(preset="hc") == "naive"
    with temper.backend("fused"):
        assert chosen(tol=1e-3) == "naive"
    with temper.backend("cpu"):
        assert chosen(torch.float64) == "cpu"
        assert chosen(torch.float16) == "fused"


def test_another_device_gets_torch():
    with torch.device("meta"):
        hc = temper.HyperConnection(temper.preset("mhc", num_streams=4, dim=16))
        assert choose(torch.zeros(1, 4, 16), hc.spec, hc.mixer).name == "fused"


@pytest.mark.parametrize(("name", "wanted"), [("naive", "naive"), ("fused", "fused"), ("cpu", "cpu"), ("auto", "cpu")])
def test_the_environment_chooses_and_the_context_overrides_it(monkeypatch, name, wanted):
    monkeypatch.setenv("TEMPER_BACKEND", name)
    assert chosen() == wanted
    with temper.backend("naive"):
        assert chosen() == "naive"
    with temper.backend("auto"):
        assert chosen() == "cpu"
    assert chosen() == wanted


def test_an_unknown_backend_in_the_environment(monkeypatch):
    monkeypatch.setenv("TEMPER_BACKEND", "fussed")
    with pytest.raises(ValueError, match=r"TEMPER_BACKEND.*'fussed'.*fused"):
        forward(site())


def test_an_unknown_backend_in_a_context():
    with pytest.raises(ValueError, match="'cuda'"), temper.backend("cuda"):
        pass
    assert chosen() == "cpu"


def test_contexts_nest_and_errors_restore_what_was_before(monkeypatch):
    monkeypatch.delenv("TEMPER_BACKEND", raising=False)
    with temper.backend("naive"):
        with temper.backend("fused"):
            assert chosen() == "fused"
        assert chosen() == "naive"
        with pytest.raises(KeyError), temper.backend("cpu"):
            raise KeyError
        with pytest.raises(ValueError, match="unknown"), temper.backend("unknown"):
            pass
        assert chosen() == "naive"
    assert chosen() == "cpu"


def test_the_backward_runs_where_its_forward_did():
    hc = site()
    streams = torch.randn(5, 4, 16, requires_grad=True)
    gradients = []
    for inside in (True, False):
        with temper.backend("fused"):
            x, state = hc.begin(streams)
            out = hc.finish(state, x)
            if inside:
                gradients.append(torch.autograd.grad(out.sin().sum(), streams)[0])
        if not inside:
            with temper.backend("cpu"):
                gradients.append(torch.autograd.grad(out.sin().sum(), streams)[0])
    assert torch.equal(*gradients)
