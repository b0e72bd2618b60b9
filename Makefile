# Every target sets up what it needs. Variables: MATRIX, ARGS (more options for the run), PYTHON.
MATRIX ?= full
ARGS ?=
PY := .venv/bin/python

.PHONY: help setup run smoke test test-cluster lint bench screenshots
help:
	@sed -n 's/^## //p' Makefile
## make setup   installs everything into .venv
setup:
	@scripts/setup.sh
## make run     runs matrix full (or MATRIX=name) and writes its HTML report
run: setup
	$(PY) -m bench run --matrix $(MATRIX) $(ARGS)
## make smoke   a first look in a minute
smoke: setup
	$(PY) -m bench run --matrix smoke $(ARGS)
## make test    all tests
test: setup
	$(PY) -m pytest $(ARGS)
## make test-cluster   the tests that need a real SLURM, on virtual nodes of this machine
test-cluster: setup
	$(PY) -m pytest -rs tests/cluster $(ARGS)
## make lint    ruff and strict mypy
lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
## make bench   the suite's own performance, as ratios
bench: setup
	$(PY) -m pytest tests/benchmarks --benchmark-only --benchmark-disable-gc --benchmark-json results/bench.json $(ARGS)
## make screenshots   pictures of the report for docs/, in headless Chromium
screenshots: setup
	$(PY) scripts/screenshots.py
