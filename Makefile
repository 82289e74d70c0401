# Every target makes or reuses its virtual environment by itself. Overrides: VENV=path PYTHON=/path/to/python3.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?=
WORKERS ?= 2
REPORTS ?= $(VENV)/reports
PYTEST_ARGS ?=
MARKS ?= not slow
RUN := $(VENV)/bin/python

.PHONY: help
help:  ## say what there is
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s '|'

.PHONY: venv
venv:  ## make the virtual environment, or bring it up to date
	@scripts/make_venv.sh "$(VENV)" "$(PYTHON)"

.PHONY: demo
demo: venv  ## train a small Qwen3 MoE on real text, then print what each remat policy would cost a deep one
	$(RUN) -m models.train_lm --config_path models/configs/qwen3_moe_tiny.yaml
	$(RUN) -m models.plan_lm --config_path models/configs/qwen3_moe_deep.yaml

# What XLA compiled for longer than half a second stays beside the environment, so that the next run takes a fraction of the time.
test: export JAX_COMPILATION_CACHE_DIR := $(abspath $(VENV))/compiled
test: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0.5
test: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := 0

# The policy tests run a second time with the remat implementation that is to become JAX's default. That there are none
# (pytest's 5) is an error, unless PYTEST_ARGS chose some of the tests.
.PHONY: test
test: venv  ## run the tests (PYTEST_ARGS="tests/test_x.py -k name" for some of them)
	@mkdir -p "$(REPORTS)" && rm -f "$(REPORTS)"/*.xml
	@status=0; \
	$(RUN) -m pytest -n $(WORKERS) --junitxml="$(REPORTS)/suite.xml" -m "$(MARKS)" $(PYTEST_ARGS) || status=$$?; \
	JAX_REMAT3=1 $(RUN) -m pytest -n $(WORKERS) --junitxml="$(REPORTS)/policy-remat3.xml" $(PYTEST_ARGS) \
	    -m "policy and not slow and not deep" || { code=$$?; [ $$code = $(if $(PYTEST_ARGS),5,none) ] || status=$$code; }; \
	exit $$status

# An environment of its own: with an accelerator's plugin installed, JAX would look for the accelerator everywhere else too. One
# worker: libtpu serves one process at a time.
.PHONY: memory
memory:  ## hold the memory that the benchmarks recorded for an H200 and a TPU v5p, by compiling
	@scripts/make_venv.sh "$(VENV)-memory" "$(PYTHON)" test,cuda-report,tpu-report
	@mkdir -p "$(REPORTS)"
	$(VENV)-memory/bin/python -m pytest --junitxml="$(REPORTS)/memory.xml" \
	    tests/benchmarks/test_stack_memory.py tests/benchmarks/test_qwen3_context.py tests/memory/test_targets.py \
	    tests/ops/test_attention_splash.py

.PHONY: parity
parity:  ## compare models, adapters and tokenizers with PyTorch, transformers and PEFT, which it installs
	@scripts/make_venv.sh "$(VENV)-parity" "$(PYTHON)" test tests/parity_requirements.txt
	@mkdir -p "$(REPORTS)"
	$(VENV)-parity/bin/python -m pytest -n $(WORKERS) --junitxml="$(REPORTS)/parity.xml" -m "torch and not slow"

.PHONY: haliax
haliax: venv  ## run Haliax's own tests of scan with this library in its place
	@mkdir -p "$(REPORTS)"
	$(RUN) scripts/haliax_suite.py --junitxml="$(abspath $(REPORTS))/haliax.xml"

.PHONY: lint
lint: venv  ## ruff and pyright
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m pyright --pythonpath "$(RUN)"

.PHONY: check
check: lint  ## ruff, pyright, and the wheel in an environment of its own
	$(RUN) scripts/check_wheel.py

.PHONY: docs
docs: venv  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

.PHONY: format
format: venv  ## let ruff format the code and mend what it can
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

.PHONY: constraints
constraints:  ## pin the newest versions for CI in constraints/
	scripts/make_constraints.sh

.PHONY: clean
clean:  ## remove the virtual environments and everything that is built (not runs/)
	rm -rf .venv .venv-newest .venv-tools .venv-memory .venv-parity build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
