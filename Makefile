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
# CI runs one eighth of the exhaustive suite, the next one with each commit on main; pytest-split
# cuts it by the seconds in .test_durations.
EIGHTH = $$(( $$(git rev-list --count --first-parent HEAD) % 8 + 1 ))

.PHONY: help
help:
	@echo 'make train   train the language model    make train ARGS="--steps 50"'
	@echo 'make test    lint, types and the default tests; on a GPU also the compiled kernels'
	@echo 'make test-all  everything, on both versions of JAX: an hour on 2 cores'
	@echo 'make eighth  one eighth of the exhaustive tests, chosen by the commit'
	@echo 'make smoke   a few tests on the oldest supported JAX'
	@echo 'make durations  measure every test, after tests were added or changed'
	@echo 'make faults  plant faults in copies, and see that the tests find them'
	@echo 'make bench   time the kernels            make bench ARGS="--help"'
	@echo 'make aot     compile ops for three generations of GPUs, none of them there, and compare'
	@echo 'make matrix  all of that: every shape, seven generations, the newest and the oldest JAX'
	@echo 'make docs    the documentation as pages, in build/site, and whether their links hold'
	@echo 'make trial   install the package from nothing, and run every example under each mode of JAX'
	@echo 'make widths  whether the pages of make docs fit windows, in a browser'
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

.PHONY: docs
docs:
	@.make/setup $(VENV) constraints/newest.txt docs
	JAX_PLATFORMS=cpu $(VENV)/bin/python .site/pages.py $(ARGS)
	@echo 'Open build/site/index.html'

# In a browser, which is some hundred megabytes.
.PHONY: widths
widths: docs
	python3 -m venv build/browser
	build/browser/bin/pip install --quiet PySide6
	build/browser/bin/python .site/widths.py

.PHONY: lint
lint:
	@.make/setup $(VENV) constraints/newest.txt $(DEV)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) pyright

.PHONY: test
test: lint
	JAX_PLATFORMS=cpu $(RUN) pytest -n 2 $(ARGS)
	@if nvidia-smi >/dev/null 2>&1 && tail -n 1 $(VENV)/.jaxkern | grep -q cuda; then \
		set -x; $(RUN) pytest -m gpu $(ARGS); \
	else echo 'No GPU here: the kernels ran in the interpreter, not compiled.'; fi

.PHONY: eighth
eighth: environment-newest
	JAX_PLATFORMS=cpu $(RUN) pytest -n 2 -m exhaustive --splits 8 --group $(EIGHTH) \
		--splitting-algorithm least_duration $(ARGS)

.PHONY: smoke
smoke: environment-oldest
	JAX_PLATFORMS=cpu $(RUN_OLDEST) pytest -n 2 -m smoke $(ARGS)

# The tests of bench/ are no part of the package and run on the newest JAX alone.
.PHONY: test-all
test-all: docs lint environment-oldest aot
	JAX_PLATFORMS=cpu $(RUN) pytest -n 2 -m '' $(ARGS)
	JAX_PLATFORMS=cpu $(RUN_OLDEST) pytest -n 2 -m 'not bench' $(ARGS)

# With nothing cached, as where CI runs.
.PHONY: durations
durations: environment-newest
	JAX_PLATFORMS=cpu JAXKERN_CACHE_DIR=$$(mktemp -d) $(RUN) pytest -n 2 -m '' \
		--store-durations --clean-durations $(ARGS)

.PHONY: faults
faults: environment-newest
	JAX_PLATFORMS=cpu $(RUN) tests.faults $(ARGS)

# From nothing: the package as a user installs it, in environments of its own.
.PHONY: trial
trial:
	@.make/setup $(VENV) constraints/newest.txt lm
	$(VENV)/bin/python .make/trial.py $(ARGS)

.PHONY: clean
clean:
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_AOT) $(VENV_AOT_OLDEST) build dist .pytest_cache .ruff_cache .hypothesis
	find jaxkern tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
