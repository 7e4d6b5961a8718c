# make demo   install, then carry a context from SmolLM2-135M to Gemma-3-270M and report on it
# make test   install, then unit and integration tests
# make lint   style and types
# make clean  remove what make made here (run folders and the model cache stay)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# On a machine with a GPU, name the build that fits it: make demo TORCH=...
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
JOBS ?= 2
# Words for run.py: make demo ARGS="mapper=heterofold eval=full"
ARGS ?=

export TOKENIZERS_PARALLELISM = false

.PHONY: demo test unit integration lint clean

demo: $(STAMP)
	$(BIN)/python run.py $(ARGS)
	@echo
	@echo "Try next:"
	@echo "  make demo ARGS=mapper=full_head_ridge     another method, from cached traces"
	@echo "  make demo ARGS=pair=gemma3_smollm2        the way back"
	@echo "  $(BIN)/kvferry ask --document FILE \"...\"   ask about a text of yours"
	@echo "  $(BIN)/kvferry doctor                     what this machine can run"

test: unit integration

unit: $(STAMP)
	@echo "== unit tests: miniatures, no network =="
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -n $(JOBS)

# Exit code 5 is pytest's word for "no test was selected".
integration: $(STAMP)
	@echo "== integration tests: the real pair, fetched once =="
	$(BIN)/python -m pytest -v -m integration || [ $$? -eq 5 ]

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build src/*.egg-info

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "== creating $(VENV) =="; $(PYTHON) -m venv $(VENV); }
	@echo "== installing pinned versions (about 2.5 GB; once) =="
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[tracking,dev]"
	@touch $@
