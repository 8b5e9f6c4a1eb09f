# Everything here makes what it needs: `make demo` and `make test` work on a fresh clone.
#
# On Linux without a GPU, pip's torch brings gigabytes of CUDA libraries. To get the CPU wheel, name the index that
# PyTorch's "Get started" page gives for it:   make demo TORCH_INDEX_URL=<that index>

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX_URL ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TORCH := torch==2.13.0 $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))

.PHONY: help demo test test-full lint bench clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo  ## a small language model learns arithmetic by GRPO (about 3 minutes on 2 cores)
	$(BIN)/python -m examples.arithmetic

test: $(VENV)/.dev  ## the gate: every layer, a covering sample of the option grid
	$(BIN)/python -m pytest -q

test-full: $(VENV)/.dev  ## the whole option grid
	$(BIN)/python -m pytest -q --full

lint: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev  ## speed of the loss and its peers on this machine
	$(BIN)/python -m pytest -q benchmarks --benchmark-only

clean:  ## remove what make made
	rm -rf $(VENV) build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.torch: constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.10+ is needed: $(PYTHON) was not found"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10+ is needed: $(PYTHON) is $$($(PYTHON) --version)"; exit 1; }
	@echo "setting up $(VENV) (torch first) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@$(PIP) transformers tqdm matplotlib
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing test tools and peers ..."
	@$(PIP) pytest pytest-benchmark hypothesis ruff mypy setuptools wheel trl liger-kernel
	@$(PIP) triton 2>/dev/null || echo "triton has no wheel here: its tests will be skipped"
	@touch $@
