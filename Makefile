# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first. CI runs `make test`.
# WEFT_PYTHON=/path/to/python uses that interpreter and what it has installed, with no set-up at all.

SHELL := /bin/bash
ifdef WEFT_PYTHON
PY := $(WEFT_PYTHON)
READY :=
RAY :=
else
PY := .venv/bin/python
READY := .venv/ready
RAY := .venv-ray/ready
endif
# the targets for a GPU take whatever torch there is, and install nothing
GPU_PY := $(or $(WEFT_PYTHON),$(wildcard .venv/bin/python),python3)
export PYTHONPATH := src:.
# every worker, and every process that a test starts, reads what the first has translated
unexport PYTHONDONTWRITEBYTECODE
# what compilers made of the same texts in the run before (`make clean` forgets it)
export WEFT_TESTS_COMPILED ?= $(CURDIR)/build/compiled
RUN := $(PY) -m
BASE ?= HEAD
SEED ?= 1
WHERE ?= tests
ALL := not gpu and not multigpu and not whole
QUICK := $(ALL) and not slow
WHOLE := tests/colocate/test_network_plans.py tests/generate/cuda/mlp/test_mlp.py \
	tests/generate/cuda/test_budget_networks.py tests/generate/cuda/test_networks.py

.PHONY: demo test test-all test-random kernels check conformance replay bench gpu-test gpu-bench gpu-bench-all gpu-faults gpu-sanitize hooks clean

$(READY): pyproject.toml tools/setup.sh
	bash tools/setup.sh

$(RAY): tools/setup_ray.sh | $(READY)
	bash tools/setup_ray.sh

demo: $(READY)
	$(PY) -m benchmarks.demo

# something of every area; three processes for two cores, as many tests wait for other processes or for clocks
test: $(READY)
	$(RUN) pytest -m "$(QUICK)" -n 3 --dist worksteal

# those marked `slow` too: sweeps, thousands of faults, kernels of whole networks
test-all: $(READY) $(RAY)
	$(RUN) pytest -m "$(ALL)" -n 2 --dist worksteal

# all of them in another order, which SEED gives (1-20: twenty orders): no test depends on those before it
test-random: $(READY)
	$(RUN) tools.random_orders --again --out build/random-order.jsonl --seeds $(SEED)

# every kernel of the ten networks' plans for a GPU, compiled for sm_80 and sm_90a, and what else takes minutes; no GPU
kernels: $(READY)
	$(RUN) pytest -m "not gpu" $(WHOLE) -n 2 --dist worksteal --durations=10

check: $(READY)
	$(RUN) ruff check src tests benchmarks tools lab
	$(RUN) ruff format --check src tests benchmarks tools lab
	$(RUN) mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as c; c()"
	$(PY) tools/sizes.py

conformance: $(READY)
	$(RUN) tools.conformance --engine compiled
	$(RUN) tools.opinfo --engine compiled

# plans, kernels and machine code against those of BASE; WITH: `--cases test_tma`, `--match template=tma,`, ...
replay: $(READY)
	$(PY) tools/replay.py --base $(BASE) $(WITH)

bench: $(READY)
	$(PY) -m benchmarks.networks
	$(PY) tools/tables.py

# every test marked `gpu` under WHERE: all of them stand in tests/gpu; LANES=8: eight processes at once
gpu-test:
	$(GPU_PY) $(if $(LANES),tools/lanes.py --lanes $(LANES),-m pytest -m "gpu" -p no:cacheprovider --show-capture=no --durations=10) $(WHERE)

gpu-bench:
	$(GPU_PY) -m benchmarks.gpu_networks
	$(GPU_PY) tools/tables.py

# every suite that is measured on a GPU, in calls of under ten minutes: give it again until nothing is left (a call with
# more to do ends with status 75); WITH: `--only gemm,zoo`, `--again`, `--list`
gpu-bench-all:
	$(GPU_PY) -m benchmarks.every $(WITH)
	$(GPU_PY) tools/tables.py

gpu-faults:
	$(GPU_PY) -m benchmarks.gpu_faults

gpu-sanitize:
	$(GPU_PY) -m tools.sanitize
	$(GPU_PY) -m tools.sanitize_pairs

clean:
	rm -rf .venv .venv-client build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
