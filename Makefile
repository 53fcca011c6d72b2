# Two commands set everything up in a private environment and need nothing but Python >= 3.11:
#   make demo    KL curves of a trained hybrid under low-precision states, on two cores
#   make test    the test suite
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTED := $(VENV)/.ready-dev
DEMO_OUT ?= runs/demo
# Each compiles kernels on a core of its own.
GPU_WORKERS ?= 8

.PHONY: setup demo test check format test-gpu sanitize clean

setup: $(TESTED)

$(READY): pyproject.toml requirements/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements/cpu.txt -e .
	touch $@

$(TESTED): $(READY)
	$(BIN)/python -m pip install --quiet -c requirements/cpu.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/quantlab kl --model tiny-gdn --tokens 4096 --streams 4 \
	    --policy 'shared:fp32' --policy 'shared:fp16-sr' --policy 'shared:nvfp4-sr' \
	    --policy 'nvfp4/fp32' --policy 'nvfp4/fp16-sr' --policy 'fp8/fp16-sr' \
	    --out $(DEMO_OUT) --resume

# One torch thread a worker: the tests are many small operations.
test: $(TESTED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m 'not gpu and not slow'

check: $(TESTED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TESTED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a machine with a CUDA device and its own torch and Triton.
test-gpu:
	PYTHONPATH=.:kernels:cli $(PYTHON) -m pytest -q -n $(GPU_WORKERS) -m gpu

# Likewise, with NVIDIA's compute-sanitizer: accesses out of bounds, and races in shared memory.
# A graph cannot be captured while every allocation goes to the driver.
sanitize:
	for tool in memcheck racecheck; do \
	    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=.:kernels:cli \
	    compute-sanitizer --tool $$tool --target-processes all --error-exitcode 1 \
	    $(PYTHON) -m pytest -q -m gpu -k 'not 128 and not graph and not smoke' tests/kernels \
	    || exit 1; \
	done

clean:
	rm -rf $(VENV) build *.egg-info
