# Each target makes or reuses its virtual environment. Overrides: VENV=path PYTHON=/path/to/python3.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?=
WORKERS ?= 2
REPORTS ?= $(VENV)/reports
PYTEST_ARGS ?=
RUN := $(VENV)/bin/python

.PHONY: help
help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | column -t -s '|'

.PHONY: venv
venv:  ## make or update the virtual environment
	@scripts/make_venv.sh "$(VENV)" "$(PYTHON)"

# An accelerator's plugin is in an environment of its own, because JAX looks for the accelerator where it is installed.
.PHONY: venv-memory venv-parity
venv-memory:
	@scripts/make_venv.sh "$(VENV)-memory" "$(PYTHON)" test,cuda-report,tpu-report,tokamax
venv-parity:
	@scripts/make_venv.sh "$(VENV)-parity" "$(PYTHON)" test tests/parity_requirements.txt

# Less is installed than for the tests. Each line fits 80 columns.
.PHONY: demo
demo:  ## train a small Qwen3 MoE on real text, let it write, and show what remat policies would cost a deep one
	@scripts/make_venv.sh "$(VENV)" "$(PYTHON)" train
	$(RUN) -m models.train_lm \
	    --config_path models/configs/qwen3_moe_tiny.yaml \
	    --trainer.run_dir runs/demo --trainer.checkpoint.overwrite true \
	    --trainer.num_steps 320
	$(RUN) -m models.generate --run_dir runs/demo \
	    --prompt 'def ' --max_new_tokens 240 --temperature 0.7
	$(RUN) -m models.plan_lm \
	    --config_path models/configs/qwen3_moe_deep.yaml \
	    --only 'False|True|attention_saved|nested'
	@printf '%s\n' '' 'Next, on text of your own:' '' \
	    '    $(RUN) -m models.train_lm \' \
	    '        --config_path models/configs/qwen3_moe_tiny.yaml \' \
	    "        --data.sources.mine.paths '[my-texts/]' --trainer.run_dir runs/my-texts"

# What is compiled is kept for the other worker, the next run and other checkouts, as long as it is used: under keys with the versions, the
# programs that took XLA more than 20 ms, and what compiling for a GPU or a TPU found.
KEPT ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/stacked_remat_tests
test deep slow docs parity parity-deep coverage mutation: export JAX_COMPILATION_CACHE_DIR := $(KEPT)/compiled
memory compiles: export KEPT_REPORTS := $(KEPT)/reports
docs: export KEPT_GALLERY := $(KEPT)/gallery
test deep slow docs parity parity-deep coverage mutation: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0.02
test deep slow docs parity parity-deep coverage mutation: export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := 0
# Nothing is compiled to bytecode that isn't imported (scripts/make_venv.sh), and what is imported by one process is there for the others.
export PYTHONDONTWRITEBYTECODE :=

# Most of the time of the tests is compilation, so LLVM optimizes less, and XLA with it (tests/conftest.py), and programs are not cut into
# parts for cores, which are busy. OPTIMIZE=1 compiles as users do, which takes twice as long.
ifndef OPTIMIZE
test deep slow parity parity-deep coverage mutation: export XLA_FLAGS := $(XLA_FLAGS) --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1
endif
IN_WORKERS := -n $(WORKERS) --dist worksteal
TESTS := $(RUN) -m pytest $(IN_WORKERS)

# Tests that save or offload values by name run again with JAX_REMAT3=1, which replaces jax.checkpoint by the implementation that is to
# become JAX's default. That there are none (exit status 5) is an error, unless PYTEST_ARGS selects tests. With worksteal, most
# tests of a file run in one process and share what they compile.
.PHONY: test deep slow test-all
test: venv  ## run the tests (PYTEST_ARGS="tests/test_x.py -k name" for some of them)
	@mkdir -p "$(REPORTS)" "$(KEPT)"/{compiled,reports,gallery} && rm -f "$(REPORTS)"/*.xml
	@find "$(KEPT)"/{compiled,reports,gallery} -type f -atime +14 -delete
	@status=0; \
	$(TESTS) --junitxml="$(REPORTS)/suite.xml" -m "not slow and not deep" $(PYTEST_ARGS) || status=$$?; \
	JAX_REMAT3=1 $(TESTS) --junitxml="$(REPORTS)/remat3.xml" -m "remat3 and not slow and not deep" \
	    $(or $(PYTEST_ARGS),$$(grep -rl --include='test_*.py' remat3 tests)) \
	    || { code=$$?; [ $$code = $(if $(PYTEST_ARGS),5,none) ] || status=$$code; }; \
	exit $$status

deep: venv  ## run the tests that `make test` leaves out because they take long, but for those marked slow
	@scripts/make_venv.sh "$(VENV)" "$(PYTHON)" launchers
	@mkdir -p "$(REPORTS)"
	$(TESTS) --junitxml="$(REPORTS)/deep.xml" -m "deep and not slow" $(PYTEST_ARGS)

slow: venv  ## run the tests marked slow, which take minutes each
	@mkdir -p "$(REPORTS)"
	$(TESTS) --junitxml="$(REPORTS)/slow.xml" -m "slow and not target and not torch" $(PYTEST_ARGS)

test-all: test deep  ## run the tests and those marked deep

# With one worker, because libtpu serves one process at a time.
.PHONY: memory compiles
memory: venv-memory  ## compile for an H200 and a TPU v5p and compare with the recorded memory
	@mkdir -p "$(REPORTS)"
	$(VENV)-memory/bin/python -m pytest --junitxml="$(REPORTS)/memory.xml" -m "target and not slow" $(PYTEST_ARGS)

# Figures are compared with the compiler that they were recorded with, which only one Python has.
compiles: venv-memory  ## compile a step of each kind of model for GPUs and TPUs, and compare no figures
	@mkdir -p "$(REPORTS)"
	$(VENV)-memory/bin/python -m pytest --junitxml="$(REPORTS)/compiles.xml" -m "target and not slow" tests/memory/test_targets.py tests/models/test_candidate.py tests/ops/test_attention_tokamax.py tests/ops/test_grouped_tokamax.py $(PYTEST_ARGS)

# On one Python, then on the other, and beside what needs no libtpu (.ci/run).
.PHONY: compiled
compiled:
	@status=0; $(MAKE) memory || status=$$?; \
	if [ -n "$(NEWEST)" ]; then $(MAKE) compiles VENV=.venv-newest PYTHON="$(NEWEST)" || status=$$?; fi; \
	exit $$status

# A worker has one core: PyTorch would start a thread for each core in every worker, which takes a third more CPU time (`test_parity.py -k round_trip`).
.PHONY: parity
parity parity-deep: export OMP_NUM_THREADS := 1
parity: venv-parity  ## install PyTorch, transformers and PEFT, and compare models, adapters and tokenizers with theirs
	@mkdir -p "$(REPORTS)"
	$(VENV)-parity/bin/python -m pytest $(IN_WORKERS) --junitxml="$(REPORTS)/parity.xml" -m "torch and not slow"

# Options of scripts/attack.py: make attack ATTACK_ARGS="--seeds 0:100 --only vmap"
ATTACK_ARGS ?= --seeds 0:10000 --jobs $(WORKERS) --log runs/attack.jsonl
.PHONY: attack
attack: venv  ## compare 10,000 random programs with loops without the library, which takes hours; goes on where it ended
	$(RUN) -m scripts.attack $(ATTACK_ARGS)

# Branches that the tests of `make test` take; processes that tests start count too.
.PHONY: coverage
coverage:  ## count the lines and branches that the tests of the core run, and list the others
	@scripts/make_venv.sh "$(VENV)-coverage" "$(PYTHON)" test,coverage
	$(VENV)-coverage/bin/python -m coverage erase
	$(VENV)-coverage/bin/python -m coverage run -m pytest $(IN_WORKERS) -m "not slow and not deep" \
	    --ignore tests/models --ignore tests/training --ignore tests/benchmarks $(PYTEST_ARGS)
	$(VENV)-coverage/bin/python -m coverage combine
	$(VENV)-coverage/bin/python -m coverage report
	@$(VENV)-coverage/bin/python -m coverage json -q -o - | $(VENV)-coverage/bin/python scripts/core_branches.py

# MUTANTS changes of the core, drawn by SEED; MUTATION_ARGS="--only _policy.py" for some places.
MUTANTS ?= 100
SEED ?= 0
.PHONY: mutation
mutation: venv  ## change the core in 100 places, one at a time, and count the changes that a test notices
	$(RUN) -m scripts.mutate --mutants $(MUTANTS) --seed $(SEED) $(MUTATION_ARGS)

# CONFIGS random configs of 5 to 12 layers from PARITY_SEED on.
CONFIGS ?= 100
.PHONY: parity-deep
parity-deep: export PARITY_CONFIGS := $(CONFIGS)
parity-deep: venv-parity  ## compare logits, weights and gradients of 100 random configs of 5 to 12 layers with transformers
	@mkdir -p "$(REPORTS)"
	$(VENV)-parity/bin/python -m pytest $(IN_WORKERS) --junitxml="$(REPORTS)/parity_deep.xml" tests/models/test_parity.py -k "deep and config"

.PHONY: haliax
haliax: venv  ## run Haliax's own tests of scan with this library in its place
	@mkdir -p "$(REPORTS)"
	$(RUN) scripts/upstream_suite.py haliax --junitxml="$(abspath $(REPORTS))/haliax.xml"

.PHONY: flax
flax: venv  ## run Flax's own tests of nnx.scan with this library's remat_scan in its place
	@mkdir -p "$(REPORTS)"
	$(RUN) scripts/upstream_suite.py flax --junitxml="$(abspath $(REPORTS))/flax.xml"

.PHONY: lint
lint: venv  ## run ruff and pyright
	$(RUN) -m ruff format --check
	$(RUN) -m ruff check
	$(RUN) -m pyright --pythonpath "$(RUN)"

.PHONY: check
check: lint  ## run ruff and pyright; check workflows and the conda recipe; build and check dist/, and use the wheel in an environment of its own
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(RUN) scripts/check_wheel.py

# In an environment with JAX for that GPU and the extra `tokamax`; an H200 holds the weights.
.PHONY: gpu
gpu:  ## on the GPU at hand: gradients, then times of attention, linear attention, experts, and steps of Qwen3-30B-A3B
	$(RUN) -m benchmarks.attention_layer
	$(RUN) -m benchmarks.linear_attention
	$(RUN) -m benchmarks.expert_layer
	$(RUN) -m benchmarks.qwen3_step --profile

.PHONY: figures
figures: venv  ## draw the charts of benchmarks/results, the README's too
	$(RUN) -m scripts.charts

.PHONY: docs
docs: figures  ## build the documentation into site/, with figures, and tables from benchmarks/results
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict # with --quiet it would not count warnings

.PHONY: format
format: venv  ## let ruff format the code and fix what it can
	$(RUN) -m ruff format
	$(RUN) -m ruff check --fix

.PHONY: constraints
constraints:  ## pin the newest versions for CI in constraints/
	scripts/make_constraints.sh

.PHONY: clean
clean:  ## remove virtual environments and build outputs (not runs/)
	rm -rf .venv .venv-newest .venv-tools .venv-memory .venv-newest-memory .venv-parity .venv-coverage build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
