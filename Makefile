# make demo, make test, make check and others set up what they need, once, in .venv.

PYTHON := .venv/bin/python
# Ranks and Spark wait much: with four processes of tests two cores were idle for a third of the time, with six for a tenth.
PROCESSES := 6
PYTEST := .ci/tests -n $(PROCESSES)
READY := .venv/ready
# Spark's classes, which the JVMs of the demo and the tests then need not parse: they start on half of the CPU time.
CLASSES := .venv/spark.jsa
# A thousand processes start in the tests: none of them should compile lagom anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test soak lint types check docs wheels dist matrix clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    one function in one process and on 2 ranks of Spark local[2], in a table"
	@echo "make test    run the tests"
	@echo "make soak    run the tests that make test leaves out, for an hour or more, and say how long they took"
	@echo "make check   ruff, mypy and the tests, as CI does"
	@echo "make docs    build the site of docs/ into build/site, strictly: no dead link, no warning"
	@echo "make dist    build and check an sdist and wheels in dist/; PYTHONS=\"python3.11 python3.13\" builds for each"
	@echo "make wheels  only build, into build/wheels and for the Python of .venv, as CI does"
	@echo "make matrix  run the tests on each tried combination of Python, torch and pyspark; PYTHON_COLUMNS=3.12 on one"
	@echo "make setup   only set up .venv, and Java where there is none"
	@echo "make clean   remove .venv and everything built"

setup: $(READY)

$(READY): .ci/setup pyproject.toml constraints.txt $(wildcard csrc/* tests/accelerator/csrc/*)
	@.ci/setup
	@touch $@

demo: $(READY) $(CLASSES)
	@$(PYTHON) -m examples.demo --picture build/demo.svg

$(CLASSES): $(READY)
	@echo "setup: Spark's classes into $@"
	@$(PYTHON) -m tests.integration.clusters > /dev/null 2>&1 || echo "setup: no $@; Spark starts more slowly"

test: $(READY) $(CLASSES)
	@$(PYTEST)

# Limits in seconds hold on a machine that does nothing else, so they come last and alone.
soak: $(READY) $(CLASSES)
	@start=$$(date +%s); failed=0; \
	$(PYTEST) -m "soak and not latency" || failed=1; \
	$(PYTHON) -m pytest -m latency || failed=1; \
	echo "make soak took $$((($$(date +%s) - start) / 60)) minutes"; \
	exit $$failed

lint: $(READY)
	@echo "== ruff"
	@$(PYTHON) -m ruff check; failed=$$?; $(PYTHON) -m ruff format --check && exit $$failed

types: $(READY)
	@echo "== mypy"
	@$(PYTHON) -m mypy

check: $(READY) $(CLASSES)
	@$(MAKE) --keep-going --no-print-directory lint types test

DOCS := build/docs-tools

$(DOCS)/ready: docs/requirements.txt $(READY)
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	@touch $@

docs: $(DOCS)/ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs --quiet build
	@! grep -rl --include='*.html' '``' build/site || { echo "docs: these pages have a block that is not shown as one"; exit 1; }
	@echo "docs: build/site/index.html"

PYTHONS := $(PYTHON)

wheels: $(READY)
	@OUT=build/wheels .ci/dist

dist: $(READY)
	@PYTHONS="$(PYTHONS)" .ci/dist
	@LAGOM_DIST=dist $(PYTHON) -m pytest -m soak tests/test_dist.py

PYTHON_COLUMNS :=

matrix: $(READY)
	@$(PYTHON) -m tests.matrix $(PYTHON_COLUMNS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
