# Every target sets up what it needs: see `make help`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ARGS ?=
EXTRA ?=
PYTHON ?=
export EXTRA PYTHON
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# The environment of every day has the newest JAX; another proves the oldest supported one, and one
# has XLA's compiler for GPUs that are not there; so has a last one, of the oldest JAX.
VENV := .venv
VENV_OLDEST := .venv-oldest
VENV_AOT := .venv-aot
VENV_AOT_OLDEST := .venv-aot-oldest
RUN := $(VENV)/bin/python -m
RUN_OLDEST := $(VENV_OLDEST)/bin/python -m
RUN_AOT := $(VENV_AOT)/bin/python -m
DEV := lm,test,lint
# The interpreter is slow: on the oldest JAX it runs rms_norm's kernels under every transformation,
# and those of the other ops are lowered for CUDA; their cases in plain JAX run on the newest, as do
# the tests of bench/, which is no part of the package.
SUBSET_OLDEST := -m 'not newest' -k 'not (mosaic or auto or xla or ssd_kernels or test_bench) or lowered or (rms_norm and transformations)'

.PHONY: help
help:
	@echo 'make train   train the language model    make train ARGS="--steps 50"'
	@echo 'make test    lint, types and all tests; on a GPU also the compiled kernels'
	@echo 'make bench   time the kernels            make bench ARGS="--help"'
	@echo 'make aot     compile ops for three generations of GPUs, none of them there, and compare'
	@echo 'make matrix  all of that: every shape, seven generations, the newest and the oldest JAX'
	@echo 'make scaling compile training steps for up to 1,024 GPUs, and predict their time'
	@echo 'make docs    the documentation as pages, in build/site, and whether their links hold'
	@echo 'make trial   install the package from nothing, and run every example under each mode of JAX'
	@echo 'make lint    formatting, lint and types'
	@echo 'make clean   remove environments and caches; runs/ stays'
	@echo
	@echo 'Each sets up its own environment in $(VENV), with JAX for the GPU that nvidia-smi shows.'
	@echo 'EXTRA=cuda13, cuda12 or cpu chooses the build of JAX, PYTHON=… the interpreter (3.12 or newer).'

# With -j3 the environments of `make docs aot test` are made side by side.
.PHONY: environments environment-newest environment-oldest environment-aot
environments: environment-newest environment-oldest environment-aot
environment-newest:
	@.make/setup $(VENV) constraints/newest.txt docs,$(DEV)
environment-oldest:
	@EXTRA=cpu .make/setup $(VENV_OLDEST) constraints/oldest.txt test
environment-aot:
	@EXTRA=cpu .make/setup $(VENV_AOT) constraints/newest.txt lm,aot

.PHONY: train
train:
	@.make/setup $(VENV) constraints/newest.txt lm
	$(RUN) jaxkern train $(ARGS)

.PHONY: bench
bench:
	@.make/setup $(VENV) constraints/newest.txt lm
	$(RUN) bench $(ARGS)

# JAX is for the CPU wherever this runs: the GPUs are described, none is used.
.PHONY: aot
aot: environment-aot
	$(RUN_AOT) bench aot --part $(ARGS)
	$(RUN_AOT) bench collectives --part

# About an hour on 2 cores; ARGS="--write --missing" goes on where an earlier run was ended.
.PHONY: matrix
matrix: environment-aot
	$(RUN_AOT) bench aot $(ARGS)
	$(RUN_AOT) bench collectives
	@EXTRA=cpu .make/setup $(VENV_AOT_OLDEST) constraints/oldest.txt lm,aot
	$(VENV_AOT_OLDEST)/bin/python -m bench aot $(ARGS)

# Steps for up to 1,024 GPUs: by hand, half an hour; ARGS="--missing" goes on.
.PHONY: scaling
scaling: environment-aot
	$(RUN_AOT) bench scaling $(ARGS)

.PHONY: docs
docs:
	@.make/setup $(VENV) constraints/newest.txt docs
	JAX_PLATFORMS=cpu $(VENV)/bin/python .site/pages.py $(ARGS)
	@echo 'Open build/site/index.html'

.PHONY: lint
lint:
	@.make/setup $(VENV) constraints/newest.txt $(DEV)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) pyright

.PHONY: test
test: lint environment-oldest
	JAX_PLATFORMS=cpu $(RUN) pytest -n 2 $(ARGS)
	JAX_PLATFORMS=cpu $(RUN_OLDEST) pytest -n 2 $(SUBSET_OLDEST) $(ARGS)
	@if nvidia-smi >/dev/null 2>&1 && tail -n 1 $(VENV)/.jaxkern | grep -q cuda; then \
		set -x; $(RUN) pytest -m gpu $(ARGS); \
	else echo 'No GPU here: the kernels ran in the interpreter, not compiled.'; fi

# From nothing: the package as a user installs it, in environments of its own.
.PHONY: trial
trial:
	@.make/setup $(VENV) constraints/newest.txt lm
	$(VENV)/bin/python tests/trial.py $(ARGS)

.PHONY: clean
clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_AOT) $(VENV_AOT_OLDEST) build dist .pytest_cache .ruff_cache .hypothesis
	find jaxkern tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
