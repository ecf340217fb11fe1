# Every target sets up what it needs. CI (.ci/run) calls targets of this file, `make check` first.
PYTHON ?= python3
# SIDEBAND_TORCH=0 leaves torch out: its tests are then skipped by name.
SIDEBAND_TORCH ?= 1
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
.DEFAULT_GOAL := help
.PHONY: help bench bench-full demo example test test-fast test-faults test-fuzz test-nfs test-slow test-vllm lint types check openapi lock sbom audit up down build clean torch

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

.venv/.ready: pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Sideband needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

.venv/.torch: .venv/.ready requirements-torch.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.lock
	@touch $@

.venv/.clients: .venv/.ready requirements-clients.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-clients.lock
	@touch $@

ifeq ($(SIDEBAND_TORCH),0)
# Types of what needs torch cannot be checked without it.
TYPES_WITHOUT_TORCH := --exclude '^(examples/train_tiny_moe|shared/sideband/torch|tests/examples|tests/unit/torch)/'
torch: .venv/.ready
else
torch: .venv/.torch
endif

demo: .venv/.ready ## the whole path on this machine: five ways, compared bitwise (under 2 minutes)
	$(BIN)/python -m simulation demo --out demo-out

example: torch ## train a small mixture-of-experts model on four ranks, compared with one process
	$(BIN)/python -m examples.train_tiny_moe train --out example-out

test: test-fast test-slow ## every test: fast tier with coverage, then real processes and containers

test-fast: torch .venv/.clients ## the fast tier: unit, properties, golden, services in process
	rm -f .coverage .coverage.*
	$(PYTEST) -n 2 -m "not e2e and not docker and not vllm" --cov --cov-report=term --cov-fail-under=95

test-slow: torch ## real processes and containers; skipped by name where no engine runs
	$(PYTEST) -m "(e2e or docker) and not vllm"

FAULT_SEEDS ?= 50
CRASH_SEEDS ?= 20
test-faults: torch ## seeded faults and crashes, so many seeds of each; says what was injected
	$(PYTEST) -n 2 -m "not docker" tests/faults --fault-seeds $(FAULT_SEEDS)
	$(PYTEST) tests/e2e/test_crashes.py tests/e2e/test_going_back.py --crash-seeds $(CRASH_SEEDS)

FUZZ_SECONDS ?= 60
test-fuzz: .venv/.ready ## changed files, steps, messages and requests for FUZZ_SECONDS each, from printed seeds
	$(PYTEST) tests/fuzz --fuzz-seconds $(FUZZ_SECONDS)

NFS_AT ?=
NFS_SHARED ?=
test-nfs: .venv/.ready ## two NFS clients: NFS_AT runs a command on one, NFS_SHARED is seen at their /
	$(PYTEST) tests/nfs --nfs-at "$(NFS_AT)" --nfs-shared "$(NFS_SHARED)"

VLLM_OPTIONS ?=
test-vllm: torch ## a real vLLM on this CPU, 0.32 and 0.30 (under 12 minutes); skipped by name where none can be built
	-$(BIN)/python -m scripts.vllm_env
	$(PYTEST) tests/vllm -m vllm $(VLLM_OPTIONS)

bench: .venv/.ready ## measure both sides in one run; writes docs/performance.md (a few minutes)
	$(BIN)/python -m bench --out docs

bench-full: .venv/.ready ## the big rows too
	$(BIN)/python -m bench --full --out docs

lint: .venv/.ready ## ruff: format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: torch ## mypy strict over library, services, simulation, examples and tests
	$(BIN)/mypy $(TYPES_WITHOUT_TORCH)

check: lint types test ## what CI runs first, and what must be green before a push

openapi: .venv/.ready ## write docs/openapi and docs/settings.md
	$(BIN)/python -m services.kit.documents docs

lock: .venv/.ready ## refresh the lock files from this environment
	$(BIN)/python -m pip freeze --exclude-editable | $(PYTHON) scripts/lock.py

LOCKS := requirements.lock requirements-torch.lock requirements-clients.lock

.venv-audit/.ready: requirements-audit.txt
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-audit.txt
	@touch $@

sbom: .venv-audit/.ready ## write sbom.json (CycloneDX) of everything that is locked
	cat $(LOCKS) | .venv-audit/bin/cyclonedx-py requirements - --of JSON -o sbom.json

audit: .venv-audit/.ready ## known weaknesses of what is locked; skipped by name where no source of them can be asked
	.venv-audit/bin/python scripts/audit.py .venv-audit/bin/pip-audit $(LOCKS)

up: ## the same as containers, checked against the seeded truth
	docker compose up --build --exit-code-from checker

down: ## stop the containers and remove their volume
	docker compose down --volumes

build: .venv/.ready ## the wheel: the library alone
	$(BIN)/python -m build --wheel

clean: ## remove what the targets made
	rm -rf .venv .venv-audit sbom.json build dist demo-out example-out .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
