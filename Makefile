# `make demo` and `make test` need only Python >= 3.11; everything else they fetch into .venv themselves.
PYTHON ?= python3
BIN := .venv/bin
.PHONY: setup setup-test demo dist docs pictures test test-full check format clean

setup: .venv/.for-use
setup-test: .venv/.for-test

.venv/.for-use: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/.for-test: .venv/.for-use
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

demo: setup
	$(BIN)/adclr demo --out runs/demo

docs: setup-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

pictures: setup-test
	$(BIN)/python docs/pictures.py

check: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# a process for each core; the tests of a file stay together, since they share what is costly to make
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

test: check
	$(BIN)/pytest $(PARALLEL)

test-full: check
	$(BIN)/pytest $(PARALLEL) -m "not gpu"

dist: setup-test
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv dist/.env && dist/.env/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	dist/.env/bin/adclr --version && rm -rf dist/.env
	ls dist

format: setup-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache dist build
