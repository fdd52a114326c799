# shmbridge: what you can do with a clone. Needs Python 3.11 or newer, a C compiler and make.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/python

# A CPU machine gets the CPU build of torch where one is provided; see constraints-cpu.txt.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c constraints-cpu.txt)

.PHONY: help install demo test lint types model bench-first clean

help: ## this list
	@echo "make demo MODEL=dir ENV=env.py DEMO_FLAGS='--seed 2'"
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

install: $(VENV)/.installed ## create .venv with everything the demo and the tests need

$(VENV)/.installed: pyproject.toml setup.py constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(CONSTRAINTS) torch
	$(BIN)/pip install --quiet $(CONSTRAINTS) --config-settings editable_mode=compat -e '.[atropos,learner,dev]'
	touch $@

# Extensions are rebuilt when their sources change.
$(VENV)/.built: $(VENV)/.installed $(wildcard shmbridge/_ext/*.pyx shmbridge/_ext/*.pxd shmbridge/_ext/*.h shmbridge/_ext/*.c)
	$(RUN) setup.py --quiet build_ext --inplace
	touch $@

demo: $(VENV)/.built ## train a small model through shared memory: policy server, two Atropos environments, learner
	$(RUN) examples/demo.py $(if $(MODEL),--model $(MODEL)) $(if $(ENV),--env $(ENV)) $(DEMO_FLAGS)

test: $(VENV)/.built lint types ## everything, Atropos end to end included
	$(BIN)/pytest

lint: $(VENV)/.built ## ruff
	$(BIN)/ruff check .

types: $(VENV)/.built ## mypy strict over the package
	$(BIN)/mypy

model: ## check the lane protocol exhaustively (needs spin)
	@command -v spin >/dev/null || { echo "spin is not installed: apt-get install spin"; exit 1; }
	docs/model/check.sh
	docs/model/check.sh --mutations

bench-first: $(VENV)/.built ## first figures: groups from lists and arrays beside the C twin
	$(RUN) bench/first_figures.py

clean: ## remove what builds and runs left here
	rm -rf build dist runs *.egg-info shmbridge/_ext/*.so
