# SPDX-License-Identifier: Apache-2.0
# make demo   from a bare machine: build the fork's wheel, install it, show its patches, and
#             rehearse a load on a 16 GB card: stock, fork, and without sleep mode
# make test   lint and all tests, against the installed fork
# make faults all injected faults on the simulated card
# make wheel  only the wheel, in dist/
# make lint   ruff and mypy on our files, and upstream's checks on what the graft changes
# make docs   the documentation as a site, in build/site

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The stamps live in the environment that they speak of, so `rm -rf .venv` starts anew.
TOOLS := $(VENV)/tools.stamp
WHEEL := $(VENV)/wheel.stamp
DEPENDENCIES := $(VENV)/dependencies.stamp
INSTALLED := $(VENV)/installed.stamp

WHEEL_INPUTS := CMakeLists.txt pyproject.toml $(shell find csrc series tools/series vllm \
	-type f -not -path '*/__pycache__/*')

# CMake and Ninja come from pip, into the environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test faults wheel lint docs clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/python -m tools.series installed
	mkdir -p build
	$(BIN)/python -m tools.rehearsal nemotron-3-nano-30b-nvfp4 --card rtx-5070-ti \
		--tensor-parallel-size 2 --compare stock,fork,no-sleep --plot build/rehearsal.png

test: lint $(INSTALLED)
	$(BIN)/python -m pytest tests

# Every driver call of load, sleep and wake failing in turn; `make test` takes a sample.
faults: $(INSTALLED)
	$(BIN)/python -m pytest tests/rehearsal -m exhaustive

wheel: $(WHEEL)

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.series lint

docs: $(TOOLS)
	$(BIN)/python -m mkdocs build --quiet --strict
	@echo build/site/index.html

$(TOOLS): $(wildcard requirements/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements/test.txt
	touch $@

$(WHEEL): $(TOOLS) $(WHEEL_INPUTS)
	rm -f dist/vllm-*.whl
	$(BIN)/python -m tools.series wheel --out dist
	touch $@

# The first installation brings torch and the rest; later ones replace only our wheel.
# pip takes a wheel of the same version for installed, hence --force-reinstall and the
# uninstall before a new base's dependencies.
$(INSTALLED): $(WHEEL) tools/series/bases.toml
	if [ $(DEPENDENCIES) -nt tools/series/bases.toml ]; then \
		$(BIN)/python -m pip install --quiet --no-deps --force-reinstall dist/vllm-*.whl; \
	else \
		$(BIN)/python -m pip uninstall --quiet --yes vllm; \
		$(BIN)/python -m pip install --quiet dist/vllm-*.whl && touch $(DEPENDENCIES); \
	fi
	$(BIN)/python -m pip check
	touch $@

clean:
	rm -rf $(VENV) build dist
