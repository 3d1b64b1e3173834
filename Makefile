# Everything runs in .venv, made on first use with the versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test test-slow lint format bench bench-loader bench-full-size constraints clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(READY)  ## make .venv with pirl and its tools

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pirl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $@" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(READY)  ## (not there yet) collect data, train BC, train RL, compare
	@echo "make demo is not there yet. It needs the embedded environment and the ACRLPD agent;" >&2
	@echo "what works today is the policy, its checkpoints and the data: see the status in README.md." >&2
	@exit 1

test: $(READY)  ## all tests but the slow ones
	$(BIN)/pytest

test-slow: $(READY)  ## the slow tests: minutes each, some install other packages
	$(BIN)/pytest -m slow

lint: $(READY)  ## style, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## the quick benchmarks; each prints one JSON line
	$(BIN)/python benchmarks/best_of_n.py
	$(BIN)/python benchmarks/loader.py

bench-loader: $(READY) .venv-lerobot  ## the loader against the real LeRobot, in an environment of its own (1.4 GB)
	$(BIN)/python benchmarks/loader.py

.venv-lerobot:
	$(PYTHON) scripts/make_lerobot_env.py v3.0 $@ || { rm -rf $@; exit 1; }

bench-full-size: $(READY)  ## full-size π₀ on this machine: needs 20 GiB of memory and ten minutes
	$(BIN)/python benchmarks/full_size.py

constraints: $(READY)  ## pin the newest versions that fit together
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --upgrade \
		--extra dev --extra hub --extra ray --extra tensorboard --extra wandb --output-file constraints.txt pyproject.toml

clean:  ## remove .venv and caches
	rm -rf $(VENV) .venv-lerobot build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
