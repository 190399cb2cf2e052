# `make serve` runs the system, `make test` proves it. See README.md.

PYTHON ?= python3
# Where pip takes torch from; empty = its usual index, which on Linux gives a CUDA build of several GB.
# A CPU build: make serve TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Arguments for `reprise serve` and for pytest.
ARGS ?=
export REPRISE_CACHE_DIR ?= $(CURDIR)/.cache/models

BIN := .venv/bin
INSTALLED := .venv/.installed
STUBS := shared/reprise/v1

.PHONY: help install serve chat demo test lint type format protos protos-baseline accel bench soak peers test-compose lint-deploy clean
.DEFAULT_GOAL := help

help: ## What there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

install: $(INSTALLED) ## Virtual environment with everything, in .venv

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Reprise needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "Python's venv module is missing: install the python3-venv package." >&2; exit 1; }
	@echo "Setting up .venv (once; torch is the large part)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --progress-bar on $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/pip install --progress-bar on --editable '.[dev,serve]'
	@PYTHON=$(BIN)/python sh shared/build_accel.sh >/dev/null 2>&1 \
	  && echo "Built the accelerators." || echo "No C compiler: all stays pure Python."
	@touch $@

accel: install ## Build the compiled accelerators again (make install tries to)
	PYTHON=$(BIN)/python sh shared/build_accel.sh

serve: install ## Run the whole system; MODEL=hugging-face-id-or-path
	@$(BIN)/reprise serve $(ARGS)

chat: install ## Chat with it in the terminal
	@$(BIN)/reprise chat $(ARGS)

demo: install ## A scripted chat, and what was reused
	@$(BIN)/reprise demo $(ARGS)

test: install ## Every test that a laptop can run
	$(BIN)/python -m pytest $(ARGS)

lint: install ## Style, import rules, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@rm -rf .cache/protos && mkdir -p .cache/protos && $(MAKE) -s protos STUBS_ROOT=.cache/protos
	@diff -r --exclude=__pycache__ .cache/protos/reprise/v1 $(STUBS) \
	  || { echo "generated code is not current: run make protos" >&2; exit 1; }
	@if [ -x $(BIN)/buf ]; then $(BIN)/buf lint protos && $(BIN)/buf breaking protos --against $(PROTOS_BASELINE); \
	  else echo "buf is not here (no package for this platform): protos are not linted"; fi

type: install ## mypy, strict
	$(BIN)/mypy

format: install ## Put the code into the project's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

PROTOS_BASELINE := protos/baseline.binpb
protos-baseline: install ## Freeze protos/ as what later changes must stay compatible with (at a release)
	$(BIN)/buf build protos -o $(PROTOS_BASELINE)

STUBS_ROOT ?= shared
protos: install ## Generate shared/reprise/v1 from protos/
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(STUBS_ROOT) --pyi_out=$(STUBS_ROOT) \
	  --grpc_python_out=$(STUBS_ROOT) protos/reprise/v1/*.proto

SOAK_S ?= 1800
SOAK_EVENT_BLOCKS ?= 10000000
soak: install ## The long runs at full length: overload of the store (SOAK_S), events under faults
	REPRISE_SOAK_S=$(SOAK_S) $(BIN)/python -m pytest -s -o faulthandler_timeout=0 tests/chaos/test_store_overload.py
	REPRISE_EVENT_BLOCKS=$(SOAK_EVENT_BLOCKS) $(BIN)/python -m pytest -s -o faulthandler_timeout=0 tests/chaos/test_event_delivery.py

bench: install ## Every benchmark, as tables
	@for name in hashing hashing-append hashing-limit kv-cache eviction step events store first-token; do \
	  $(BIN)/reprise bench $$name || exit 1; done

PEER_VERSION ?= 0.33.0
peers: install ## The reference in .venv-peers, a peer in the hashing and kv-cache benchmarks (a large download)
	$(BIN)/python -m venv --clear .venv-peers
	@echo '*' > .venv-peers/.gitignore
	.venv-peers/bin/pip install --progress-bar on $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	.venv-peers/bin/pip install --progress-bar on --no-deps vllm==$(PEER_VERSION) xgrammar
	.venv-peers/bin/pip install --progress-bar on -r shared/reprise_cli/bench/reference_requirements.txt
	@echo '{"work": "version"}' | .venv-peers/bin/python shared/reprise_cli/bench/reference_runner.py

test-compose: install ## The system on Docker, built and run for real
	tests/compose/run.sh $(ARGS)

lint-deploy: install ## Dockerfile, compose file and chart, without an engine
	tests/compose/lint.sh

clean: ## Remove what was built; the virtual environment and models stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .cache/protos
