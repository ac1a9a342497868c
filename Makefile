# Every target makes the virtual environment it needs. PYTHON chooses the interpreter, VENV the place.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
CUT    := -c constraints.txt
# Most tests with processes wait for them to start or to notice something: two at a time take half as long.
WORKERS ?= 2
# For `make gpu`: an interpreter that has torch with CUDA, Lightning and pytest. Nothing is installed there.
GPU_PYTHON ?= python3

.PHONY: demo test test-all test-fast check bench gpu docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/demo.stamp          ## train a small Llama, lose a process, heal, grow, shrink, end with the same bits, and write a page; about 2 minutes
	$(BIN)/python examples/show_recovery.py

test: $(VENV)/test.stamp          ## every test but variants of others, WORKERS at a time
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not variant"

test-all: $(VENV)/test.stamp      ## every test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-fast: $(VENV)/test.stamp     ## the pure tests: no processes
	$(BIN)/python -m pytest -m "not spawns and not slow_single"

check: $(VENV)/check.stamp $(VENV)/docs.stamp   ## lint, types, layers, docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_public_surface.py
	DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

bench: $(VENV)/bench.stamp .venv-peers/made.stamp  ## every benchmark: tables on the screen, JSON in benchmarks/results/
	$(BIN)/python benchmarks/run_all.py

gpu:                              ## on a machine with a GPU: the tests marked for it, and its benchmarks; writes docs/gpu-status.md
	@$(GPU_PYTHON) -m benchmarks.gpu_status

docs: $(VENV)/docs.stamp          ## the site, served at http://localhost:8000
	$(BIN)/mkdocs serve

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade "pip>=25.1"

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install $(CUT) -e '.[lightning,cli]' --group demo
	@touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(PIP) install $(CUT) -e '.[lightning,accelerate,cli]' --group test
	@touch $@

$(VENV)/check.stamp: $(VENV)/test.stamp
	$(PIP) install $(CUT) --group check
	@touch $@

$(VENV)/bench.stamp: $(VENV)/demo.stamp
	$(PIP) install $(CUT) --group bench
	@touch $@

.venv-peers/made.stamp: benchmarks/requirements-recovery.txt | $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks.recovery_jobs.peers
	@touch $@

$(VENV)/docs.stamp: $(VENV)/demo.stamp
	$(PIP) install $(CUT) -e '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-peers .gpu-site site
