# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= checkpoints/nano

.PHONY: serve test check fix bench docs size compile

serve: $(STAMP)
	@$(BIN)/tercel serve $(MODEL) --host 127.0.0.1 --port 8000

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow" -q

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/load_memory.py
	$(BIN)/python benchmarks/cpu_throughput.py

docs: $(STAMP)
	$(BIN)/python tools/generate_docs.py

compile: $(STAMP)
	$(BIN)/python tools/compile.py

size: $(STAMP)
	$(BIN)/python tools/size.py

# The stamp is newer than what decides the installation, so a second run starts at once and offline.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)
