# `make quickstart` and `make test` do all of the set-up; a second run reuses it.
# PYTHON: a Python 3.11 to make .venv with. MOPD_TORCH_INDEX: see tools/setup_env.py.

# The first that runs and is 3.11: a pyenv shim may exist for a version that is not active.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1 \
	&& { echo $$p; break; }; done)
BIN := .venv/bin
CONFIG ?= configs/quickstart.yaml

.PHONY: help quickstart test test-slow lint setup lock bench-env clean-env
.DEFAULT_GOAL := help

help:
	@echo "make quickstart  set up, then distil three teachers into one student (CONFIG=$(CONFIG),"
	@echo "                 ARGS=overwrite=true to do it again, ARGS='key=value --plain ...')"
	@echo "make test        set up, then ruff, mypy and every test that is not marked slow"
	@echo "make test-slow   the tests that are marked slow"
	@echo "make lint        set up, then ruff and mypy"
	@echo "make setup       only make .venv (PYTHON=python3.11)"
	@echo "make bench-env   make .venv-trl, for tools/bench_trl.py"
	@echo "make lock        remake requirements/*.lock (tools/lock.py)"
	@echo "make clean-env   remove .venv and .venv-trl"

setup:
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.11 is needed and none was found as python3.11, python3 or python." >&2; \
		echo "Install it, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; fi
	@$(PYTHON) tools/setup_env.py

quickstart: setup
	$(BIN)/mopd train $(CONFIG) $(if $(findstring overwrite=true,$(ARGS)),,resume=true) $(ARGS)

test: lint
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

lock: setup
	$(PYTHON) tools/lock.py

bench-env:
	@$(PYTHON) tools/setup_env.py trl

clean-env:
	rm -rf .venv .venv-trl
