# One command per purpose; each brings its own environment (.venv, made on the first call).
.DEFAULT_GOAL := help
.PHONY: help env train test check fix bench bench-startup

PYTHON_ENV := .venv/bin/python
IN_ENV := PATH="$(CURDIR)/.venv/bin:$$PATH"
# A layer is half of a module of the wheel and cannot be type-checked alone; the modules that the wheel has not can.
NEW_MODULES = $(shell find megatron/core megatron/training -name '*.py' | sort | while read -r file; do \
	ls .venv/lib/python*/site-packages/"$$file" >/dev/null 2>&1 || echo "$$file"; done)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:
	@tools/bootstrap.sh

train: env  ## train a small GPT on Python's own standard library, PP=2 and VPP=2, with or without a GPU (about 3 minutes)
	@$(IN_ENV) PYTHON=$(PYTHON_ENV) bash examples/gpt/train_stdlib.sh $(ARGS)

test: env  ## every test that needs no GPU
	@$(PYTHON_ENV) -m pytest -m "not gpu" --durations=10 $(ARGS)

check: env  ## formatting, types, and the layers against the installed megatron-core
	@$(PYTHON_ENV) -m black --check .
	@$(PYTHON_ENV) -m isort --check-only .
	@$(PYTHON_ENV) -m mypy megatron/overlay $(wildcard megatron/rl) $(NEW_MODULES) tools tests $(wildcard *.py)
	@$(PYTHON_ENV) -m megatron.overlay check

fix: env  ## rewrite the formatting that check complains about
	@$(PYTHON_ENV) -m isort --quiet .
	@$(PYTHON_ENV) -m black --quiet .

bench: env  ## what the overlay costs at import, against the bare wheel
	@$(PYTHON_ENV) tools/benchmarks/install_cost.py

bench-startup: env  ## start-up with pipeline prewarm and without, on cold caches
	@$(IN_ENV) $(PYTHON_ENV) tools/benchmarks/startup.py --layouts 2x1 4x1 --models dense --output runs/startup $(ARGS)
