# make run, make test: the two commands. Everything is written inside this folder,
# apart from pip's own cache.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOOPS := $(VENV)/.compiled

# Matplotlib would otherwise write its font list into the home directory.
export MPLCONFIGDIR := $(CURDIR)/$(VENV)/matplotlib
# Many containers set it; each process would then compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install ready run test test-all check attack bench docs clean

help:
	@echo "make run     install into $(VENV) and run the demonstration"
	@echo "make test    install into $(VENV) and run the tests"
	@echo "make test-all  the same, and tests of more than 20 seconds"
	@echo "make check   linters, types, import contracts"
	@echo "make attack  KILLS=100 kills, FILES=500 hostile files, EXAMPLES=400 inputs each"
	@echo "make bench   speed and accuracy against peers, as ratios"
	@echo "make docs    build the site, with its examples run, into SITE=build/site, where"
	@echo "             versions lie side by side"

install: $(STAMP) $(LOOPS)

# Python compiles what is imported, which is a fraction of what is installed.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile \
	  --constraint constraints.txt --editable ".[dev]"
	@mkdir -p $(MPLCONFIGDIR)
	@touch $@

$(LOOPS): $(STAMP)
	@echo "Compiling the hot loops, once ..."
	$(BIN)/python -c "from coulomb.attention.encoder.packed_compiled import compile_loops; compile_loops()"
	@touch $@

run: install
	$(BIN)/coulomb demo

# Loops are compiled while the linters run. A worker takes tests in their order, so that
# what a file of tests has prepared is made once.
ready:
	@$(MAKE) --jobs 2 install check

test: ready
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not long"

test-all: ready
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

KILLS ?= 100
FILES ?= 500
EXAMPLES ?= 400
attack: install
	KILLS=$(KILLS) FILES=$(FILES) ATTACK_EXAMPLES=$(EXAMPLES) \
	  $(BIN)/python -m pytest tests/attack -rP --numprocesses 2 --dist worksteal --timeout 0

bench: install
	$(BIN)/python benchmarks/dynamics.py
	$(BIN)/python benchmarks/accuracy.py

SITE ?= build/site
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/coulomb/_version.py)
docs: install
	$(BIN)/python -m sphinx -qW --keep-going --doctree-dir build/doctrees docs \
	  $(SITE)/$(VERSION)
	@echo "The site: $(SITE)/index.html"

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .hypothesis
