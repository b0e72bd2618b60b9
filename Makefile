# Each target first sets up what it needs. Variables: MATRIX, ARGS (further options), PYTHON.
MATRIX ?= full
ARGS ?=
WORKERS ?= 3
FAULTS ?= 500
SEED ?= 1
FUZZ ?= 20000
ROUNDS ?= 200
TRIALS ?= 2000
RUNS ?= 700
PY := .venv/bin/python

.PHONY: help setup setup-cuda-check need need-light need-tests run smoke test test-thorough test-quick test-torch test-newest test-cluster lint bench campaign campaign-large audit lock screenshots
help:
	@sed -n 's/^## //p' Makefile
## make setup   installs everything into .venv, and retries libraries that failed to build
setup:
	@scripts/setup.sh
## make setup-cuda-check   checks the CUDA set-up on a machine without a GPU (9 GB, an hour on 2 cores)
setup-cuda-check:
	@scripts/cuda_check.sh $(ARGS)
need:
	@scripts/setup.sh --need
need-light:
	@scripts/setup.sh --need --light
need-tests:
	@scripts/setup.sh --need --tests
## make run     runs the matrix full (or MATRIX=name) and writes its HTML report
run: need
	$(PY) -m bench run --matrix $(MATRIX) $(ARGS)
## make smoke   takes a first look in a minute, without compiling Horovod and DeepSpeed
smoke: need-light
	$(PY) -m bench run --matrix smoke $(ARGS)
## make test    runs all tests except the thorough ones, three at a time; tests that measure time run last, one by one
test: need-tests
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -m "not thorough" $(ARGS)
## make test-thorough   runs slow tests that find little more: variants of strategies, worked examples, long commands, pages of 5,000 cells
test-thorough: need-tests
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -m thorough $(ARGS)
## make test-quick   runs unit tests and one cell of each strategy, for use between edits
test-quick: need
	$(PY) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m quick tests/unit tests/ranks/test_strategies.py $(ARGS)
## make test-torch TORCH=2.11.0 [TRANSFORMERS=5.17.0] [PYTHON=python3.12]   runs unit tests, smoke and quick with another torch (6 GB, half an hour)
test-torch:
	@TORCH=$(TORCH) scripts/other_torch.sh
## make test-newest   runs unit tests and smoke with the newest release of every library, in an environment of its own (6 GB)
test-newest:
	@scripts/newest.sh
## make test-cluster   runs the tests that need a real SLURM, on virtual nodes of this machine
test-cluster: need-tests
	$(PY) -m pytest -rs tests/cluster $(ARGS)
## make lint    checks style, types, import contracts, prose, and the length of modules and functions
lint: need
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-logo
	$(PY) -m scripts.prose
	$(PY) -m scripts.sizes
## make bench   measures the suite's own performance, as ratios
bench: need
	$(PY) -m pytest tests/benchmarks --benchmark-only --benchmark-disable-gc --benchmark-json results/bench.json $(ARGS)
	if [ -n "$$BENCH_PLANNER_DATA" ]; then $(PY) -m docs.studies.planner_scores; fi
	if [ -n "$$BENCH_CLUSTERS_DATA" ]; then $(PY) -m docs.studies.planner_widths; fi
## make campaign   injects FAULTS faults drawn with SEED; runs ROUNDS rounds of two writers and a reader, and FUZZ random inputs per parser
campaign: need
	FAULTS=$(FAULTS) SEED=$(SEED) $(PY) -m pytest -s tests/faults/test_campaign.py $(ARGS)
	ROUNDS=$(ROUNDS) $(PY) -m pytest -s tests/faults/test_concurrent.py $(ARGS)
	FUZZ=$(FUZZ) $(PY) -m pytest tests/faults/test_fuzz.py --timeout 0 $(ARGS)
## make campaign-large   checks a run of TRIALS trials for leaks, and the speed of commands in a folder of RUNS runs (needs 6 GB)
campaign-large: need
	$(PY) -m docs.studies.long_run --trials $(TRIALS)
	$(PY) -m docs.studies.large_folder --runs $(RUNS)
## make audit   checks the pinned versions for known vulnerabilities (pip-audit, run by pipx)
audit:
	pipx run pip-audit --disable-pip --no-deps --requirement constraints.txt
## make lock    writes requirements.lock, with the hash of each pinned wheel for this platform (2 minutes)
lock: need
	$(PY) -m scripts.lock
## make screenshots   takes the screenshots of the report for docs/, in headless Chromium
screenshots: need-tests
	$(PY) scripts/screenshots.py
