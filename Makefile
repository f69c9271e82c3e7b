# make demo, make test and make check set up what they need, once, in .venv.

PYTHON := .venv/bin/python
# Ranks and Spark wait more than they compute: four processes of tests keep two cores busy.
PROCESSES := 4
PYTEST := pytest -n $(PROCESSES)
READY := .venv/ready
# Spark's classes, which the JVMs of the tests then need not parse: they start on half of the CPU time.
CLASSES := .venv/spark.jsa
# A thousand processes start in the tests: none of them should compile lagom anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test soak check clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    train examples/scalar_field.py on Spark local[2]"
	@echo "make test    run the tests"
	@echo "make soak    run the tests that make test leaves out, for an hour or more, and say how long they took"
	@echo "make check   ruff, mypy and the tests, as CI does"
	@echo "make setup   only set up .venv, and Java where there is none"
	@echo "make clean   remove .venv and everything built"

setup: $(READY)

$(READY): .ci/setup pyproject.toml constraints.txt $(wildcard csrc/*)
	@.ci/setup
	@touch $@

demo: $(READY)
	@$(PYTHON) examples/scalar_field.py

$(CLASSES): $(READY)
	@echo "setup: Spark's classes into $@"
	@$(PYTHON) -m tests.integration.clusters > /dev/null 2>&1 || echo "setup: no $@; Spark starts more slowly in the tests"

test: $(READY) $(CLASSES)
	@$(PYTHON) -m $(PYTEST)

# Limits in seconds hold on a machine that does nothing else, so they come last and alone.
soak: $(READY) $(CLASSES)
	@start=$$(date +%s); failed=0; \
	$(PYTHON) -m $(PYTEST) -m "soak and not latency" || failed=1; \
	$(PYTHON) -m pytest -m latency || failed=1; \
	echo "make soak took $$((($$(date +%s) - start) / 60)) minutes"; \
	exit $$failed

check: $(READY) $(CLASSES)
	@failed=; \
	for step in "ruff check" "ruff format --check" "mypy" "$(PYTEST)"; do \
		echo "== $$step"; \
		$(PYTHON) -m $$step || failed="$$failed, $$step"; \
	done; \
	[ -z "$$failed" ] || { echo "failed: $${failed#, }" >&2; exit 1; }

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
