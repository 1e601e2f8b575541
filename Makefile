# Every target makes .venv when it is missing or older than what it is made from, and needs nothing else but python3.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test matrix agent-faults cascades replay simulation bench golden pictures lint format types proto proto-check floors wheel test-wheel clean

BIN := .venv/bin
VENV := .venv/.made-for

$(VENV): pyproject.toml constraints.txt
	@tools/make_venv.sh

# A folder that was copied or moved brings a .venv that leads back to the old place.
ifneq ($(shell cat $(VENV) 2>/dev/null),$(CURDIR))
.PHONY: $(VENV)
endif

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1\t\2/p' Makefile | expand -t 14

demo: $(VENV) ## train on 2 nodes, lose a rank, read why, retry, succeed
	$(BIN)/firstfault run examples/recoverable.py train --nodes 2 --store build/demo

test: $(VENV) ## run all tests; ARGS="-k name" is passed to pytest
	@$(BIN)/pytest $(ARGS)

matrix: $(VENV) ## run all 24 combinations of raises; print what they took
	@FIRSTFAULT_MATRIX=all $(BIN)/pytest tests/plugin/test_matrix.py $(ARGS)

agent-faults: $(VENV) ## repeat what CI runs once: peers that sleep, slow finally, signals; print medians
	@FIRSTFAULT_REPEAT=5 $(BIN)/pytest tests/plugin/test_agent_faults.py -s $(ARGS)

cascades: $(VENV) ## record what the lab's faults leave behind; ARGS="hang" for those that begin so
	@$(BIN)/python tests/cascades/record.py $(ARGS)

simulation: $(VENV) ## judge the strategies on 2,000 simulated cascades of 1,024 workers; ARGS="--cascades 100" for fewer
	@$(BIN)/python tests/cascades/simulation.py $(ARGS)

replay: $(VENV) ## judge the strategies on the recorded cascades; ARGS=-v shows what is not right
	@$(BIN)/python tests/cascades/replay.py $(ARGS)

bench: $(VENV) ## measure reading, raising, failing and succeeding beside others; ARGS="read" for a part; forty minutes in all
	@$(BIN)/python tests/benchmarks/bench.py $(ARGS)

golden: $(VENV) ## write the texts anew that tests compare reports with; read the difference
	@FIRSTFAULT_GOLDEN=write $(BIN)/pytest -q tests/reports/test_golden.py
	@git diff --stat tests/reports/golden

pictures: $(VENV) ## make README's pictures from a real failing job
	@$(BIN)/python tools/pictures.py $(ARGS)

lint: $(VENV) ## check style and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports

format: $(VENV) ## put every file into the format that lint checks
	@$(BIN)/ruff format

types: $(VENV) ## check types
	@$(BIN)/mypy

proto: ## generate the protobuf code from its .proto file
	@tools/generate_proto.sh

proto-check: ## fail if the checked-in protobuf code is not what its .proto file generates
	@tools/quietly.sh "generating the protobuf code and comparing it" tools/check_generated.sh

floors: $(VENV) ## test the library with the oldest dependencies it admits
	@tools/quietly.sh "testing with the oldest dependencies" tools/test_floors.sh

wheel: $(VENV) ## build the source distribution, and the wheel from it, into dist/
	@rm -rf dist
	@tools/quietly.sh "building dist/" $(BIN)/python -m build --no-isolation

test-wheel: wheel ## install the wheel out of reach of the sources, and test it there
	@tools/test_wheel.sh dist/*.whl

clean: ## remove everything that was made, .venv included
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find plugin readers proto tests examples tools -name __pycache__ -prune -exec rm -rf {} +
