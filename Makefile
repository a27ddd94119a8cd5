# make serve   create .venv, install, get the default model, serve it on 127.0.0.1
# make test    create .venv, install what tests need, run them
# PIP_ARGS     more arguments for pip, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

VENV ?= .venv
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(if $(shell $(name) --version 2>/dev/null),$(name))))
CONFIG ?= configs/quickstart.yaml
PIP_ARGS ?=
WORKERS ?= 2
PYTEST_ARGS ?=
BIN := $(VENV)/bin

CLIENTS ?= .venv-clients

.PHONY: help serve test clients check fmt docs contract clean

help:
	@sed -n '1,3s/^# //p' $(firstword $(MAKEFILE_LIST))
	@echo "make clients  other people's clients against a scripted server"
	@echo "make check   format, lint, types, import contracts"
	@echo "make fmt     rewrite the sources in the project's format"
	@echo "make docs    rewrite what scripts write in docs/: settings, metrics, the dashboard"
	@echo "make contract  which statements of docs/contract the tests show"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev,smg]'
	@touch $@ $(VENV)/installed

serve: $(VENV)/installed
	$(BIN)/tokenspeed serve $(CONFIG)

# A wait on the forward thread or a late kernel compilation is an error here, not a log line.
test contract: export TOKENSPEED_DATA_PLANE_SYNC_DEBUG := error
test contract: export TOKENSPEED_JIT_COMPILE_CHECK := error

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --max-worker-restart 2 $(PYTEST_ARGS)

contract: PYTEST_ARGS = --contract-report=build/contract.json
contract: test
	$(BIN)/python tools/contract_report.py build/contract.json

# These pin versions of what the engine uses too, so they live in an environment of their own.
$(CLIENTS)/installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install $(PIP_ARGS) --no-deps --no-compile -r tests/clients/requirements.txt
	@touch $@

clients: $(VENV)/installed-dev $(CLIENTS)/installed
	@if command -v npm >/dev/null; then cd tests/clients/node && npm ci --no-audit --no-fund --loglevel=error; \
		else echo "npm is not on this machine: the clients of Node are skipped"; fi
	TOKENSPEED_PYTHON=$(abspath $(BIN)/python) $(CLIENTS)/bin/python -m pytest -q -c tests/clients/pytest.ini --rootdir . tests/clients

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

fmt: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/installed-dev
	for script in configuration metrics dashboard; do $(BIN)/python tools/make_$$script.py || exit 1; done

clean:
	rm -rf build .venv-clients tests/clients/node/node_modules .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
