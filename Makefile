# Every target sets up what it needs. Variables: MATRIX, ARGS (more options for the run), PYTHON.
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

.PHONY: help setup setup-cuda-check need need-light need-tests run smoke test test-thorough test-quick test-torch test-cluster lint bench campaign campaign-large audit lock screenshots
help:
	@sed -n 's/^## //p' Makefile
## make setup   installs everything into .venv, and tries again what could not be built
setup:
	@scripts/setup.sh
## make setup-cuda-check   proves the set-up of a CUDA machine on one without a GPU (9 GB, an hour on 2 cores)
setup-cuda-check:
	@scripts/cuda_check.sh $(ARGS)
need:
	@scripts/setup.sh --need
need-light:
	@scripts/setup.sh --need --light
need-tests:
	@scripts/setup.sh --need --tests
## make run     runs matrix full (or MATRIX=name) and writes its HTML report
run: need
	$(PY) -m bench run --matrix $(MATRIX) $(ARGS)
## make smoke   a first look in a minute, without waiting for what must be compiled
smoke: need-light
	$(PY) -m bench run --matrix smoke $(ARGS)
## make test    all tests but the thorough ones, three at a time; those that measure time alone, at the end
test: need-tests
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -m "not thorough" $(ARGS)
## make test-thorough   the slow tests that find little else: worked examples, peaks of real ranks, pages of 5,000 cells
test-thorough: need-tests
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -m thorough $(ARGS)
## make test-quick   between edits: unit tests, and one cell of each strategy
test-quick: need
	$(PY) -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m quick tests/unit tests/ranks/test_strategies.py $(ARGS)
## make test-torch TORCH=2.11.0 [TRANSFORMERS=5.17.0] [PYTHON=python3.12]   unit tests, smoke and quick with another torch (6 GB, half an hour)
test-torch:
	@TORCH=$(TORCH) scripts/other_torch.sh
## make test-cluster   the tests that need a real SLURM, on virtual nodes of this machine
test-cluster: need-tests
	$(PY) -m pytest -rs tests/cluster $(ARGS)
## make lint    ruff, strict mypy, the direction of imports, the prose, and the sizes of modules and functions
lint: need
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports --no-logo
	$(PY) -m scripts.prose
	$(PY) -m scripts.sizes
## make bench   the suite's own performance, as ratios
bench: need
	$(PY) -m pytest tests/benchmarks --benchmark-only --benchmark-disable-gc --benchmark-json results/bench.json $(ARGS)
	$(PY) -m bench validate --results results/reference
	if [ -n "$$BENCH_PLANNER_DATA" ]; then $(PY) -m bench validate; fi
## make campaign   injects FAULTS faults by SEED; ROUNDS rounds of two writers and a reader; FUZZ random inputs for each parser
campaign: need
	FAULTS=$(FAULTS) SEED=$(SEED) $(PY) -m pytest -s tests/faults/test_campaign.py $(ARGS)
	ROUNDS=$(ROUNDS) $(PY) -m pytest -s tests/faults/test_concurrent.py $(ARGS)
	FUZZ=$(FUZZ) $(PY) -m pytest tests/faults/test_fuzz.py --timeout 0 $(ARGS)
## make campaign-large   a run of TRIALS trials that may not grow, and commands in a folder of RUNS runs (6 GB while it is measured)
campaign-large: need
	$(PY) -m scripts.long_run --trials $(TRIALS)
	$(PY) -m scripts.large_folder --runs $(RUNS)
## make audit   asks whether a pinned version has a known vulnerability (pip-audit, by pipx)
audit:
	pipx run pip-audit --disable-pip --no-deps --requirement constraints.txt
## make lock    writes requirements.lock: the hash of each pinned wheel for this platform (2 minutes)
lock: need
	$(PY) -m scripts.lock
## make screenshots   pictures of the report for docs/, in headless Chromium
screenshots: need-tests
	$(PY) scripts/screenshots.py
