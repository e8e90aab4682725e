# dflash-fleet: every command of the README. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
# molecule and ansible-lint call the other tools of the environment by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Releases of the rehearsal engine that the demo and the scenarios play with.
REHEARSAL_RELEASES := 0.5.11 0.5.20 0.5.23

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

# The environment is rebuilt when the lock changes, and marked when it is whole.
.venv/.complete: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dflash-fleet needs Python >= 3.11 on the controller; name one with make PYTHON=python3.12")'
	@echo "preparing .venv from requirements.lock"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock 2>&1 | { grep -v '^WARNING: Location' || true; }
	@$(BIN)/python -c 'import ansible, molecule, testinfra'
	@touch $@

.PHONY: venv
venv: .venv/.complete  ## the controller's environment in .venv, from requirements.lock

.PHONY: lock
lock: .venv/.complete  ## write requirements.lock anew from pyproject.toml (uv resolves for every supported Python)
	@$(PYTHON) -m venv .cache/uv && .cache/uv/bin/pip install --quiet uv
	@.cache/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --no-header --no-annotate --upgrade --group dev pyproject.toml -o requirements.lock

.PHONY: prepare
prepare: .venv/.complete  ## container tools, host image, wheels and models that demo and scenarios need
	@$(BIN)/python rehearsal/fleet.py prerequisites --install
	@$(BIN)/python rehearsal/fleet.py image
	@$(BIN)/python rehearsal/wheels.py hf-client
	@$(BIN)/python rehearsal/wheels.py sglang-router
	@for release in $(REHEARSAL_RELEASES); do $(BIN)/python rehearsal/wheels.py rehearsal $$release; done
	@$(BIN)/python rehearsal/wheels.py cpu

.PHONY: demo
demo: prepare  ## boot the demo fleet and deploy to it
	@$(BIN)/python rehearsal/fleet.py up demo --spec rehearsal/hosts/demo.yml --inventory inventory/demo
	@$(BIN)/ansible-playbook rehearsal/prepare.yml
	@$(BIN)/ansible-playbook deploy-dflash.yml
	@$(BIN)/python rehearsal/fleet.py bake demo cpu-01 --path /var/lib/sglang/venvs --tag cpu

.PHONY: demo-down
demo-down: .venv/.complete  ## remove exactly what demo made
	@$(BIN)/python rehearsal/fleet.py down demo

.PHONY: lint
lint: .venv/.complete  ## ruff, mypy, yamllint, ansible-lint (production)
	@$(BIN)/pytest -q tests/lint

.PHONY: unit
unit: .venv/.complete  ## unit tests only
	@$(BIN)/pytest -q -n 2 --dist loadfile tests/unit

.PHONY: test
test: prepare  ## everything a change must pass: lint, unit tests, core scenarios, the real engine
	@$(BIN)/pytest -n 2 --dist loadfile tests/lint tests/unit --durations=20 --durations-min=1
	@$(BIN)/pytest tests/scenarios -m 'not faults and not readme' --durations=0 --durations-min=1

.PHONY: test-faults
test-faults: prepare  ## the long matrices; FROM=N starts with the Nth scenario, MINUTES=N stops taking new ones
	@FROM="$(FROM)" MINUTES="$(MINUTES)" $(BIN)/pytest tests/scenarios -m faults --durations=0 --durations-min=1

.PHONY: test-readme
test-readme: prepare  ## every command of the README, on the demo fleet (removes it at the end)
	@$(BIN)/pytest tests/scenarios/test_readme.py -m readme --durations=0 --durations-min=1

.PHONY: diagnose-corpus
diagnose-corpus: .venv/.complete  ## score the diagnosis on every journal of the corpus
	@$(BIN)/python tests/diagnose_corpus.py

.PHONY: option-table
option-table: .venv/.complete  ## write the table of options anew from the released packages; RELEASES="0.5.24" adds one
	@$(BIN)/python tests/parsers/option_table.py $(RELEASES)

.PHONY: real-parsers
real-parsers: .venv/.complete  ## compare it and every configuration with SGLang's own parsers (RELEASES, default all)
	@$(BIN)/python rehearsal/wheels.py cpu
	@$(BIN)/python tests/parsers/environment.py $(RELEASES)
	@DFLASH_FLEET_REAL_PARSERS="$(or $(RELEASES),all)" $(BIN)/pytest -q tests/parsers/test_real_parsers.py

.PHONY: docs
docs: .venv/.complete  ## the site of docs/, in .cache/site
	@$(BIN)/mkdocs build

.PHONY: wheel
wheel: .venv/.complete  ## the command dflash-fleet as a wheel, in .cache/dist
	@$(BIN)/hatchling build -t wheel -d .cache/dist

.PHONY: changelog
changelog: .venv/.complete  ## move what changes/ holds into CHANGELOG.md, as VERSION
	@test -n "$(VERSION)" || { echo "make changelog VERSION=0.2.0"; exit 2; }
	@$(BIN)/towncrier build --yes --version "$(VERSION)"

.PHONY: bench
bench: .venv/.complete  ## one benchmark by NAME, its figures as JSON on the last line
	@test -n "$(NAME)" || { echo "make bench NAME=<one of: $(basename $(notdir $(wildcard benchmarks/*.py)))>"; exit 2; }
	@$(BIN)/python benchmarks/$(NAME).py
