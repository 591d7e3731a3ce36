# Every target of a model's Makefile is pytest or the inference driver on its folder.
# The Makefile sets NAME and MODEL, and where it is no folder of this package, PACKAGE and PARENT.
PACKAGE  ?= llms.$(NAME)
PARENT   ?= ../..
PYTHON   ?= python3
PROMPT   ?= What is gravity?
N_TOKENS ?= 100

NPUOPT := $(if $(filter 1,$(NPU)),--npu,)
PYTEST := $(PYTHON) -m pytest --import-mode=importlib $(NPUOPT) --npu-model $(MODEL)
DRIVER := cd $(PARENT) && $(PYTHON) -m $(PACKAGE).$(NAME)_inference $(NPUOPT) --model $(MODEL)

export PROMPT
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help deploy status verify verify-full diagnosis run chat profile compile benchmark clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

deploy: ## all phases in order
	$(PYTHON) -m npu_deploy run $(CURDIR) $(NPUOPT)

status: ## verdict of every phase
	$(PYTHON) -m npu_deploy status $(CURDIR)

verify: ## token-set gate on 2 prompts, with a report
	$(PYTEST) -m phase6 tests/test_phase6_topk_gate.py

verify-full: ## the same on all prompts
	$(PYTEST) -m phase6 --npu-prompts all tests/test_phase6_topk_gate.py

diagnosis: ## cosine per layer against the reference, prefill and decode
	$(PYTEST) tests/test_diagnosis_cosine.py

run: ## generate N_TOKENS tokens from PROMPT
	@$(DRIVER) --prompt "$$PROMPT" --n-tokens $(N_TOKENS)

chat: ## chat until end of input
	@$(DRIVER) --interactive --n-tokens $(N_TOKENS)

profile: N_TOKENS = 20
profile: ## generate 20 tokens and show where the time goes
	@$(DRIVER) --profile --prompt "$$PROMPT" --n-tokens $(N_TOKENS)

compile: ## compile all ELFs; needs no weights and no device
	@$(DRIVER) --compile-only

benchmark: ## TTFT and time per output token on the device clock
	$(PYTEST) --benchmark-only tests

clean: ## remove the compiled artefacts
	$(PYTHON) -m npu_deploy clean $(CURDIR)
