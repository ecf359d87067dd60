# The developer's and the user's front door. `make serve` and `make test` are all a fresh machine needs.
PYTHON ?= python3
.PHONY: native

# In-tree build of the native module for development: fast, incremental, no packaging.
DEV_PYTHON ?= .venv/bin/python
native:
	cmake -G Ninja -S . -B build/dev -DPython_EXECUTABLE=$(abspath $(DEV_PYTHON)) > /dev/null
	ninja -C build/dev
	cp build/dev/_native*.so src/headrace/
