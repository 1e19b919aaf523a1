# SPDX-License-Identifier: Apache-2.0
# From nothing to a result, on a machine with Python 3.10 - 3.12, g++ and make (as root on Debian and Ubuntu, missing
# packages of theirs are installed: tools/system_packages.sh):
#   make demo   trains a small MoE on real packed documents under context parallelism
#   make test   runs the whole test suite
# Every target sets up what it needs and repeats nothing that is done already.
#
#   PYTHON=python3.12     the interpreter to make .venv with
#   VENV=path             an environment elsewhere
#   JOBS=4                parallel compile jobs
#   CUDA=ON               also build the Hopper kernels (needs nvcc 12.8 or newer)
#   PADDLE=folder         build the op against this `paddle` folder, a GPU build's say, not the environment's
#   DATA=folder RUN=name TOKENIZER=tokenizer.json DEMO_ARGS="--steps 20"     for `make demo`
#   PYTEST_ARGS="-k window"                                                  for the test targets

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
JOBS ?= $(shell nproc)
CUDA ?= OFF
PADDLE ?=
DATA ?=
RUN ?=
TOKENIZER ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?= --device cpu

BIN := $(abspath $(VENV))/bin
RUN_PYTHON := PYTHONPATH="$(CURDIR)" $(BIN)/python
SETUP_STAMP := $(VENV)/.fm3-requirements
LINT_STAMP := $(VENV)/.fm3-requirements-dev

.PHONY: help setup build demo test test-unit test-gpu test-dist lint bench clean
.DEFAULT_GOAL := help

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(SETUP_STAMP)

$(SETUP_STAMP): requirements.txt requirements-paddlenlp.txt constraints.txt
	@tools/system_packages.sh "$(PYTHON)"
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@# Debian 12 brings pip 23.0, which builds old source packages (seqeval) the legacy way, and that fails today.
	$(BIN)/python -m pip install --disable-pip-version-check -q pip==24.3.1
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements.txt -c constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -r requirements-paddlenlp.txt
	@touch $@

build: setup
	@PATH="$(BIN):$$PATH" cmake -S . -B build -G Ninja --log-level=WARNING -DFM3_CUDA=$(CUDA) -DFM3_TESTS=ON \
	  -DPython_EXECUTABLE=$(BIN)/python -DPaddle_ROOT="$(abspath $(PADDLE))"
	@PATH="$(BIN):$$PATH" cmake --build build -j $(JOBS)

# CMake goes on without the planner module where Python.h is missing; context parallelism then has nothing to run on.
REQUIRE_PLANNER = ls paddle_fm3/_lib/_planner*.so >/dev/null 2>&1 || { echo "context parallelism is not built: \
  $(BIN)/python has no Python.h; on Debian and Ubuntu: apt-get install python3-dev, then again"; exit 1; }

demo: build
	@$(REQUIRE_PLANNER)
	$(RUN_PYTHON) tools/demo.py $(if $(DATA),--data "$(DATA)") $(if $(RUN),--run "$(RUN)") \
	  $(if $(TOKENIZER),--tokenizer "$(TOKENIZER)") $(DEMO_ARGS)

test: build
	@$(REQUIRE_PLANNER)
	@PATH="$(BIN):$$PATH" ctest --test-dir build --output-on-failure --no-tests=ignore
	$(RUN_PYTHON) -m pytest $(PYTEST_ARGS)

test-unit: build
	$(RUN_PYTHON) -m pytest test/unit test/cpu $(PYTEST_ARGS)

test-gpu: build
	$(RUN_PYTHON) -m pytest -m gpu $(PYTEST_ARGS)

test-dist: build
	@$(REQUIRE_PLANNER)
	$(RUN_PYTHON) -m pytest -m dist $(PYTEST_ARGS)

bench: build
	$(RUN_PYTHON) tools/bench_attention.py $(BENCH_ARGS)

$(LINT_STAMP): $(SETUP_STAMP) requirements-dev.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements-dev.txt
	@touch $@

lint: $(LINT_STAMP)
	$(BIN)/python tools/lint.py

clean:
	rm -rf build dist paddle_fm3/_lib *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
