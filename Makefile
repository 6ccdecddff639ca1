# One command per purpose; each brings its own environment (.venv, made on the first call).
.DEFAULT_GOAL := help
.PHONY: help env train test check fix bench

PYTHON_ENV := .venv/bin/python
IN_ENV := PATH="$(CURDIR)/.venv/bin:$$PATH"
# Layers are halves of upstream's modules and cannot be type-checked alone; every other module can.
NEW_MODULES = $(shell grep -rL --include='*.py' 'upstream_of(' megatron/core megatron/training 2>/dev/null)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:
	@tools/bootstrap.sh

train: env  ## train a small GPT on Python's own standard library, PP=2 and VPP=2, with or without a GPU (about 3 minutes)
	@$(IN_ENV) bash examples/gpt/train_stdlib.sh

test: env  ## every test that needs no GPU
	@$(PYTHON_ENV) -m pytest -m "not gpu" --durations=10 $(ARGS)

check: env  ## formatting, types, and the layers against the installed megatron-core
	@$(PYTHON_ENV) -m black --check --quiet --diff .
	@$(PYTHON_ENV) -m isort --check-only --diff --quiet .
	@$(PYTHON_ENV) -m mypy megatron/overlay $(wildcard megatron/rl) $(NEW_MODULES) tools tests $(wildcard *.py)
	@$(PYTHON_ENV) -m megatron.overlay check

fix: env  ## rewrite the formatting that check complains about
	@$(PYTHON_ENV) -m isort --quiet .
	@$(PYTHON_ENV) -m black --quiet .

bench: env  ## what the overlay costs at import, against the bare wheel
	@$(PYTHON_ENV) tools/benchmarks/install_cost.py
