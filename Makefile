# Everything a newcomer types. Each target sets up .venv by itself; a second call does not reinstall.
#   PIP_ARGS="--index-url ..."   chooses another source of packages, such as PyTorch's CPU builds

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SETUPTOOLS := 80.9.0
VLLM := 0.32.0

.PHONY: help demo test lint types format bench check docs vllm clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -c 'import pip' 2>/dev/null || { \
		$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("Tandem needs Python 3.11 or newer, this is %s; try make PYTHON=python3.11" % sys.version.split()[0])' && \
		$(PYTHON) -m venv $(VENV); }
	@echo "Installing Tandem and its pinned dependencies into $(VENV) (a few minutes, once) ..."
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) setuptools==$(SETUPTOOLS) torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_ARGS) --no-build-isolation \
		--config-settings editable_mode=compat --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## watch a tiny model learn to add, in about three minutes
	@$(BIN)/tandem train examples/addition.yaml

$(VENV)/.vllm: $(STAMP) requirements-vllm-cpu.txt
	@if nvidia-smi -L >/dev/null 2>&1; then \
		echo "Installing vLLM for GPUs ..."; \
		$(BIN)/python -m pip install --quiet $(PIP_ARGS) $$(grep -E '^(torch|transformers)==' constraints.txt) vllm==$(VLLM); \
	else \
		echo "Installing vLLM for CPUs ..."; \
		$(BIN)/python -m pip install --quiet --no-deps $(PIP_ARGS) --requirement requirements-vllm-cpu.txt; \
	fi
	@touch $@

vllm: $(VENV)/.vllm  ## install vLLM, for rollout.engine=vllm

test: $(STAMP)  ## run the whole test suite
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)  ## ruff, layers, sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/size_budget.py

types: $(STAMP)  ## pyrefly, strict
	$(BIN)/pyrefly check

format: $(STAMP)  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## speed of rollout, update and reshard
	$(BIN)/python examples/prepare_smollm2.py work/smollm2
	$(BIN)/python -m benchmarks.rollout work/smollm2/model
	$(BIN)/python -m benchmarks.step work/smollm2/model
	$(BIN)/python -m benchmarks.reshard work/smollm2/model

docs: $(STAMP)  ## write the pages that are made from the source
	$(BIN)/python -m tandem.config.reference > docs/config.md
	$(BIN)/python -m tandem.observe.metrics > docs/metrics.md

check: lint types test  ## all that continuous integration runs

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
