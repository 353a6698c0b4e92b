# make demo: see it work.  make test: check everything.  Both set up a .venv first; nothing else is needed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.manyheads

.PHONY: setup demo test lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/python -m manyheads.demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

test: lint
	$(BIN)/pytest -n 2

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis runs
