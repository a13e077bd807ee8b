# make demo    train the demo from a clean clone        make test    everything that CI checks
#
# Needs: Linux, Python 3.11 or newer with venv. Everything else is installed into .venv.
# A CUDA build of torch works but is large; to get the CPU build where pip finds none, point PIP_EXTRA_INDEX_URL at
# PyTorch's own CPU index.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env demo test unit integration system lint types format test-vllm bench clean

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -rs
RUN ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
ARGS ?=

# Announce a tier, run it, say how long it took, keep its exit code.
define tier
@echo "== $(1)"; start=$$SECONDS; code=0; $(2) || code=$$?; echo "== $(1): $$((SECONDS - start)) s"; exit $$code
endef

help:
	@echo "make demo              train the demo (RUN=directory, ARGS='--set a.b=v')"
	@echo "make test              lint, types and all tests; make unit, integration, system, lint, types for one tier"
	@echo "make test-vllm         the engine tests on a real vLLM (venusrl engine install vllm first)"
	@echo "make bench             controls and convergence, three seeds each (hours)"
	@echo "make env format clean  the environment; reformat; remove what was built"

# --- environment: made once, again only when pyproject.toml changed ---------------------------------------------
env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@python=; for name in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if "$$name" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "Python 3.11 or newer with venv is needed (Debian: apt install python3-venv)" >&2; exit 1; fi; \
	[ -x $(BIN)/pip ] || "$$python" -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check --editable '.[dev]'
	@touch $@

# --- use ------------------------------------------------------------------------------------------------------------
demo: env
	@$(BIN)/venusrl doctor
	$(BIN)/venusrl train demo --run-dir $(RUN) $(ARGS)

bench: env
	$(BIN)/python benchmarks/controls.py $(ARGS)
	$(BIN)/python benchmarks/convergence.py $(ARGS)

# --- checks ---------------------------------------------------------------------------------------------------------
test:
	@$(MAKE) --no-print-directory env
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory integration
	@$(MAKE) --no-print-directory system

lint: env
	$(call tier,lint,$(BIN)/ruff check . && $(BIN)/ruff format --check .)

types: env
	$(call tier,types,$(BIN)/mypy)

unit: env
	$(call tier,unit tests,$(PYTEST) -n auto --maxprocesses 4 --dist worksteal tests/unit $(ARGS))

integration: env
	$(call tier,integration tests,$(PYTEST) tests/integration $(ARGS))

system: env
	$(call tier,system tests,$(PYTEST) tests/system $(ARGS))

test-vllm: env
	$(call tier,vllm tests,$(PYTEST) -m vllm tests $(ARGS))

format: env
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
