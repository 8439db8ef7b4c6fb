# Everything a fresh machine needs is set up in .venv on the first call of any target.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
RUN := runs/demo
export TOKENIZERS_PARALLELISM := false

.PHONY: help install demo check format test test-all clean-demo

help:
	@echo "make demo      corpus, tokenizer, pretraining, long-context evals, export, report"
	@echo "make test      the test suite (make test-all: with the long matrices)"
	@echo "make check     lint, format and type check (make format mends the first two)"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Each command finds what it has finished before and skips it, so a second `make demo`, or one
# after a kill, goes on from there. The demo runs on the CPU whatever the machine has.
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

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test test-all: export DS_ACCELERATOR := cpu
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow" --numprocesses auto --dist loadfile tests/unit
	$(BIN)/pytest -m "not slow" tests/distributed tests/launch

test-all: test
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow --numprocesses auto --dist loadfile tests/unit
	$(BIN)/pytest -m slow tests/distributed tests/launch
