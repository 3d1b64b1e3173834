# Everything runs in .venv, made on first use with the versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What to install JAX for: cpu, cuda12, cuda13 or tpu. If not given, as before, or else by what the machine has.
ifndef ACCELERATOR
ACCELERATOR := $(or $(patsubst $(VENV)/.ready-%,%,$(firstword $(wildcard $(VENV)/.ready-*))),$(shell \
	driver=$$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1); \
	if [ "$$driver" ]; then [ "$${driver%%.*}" -ge 580 ] && echo cuda13 || echo cuda12; \
	elif ls /dev/accel0 /dev/vfio/0 >/dev/null 2>&1; then echo tpu; else echo cpu; fi))
endif
READY := $(VENV)/.ready-$(ACCELERATOR)
COMMA := ,
EXTRAS := dev$(if $(filter-out cpu,$(ACCELERATOR)),$(COMMA)$(ACCELERATOR))
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet

.PHONY: help setup setup-aloha setup-metaworld setup-libero setup-rendering demo demo-ript test test-slow test-sims fuzz soak mutants lint format
.PHONY: bench bench-loader bench-step bench-rollouts bench-gate bench-full-size pictures docs docs-serve constraints clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(READY)  ## create .venv with pirl and the development tools

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pirl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 setup" >&2; exit 2; }
	@case '$(ACCELERATOR)' in cpu|cuda12|cuda13|tpu) ;; *) \
		echo "ACCELERATOR=$(ACCELERATOR) is none of cpu, cuda12, cuda13, tpu." >&2; exit 2;; esac
	@echo "installing for $(ACCELERATOR); for another: make setup ACCELERATOR=cpu|cuda12|cuda13|tpu"
	$(PYTHON) -m venv $(if $(filter-out $@,$(wildcard $(VENV)/.ready-*)),--clear) $(VENV)
	$(INSTALL) --editable '.[$(EXTRAS)]'
	@touch $@

setup-aloha: $(READY) setup-rendering  ## add the ALOHA simulator
	$(INSTALL) --editable '.[aloha]'

setup-metaworld: $(READY) setup-rendering  ## add the Meta-World simulator
	$(INSTALL) --editable '.[metaworld]'

# What `pip install 'pirl[libero]'` would bring besides is torch, which nothing here imports, and a probe that needs cmake.
# The MuJoCo in constraints.txt has no wheels for Python 3.14; there it is the newest that LIBERO works with.
setup-libero: $(READY) setup-rendering  ## add the LIBERO simulator (download its assets yourself: docs/environments.md)
	$(INSTALL) --only-binary mujoco 'mujoco<3.9' 2>/dev/null || $(BIN)/pip install --quiet --only-binary mujoco 'mujoco<3.9'
	$(INSTALL) numba scipy opencv-python matplotlib cloudpickle easydict future pyyaml termcolor PyOpenGL
	$(INSTALL) --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1

# MuJoCo renders without a screen by EGL or OSMesa, which come from the system.
GL := libegl1 libosmesa6 libgl1-mesa-dri
setup-rendering:
	@test "$$(uname)" != Linux || dpkg --status $(GL) >/dev/null 2>&1 || { \
		test "$$(id -u)" = 0 || as_root=sudo; \
		$$as_root apt-get update --quiet && $$as_root apt-get install --quiet --yes $(GL); \
	} || echo "To render without a screen, please install what your system calls: $(GL)" >&2

demo: $(READY)  ## from pixels: collect data, train BC, train ACRLPD, compare: a quarter of an hour or more on two cores
	$(BIN)/pirl demo

demo-ript: $(READY)  ## the same for RIPT: a weak policy improves by rollouts in the simulator
	$(BIN)/pirl demo ript

test: $(READY)  ## all tests except the slow ones, with line coverage
	$(BIN)/pytest -p line_coverage --least-lines 90

test-slow: $(READY)  ## the slow tests: minutes each; some install other packages
	$(BIN)/pytest -m slow

SIMULATORS := aloha libero metaworld mujoco ript_simulators
test-sims: $(READY)  ## all tests of the installed simulators, including slow ones
	env -u MUJOCO_GL $(BIN)/pytest -m '' $(wildcard $(SIMULATORS:%=tests/envs/test_%*.py))

fuzz: $(READY)  ## fuzz everything that reads text, for ten minutes
	$(INSTALL) atheris==3.0.0
	$(BIN)/python scripts/fuzz.py --seconds 600

mutants: $(READY)  ## mutation tests: break the code in twenty places and check that tests fail
	$(BIN)/python scripts/mutants.py

soak: $(READY)  ## inject faults into the demo's learners for two hours; they have to end bit-identical (docs/results/soak.md)
	PYTHONPATH=scripts $(BIN)/python -m soak --minutes 120 --out runs/soak

lint: $(READY)  ## style, types, import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## format the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## the quick benchmarks; each prints one JSON line
	$(BIN)/python benchmarks/best_of_n.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/env_steps.py

bench-loader: $(READY) .venv-lerobot  ## the loader against LeRobot, installed in its own environment (1.4 GB)
	$(BIN)/python benchmarks/loader.py

.venv-lerobot:
	$(PYTHON) scripts/make_lerobot_env.py v3.0 $@ || { rm -rf $@; exit 1; }

bench-step: $(READY)  ## an ACRLPD update against a BC update: minutes, mostly compilation
	$(BIN)/python benchmarks/acrlpd_step.py

bench-rollouts: $(READY)  ## RIPT's rollout engine against bare stepping of the same environments: minutes
	$(BIN)/python benchmarks/rollout_engine.py

bench-gate: $(READY)  ## whether behavior cloning learns the tabletop: a quarter of an hour
	$(BIN)/python benchmarks/tabletop_gate.py

bench-full-size: $(READY)  ## full-size π₀ on this machine: needs 20 GiB of memory and ten minutes
	$(BIN)/python benchmarks/full_size.py

pictures: $(READY)  ## regenerate the images of the documentation
	$(BIN)/pirl envs play --out docs/images/tabletop.gif --size 220 --episodes 6 --seed 1 --env.max-steps 40 \
		--env.objects 3 --env.zones 3 --expert.aim-bias 0.025 --expert.flawed 0.5
	$(BIN)/pirl envs play --out docs/images/tabletop.png --size 200 --episodes 2
	$(BIN)/python scripts/learning_pictures.py
	$(BIN)/python scripts/scoreboard_page.py

# The theme is maintained until May 2027 and says so at every build; its successor, Zensical, reads the same mkdocs.yml.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.docs  ## build the documentation into site/; it needs no server and no network
	$(BIN)/mkdocs build --quiet --strict

docs-serve: $(VENV)/.docs  ## serve the documentation at http://127.0.0.1:8000, rebuilt on every change
	$(BIN)/mkdocs serve --strict --watch src --watch README.md

$(VENV)/.docs: $(READY)
	$(INSTALL) --editable '.[docs]'
	@touch $@

constraints: $(READY)  ## pin the newest compatible versions
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate --upgrade \
		--extra dev --extra docs --extra hub --extra plan --extra ray --extra sweep --extra tensorboard --extra wandb --extra aloha --extra metaworld \
		--output-file constraints.txt pyproject.toml

clean:  ## remove .venv and caches
	rm -rf $(VENV) .venv-lerobot build site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
