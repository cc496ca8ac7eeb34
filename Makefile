# Every target sets up what it needs: a virtual environment in .venv, filled by pip from pyproject.toml's `dev` extra; for
# `demo` with the dependencies alone, by the `tested` extra.
# PYTHON names the interpreter it is made with (3.11 or later); by default the first such one that is found.

PYTHON ?= $(shell for p in python3 python3.15 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OWN_READY := $(VENV)/.ready-own
# An interpreter of $$version, or none. A name on PATH may be a shim without one, or one of pyenv's that is told of
# another version: pyenv's own folder has the interpreter.
FIND_PYTHON := for python in python$$version $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version.*/bin/python$$version none; do \
	$$python -c "" 2>/dev/null && break; done
VERSIONS := 3.11 3.12 3.13 3.14 3.15
MINUTES ?= 10
# Tests run in this many processes, three a core, since tests wait for processes most of the time. `make test JOBS=0` runs
# them in one.
JOBS ?= 6
BESIDE := --beside $(JOBS)
# The suites that have no packages of their own, and that can be collected without those.
CORE := --ignore=tests/frameworks --ignore=tests/clusters
SERVICES_READY := $(VENV)/.ready-services
FRAMEWORKS_READY := $(VENV)/.ready-frameworks
RAY_READY := $(VENV)/.ready-ray
ALL_READY := $(VENV)/.ready-all
BENCH_READY := $(VENV)/.ready-bench
FASTAI := fastai==2.8.12
LITDATA := litdata==0.2.76
DLIO := dlio-benchmark==2.0.0
FRAMEWORKS_WITH_RAY := tests/frameworks/test_ray.py tests/frameworks/test_documentation.py

# Where this is set, every process that a test spawns would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: demo test test-all matrix test-frameworks test-frameworks-with-ray test-frameworks-without-ray test-services test-ray soak lint typecheck mypy pyright docs bench bench-outsiders gpu compare-loaders build dist clean help

demo: $(OWN_READY) ## one training, beside torch's loader: how long it waits, a worker that is killed, a resume
	$(BIN)/python examples/demo.py

test: $(READY) ## the tests that are quick; ROOM=transport: those of tests/transport
	$(BIN)/python -m pytest $(BESIDE) $(if $(ROOM),tests/$(ROOM),$(CORE))

# Not beside each other: frameworks and Ray each start clusters of Ray, and a program takes part in the latest of a machine.
test-all: $(ALL_READY) ## all tests, those that are slow, soak, need a GPU or train with frameworks included
	ASYNCLOADER_SERVICES=required $(BIN)/python -m pytest -m "" $(BESIDE) $(CORE)
	$(BIN)/python -m pytest -m "" tests/frameworks
	$(BIN)/python -m pytest -m "" tests/clusters

# Each has an environment of its own, in .venv-3.12 and so on.
matrix: ## demo and quick tests on each of VERSIONS of Python that is there, with the newest torch (TORCH===2.13.0: with that)
	@failed=""; for version in $(VERSIONS); do $(FIND_PYTHON); \
		[ $$python != none ] || { echo "== Python $$version: not found"; continue; }; \
		own="VENV=.venv-$$version PYTHON=$$python"; \
		$(MAKE) $$own .venv-$$version/.ready && \
		.venv-$$version/bin/pip install --quiet --upgrade 'torch$(TORCH)' && \
		.venv-$$version/bin/python -c 'import sys, torch; print("== Python", sys.version.split()[0], "torch", torch.__version__)' && \
		$(MAKE) $$own demo test || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed on:$$failed" >&2; exit 1; }

test-frameworks: $(FRAMEWORKS_READY) ## train with Lightning, Accelerate, the Hugging Face Trainer, Ignite, fastai and Ray Train
	$(BIN)/python -m pytest -m "frameworks and not slow" tests/frameworks

# The same in two parts: what starts a cluster of Ray, and what does not.
test-frameworks-with-ray: $(FRAMEWORKS_READY)
	$(BIN)/python -m pytest -m "frameworks and not slow" $(FRAMEWORKS_WITH_RAY)

test-frameworks-without-ray: $(FRAMEWORKS_READY)
	$(BIN)/python -m pytest -m "frameworks and not slow" $(addprefix --ignore=,$(FRAMEWORKS_WITH_RAY)) tests/frameworks

test-services: $(SERVICES_READY) ## datasets against PostgreSQL and an S3 server, which it installs (as root)
	ASYNCLOADER_SERVICES=required $(BIN)/python -m pytest -m "services and not slow" tests/datasets tests/test_examples.py

test-ray: $(RAY_READY) ## workers on the nodes of a Ray cluster: several raylets on this machine
	$(BIN)/python -m pytest -m "ray and not slow" tests/clusters

soak: $(READY) ## the soak tests, for MINUTES=10
	ASYNCLOADER_SOAK_S=$$(( $(MINUTES) * 60 )) $(BIN)/python -m pytest -s -m soak $(CORE)

lint: $(READY) ## ruff, its format, what may import what (quick tests too), and how long functions are
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.style

typecheck: mypy pyright ## mypy --strict; pyright over a program that uses us, and for how much of the package it knows the type

mypy: $(READY)
	$(BIN)/mypy

pyright: $(READY)
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	@PATH="$(abspath $(BIN)):$$PATH" basedpyright --verifytypes asyncloader --ignoreexternal --outputjson | $(BIN)/python -c \
		'import json, sys; share = json.load(sys.stdin)["typeCompleteness"]["completenessScore"]; \
		print(f"{share:.1%} of the names in the package have types that are known"); sys.exit(share < 0.99)'

docs: $(READY) ## build the documentation into build/docs; check the links, run the code on its pages and the examples
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs
	$(BIN)/python -m pytest -m "docs and not slow and not services" tests/test_docs.py tests/test_examples.py
	@echo "open build/docs/index.html"

# A benchmark is a module that can be run; the others in the folder are what they share.
bench: $(BENCH_READY) ## every benchmark in tests/benchmarks, one after the other (ARGS=--quick for a look)
	@set -e; for script in $$(grep -l '^if __name__ == "__main__"' tests/benchmarks/*.py); do \
		name=$$(basename $$script .py); echo "== $$name"; $(BIN)/python -m tests.benchmarks.$$name $(ARGS); done

bench-outsiders: $(BENCH_READY) ## other people's benchmarks, by their rules; makes docs/outsiders.md (ARGS=--quick for a look)
	@mkdir -p docs/results
	$(BIN)/python -m tests.benchmarks.outsiders --json docs/results/outsiders$(SUFFIX).json $(ARGS)
	$(BIN)/python docs/draw_outsiders.py docs/results/outsiders*.json

# Ten minutes at most, for a machine that is lent.
gpu: $(READY) ## on a machine with a GPU: the tests that need one, and copies beside a training; results go to docs/results
	@$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "there is no GPU"'
	@mkdir -p docs/results
	-timeout 240 $(BIN)/python -m pytest -q -m gpu --junitxml=docs/results/gpu-tests.xml tests/wrap tests/transport tests/conformance
	-timeout 240 $(BIN)/python -m tests.benchmarks.device --quick --json docs/results/gpu-device.json
	timeout 120 $(BIN)/python -m tests.benchmarks.outsiders --quick --only imread --json docs/results/gpu-images.json

compare-loaders: $(BENCH_READY) ## what happens to six other loaders and ours when something goes wrong; makes docs/faults.md of it
	$(BIN)/python -m asyncloader.testing.suite $(addprefix tests.faults.adapters:,Ours Torch Stateful Spdl Nodes Grain Litdata) --json docs/results/faults.json
	$(BIN)/python docs/draw_faults.py docs/results/faults.json

build: $(READY) ## wheel and source distribution in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

# Into an empty environment, with no other packages than it asks for; each takes a gigabyte, so it is removed again.
dist: build ## the same, and each of VERSIONS of Python that is there installs the wheel and passes its self-test
	@failed=""; for version in $(VERSIONS); do $(FIND_PYTHON); \
		[ $$python != none ] || { echo "== Python $$version: not found"; continue; }; \
		echo "== Python $$version"; rm -rf build/dist && $$python -m venv build/dist && \
		build/dist/bin/pip install --quiet "$$(echo dist/*.whl)[tested]" && \
		(cd build/dist && bin/python -m asyncloader doctor --selftest) || failed="$$failed $$version"; \
		rm -rf build/dist; \
	done; test -z "$$failed" || { echo "failed on:$$failed" >&2; exit 1; }

clean: ## remove what was built and cached, but for the virtual environment (rm -r .venv)
	rm -rf build dist .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later found; name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# What is needed to use the library, and no more.
$(OWN_READY): pyproject.toml | $(BIN)/pip
	@echo "installing asyncloader and its own dependencies into $(VENV)"
	@$(BIN)/pip install --quiet --editable '.[tested]'
	@touch $@

$(READY): pyproject.toml | $(BIN)/pip
	@echo "installing asyncloader and what its development needs into $(VENV) (the first time takes some minutes)"
	@$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@ $(OWN_READY)

$(SERVICES_READY): $(READY) tests/services/install.sh
	@bash tests/services/install.sh
	@$(BIN)/pip install --quiet --editable '.[dev,services]'
	@touch $@

# `dev` is named again so that its pins hold: no framework may bring another torch.
$(FRAMEWORKS_READY): $(READY)
	@echo "installing the training frameworks into $(VENV)"
	@$(BIN)/pip install --quiet --editable '.[dev,frameworks]'
	@$(BIN)/pip install --quiet --no-deps $(FASTAI) # without torchvision and spacy: see pyproject.toml
	@touch $@

$(RAY_READY): $(READY)
	@$(BIN)/pip install --quiet --editable '.[dev,ray]'
	@touch $@

# Those three at once: each call of pip looks at all packages again.
$(ALL_READY): $(READY) tests/services/install.sh
	@bash tests/services/install.sh
	@$(BIN)/pip install --quiet --editable '.[dev,services,frameworks,ray]'
	@$(BIN)/pip install --quiet --no-deps $(FASTAI)
	@touch $@ $(SERVICES_READY) $(FRAMEWORKS_READY) $(RAY_READY)

$(BENCH_READY): $(READY)
	@echo "installing the loaders that benchmarks compare with into $(VENV)"
	@$(BIN)/pip install --quiet --editable '.[dev,bench]'
	@$(BIN)/pip install --quiet --no-deps $(LITDATA) $(DLIO) # without torchvision and TensorFlow: see pyproject.toml
	@touch $@
