# Every target sets up what it needs: on a fresh machine with Python and make, `make demo` and `make test` just run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/python $(INSTALL)

.PHONY: demo test lint format recipes wheels bench paper docs clean

demo: $(VENV)/.ready-demo
	$(BIN)/python -m ssla.demo

test: lint $(VENV)/.ready-peers
	$(BIN)/python -m pytest -n auto --dist worksteal -rs

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the recipes of docs/recipes.md, in an environment of their own; a missing library fails there
RECIPES := .venv-recipes
RECIPE_PACKAGES := '.[metrics,recipes,sklearn]' pandas pytest
recipes: $(RECIPES)/.ready
	SSLA_RECIPES=1 $(RECIPES)/bin/python -m pytest tests/test_recipes.py

# `make wheels WHEELS=DIR` fills a folder, `make recipes WHEELS=DIR` installs from it alone
WHEELS ?=
RECIPE_PIP = $(RECIPES)/bin/python $(INSTALL) $(if $(WHEELS),--no-index --find-links '$(WHEELS)')
DOWNLOAD = $(PYTHON) -m pip download --quiet -c constraints.txt --dest '$(WHEELS)'
wheels:
	$(if $(WHEELS),,$(error give WHEELS=DIR))
	$(DOWNLOAD) torch==2.13.0 $(RECIPE_PACKAGES) hatchling editables
	$(DOWNLOAD) --no-deps skpro scikit-base

bench: $(VENV)/.ready-peers
	$(BIN)/python -m pytest -q -p no:cacheprovider benchmarks/accuracy/test_agreement.py
	$(BIN)/python benchmarks/speed/predict_speed.py
	$(BIN)/python benchmarks/speed/curvature_speed.py --quick
	$(BIN)/python benchmarks/speed/growth.py --quick
	$(BIN)/python benchmarks/speed/prior_speed.py
	$(BIN)/python benchmarks/speed/refit_speed.py --rounds 1 --one-by-one 50

# The pages of the paper from the shipped records: the same bytes, in a minute after the set-up.
# `make paper FRESH=1` computes everything, writes the records and then the pages; that takes hours
# (`python -m ssla_paper --list`), and a killed run continues where it stopped.
FRESH ?=
paper: $(VENV)/.ready-$(if $(FRESH),peers,paper)
	$(if $(FRESH),$(BIN)/python -m ssla_paper --all --ship)
	$(BIN)/python -m ssla_paper --report --page docs/paper.md

# the site in build/site: executed examples, warnings as errors, nothing from a network
docs: $(VENV)/.ready-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -E -b html -d build/doctrees docs build/site
	$(BIN)/python tools/check_site.py build/site

clean:
	rm -rf $(VENV) $(RECIPES) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist docs/examples docs/messages.md

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first, in exactly the pinned version, so that nothing else chooses one
$(VENV)/.ready-torch: constraints.txt | $(VENV)/bin/python
	$(PIP) torch==2.13.0
	@touch $@

$(VENV)/.ready-%: pyproject.toml constraints.txt $(VENV)/.ready-torch
	$(PIP) -e '.[$*]'
	@touch $@

$(VENV)/.ready-paper: reproduction/pyproject.toml $(VENV)/.ready-dev
	$(PIP) -e ./reproduction
	@touch $@

# laplace-torch and what it imports declare torchvision, which breaks here and which none of them needs: hence --no-deps
$(VENV)/.ready-peers: $(VENV)/.ready-paper benchmarks/requirements-peers.txt benchmarks/requirements-peers-nodeps.txt
	$(PIP) -r benchmarks/requirements-peers.txt
	$(PIP) --no-deps -r benchmarks/requirements-peers-nodeps.txt
	@touch $@

# what benchmarks/tables/tables.py and trees.py compare with
$(VENV)/.ready-tables: $(VENV)/.ready-peers benchmarks/requirements-tables.txt
	$(PIP) -r benchmarks/requirements-tables.txt
	@touch $@

# skpro declares an older pandas than ours and works with ours: hence --no-deps
$(RECIPES)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RECIPES)
	$(RECIPE_PIP) torch==2.13.0
	$(RECIPE_PIP) -e $(RECIPE_PACKAGES)
	$(RECIPE_PIP) --no-deps skpro scikit-base
	@touch $@
