# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A file's tests stay together: they share its models. The many short files of the ops come last.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder
MODEL ?= checkpoints/nano
# What `make bench` runs; empty: every figure. The peer that it measures has an environment of its own.
FIGURES ?=
MLX := $(VENV)/mlx
MLX_STAMP := $(MLX)/.installed

.PHONY: serve test check fix bench docs size compile

serve: $(STAMP)
	@$(BIN)/tercel serve $(MODEL) --host 127.0.0.1 --port 8000

test: $(STAMP)
	$(PYTEST)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow" -q

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) $(MLX_STAMP)
	$(BIN)/python -m benchmarks.report --model $(MODEL) --mlx-python $(MLX)/bin/python $(FIGURES)

docs: $(STAMP)
	$(BIN)/python -m tools.generate_docs

compile: $(STAMP)
	$(BIN)/python tools/compile.py

size: $(STAMP)
	$(BIN)/python tools/size.py

# The stamp is newer than what decides the installation, so a second run starts at once and offline.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing Tercel and what it needs into $(VENV), once: minutes, most of them for torch."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(STAMP)

$(MLX_STAMP): $(STAMP)
	@echo "Installing mlx-lm, a peer that is measured, into $(MLX), once."
	$(PYTHON) -m venv $(MLX)
	$(MLX)/bin/python -m pip install --disable-pip-version-check mlx-lm==0.32.2 "mlx[cpu]==0.32.4"
	@touch $(MLX_STAMP)
