# Two commands matter: `make demo` and `make test`. Both work in a fresh clone and install into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Modules are compiled when they are first imported, and kept: most of those that are installed never are.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile
export PYTHONDONTWRITEBYTECODE :=

# The build of torch that `run` installs. Another build: make demo TORCH='torch==2.13.0 --index-url ...'
TORCH ?= torch==2.13.0

DEMO_MODEL ?= examples/llama3-70b.json
DEMO_CLUSTER ?= 8x8xh100-sxm
DEMO_FLAGS ?= --tp 8 --pp 2 --zero 1 --micro-batch 1 --global-batch 512 --seq 8192 --tokens 15e12

# What the demo plans: devices of two kinds, which no even split suits.
PLAN_MODEL ?= llama3-8b
PLAN_CLUSTER ?= 1x8xa100-sxm-80gb+2x8xh100-sxm@400Gb/s
PLAN_FLAGS ?= --global-batch 512 --seq 8192 --tokens 1e12 --budget-s 5

# What the demo trains for real: a small GPT on a mixed lab of four local ranks, speeds 8 : 4 : 2 : 1.
LAB ?= examples/labs/mixed4.toml
JOB ?= examples/jobs/gpt_job.py
JOB_BATCH ?= 128
JOB_SEQ ?= 64
RUN_STEPS ?= 16

# Loops of the planner are compiled once and kept; done here so that the first plan does not pay for it.
COMPILE = $(BIN)/foreshard plan llama3.2-1b 1x4xa100-sxm-80gb+1x4xh100-sxm@400Gb/s --global-batch 64 --seq 2048 > /dev/null

.PHONY: demo picture test lint bench soak check clean

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "foreshard needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	$(PIP) $(TORCH)
	$(PIP) -e '.[plan,run]'
	$(COMPILE)
	touch $@

$(VENV)/.tested: $(VENV)/.made pyproject.toml
	$(PIP) $(TORCH)
	$(PIP) -e '.[test]'
	$(COMPILE)
	touch $@ $(VENV)/.installed

$(VENV)/.dev: $(VENV)/.tested
	$(PIP) -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	mkdir -p demo
	$(BIN)/foreshard predict $(DEMO_MODEL) $(DEMO_CLUSTER) $(DEMO_FLAGS) \
	    --report demo/report.html --trace demo/trace.json.gz -o demo/prediction.json > demo/prediction.txt
	@cat demo/prediction.txt
	$(BIN)/foreshard plan $(PLAN_MODEL) $(PLAN_CLUSTER) $(PLAN_FLAGS) \
	    --report demo/plan.html -o demo/plan.json > demo/plan.txt
	@cat demo/plan.txt
	$(BIN)/foreshard predict $(PLAN_MODEL) $(PLAN_CLUSTER) --plan demo/plan.json --json > demo/plan_prediction.json
	rm -rf demo/run demo/run_even demo/job_profile.json
	$(BIN)/foreshard profile $(JOB) --local 4 --samples 1,2,4,8,16 -o demo/job_profile.json
	$(BIN)/foreshard calibrate --profile demo/job_profile.json --lab $(LAB) -o demo/job_costs.json
	$(BIN)/foreshard plan $(JOB) $(LAB) --costs demo/job_costs.json --global-batch $(JOB_BATCH) --seq $(JOB_SEQ) \
	    --dtype fp32 --budget-s 10 -o demo/job_plan.json > demo/job_plan.txt
	@cat demo/job_plan.txt
	$(BIN)/foreshard predict $(JOB) $(LAB) --costs demo/job_costs.json --plan demo/job_plan.json --json \
	    > demo/job_prediction.json
	$(BIN)/foreshard run $(JOB) --plan demo/job_plan.json --local 4 --lab $(LAB) --steps $(RUN_STEPS) --out demo/run
	$(BIN)/python scripts/even_split.py demo/job_plan.json 4 > demo/even_plan.json
	$(BIN)/foreshard run $(JOB) --plan demo/even_plan.json --local 4 --lab $(LAB) --steps $(RUN_STEPS) --out demo/run_even
	@$(BIN)/python scripts/demo_summary.py demo $(JOB)

# Several tests run at a time: with a thread for each core in all of them they would wait for each other. Ranks of
# tests/distributed wait for what they are tested with: one more at a time fills two cores.
test: export OMP_NUM_THREADS ?= 1
test: $(VENV)/.tested
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --doctest-modules --ignore tests/distributed tests src/foreshard
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/distributed

# ruff check, ruff format --check, mypy and the architecture tests; scripts/check runs the unit tests too.
lint: $(VENV)/.dev
	BIN=$(BIN) scripts/check --static

# The picture of the README, drawn from a plan that is made here and from those of other planners.
PICTURE_CLUSTER ?= 1x8xh100-sxm+1x8xa100-sxm-40gb@400Gb/s
picture: $(VENV)/.installed
	mkdir -p demo
	$(BIN)/foreshard plan llama3-8b $(PICTURE_CLUSTER) --global-batch 512 --seq 4096 --budget-s 30 --compare-with all \
	    -o demo/picture_plan.json --json > demo/picture.json
	$(BIN)/python scripts/readme_picture.py demo/picture.json demo/picture_plan.json $(PICTURE_CLUSTER) docs/plan.svg

# Benches, and their tables in the documents: those that have not run on this state of the code, or `make bench
# BENCH="search planner-rules"`. Interrupted, it goes on where it stopped. Their names: scripts/doc_tables.py --list.
bench: $(VENV)/.tested
	$(BIN)/python scripts/doc_tables.py $(BENCH)

# The tests that `make test` leaves out since they are slow. Then ten minutes of seeded faults on four local ranks: no
# sample lost or trained twice, parameters as if in peace. Then small clusters at random: no plan made by hand beats
# the planner's by a percent, or its bound.
SOAK_FLAGS ?= --minutes 10 --faults 200 --seed 0
SOAK_PLANS_FLAGS ?= --cases 2000 --seed 0
soak: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m slow tests
	rm -rf soak
	$(BIN)/python scripts/soak.py --out soak $(SOAK_FLAGS)
	$(BIN)/python scripts/soak_plans.py $(SOAK_PLANS_FLAGS)
	$(BIN)/python scripts/soak_controller.py $(SOAK_SCENARIOS_FLAGS)

# Refit every shipped constant from the measured tables (FORESHARD_MEASURED) and fail where one has moved by more
# than its script says: 1e-6 relative (kernels), 1e-4 (collectives), a thousandth of its range (training), 1e-3 (residuals).
REFITS := fit_kernels fit_comm fit_training accuracy
check: $(VENV)/.tested
	@for name in $(REFITS); do echo "== $$name --check"; $(BIN)/python "scripts/$$name.py" --check || exit 1; done

clean:
	rm -rf $(VENV) demo build dist
