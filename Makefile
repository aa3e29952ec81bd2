# Every target sets up what it needs: .venv, torch, tools, the compiled library.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
CALLERS_PYTHONPATH := $(PYTHONPATH)
export PYTHONPATH := .

# The CUDA half is compiled wherever nvcc is found: for the visible GPUs, or for one architecture when there is none.
ifneq ($(shell command -v nvcc 2>/dev/null),)
export FORCE_CUDA := 1
ifeq ($(shell nvidia-smi -L 2>/dev/null),)
export TORCH_CUDA_ARCH_LIST ?= 9.0
endif
endif

.PHONY: demo demo-hf demo-megatron demo-data test test-newest lint emulator build bench test-gpu bench-gpu profile-gpu readme \
	wheel clean

demo: build
	$(BIN)/python examples/train_packed.py

demo-hf: build
	$(BIN)/python examples/hf_sft.py

demo-megatron: build
	$(BIN)/python examples/megatron_sft.py

demo-data: build
	$(BIN)/python examples/rl_mini_batches.py
	$(BIN)/python examples/async_sft.py

# The emulator needs no package: it is compiled while they are installed. A process more than there are cores, up to 5:
# some tests wait for processes of their own. Each takes tests from the others.
test:
	@$(MAKE) --no-print-directory -j3 lint build emulator
	$(BIN)/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 5 --dist worksteal --durations 20

# The library as it is built, in the newest torch (TORCH=torch==2.14.1: in that one): an environment of its own.
test-newest: build .venv-newest/.ready
	.venv-newest/bin/python -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 5 --dist worksteal

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Attention's CUDA kernels for the CPU, where CUDA's headers are: tests/emulated.py.
emulator:
	@$(PYTHON) tests/emulator/build.py

# The whole output is in build/build.log.
build: .venv/.ready
	$(BIN)/python setup.py -q build_ext --inplace

# On a GPU machine: a library that is already there is used, so that no compiler is needed, and the caller's PYTHONPATH.
GPU_PYTHON ?= $(if $(wildcard .venv/.ready),$(BIN)/python,python3)
test-gpu bench-gpu profile-gpu: export PYTHONPATH := .$(addprefix :,$(CALLERS_PYTHONPATH))

# LOGS=folder for a log per group of tests; TESTS="--only attention -k cuda" for some, and for pytest.
test-gpu:
	$(GPU_PYTHON) tests/run_gpu.py $(if $(LOGS),--logs $(LOGS)) $(TESTS)

# FAMILIES="attention e2e" for some. One that fails leaves the others theirs.
FAMILIES ?= boundaries padding packing rope attention logps megatron e2e
bench-gpu:
	@failed=; \
	for family in $(FAMILIES); do \
		$(GPU_PYTHON) benchmarks/bench_$$family.py --device cuda || failed="$$failed $$family"; done; \
	$(GPU_PYTHON) benchmarks/report.py --device cuda || failed="$$failed report"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

profile-gpu:
	$(GPU_PYTHON) benchmarks/profile_gpu.py

bench: build
	@for family in boundaries padding packing rope attention logps megatron data; do \
		$(BIN)/python benchmarks/bench_$$family.py --device cpu || exit 1; done
	$(BIN)/python benchmarks/bench_report.py
	$(BIN)/python examples/train_packed.py --out benchmarks/results

# The tables of README.md, from benchmarks/results.
readme: .venv/.ready
	$(BIN)/python benchmarks/readme.py

wheel: .venv/.ready
	$(BIN)/pip wheel --no-deps --no-build-isolation -w dist .

.venv-newest/.ready: TORCH = torch
.venv/.ready .venv-newest/.ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(@D)/bin/pip install --quiet --no-compile "$(TORCH)"
	$(@D)/bin/pip install --quiet --no-compile --group dev
	touch $@

clean:
	rm -rf build dist packing_ops/_C.so
