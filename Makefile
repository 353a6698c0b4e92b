# make demo: see it work.  make test: check everything.  Both set up a .venv first; nothing else is needed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.manyheads
APT := DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -y --no-install-recommends -o Acquire::Retries=1
BROWSER := chromium chromium-driver

.PHONY: setup demo test lint browser clean

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

# The report is tested in Debian's browser; where there is none and none can be installed, those tests are skipped.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	! test "$$(id -u)" = 0 || ! command -v apt-get >/dev/null || { \
		echo 'installing chromium, to test the report in'; \
		{ $(APT) install $(BROWSER) || { $(APT) update && $(APT) install $(BROWSER); }; } >/dev/null 2>&1; \
	} || true

test: lint browser
	$(BIN)/pytest -n 2

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
