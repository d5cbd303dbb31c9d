# Two commands: `make train` and `make test`. Both set up everything they need in .venv.
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/small.py
ARGS ?=

RUN := $(VENV)/bin
CHECK_PYTHON := $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'

.PHONY: setup train test exhaustive bench-rounding bench-rounding-tpu gpu-compile outside check clean

train: setup
	$(RUN)/python train.py --config $(CONFIG) $(ARGS)

test: setup
	$(RUN)/python -m pytest -n 2 $(ARGS)

# Every float32 in every deterministic mode; ARGS="--dtype float16 ..." for others.
exhaustive: setup
	PYTHONPATH=.:tests $(RUN)/python tests/exhaustive.py $(ARGS)

# Speed on this machine, in ratios.
bench-rounding: setup
	$(RUN)/python benchmarks/rounding_speed.py $(ARGS)

# What the TPU's compiler makes of it; no TPU is needed.
bench-rounding-tpu: setup
	PYTHONPATH=tests $(RUN)/python benchmarks/rounding_bundles.py $(ARGS)
	PYTHONPATH=tests $(RUN)/python benchmarks/rounding_tpu.py $(ARGS)

# The kernel, compiled for NVIDIA GPUs by XLA's compiler for them; no GPU is needed.
gpu-compile: $(VENV)/cuda
	MIXPREC_GPU_COMPILE=1 $(RUN)/python -m pytest -n 2 -m gpu_compile $(ARGS)

# `wrap` on models of other packages.
outside: $(VENV)/outside/installed
	MIXPREC_OUTSIDE=1 $(VENV)/outside/bin/python -m pytest -n 2 --dist loadgroup -m outside tests/outside*_test.py $(ARGS)

# Formatting, lint and types.
check: setup
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable ".[train,test]"
ifeq ($(shell uname -sm),Linux x86_64)
	# The TPU compiler, with which the tests compile for TPUs that are not there. It lies
	# where JAX does not look by itself: without a TPU it would warn at every start.
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --upgrade --target $(VENV)/libtpu libtpu
endif
	touch $@

# Aside, as the TPU compiler: JAX would start it in every process.
$(VENV)/cuda: $(VENV)/installed
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --upgrade --no-deps --target $@ jax-cuda12-plugin jax-cuda12-pjrt

# In an environment of their own: they bring thirty more packages, and `make test` is to
# run without.
$(VENV)/outside/installed: pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)/outside
	$(VENV)/outside/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[test,outside]"
	touch $@

clean:
	rm -rf $(VENV) runs
