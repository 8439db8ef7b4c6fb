# The first call of any target sets up everything a fresh machine needs in .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
RUN := runs/demo
export TOKENIZERS_PARALLELISM := false

.PHONY: help install demo check lint types spelling site format reference test test-all clean-demo

help:
	@echo "make demo      corpus, tokenizer, pretraining, long-context evals, export, report"
	@echo "make test      the test suite (make test-all: with the long matrices)"
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

test test-all: export DS_ACCELERATOR := cpu
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" --numprocesses auto --dist loadfile tests/unit tests/benchmarks
	$(BIN)/pytest -m "not slow" tests/distributed tests/launch

test-all: test
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow --numprocesses auto --dist loadfile tests/unit tests/benchmarks
	$(BIN)/pytest -m slow tests/distributed tests/launch
