# Each of `make demo`, `make demo-flights`, `make demo-keras`, `make demo-ray`, `make demo-chaos` and `make test` works
# in a fresh clone.
# Needs make, git and Python 3.11 or newer (choose one with `make test PYTHON=python3.13`).

PYTHON ?= python3
WORKERS ?= 3
TIMES ?= 20

VENV := .venv
BENCH_VENV := .venv-bench
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
FLIGHTS_READY := $(VENV)/.ready-demo-flights
KERAS_READY := $(VENV)/.ready-demo-keras
RAY_READY := $(VENV)/.ready-demo-ray
BENCH_READY := $(BENCH_VENV)/.ready
# Variables, because a comma would separate arguments of $(call ...).
EXTRAS := demo,demo-flights,demo-keras,demo-ray,dev,docs
DEMO_EXTRAS := demo
FLIGHTS_EXTRAS := demo-flights
KERAS_EXTRAS := demo-keras
RAY_EXTRAS := demo-ray
BENCH_EXTRAS := bench,compression
PIP_FLAGS := --quiet --quiet --disable-pip-version-check --no-input
SETUP_TIME := two to five minutes

export PIP_NO_WARN_SCRIPT_LOCATION := 1
# Tests start hundreds of Python processes; without cached bytecode each compiles Headrace again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-flights demo-keras demo-ray demo-chaos test test-all check soak bench docs dist \
    release-check clean
.DEFAULT_GOAL := test

help:
	@echo "make setup   create a virtual environment in .venv with all dependencies"
	@echo "make demo    train a classifier through a dispatcher and two worker processes"
	@echo "make demo-flights"
	@echo "             train a model of flight delays on two workers and two parameter servers"
	@echo "make demo-keras"
	@echo "             train a Keras model on two of each, kill one of each, compare the weights"
	@echo "make demo-ray"
	@echo "             train on Ray actors, kill three of them, scale the data service out and in"
	@echo "make demo-chaos"
	@echo "             kill a process every second, and compare with reading in one process"
	@echo "make test    all checks, and all tests but the slow ones (WORKERS=3 processes)"
	@echo "make test-all"
	@echo "             all checks and tests; installs Chromium if it is missing (as root on Debian)"
	@echo "make check   format, lint, types, import rules"
	@echo "make soak    simulation with many peers, and the service tests many times (TIMES=20)"
	@echo "             SELECT=EXPRESSION runs only matching tests, as pytest -k"
	@echo "make bench   the benchmarks, in a separate environment; about 40 minutes on two idle cores,"
	@echo "             and on first use five minutes to set it up;"
	@echo "             ARGS=--quick runs the main ones in 8 minutes, ARGS=--list shows names,"
	@echo "             and ARGS='service jpeg' runs an area and a benchmark"
	@echo "make docs    redraw the pictures in docs/, and build the documentation in build/docs"
	@echo "make dist    build the sdist and the wheel in build/dist, and check them"
	@echo "make release-check"
	@echo "             build, install the wheel for each Python here, use each extra; some minutes"
	@echo "make clean   remove environments and caches"

setup: $(READY)

demo: $(DEMO_READY)
	@$(BIN)/headrace demo

demo-flights: $(FLIGHTS_READY)
	@$(BIN)/python examples/flights.py

demo-keras: $(KERAS_READY)
	@$(BIN)/python examples/keras_demo.py

demo-ray: $(RAY_READY)
	@$(BIN)/python examples/ray_demo.py

demo-chaos: $(DEMO_READY)
	@$(BIN)/python examples/chaos.py

test: check
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow"

# Tests with Slurm itself are skipped without its daemons; the same cases run with a stand-in.
test-all: check
	@$(call install,slurmctld,slurm-wlm) || echo "so tests with Slurm are skipped" >&2
	@$(call install,chromium,chromium) || { echo "the tests of the dashboard need it" >&2; exit 1; }
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

check: $(READY)
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

soak: $(READY)
	@$(BIN)/python -m tests.soak $(TIMES) $(if $(SELECT),--select '$(SELECT)')

bench: $(BENCH_READY)
	@$(BENCH_VENV)/bin/python -m benchmarks $(ARGS)

docs: $(READY)
	@$(BIN)/python docs/architecture.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "built build/docs/index.html"

dist: $(READY)
	@$(BIN)/python -m release --dist

release-check: $(READY)
	@$(BIN)/python -m release

clean:
	rm -rf $(VENV) $(BENCH_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	    .import_linter_cache
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# Install the Debian package $(2) unless the command $(1) exists; fails if it cannot.
define install
command -v $(1) >/dev/null || { \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing $(2)" \
	    && apt-get update -qq && apt-get install -qq -y --no-install-recommends $(2) >/dev/null; \
	} || { echo "$(1) is missing; install Debian's package $(2)" >&2; false; }
endef

# An environment with a stamp file is updated; one without (new, or incomplete after an interrupted
# run) is created from scratch. Stamps are removed first and written last.
define make_environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Headrace needs Python 3.11 or newer, but '$(PYTHON)' is older or missing;" \
	        "choose another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "'$(PYTHON)' lacks the venv module; install it (on Debian and Ubuntu the package" \
	        "python3-venv) or choose another Python: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }
	@echo "setting up $(1) (the first time takes $(SETUP_TIME))"
	@if ls $(1)/.ready* >/dev/null 2>&1; then rm -f $(1)/.ready*; else $(PYTHON) -m venv --clear $(1); fi
	@$(1)/bin/python -m pip install $(PIP_FLAGS) $(2)
	@touch $(3)
endef

$(READY): pyproject.toml constraints.txt
	$(call make_environment,$(VENV),--constraint constraints.txt --editable '.[$(EXTRAS)]',$(READY) $(DEMO_READY) $(FLIGHTS_READY) $(KERAS_READY) $(RAY_READY))

$(DEMO_READY): pyproject.toml constraints.txt
	$(call make_environment,$(VENV),--constraint constraints.txt --editable '.[$(DEMO_EXTRAS)]',$(DEMO_READY))

$(FLIGHTS_READY): pyproject.toml constraints.txt
	$(call make_environment,$(VENV),--constraint constraints.txt --editable '.[$(FLIGHTS_EXTRAS)]',$(FLIGHTS_READY))

$(KERAS_READY): pyproject.toml constraints.txt
	$(call make_environment,$(VENV),--constraint constraints.txt --editable '.[$(KERAS_EXTRAS)]',$(KERAS_READY))

$(RAY_READY): pyproject.toml constraints.txt
	$(call make_environment,$(VENV),--constraint constraints.txt --editable '.[$(RAY_EXTRAS)]',$(RAY_READY))

# Its frameworks are large, so pip shows what it downloads.
$(BENCH_READY): PIP_FLAGS := --disable-pip-version-check --no-input
$(BENCH_READY): SETUP_TIME := about five minutes
$(BENCH_READY): pyproject.toml
	$(call make_environment,$(BENCH_VENV),--editable '.[$(BENCH_EXTRAS)]',$(BENCH_READY))
