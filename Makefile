# `make run` and `make test` work on a fresh machine: they make .venv, install the locked packages once, and go.
# Options: PYTHON=/path/to/python3.11   PIP_FLAGS="--extra-index-url URL"   CONFIG=experiment.yaml   ARGS="run.steps=5"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
ENVS_LOCK := requirements/envs.lock
PIP_VERSION := 25.3
PIP_FLAGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
BENCHMARKS := tokens planner logprobs train_step weight_sync rollout step credit
CONFIG ?= yaml_configs/quickstart.yaml
ARGS ?=

.PHONY: help run test envs lint format bench docs clean

help:
	@echo "make run     train the quickstart agent        make lint    ruff, pyright"
	@echo "make test    run the tests                     make format  let ruff rewrite the code"
	@echo "make bench   run the benchmarks                make docs    write the generated pages, check all links"
	@echo "make envs    install the optional environments (textworld, reasoning-gym, textarena, alfworld)"
	@echo "make clean   remove .venv, runs, built models and caches"

run: $(VENV)/.project-installed
	$(BIN)/megatron-agent train $(CONFIG) $(ARGS)

test: $(VENV)/.project-installed
	$(BIN)/python -m pytest $(ARGS)

envs: $(VENV)/.envs-installed

lint: $(VENV)/.project-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.project-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.project-installed
	for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python "benchmarks/$$name.py"; done

docs: $(VENV)/.project-installed
	$(BIN)/megatron-agent schema > yaml_configs/schema.json
	$(BIN)/megatron-agent schema --markdown > docs/configuration.md
	$(BIN)/python -m pytest -q tests/test_docs.py

clean:
	rm -rf $(VENV) runs models build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is written only after its step succeeded, so that a broken install is tried again.
$(VENV)/.pip-installed:
	@python="$(PYTHON)"; \
	for candidate in python3.11 python3.12 python3.13 python3; do \
	    if [ -z "$$python" ] && "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2> /dev/null; \
	    then python="$$candidate"; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "error: no Python 3.11, 3.12 or 3.13 on the PATH; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	echo "creating $(VENV) with $$python"; \
	"$$python" -m venv $(VENV) || { echo "error: $$python cannot make a virtual environment; on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	$(PIP) install --quiet $(PIP_FLAGS) pip==$(PIP_VERSION)
	touch $@

$(VENV)/.lock-installed: $(LOCK) $(VENV)/.pip-installed
	@torch=$$(grep '^torch==' $(LOCK)); \
	$(PIP) install --quiet --no-deps $(PIP_FLAGS) "$$torch" || { \
	    echo "error: $$torch cannot be installed; if your package index lacks it, name PyTorch's index of CPU builds:" \
	        "make PIP_FLAGS='--extra-index-url URL'" >&2; exit 1; }
	$(PIP) install --quiet --no-deps $(PIP_FLAGS) -r $(LOCK)
	touch $@

# The build package is in the lock, so that nothing is fetched here.
$(VENV)/.project-installed: pyproject.toml $(VENV)/.lock-installed
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	touch $@

# Not without dependencies' own build tools: some of these packages are built here.
$(VENV)/.envs-installed: $(ENVS_LOCK) $(VENV)/.project-installed
	$(PIP) install --quiet --no-deps $(PIP_FLAGS) -r $(ENVS_LOCK)
	touch $@
