# make demo: set up and judge the example kernels.   make test: set up and run the quick tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One more than there are cores: a test that waits for a time limit leaves its core to others.
JOBS ?= $(shell echo $$(($$(nproc) + 1)))
# pip compiles every module on one core. What a kernel's process may import is compiled below, on all; it cannot write there.
# (torch has files for newer Pythons, which older ones cannot compile.)
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
PYTEST = $(BIN)/python -m pytest
# With it set, every process would compile every module again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup browser demo test test-slow test-all durations test-gpu lint bench native-binaries native-matrix wheel clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev,triton]'
	$(BIN)/python -m compileall -qq -j $(JOBS) $(VENV)/lib/python3*/site-packages/torch $(VENV)/lib/python3*/site-packages/triton & \
	$(PIP) --no-deps executorch torchao; installed=$$?; wait; exit $$installed
	touch $(STAMP)

# Chromium, in which the tests look at report.html; installed where that can be done, and not needed for anything else.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq >/dev/null 2>&1 && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null 2>&1; \
	then echo "installed Chromium for the tests of pages"; \
	else echo "no Chromium: the tests of pages will be skipped (apt-get install chromium chromium-driver)"; fi

demo: setup
	PATH=$(abspath $(BIN)):$$PATH sh examples/demo.sh

# The quick set: every feature once, all exploits. On two cores it takes minutes.
test: setup browser
	$(PYTEST) -n $(JOBS) -m "not gpu and not slow"

# The rest: whole corpora, all of OpInfo, pages and packages that compile, wheels in new environments, clusters.
test-slow: setup browser
	$(PYTEST) -n $(JOBS) -m "slow and not gpu"

test-all: test test-slow

# Measure how long the tests take, by which they are ordered: commit tests/durations.json afterwards.
durations: setup browser
	$(PYTEST) -n $(JOBS) -m "not gpu and not slow" --store-durations
	$(PYTEST) -n $(JOBS) -m "slow and not gpu" --store-durations

# On a machine with a GPU, with the packages it has: PYTHONPATH=src python3 -m pytest -m gpu
test-gpu:
	PYTHONPATH=$(CURDIR)/src $(PYTHON) -m pytest -m gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python benchmarks/opinfo_throughput.py --cold

# Libraries of the native runtime, which the wheel then ships. TORCHES are wheels of torch, of which only headers are
# read; MACHINE=x86_64 or aarch64 is for another architecture than this one (needs g++-x86-64-linux-gnu or such).
native-binaries: setup
	$(BIN)/python tools/native_binaries.py $(if $(MACHINE),--machine $(MACHINE)) $(TORCHES)

# Tests of the native runtime with other versions of torch, each in a new environment of gigabytes that is deleted.
TORCH_VERSIONS ?= 2.11 2.12 2.13 2.14 2.15 newest
native-matrix:
	for version in $(TORCH_VERSIONS); do \
	  venv=build/torch-$$version; torch=torch; [ $$version = newest ] || torch="torch==$$version.*"; \
	  $(PYTHON) -m venv $$venv && $$venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
	    "$$torch" '.[triton]' pytest pytest-timeout pytest-xdist hypothesis psutil && \
	  PYTHONPATH=$(CURDIR)/src $$venv/bin/python -m pytest -q -m "not gpu and not slow" tests/runtime; \
	  status=$$?; rm -rf $$venv; [ $$status = 0 ] || exit 1; \
	done

wheel: setup
	rm -rf build/lib
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w dist .

clean:
	rm -rf $(VENV) .cache build dist
