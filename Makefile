# Each target sets up what it needs: on a fresh machine `make test` is enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# One thread per test process: several processes with several threads each are slower than one.
export OMP_NUM_THREADS ?= 1

comma       := ,
EXTRAS      := dev,train,ray,ocr,serve,video,vision
EXTRA_NAMES := $(subst $(comma), ,$(EXTRAS))

.PHONY: setup lock demo test test-fast lint types imports pytest docs bench chaos chaos-ci mutants crashes faults fuzz clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
ifdef LOCKED
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
else
	$(PIP) torch
	$(PIP) --editable '.[$(EXTRAS)]'
endif
	touch $(STAMP)

# Writes requirements.lock after a change of dependencies; needs uv.
lock:
	echo setuptools | uv pip compile pyproject.toml - $(foreach extra,$(EXTRA_NAMES),--extra $(extra)) --universal \
	    --constraint constraints.txt --generate-hashes --no-header --no-annotate --no-emit-index-url \
	    --no-emit-find-links --quiet --output-file requirements.lock

# Five to ten minutes of training on two cores; ends with the path of the report.
demo: $(STAMP)
	$(BIN)/digenrl train demo

# The type checker uses one core, so it runs beside the tests.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 lint imports types pytest

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

# Three workers per two cores: many of these tests wait for processes that they start. All of these import the package,
# so bytecode is written even where PYTHONDONTWRITEBYTECODE is set.
pytest: $(STAMP)
	$(BIN)/python -m compileall -q digenrl tests benchmarks
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) * 3 / 2)) --dist loadfile --no-loadscope-reorder

# Draws every picture of docs/ again, with the tool itself, and writes the tables of recipes.
docs: $(STAMP)
	$(BIN)/python docs/draw_pictures.py
	$(BIN)/python docs/draw_stages.py
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

# The scheduler and the driver in simulated worlds with random faults, on all cores.
chaos-ci: $(STAMP)
	$(BIN)/digenrl simulate --chaos 2000
	$(BIN)/digenrl simulate --chaos 20 --large

# All 100,000 take an hour or more; FIRST_SEED continues a run that was interrupted.
FIRST_SEED ?= 0
chaos: $(STAMP)
	$(BIN)/digenrl simulate --chaos $(shell expr 100000 - $(FIRST_SEED)) --first-seed $(FIRST_SEED)

mutants: $(STAMP)
	$(BIN)/python benchmarks/mutants.py

# Drivers killed at every journal record. For Ray, which starts slowly, see the options of the script.
crashes: $(STAMP)
	$(BIN)/python benchmarks/crash_points.py --transport local
	$(BIN)/python benchmarks/crash_points.py --transport colocated

# Workers that are killed, stopped or hang.
faults: $(STAMP)
	$(BIN)/python benchmarks/process_faults.py --faults 100

# Damaged run folders, and random recipes and prompt files.
fuzz: $(STAMP)
	DIGENRL_DAMAGED_FOLDERS=2000 $(BIN)/pytest tests/unit/test_damaged_runs.py
	$(BIN)/python benchmarks/fuzzed_files.py --files 500

clean:
	rm -rf $(VENV) build dist *.egg-info
