# Each target needs python3 only: it makes .venv if it is missing, or older than pyproject.toml or constraints.txt.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# Without compiled modules each of hundreds of processes would compile torch again: seconds of work for each.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test quick timing matrix frameworks nvrx agent-faults cascades consoles hangs generated replay simulation scale bench bench-restart soak fuzz golden pictures lint format types proto proto-check floors newest gpu pythons sizes walk wheel process chaos clean

BIN := .venv/bin
VENV := .venv/.made-for

$(VENV): pyproject.toml constraints.txt
	@tools/make_venv.sh

# Scripts in a copied or moved .venv still point to the old folder, so it is made again.
ifneq ($(shell cat $(VENV) 2>/dev/null),$(CURDIR))
.PHONY: $(VENV)
endif

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1\t\2/p' Makefile | expand -t 14

demo: $(VENV) ## train on 2 nodes, fail on rank 3, explain the failure, retry, succeed
	@tools/demo.sh

test: wheel ## build the wheel and run all tests on it; ARGS="-k name" is passed to pytest
	@tools/test_wheel.sh dist/*.whl $(ARGS)

quick: $(VENV) ## run the tests that wait for no other process on the sources; ARGS="-m jobs" for trainings
	@$(BIN)/pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=5 -m 'not slow' $(ARGS)

timing: $(VENV) ## run the tests that measure speed, one by one; they need a machine that does nothing else
	@$(BIN)/pytest -m timing $(ARGS)

matrix: $(VENV) ## run all 24 combinations of raises; print how long they took
	@FIRSTFAULT_MATRIX=all $(BIN)/pytest tests/plugin/test_matrix.py $(ARGS)

process: $(VENV) ## run trainings that change their own process, on machines that refuse much; compare all that differs
	@FIRSTFAULT_PROCESS=all $(BIN)/pytest tests/torch_agent/test_own_process.py tests/torch_agent/test_hostile_processes.py $(ARGS)

frameworks: $(VENV) ## run faults under Lightning, transformers, Accelerate and Hydra, in an environment of its own
	@tools/quietly.sh "installing the frameworks" tools/make_frameworks_venv.sh
	@FIRSTFAULT_FRAMEWORKS=all build/frameworks-venv/bin/pytest tests/lab/test_frameworks.py tests/lab/test_framework_launchers.py tests/lab/test_framework_scripts.py $(ARGS)

nvrx: $(VENV) ## test the adapter for NVIDIA's nvidia-resiliency-ext with the real package, in an environment of its own
	@tools/quietly.sh "installing NVIDIA's nvidia-resiliency-ext" tools/make_nvrx_venv.sh
	@build/nvrx-venv/bin/python -m pytest -q -W ignore tests/plugin/test_nvrx.py $(ARGS)

agent-faults: $(VENV) ## repeat faults that CI runs once (sleeping peers, slow finally, signals); print medians
	@FIRSTFAULT_REPEAT=5 $(BIN)/pytest tests/torch_agent/test_faults_of_nodes.py -s $(ARGS)

chaos: $(VENV) ## kill each process at each step of a failure, break the storage; print faults x promises
	@$(BIN)/python lab/chaos/chaos.py $(ARGS)

cascades: $(VENV) ## record the lab's missing cascades; ARGS="hang" for those whose names start with it
	@$(BIN)/python lab/cascades/record.py $(ARGS)

hangs: $(VENV) ## stall trainings of 2 and 4 nodes in 49 ways, score what the agents tell; ARGS="4 loader" for some
	@$(BIN)/python lab/stalls/stall_lab.py $(ARGS)

consoles: $(VENV) ## record missing console logs of jobs without firstfault, score all; ARGS="srun" for some; needs root
	@tools/quietly.sh "starting Slurm, if it is installed" tools/start_slurm.sh
	@tools/quietly.sh "installing DeepSpeed and Ray" tools/make_consoles_venv.sh
	@$(BIN)/python lab/consoles/record.py $(ARGS)

generated: $(VENV) ## run 100 trainings composed at random, judge each verdict; ARGS="--seeds 400", ARGS="17" for one
	@$(BIN)/python lab/generated/campaign.py $(ARGS)

scale: $(VENV) ## fail and stall jobs of many simulated nodes; count their requests and seconds; ARGS="--nodes 1024"
	@$(BIN)/python lab/benchmarks/scale.py $(ARGS)
	@$(BIN)/python lab/stalls/scale.py

simulation: $(VENV) ## judge the strategies on 2,000 simulated cascades of 1,024 workers; ARGS="--cascades 100" for fewer
	@$(BIN)/python lab/cascades/simulation.py $(ARGS)

replay: $(VENV) ## judge the strategies on the recorded cascades, and count what a confidence is worth; ARGS=-v explains
	@$(BIN)/python lab/cascades/replay.py --simulated 100 $(ARGS)

bench: $(VENV) ## measure reading, raising, failing, succeeding (forty minutes); ARGS="read" for a part
	@$(BIN)/python lab/benchmarks/bench.py $(ARGS)

bench-restart: $(VENV) ## restart after faults, side by side with NVIDIA's Wrapper (fifteen minutes); ARGS="--runs 1" for fewer
	@tools/quietly.sh "installing NVIDIA's nvidia-resiliency-ext" tools/make_nvrx_venv.sh
	@build/nvrx-venv/bin/python -W ignore lab/benchmarks/restarting.py $(ARGS)

soak: $(VENV) ## run 200 attempts with random faults; name what they leave, and what grows; ARGS="--attempts 20 --seed 3"
	@$(BIN)/python lab/benchmarks/soak.py $(ARGS)

fuzz: $(VENV) ## look for bytes that make a reader raise, four times fifteen seconds; ARGS="--seconds 300 --target reader"
	@$(BIN)/python -c "import atheris" 2>/dev/null || tools/quietly.sh "installing atheris" $(BIN)/pip install atheris
	@$(BIN)/python tools/fuzz.py $(ARGS)

golden: $(VENV) ## rewrite the texts with which tests compare reports; read the difference
	@FIRSTFAULT_GOLDEN=write $(BIN)/pytest -q tests/reports/test_golden.py
	@git diff --stat tests/reports/golden

pictures: $(VENV) ## make README's pictures from a real failing job
	@$(BIN)/python tools/pictures.py $(ARGS)

lint: $(VENV) ## check style, format and import contracts
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports

format: $(VENV) ## format every file
	@$(BIN)/ruff format

types: $(VENV) ## check types
	@$(BIN)/mypy

proto: ## generate the protobuf code from its .proto file
	@tools/generate_proto.sh

proto-check: ## fail if the checked-in protobuf code is not what its .proto file generates
	@tools/quietly.sh "generating the protobuf code and comparing it" tools/check_generated.sh

floors: $(VENV) ## test with the oldest supported dependencies; ARGS=2.3.1 also with that torch (5 GB)
	@tools/quietly.sh "testing with the oldest dependencies" tools/test_floors.sh $(ARGS)

newest: $(VENV) ## test with the newest torch, flytekit and kfpytorch (several GB of CUDA packages); ARGS=2.14.1 for that torch
	@tools/test_newest.sh $(ARGS)

gpu: $(VENV) ## run faults of two ranks on a real GPU with both of torch's NCCL backends; print a table; ten minutes
	@tools/test_gpu.sh $(ARGS)

pythons: ## run the quick tests and one job on Python 3.10, 3.12 and 3.13, if they are found; ARGS="3.13" for one
	@tools/test_pythons.sh $(ARGS)

sizes: $(VENV) ## print how large the product and the tests are: lines, modules, functions, parameters
	@$(BIN)/python tools/sizes.py

walk: $(VENV) ## list the modules that a failure passes from `raise` to the error that Flyte shows
	@$(BIN)/python tools/walk.py

wheel: $(VENV) ## build the source distribution and the wheel into dist/
	@rm -rf dist
	@tools/quietly.sh "building dist/" $(BIN)/python -m build --no-isolation

clean: ## remove everything that was made, .venv included
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find plugin readers proto tests lab examples tools -name __pycache__ -prune -exec rm -rf {} +
