# `make demo` and `make test` do all the set-up a fresh machine needs: Python 3.11+ and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := $(VENV)/.lab
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two processes with a thread each beat one with two: the tests are many and small.
JOBS ?= 2

.PHONY: setup demo test fuzz lint browser triton docs dist bench clean

setup: $(STAMP)

# Installed again whenever what to install has changed; constraints.txt keeps torch a CPU build.
$(LAB): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "TEMPER needs Python 3.11 or newer, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[lab]'
	touch $(LAB)

$(STAMP): $(LAB)
	$(PIP) -e '.[lab,tensorboard,dev]'
	touch $(STAMP)

demo: $(LAB)
	$(BIN)/temper compare --recipe demo --out demo
	$(BIN)/temper report demo

test: setup lint browser triton
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow' -n $(JOBS)

# For minutes or hours: CASES=10000 SEED=1. What fails is kept in tests/fuzz/corpus, which `make test` runs.
CASES ?= 1000
SEED ?= 0
fuzz: setup
	$(BIN)/python tests/fuzz/fuzz.py --cases $(CASES) --seed $(SEED) --keep

# Tests of pages need a browser. Where it cannot be installed (no root, no apt, no network) they are skipped and say so.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	  || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
	    && apt-get update -qq >/dev/null 2>&1 \
	    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null 2>&1; } \
	  || echo "no chromium here: the tests that need a browser will be skipped"

# Tests of the GPU kernels run them in Triton's interpreter and compile them; without it they are skipped and say so.
triton: setup
	@$(BIN)/python -c 'import triton' 2>/dev/null \
	  || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.7.1 \
	  || echo "no triton here: the tests of the GPU kernels will be skipped"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A broken link, a warning or a public name without a docstring fails the build.
docs: setup
	test -f $(VENV)/.docs || { $(PIP) -e '.[docs]' && touch $(VENV)/.docs; }
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "the site is in build/site: $(BIN)/python -m http.server --directory build/site"

# Source distribution and wheel, then the wheel in a fresh environment with torch alone.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	TEMPER_DIST=dist $(BIN)/python -m pytest -m slow tests/test_dist.py

bench: setup
	$(BIN)/temper bench --out bench/bench.json --plot bench/bench.png

clean:
	rm -rf $(VENV) demo bench build dist src/*.egg-info
