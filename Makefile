# linvit: `make quickstart` and `make test` do all the set-up on a fresh machine; a second run is quick.
PYTHON ?= python3
BIN := .venv/bin
RUNS := checkpoints/quickstart
EPOCHS ?= 20
SEEDS ?= 3
JOBS ?= 1
PAIRS ?= 8,32
TUTORIALS ?= all
RESOLUTION ?= lowest-direct
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Tests run on all cores, each process with one torch thread (tests/conftest.py); more than 8 wait for the disk.
PARALLEL := --numprocesses=auto --maxprocesses=8 --dist=worksteal

.PHONY: quickstart gallery diagnostics docs test test-all test-transformers test-dependencies lint release tensorboard clean help
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(RUNS)/result.txt ## install, train focused attention on real digits, test it (minutes, on a CPU)
	@cat $(RUNS)/result.txt

# A file names the run while it trains, so that after an interruption it, and no other, continues.
$(RUNS)/result.txt: | .venv/installed
	@mkdir -p $(RUNS); \
	trap 'echo "interrupted; resume with: make quickstart"' INT TERM; \
	run=$$(cat $(RUNS)/unfinished 2>/dev/null); \
	if [ -f "$$run/config.yaml" ]; then \
	  set -- --config $$run/config.yaml --resume=auto; \
	else \
	  last=$$(ls $(RUNS) | sed -n 's/^version_//p' | sort -n | tail -n 1); \
	  run=$(RUNS)/version_$$(($${last:--1} + 1)); \
	  echo $$run > $(RUNS)/unfinished; \
	  set -- --config quickstart; \
	fi; \
	echo $(BIN)/linvit fit $$*; \
	$(BIN)/linvit fit $$* && \
	$(BIN)/linvit test --config $$run/config.yaml --ckpt_path $$run/checkpoints/best_ema.ckpt > $$run/test.txt && \
	{ cat $$run/test.txt; echo; \
	  echo "  trained model    $$run/checkpoints/best_ema.ckpt"; \
	  echo "  look at the run  make tensorboard, then open http://localhost:6006"; \
	  echo "  compare          $(BIN)/linvit fit --config quickstart --model.attention=softmax"; \
	  echo "  train it again   rm $@ && make quickstart"; } > $@ && \
	rm $(RUNS)/unfinished

test: .venv/installed-dev ## all fast tests
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu"

test-all: .venv/installed-dev ## all tests; those that need a GPU skip without one
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu"
	$(BIN)/python -m pytest -m gpu
	$(MAKE) test-transformers

test-transformers: .venv/installed-transformers ## tests of models of Hugging Face's transformers, slow ones too
	.venv/transformers/bin/python -m pytest $(PARALLEL) -m "not gpu" tests/backbones/transformers tests/weights/test_transformers.py

test-dependencies: .venv/installed-release ## a few tests with the lowest-direct or highest versions that are allowed (RESOLUTION=...)
	$(BIN)/python .ci/release.py --dependencies $(RESOLUTION)

lint: .venv/installed-dev ## ruff (format and lint) and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

gallery: .venv/installed ## train all attentions on the digits, and write docs/gallery (hours on two cores)
	$(BIN)/python benchmarks/gallery.py --epochs $(EPOCHS) --seeds $(SEEDS) --jobs $(JOBS)

diagnostics: .venv/installed ## what all attentions recall: docs/results/recall.md (over an hour on two cores with JOBS=2)
	$(BIN)/python benchmarks/recall.py --pairs $(PAIRS) --seeds $(SEEDS) --jobs $(JOBS)

docs: .venv/installed-docs ## build the site (TUTORIALS=all, changed or none are run; URL=where it will lie)
	$(BIN)/codespell README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs --skip 'docs/_build,*.svg,*.png' --ignore-words docs/words.txt
	$(BIN)/python docs/prose.py
	TUTORIALS=$(TUTORIALS) URL=$(URL) $(BIN)/python -m sphinx -W --keep-going -q -j 2 -b html -d docs/_build/doctrees docs docs/_build/html/$(VERSION)
	@echo "open docs/_build/html/index.html"

release: .venv/installed-release ## check, build and try what can be uploaded as this version; uploads nothing
	$(BIN)/python .ci/release.py

tensorboard: .venv/installed ## show all runs at http://localhost:6006
	$(BIN)/tensorboard --logdir checkpoints

clean: ## remove the environment and caches; runs in checkpoints/ stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each installs all that it needs in one go, so that a fresh machine resolves the dependencies once.
INPUTS := pyproject.toml setup.py constraints.txt
INSTALL = { test -x $(BIN)/pip || $(PYTHON) -m venv .venv; } && \
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e

.venv/installed: $(INPUTS)
	@echo "Installing linvit and its dependencies into .venv, once. With CUDA on Linux, torch is a download of a few GB."
	$(INSTALL) .
	@touch $@

.venv/installed-dev: $(INPUTS)
	$(INSTALL) '.[dev]'
	@touch .venv/installed $@

# Beside .venv, whose packages it has, too: torchmetrics imports transformers where it is installed, at each start.
.venv/installed-transformers: .venv/installed-dev
	$(BIN)/python -m venv .venv/transformers
	$(BIN)/python -c 'import glob, sysconfig; \
	path, = glob.glob(".venv/transformers/lib/python*/site-packages"); \
	print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"), file=open(path + "/linvit.pth", "w"))'
	.venv/transformers/bin/pip install --disable-pip-version-check -c constraints.txt 'linvit[transformers]'
	@touch $@

.venv/installed-docs: $(INPUTS)
	$(INSTALL) '.[dev,docs]'
	@touch .venv/installed .venv/installed-dev $@

.venv/installed-release: $(INPUTS)
	$(INSTALL) '.[dev,release]'
	@touch .venv/installed .venv/installed-dev $@
