# Each target sets up what it needs: on a fresh machine `make test` is enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One thread per test process: several processes with several threads each are slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-fast lint types imports pytest docs bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev,train,ray,ocr,serve]'
	touch $(STAMP)

# About five minutes of training on two cores; ends with the path of the report.
demo: $(STAMP)
	$(BIN)/digenrl train demo

test: lint types imports pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports

# Unit and contract tests without Ray, a browser or worker processes. The longest files come first.
test-fast: $(STAMP)
	$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder -m "not slow" tests/contract tests/unit

pytest: $(STAMP)
	$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# Draws every picture of docs/ again, with the tool itself, and writes the tables of recipes.
docs: $(STAMP)
	$(BIN)/python docs/draw_pictures.py
	$(BIN)/python docs/recipe_tables.py

# Prints the tables that docs/ and CHANGELOG.md quote.
bench: $(STAMP)
	$(BIN)/python benchmarks/schedule_suite.py
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/paper_ladder.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/fidelity.py
	$(BIN)/python benchmarks/background_scoring.py
	$(BIN)/python benchmarks/gpu.py $(if $(shell command -v nvidia-smi),,--tiny)
	$(BIN)/python benchmarks/offload.py $(if $(shell command -v nvidia-smi),,--tiny)
	$(BIN)/python benchmarks/decoding.py $(if $(shell command -v nvidia-smi),,--tiny)
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/publishing.py
	$(BIN)/python benchmarks/ray_overhead.py
	$(BIN)/python benchmarks/ray_unequal.py
	$(BIN)/python benchmarks/ray_faults.py

clean:
	rm -rf $(VENV) build dist *.egg-info
