# The first call of any target sets up everything a fresh machine needs in .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
RUN := runs/demo
export TOKENIZERS_PARALLELISM := false

.PHONY: help install demo check lint types spelling site format reference test test-all \
	test-slow-attention test-slow-pruning test-slow-unit test-slow-ranks clean-demo

help:
	@echo "make demo      corpus, tokenizer, pretraining, long-context evals, export, report"
	@echo "make test      the test suite, in at most 10 minutes on two cores"
	@echo "make test-all  and the long matrices; its parts, each at most 90 minutes:"
	@echo "               test-slow-attention test-slow-pruning test-slow-unit test-slow-ranks"
	@echo "make check     lint, format, types, spelling, documentation (make format fixes the first two)"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Re-running skips finished steps; an interrupted demo resumes where it stopped. It runs on the CPU
# whatever the machine has.
demo: export DS_ACCELERATOR := cpu
demo: $(INSTALLED)
	$(BIN)/alibi-lm prepare data/demo.yaml
	$(BIN)/deepspeed --num_gpus 2 launch/pretrain.py configs/demo.yaml
	$(BIN)/alibi-lm eval perplexity $(RUN) --suite evals/demo.yaml
	$(BIN)/alibi-lm eval needle $(RUN) --suite evals/demo.yaml
	$(BIN)/alibi-lm eval attention-span $(RUN) --suite evals/demo.yaml
	$(BIN)/alibi-lm export $(RUN)
	$(BIN)/alibi-lm report $(RUN)

clean-demo:
	rm -rf $(RUN) prepared/demo

check: lint types spelling site

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

spelling: $(INSTALLED)
	git ls-files -z | xargs -0 $(BIN)/codespell

# The documentation site, in build/site. A warning, a broken link or a file from elsewhere is an error.
site: export NO_MKDOCS_2_WARNING := 1
site: $(INSTALLED)
	$(BIN)/mkdocs build --strict --quiet
	! grep -rnoE --include='*.html' '<(script|link|img|iframe)[^>]*"(https?:)?//[^"]*' build/site

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What is generated from the settings' types and docstrings.
reference: $(INSTALLED)
	$(BIN)/alibi-lm config reference docs/configuration.md
	$(BIN)/alibi-lm config schema configs/schema.json

# One pool of workers for everything: tests that wait for ranks leave the cores to the others. The
# long files, those of ranks and launchers, are collected first and so start first.
PYTEST := OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu $(BIN)/pytest --numprocesses auto
BY_FILE := --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	$(PYTEST) $(BY_FILE) -m "not slow" tests

# `make test` and the tests marked slow, in parts of at most 90 minutes on two cores.
test-all: test test-slow-attention test-slow-pruning test-slow-unit test-slow-ranks

test-slow-attention: $(INSTALLED)
	$(PYTEST) --dist worksteal -m slow tests/unit/model/attention

test-slow-pruning: $(INSTALLED)
	$(PYTEST) --dist worksteal -m slow tests/unit/model/pruning

test-slow-unit: $(INSTALLED)
	$(PYTEST) $(BY_FILE) -m slow tests/unit tests/benchmarks \
		--ignore tests/unit/model/attention --ignore tests/unit/model/pruning

test-slow-ranks: $(INSTALLED)
	$(PYTEST) $(BY_FILE) -m slow tests/distributed tests/launch
