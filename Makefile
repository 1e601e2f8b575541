# Each target needs python3 only: it makes .venv if it is missing, or older than pyproject.toml or constraints.txt.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# Without compiled modules each of hundreds of processes would compile torch again: seconds of work for each.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo demo-check test quick timing matrix frameworks nvrx flyte2 ray progress progress-torchrun progress-flyte2 progress-ray agent-faults harmless cascades consoles small-print hangs generated replay simulated simulation scale bench bench-restart soak fuzz golden pages pictures lint format types docs proto proto-check floors newest gpu pythons sizes walk wheel process chaos clean

BIN := .venv/bin
VENV := .venv/.made-for

$(VENV): pyproject.toml constraints.txt
	@tools/make_venv.sh

# Scripts in a copied or moved .venv still point to the old folder, so it is made again.
ifneq ($(shell cat $(VENV) 2>/dev/null),$(CURDIR))
.PHONY: $(VENV)
endif

help: ## list all targets
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1\t\2/p' Makefile | expand -t 14

demo: $(VENV) ## train on 2 nodes, fail on rank 3, explain the failure, retry and succeed
	@tools/demo.sh

demo-check: demo ## run the demo, check what it left, and run the demo without Flyte
	@$(BIN)/python tools/check_demo.py
	@tools/demo.sh plain

test: $(VENV) wheel ## build the wheel and run all tests on it (ARGS="-k name" goes to pytest)
	@tools/test_wheel.sh dist/*.whl $(ARGS)

quick: $(VENV) ## test the sources without waiting for other processes (ARGS="-m jobs" runs trainings)
	@$(BIN)/pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=5 -m 'not slow' $(ARGS)

timing: $(VENV) ## run the tests that measure speed, on an idle machine
	@$(BIN)/pytest -m timing $(ARGS)

matrix: $(VENV) ## run all 24 combinations of raised exceptions and print their times
	@FIRSTFAULT_MATRIX=all $(BIN)/pytest tests/plugin/test_matrix.py $(ARGS)

process: $(VENV) ## compare workers with torch's own, in trainings that change their process and on restricted machines
	@FIRSTFAULT_PROCESS=all $(BIN)/pytest tests/torch_agent/test_own_process.py tests/torch_agent/test_hostile_processes.py $(ARGS)

frameworks: $(VENV) ## run faults under Lightning, transformers, Accelerate and Hydra (25 minutes)
	@tools/quietly.sh "installing the frameworks" tools/make_frameworks_venv.sh
	@FIRSTFAULT_FRAMEWORKS=all build/frameworks-venv/bin/pytest tests/lab/test_frameworks.py tests/lab/test_framework_launchers.py tests/lab/test_framework_scripts.py $(ARGS)

nvrx: $(VENV) ## test the adapter for the real nvidia-resiliency-ext in a separate environment
	@tools/quietly.sh "installing NVIDIA's nvidia-resiliency-ext" tools/make_nvrx_venv.sh
	@build/nvrx-venv/bin/python -m pytest -q -W ignore tests/plugin/test_nvrx.py $(ARGS)

flyte2: $(VENV) ## test clustered and Elastic tasks of Flyte 2 with its real entrypoint in a separate environment
	@tools/quietly.sh "installing Flyte 2" tools/make_side_venv.sh flyte2 flyte==2.12.1 flyteplugins-pytorch==2.12.1
	@build/flyte2-venv/bin/python -m pytest -q -n 2 -W ignore tests/flyte2 $(ARGS)

ray: $(VENV) ## test the callback for Ray Train on a real cluster of Ray in a separate environment
	@tools/quietly.sh "installing Ray" tools/make_side_venv.sh ray "ray[train]==2.60.0"
	@build/ray-venv/bin/python -m pytest -q -W ignore tests/ray_train $(ARGS)

progress: $(VENV) ## repeat a fault after 10 minutes of training under torchrun, Flyte 2 and Ray: all continue (15 minutes)
	@tools/quietly.sh "installing Flyte 2" tools/make_side_venv.sh flyte2 flyte==2.12.1 flyteplugins-pytorch==2.12.1
	@tools/quietly.sh "installing Ray" tools/make_side_venv.sh ray "ray[train]==2.60.0"
	@FIRSTFAULT_LONG=1 $(MAKE) --no-print-directory --jobs 3 --output-sync progress-torchrun progress-flyte2 progress-ray

progress-torchrun:
	@$(BIN)/pytest -q tests/torchrun/test_exit_codes.py -k after_progress

progress-flyte2:
	@build/flyte2-venv/bin/python -m pytest -q -W ignore tests/flyte2 -k after_progress

progress-ray:
	@build/ray-venv/bin/python -m pytest -q -W ignore tests/ray_train -k after_progress

agent-faults: $(VENV) ## repeat faults that CI runs once (sleeping peers, slow finally, signals) and print medians
	@FIRSTFAULT_REPEAT=5 $(BIN)/pytest tests/torch_agent/test_faults_of_nodes.py -s $(ARGS)

harmless: $(VENV) ## run jobs with and without firstfault, and print what differs (ARGS="--pairs 20 --first 50" for others)
	@$(BIN)/python lab/harmless/campaign.py $(ARGS)

chaos: $(VENV) ## kill each process at each step of a failure, break the storage, and print which promises held
	@$(BIN)/python lab/chaos/chaos.py $(ARGS)

cascades: $(VENV) ## record missing cascades (ARGS="hang" selects names by prefix)
	@$(BIN)/python lab/cascades/record.py $(ARGS)

hangs: $(VENV) ## stall trainings of 2 and 4 nodes in 49 ways and score the reports (ARGS="4 loader" selects some)
	@$(BIN)/python lab/stalls/stall_lab.py $(ARGS)

small-print: $(VENV) ## flag lines of reports on recorded console logs that the logs don't prove (ARGS="FOLDER" for others)
	@$(BIN)/python lab/consoles/small_print.py $(ARGS)

consoles: $(VENV) ## record and score console logs of jobs without firstfault, as root (ARGS="srun" selects some)
	@tools/quietly.sh "starting Slurm, if it is installed" tools/start_slurm.sh
	@tools/quietly.sh "installing DeepSpeed and Ray" tools/make_consoles_venv.sh
	@$(BIN)/python lab/consoles/record.py $(ARGS)
	@$(BIN)/python lab/consoles/variants.py

generated: $(VENV) ## run 100 random trainings and judge each verdict (ARGS="--seeds 400" for more, ARGS="17" for one)
	@$(BIN)/python lab/generated/campaign.py $(ARGS)

scale: $(VENV) ## fail and stall jobs of many simulated nodes, and count requests and seconds (ARGS="--nodes 1024")
	@$(BIN)/python lab/benchmarks/scale.py $(ARGS)
	@$(BIN)/python lab/stalls/scale.py

simulation: $(VENV) ## score the strategies on 2,000 simulated cascades of 1,024 workers (ARGS="--cascades 100" for fewer)
	@$(BIN)/python lab/cascades/simulation.py $(ARGS)

replay: $(VENV) ## score the strategies and their confidence on recorded cascades (ARGS=-v explains misses)
	@$(BIN)/python lab/cascades/replay.py --simulated 100 $(ARGS)

bench: $(VENV) ## measure reading, raising, failing and succeeding in about an hour (ARGS="read" for a part)
	@$(BIN)/python lab/benchmarks/bench.py $(ARGS)

bench-restart: $(VENV) ## compare restarts with NVIDIA's Wrapper in fifteen minutes (ARGS="--runs 1" for fewer)
	@tools/quietly.sh "installing NVIDIA's nvidia-resiliency-ext" tools/make_nvrx_venv.sh
	@build/nvrx-venv/bin/python -W ignore lab/benchmarks/restarting.py $(ARGS)

soak: $(VENV) ## run 200 attempts with random faults and check for leaks (ARGS="--attempts 20 --seed 3" for fewer)
	@$(BIN)/python lab/benchmarks/soak.py $(ARGS)

fuzz: $(VENV) ## search for input that makes a reader raise, for one minute (ARGS="--seconds 300 --target reader")
	@$(BIN)/python -c "import atheris" 2>/dev/null || tools/quietly.sh "installing atheris" $(BIN)/pip install atheris
	@$(BIN)/python tools/fuzz.py $(ARGS)

golden: $(VENV) ## rewrite the expected reports and print a summary of the changes
	@FIRSTFAULT_GOLDEN=write $(BIN)/pytest -q tests/reports/test_golden.py
	@git diff --stat tests/reports/golden

pictures: $(VENV) ## create README's pictures from a real failing job
	@$(BIN)/python tools/pictures.py $(ARGS)

docs: ## build the documentation site in build/docs and fail on warnings, without .venv
	@tools/quietly.sh "installing what builds the documentation" tools/make_docs_venv.sh
	@rm -rf build/docs
	@build/docs-venv/bin/sphinx-build -q -W --keep-going -E -b html -d build/docs-cache docs build/docs

pages: $(VENV) ## run the commands of README and docs/start as pasted, in bare environments (ARGS="README.md" for one)
	@$(BIN)/python -m tools.pages.run $(ARGS)

simulated: $(VENV) ## play failures of simulated jobs, and count what they violate (ARGS="--seeds 0 100000")
	@$(BIN)/python -m lab.simulated_jobs $(ARGS)

lint: $(VENV) ## check style, format and import contracts
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports

format: $(VENV) ## format all files
	@$(BIN)/ruff format

types: $(VENV) ## check types
	@$(BIN)/mypy

proto: ## generate the protobuf code from the .proto file
	@tools/generate_proto.sh

proto-check: ## fail if the checked-in protobuf code doesn't match the .proto file
	@tools/quietly.sh "generating the protobuf code and comparing it" tools/check_generated.sh

floors: $(VENV) ## test with the oldest supported dependencies (ARGS=2.3.1 adds that torch, 5 GB)
	@tools/quietly.sh "testing with the oldest dependencies" tools/test_floors.sh $(ARGS)

newest: $(VENV) ## download and test the newest torch, flytekit and kfpytorch, several GB (ARGS=2.14.1 for that torch)
	@tools/test_newest.sh $(ARGS)

gpu: $(VENV) ## run faults of two ranks on a real GPU with both NCCL backends in ten minutes
	@tools/test_gpu.sh $(ARGS)

pythons: ## run the quick tests and one job on Python 3.10, 3.12 and 3.13 (ARGS="3.13" for one)
	@tools/test_pythons.sh $(ARGS)

sizes: $(VENV) ## print sizes of the product and the tests: lines, modules, functions, parameters
	@$(BIN)/python tools/sizes.py

walk: $(VENV) ## list the modules that a failure passes, from `raise` to the error in Flyte
	@$(BIN)/python tools/walk.py

wheel: ## build the source distribution and the wheel in dist/, without .venv
	@tools/quietly.sh "building dist/" tools/build_dist.sh

clean: ## remove all generated files, including .venv
	@rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find plugin readers proto tests lab examples tools -name __pycache__ -prune -exec rm -rf {} +
