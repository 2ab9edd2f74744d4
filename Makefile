# `make help` lists the commands. PYTHON (3.10 to 3.13) makes the environment VENV; ARGS goes to
# the command of demo, test, bench and gpu.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
FUZZ_SECONDS ?= 60
PYTHONS ?= python3.10 python3.11 python3.12 python3.13

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile
LOCKS := requirements/vllm-omni-0.30-cpu.txt requirements/dev.txt
TORCH := $(shell sed -n 's/^torch==//p' $(LOCKS))
NATIVE := $(shell find csrc \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \))
SOURCES := setup.py pyproject.toml $(NATIVE) \
	$(shell find omni_tensor_key \( -name '*.py' -o -name '*.pyi' -o -name py.typed \))

# Without bytecode on disk, every process of the tests would compile torch and vLLM-Omni anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test lint sanitize fuzz bench gpu dist pythons matrix clean
.DELETE_ON_ERROR:

help: ## List these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

venv: $(VENV)/.package ## Make the environment and install the package into it

demo: venv ## Run rollouts in the real engine of vLLM-Omni, with the extension off and on
	$(BIN)/python examples/engine/rollout.py $(ARGS)

test: venv ## Run the tests against the real vllm-omni
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.environment ## Check style, types and the layout of the C++ code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict omni_tensor_key
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) $(wildcard tests/native/*.cpp tests/native/*.h)

sanitize: venv ## Run the tests of the native code under AddressSanitizer and UndefinedBehaviorSanitizer
	$(MAKE) --no-print-directory -C tests/native sanitize PYTHON=$(abspath $(BIN)/python)

fuzz: ## Fuzz the native code for FUZZ_SECONDS (60) under the same two, with libFuzzer
	$(MAKE) --no-print-directory -C tests/native fuzz FUZZ_SECONDS=$(FUZZ_SECONDS)

bench: venv ## Measure what a key costs
	$(BIN)/python benchmarks/bench.py $(ARGS)

gpu: venv ## Build for a GPU, and check and measure there; without one a dry run, which ends with 3
	$(BIN)/python benchmarks/gpu/build.py
	$(BIN)/python benchmarks/gpu/run.py $(ARGS)

dist: venv ## Build the archives of a release into dist/, and test the wheel where there is no compiler
	$(BIN)/python tests/environments/dist.py

pythons: dist ## Run the tests of keys with the one wheel in each of PYTHONS
	$(BIN)/python tests/environments/pythons.py $(PYTHONS)

matrix: venv ## Run the tests that meet vLLM-Omni with every supported release
	$(BIN)/python tests/environments/matrix.py $(ARGS)

clean: ## Remove the environment and everything that was built
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	[ ! -f $(VENV)/pyvenv.cfg ] || rm -rf $(VENV)

# A stamp is the last thing that its recipe writes, so an interrupted one is done again.
$(VENV)/.environment: $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "$(PYTHON) is not CPython 3.10 to 3.13: name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make an environment: install its venv module (Debian and Ubuntu:" \
			"apt-get install python3-venv), or name another with make PYTHON=..." >&2; exit 1; }
	@echo "Installing the pinned packages into $(VENV): some minutes, 3 GB."
	@$(PIP_INSTALL) --no-deps torch==$(TORCH)+cpu || \
		{ echo "pip has no CPU build of torch $(TORCH): installing the default build, several GB more." \
			"To avoid that, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels." >&2; \
		$(PIP_INSTALL) torch==$(TORCH); }
	$(PIP_INSTALL) --no-deps $(LOCKS:%=-r %)
	@touch $@

# Without the old build directory, where a module that is gone would still be found and packed.
$(VENV)/.package: $(VENV)/.environment $(SOURCES)
	rm -rf build
	$(PIP_INSTALL) --no-deps .
	@touch $@
