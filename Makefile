# Two commands matter: `make demo` and `make test`. Both work in a fresh clone and install into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# The build of torch that `run` will install; not needed yet. Another build: make demo TORCH='torch==2.13.0+cpu ...'
TORCH ?= torch==2.13.0

DEMO_MODEL ?= examples/llama3-70b.json
DEMO_CLUSTER ?= 8x8xh100-sxm
DEMO_FLAGS ?= --tp 8 --pp 2 --zero 1 --micro-batch 1 --global-batch 512 --seq 8192 --tokens 15e12

# What the demo plans: devices of two kinds, which no even split suits.
PLAN_MODEL ?= llama3-8b
PLAN_CLUSTER ?= 1x8xa100-sxm-80gb+2x8xh100-sxm@400Gb/s
PLAN_FLAGS ?= --global-batch 512 --seq 8192 --tokens 1e12 --budget-s 5

.PHONY: demo test bench soak check clean

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "foreshard needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	$(PIP) install -e '.[plan]'
	touch $@

$(VENV)/.tested: $(VENV)/.made pyproject.toml
	$(PIP) install -e '.[test]'
	touch $@ $(VENV)/.installed

demo: $(VENV)/.installed
	mkdir -p demo
	$(BIN)/foreshard predict $(DEMO_MODEL) $(DEMO_CLUSTER) $(DEMO_FLAGS) \
	    --report demo/report.html --trace demo/trace.json.gz -o demo/prediction.json > demo/prediction.txt
	@cat demo/prediction.txt
	$(BIN)/foreshard plan $(PLAN_MODEL) $(PLAN_CLUSTER) $(PLAN_FLAGS) \
	    --report demo/plan.html -o demo/plan.json > demo/plan.txt
	@cat demo/plan.txt
	$(BIN)/foreshard predict $(PLAN_MODEL) $(PLAN_CLUSTER) --plan demo/plan.json --json > demo/plan_prediction.json
	@$(BIN)/python scripts/demo_summary.py demo

test: $(VENV)/.tested
	$(BIN)/python -m pytest --doctest-modules tests src/foreshard

bench: $(VENV)/.tested
	@for script in bench/bench_*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

soak:
	@echo "make soak: the long chaos run comes with the runtime, which this version does not have" >&2; exit 2

# Refit every shipped constant from the measured tables (FORESHARD_MEASURED) and fail where one has moved by more
# than its script says: 1e-6 relative (kernels, collectives), a thousandth of its range (training), 1e-3 (residuals).
REFITS := fit_kernels fit_comm fit_training accuracy
check: $(VENV)/.tested
	@for name in $(REFITS); do echo "== $$name --check"; $(BIN)/python "scripts/$$name.py" --check || exit 1; done

clean:
	rm -rf $(VENV) demo build dist
