# Table of contents of the project: `make help` lists the targets.

PYTHON ?= python3
SEEDS  ?= 2000
SEED   ?= 0
T      ?=
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(shell find csrc syncer -name '*.[ch]' -not -path 'syncer/*.c' -o -name '*.pyx' -o -name '*.pxd')

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n "s,^\([a-z-]*\):.*\#\#.*,\1,p" Makefile)

help:  ## list the targets
	@awk -F ':.*## *' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## build, install, and train a small language model with three learners
	$(BIN)/syncer demo

test: $(VENV)/.built  ## build, install with the test extra, run every test: make test T=name-or-path
	$(if $(T),$(BIN)/python -m pytest $(if $(findstring /,$(T)),$(T),-k '$(T)'),.ci/test $(BIN)/python)

fast: $(VENV)/.built  ## run the unit tests that take moments (under 30 s once built)
	$(BIN)/python -m pytest tests/unit -m "not slow"

check: $(VENV)/.built $(VENV)/.check  ## style, formats, types and docs (under 60 s once built)
	PYTHON=$(CURDIR)/$(BIN)/python .ci/check

lint: check  ## the same as check

debug: $(VENV)/.test  ## build with Cython's checks on, in build/debug, and run the unit tests there
	.ci/debug $(CURDIR)/$(BIN)/python

sim: $(VENV)/.built  ## simulate fleets with faults: make sim SEEDS=100000 SEED=0
	SEEDS=$(SEEDS) SEED=$(SEED) .ci/sim $(BIN)/python

sim-coverage: $(VENV)/.test  ## which lines of the server the simulated fleets reach; fails below 95 %
	SEEDS=$(SEEDS) SEED=$(SEED) .ci/sim_coverage $(CURDIR)/$(BIN)/python

fuzz: $(VENV)/.built  ## fuzz everything that reads foreign bytes: make fuzz SEED=1
	$(BIN)/python -m tests.fuzz --seconds 60 --jobs 0 --seed $(SEED)

kill-test: $(VENV)/.built  ## kill -9 a server 200 times per kind of checkpoint (about ten minutes)
	$(BIN)/python -m tests.e2e.killed --kills 200

soak: $(VENV)/.built  ## ten minutes of learners that come, go, pause and send rubbish, behind a forgetful proxy
	$(BIN)/python -m tests.e2e.soak --seconds 600

bench-checkpoint: $(VENV)/.built  ## checkpoint speed against raw disk speed (writes 2 GiB files here)
	$(BIN)/python -m pytest benchmarks/bench_checkpoint.py --benchmark-only -s

bench: $(VENV)/.built  ## run every benchmark; each prints a ratio to a reference of the same run
	$(BIN)/python -m pytest benchmarks --benchmark-only -s

bench-kernels: $(VENV)/.built  ## run the kernel benchmarks only (no network, no root)
	$(BIN)/python -m pytest benchmarks/bench_kernels.py --benchmark-only -s

bench-limits: $(VENV)/.built  ## every path beside its bound, in one table and limits.json (25 minutes)
	$(BIN)/python -m benchmarks.limits --json limits.json --figures docs/limits.json

bench-peers: $(VENV)/.built build/peers/.made build/flower/.made  ## torchft, hivemind, Flower and torch side by side with this (45 minutes)
	$(BIN)/python -m benchmarks.peers --python build/peers/bin/python \
	  --flower-python build/flower/bin/python --json docs/peers.json --png docs/peers.png

wheels: $(VENV)/.test  ## build x86_64 and aarch64 wheels and an sdist into dist/, and check each
	.ci/wheels $(BIN)/python

build: $(VENV)/.built  ## rebuild the compiled modules in place

docs: $(VENV)/.built  ## write the generated parts of docs/ again
	$(BIN)/python docs/generate.py

clean:  ## remove everything that was built
	rm -rf $(VENV) build dist *.egg-info
	find syncer -name '*.so' -delete
	find syncer -name '*.pyx' | sed 's/pyx$$/c/' | xargs rm -f

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "syncer: Python 3.11 or newer is needed; name one with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "syncer: this Python has no venv module; install it, for example with: apt-get install python3-venv"; exit 1; }

# The demo is installed as a user would: the build has an environment of its own.
$(VENV)/.demo: $(VENV)/bin/python $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/bin/python setup.py pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

# The peers of benchmarks/peers: two environments, since they want other versions of the same.
build/peers/.made: benchmarks/peers/requirements.txt
build/flower/.made: benchmarks/peers/requirements-flower.txt
build/%/.made:
	$(PYTHON) -m venv build/$*
	build/$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# What builds is in the test extra, so another environment need not be made for it.
$(VENV)/.check: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e '.[check]'
	@touch $@

$(VENV)/.built: $(VENV)/.test $(SOURCES)
	$(BIN)/python setup.py -q build_ext --inplace
	@touch $@
