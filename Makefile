# linvit: `make quickstart` and `make test` do all the set-up on a fresh machine; a second run is quick.
PYTHON ?= python3
BIN := .venv/bin
RUN := checkpoints/quickstart/version_0

.PHONY: quickstart test test-all lint tensorboard clean help
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(RUN)/test.txt ## install, train focused attention on real digits, test it (minutes, on a CPU)
	@cat $(RUN)/test.txt
	@echo
	@echo "Trained model:   $(RUN)/checkpoints/best.ckpt"
	@echo "Look at the run: make tensorboard, then open http://localhost:6006"
	@echo "Next:            $(BIN)/linvit fit --config configs/quickstart.yaml --model.attention=softmax"

$(RUN)/test.txt: | .venv/installed
	rm -rf $(RUN)
	$(BIN)/linvit fit --config configs/quickstart.yaml
	@mkdir -p $(RUN)
	$(BIN)/linvit test --config $(RUN)/config.yaml --ckpt_path $(RUN)/checkpoints/best.ckpt > $@.part
	@mv $@.part $@

test: .venv/installed-dev ## all fast tests
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: .venv/installed-dev ## all tests; those that need a GPU skip without one
	$(BIN)/python -m pytest

lint: .venv/installed-dev ## ruff (format and lint) and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

tensorboard: .venv/installed ## show all runs
	$(BIN)/tensorboard --logdir checkpoints

clean: ## remove the environment and caches; runs in checkpoints/ stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
