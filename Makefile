# Everything happens in .venv, whatever environment is active. `make help` lists the targets.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
STAMPS := .venv/.stamps
# The same range as `build-system.requires` in pyproject.toml.
MATURIN := maturin>=1.14,<2

# An active virtual or conda environment must not be built into, nor its packages be imported.
unexport CONDA_PREFIX PYTHONHOME PYTHONPATH
export VIRTUAL_ENV := $(CURDIR)/.venv
# One interpreter for every cargo call: pyo3 is rebuilt whenever this differs from the last one.
export PYO3_PYTHON := $(CURDIR)/.venv/bin/python

# With CI set, a Cargo.lock that is out of date is an error instead of being rewritten.
LOCKED := $(if $(CI),--locked)

# The compiler of `build-system.requires` in pyproject.toml, and what reads its code, so that what it
# makes of the kernels is tested. It lies apart: torch brings the packages of another CUDA.
# `KVFERRY_NVCC=` does without.
ifeq ($(origin KVFERRY_NVCC) $(shell uname -sm),undefined Linux x86_64)
NVCC := $(addprefix nvidia-,$(addsuffix ==13.0.*,cuda-nvcc nvvm cuda-crt cuda-runtime cuda-cccl))
# Of CUDA 13.0 there are none; later ones read earlier code.
NVCC += nvidia-cuda-cuobjdump==13.2.* nvidia-cuda-nvdisasm==13.2.*
export KVFERRY_NVCC := $(CURDIR)/.venv/nvcc/nvidia/cu13/bin/nvcc
endif

UV := $(shell command -v uv 2>/dev/null)
ifneq ($(UV),)
# Without a download: the interpreter is the one that PYTHON names.
CREATE_VENV = UV_PYTHON_DOWNLOADS=never uv venv --quiet --python "$(PYTHON)"
INSTALL_INTO = uv pip install --quiet --python $(1)/bin/python
BUILD_WHEEL = uv build --quiet --wheel --python $(BIN)/python --out-dir
DEVELOP_FLAGS := --uv
else
CREATE_VENV = "$(PYTHON)" -m venv
INSTALL_INTO = $(1)/bin/python -m pip install --quiet --disable-pip-version-check
BUILD_WHEEL = $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps . --wheel-dir
endif
INSTALL = $(call INSTALL_INTO,.venv)
DEVELOP = $(BIN)/maturin develop --release $(LOCKED) $(DEVELOP_FLAGS)
# Tests run host copies through the device's kernels, which no wheel has a use for.
EMULATED := --features emulated

# Users have none of what says here which interpreter and which CUDA compiler to build with. One on
# their PATH is used, and so it is here.
AS_USER := env $(addprefix -u ,VIRTUAL_ENV PYO3_PYTHON KVFERRY_NVCC CUDA_HOME)

# What the installed package is built from; Python files are used where they lie.
BUILD_INPUTS := Cargo.toml $(wildcard Cargo.lock) pyproject.toml \
	$(shell find rust cuda \( -name '*.rs' -o -name '*.toml' -o -name '*.cu*' -o -name '*.[ch]pp' \) 2>/dev/null)
# In a wheel they are copies.
WHEEL_INPUTS := $(BUILD_INPUTS) README.md LICENSE \
	$(shell find python \( -name '*.py' -o -name '*.pyi' -o -name '*.typed' -o -name '*.json' \))

.PHONY: help venv build demo test test-wheel test-peers lint bench instructions mutants clean
.DELETE_ON_ERROR:

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(STAMPS)/venv ## Make the virtual environment in .venv, with PYTHON=python3

build: $(STAMPS)/dev ## Build the extension and install the package with all it is tested with

demo: $(STAMPS)/demo ## Show what kvferry does: make demo ARGS="--help"
	$(BIN)/kvferry demo $(ARGS)

test: $(STAMPS)/dev ## Run every test and every example in the documentation
	$(BIN)/python -m pytest $(ARGS)
	cargo test --workspace $(LOCKED)

# What `testpaths` in pyproject.toml names, with the package as it lies in .wheel.
test-wheel: .wheel/.stamps/installed ## Build the wheel as users do, and run its Python tests, in .wheel
	$(AS_USER) .wheel/bin/python -m pytest tests/wheel tests/unit tests/property tests/fuzz \
		tests/gpu --pyargs kvferry $(ARGS)

test-peers: $(STAMPS)/dev $(STAMPS)/wheel $(STAMPS)/uv ## Compare with LMCache and vLLM themselves, in .peers (6 GB)
	$(BIN)/python tests/peers/run.py $(ARGS)

lint: $(STAMPS)/dev ## Check format, lints, types and that the stubs match the extension
	cargo fmt --all --check
	cargo clippy --workspace --all-targets $(LOCKED) -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet $(LOCKED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/stubtest kvferry._core --mypy-config-file pyproject.toml

bench: $(STAMPS)/bench ## Run the benchmarks; Python's leave tables and a plot in target/bench
	cargo bench --workspace $(LOCKED)
	@mkdir -p target/bench
	@$(BIN)/python benches/python/_machine.py | tee target/bench/table.md
	@for bench in $(wildcard benches/python/[!_]*.py); do \
		$(BIN)/python "$$bench" > target/bench/part.md || exit 1; \
		tee -a target/bench/table.md < target/bench/part.md; \
	done

instructions: $(STAMPS)/dev ## Count instructions beside the recorded counts (ARGS=--record)
	$(BIN)/python benches/instructions.py $(ARGS)

mutants: $(STAMPS)/dev ## Break the planner in known ways, and show that a property notices each
	$(BIN)/python tests/mutation/run.py

clean: ## Remove everything that was built
	rm -rf .venv .wheel .peers target dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f python/kvferry/_core*.so
	find python tests benches -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 10) or sys.exit("kvferry needs Python 3.10 or newer; PYTHON=$(PYTHON) is " + sys.version.split()[0])'
	rm -rf .venv
	$(CREATE_VENV) .venv
	$(INSTALL) "$(MATURIN)"
	@mkdir -p $(@D) && touch $@

$(STAMPS)/nvcc: $(STAMPS)/venv
	rm -rf .venv/nvcc
	$(if $(NVCC),$(INSTALL) --target .venv/nvcc $(foreach package,$(NVCC),"$(package)"))
	@touch $@

# The demo needs no kernels, and so no compiler for them.
$(STAMPS)/demo: export KVFERRY_NVCC :=
$(STAMPS)/demo: $(STAMPS)/venv $(BUILD_INPUTS)
	$(DEVELOP) --extras demo
	@touch $@

# What the demo needs is part of it, so a later `make demo` finds nothing to do.
$(STAMPS)/dev: $(STAMPS)/nvcc $(BUILD_INPUTS)
	$(DEVELOP) $(EMULATED) --extras test,lint
	@touch $@ $(STAMPS)/demo

$(STAMPS)/bench: $(STAMPS)/dev
	$(DEVELOP) --extras test,lint,bench
	@touch $@

# A failure is left to the script, which says what it skips.
$(STAMPS)/uv: $(STAMPS)/venv
	-$(INSTALL) uv && touch $@

$(STAMPS)/wheel: $(STAMPS)/venv $(WHEEL_INPUTS)
	rm -rf target/wheel
	$(AS_USER) $(BUILD_WHEEL) target/wheel
	@touch $@

# The package and what it needs at run time, tried; then what tests need besides, as .venv has it: torch
# is too large to have twice.
.wheel/.stamps/installed: $(STAMPS)/wheel $(STAMPS)/dev
	rm -rf .wheel
	$(CREATE_VENV) .wheel
	$(call INSTALL_INTO,.wheel) target/wheel/*.whl
	$(AS_USER) .wheel/bin/python -c "import kvferry.cli, kvferry.copy, kvferry.cuda, kvferry.testing, kvferry.wire"
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('platlib'))" \
		> "$$(.wheel/bin/python -c "import sysconfig; print(sysconfig.get_path('platlib'))")/tests.pth"
	@mkdir -p $(@D) && touch $@
