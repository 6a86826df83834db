# Each target sets itself up: a .venv with torch 2.11, then the package. Needs Python 3.11 and a C++ compiler.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-for-demo
# One thread a worker. Neighbours stay with one worker, whose fixtures and compiled programs they share, until the other
# worker has nothing left.
PARALLEL := -n 2 --dist worksteal
# CI passes --longest=5: a test that takes more seconds and is not marked slow fails the run. On a slower processor they
# count for less.
LONGEST ?=

# Every target has its own environment; what the caller's PYTHONPATH names is not in it.
unexport PYTHONPATH
# Many processes import the same modules, whose compilation takes each of them ten seconds if none may keep it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo gpu test test-nvfuser test-versions test-eight-bit test-notebooks test-long fuzz upstream-tests mutants lint docs notebooks dist
.DELETE_ON_ERROR:

demo: $(DEMO_STAMP)  ## issue 1337's functions and a small training step, before and after: 4 minutes with its installation
	$(BIN)/python -m benchmarks.demo

test: $(STAMP)  ## all that is not slow: 5 to 9 minutes on two cores
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(LONGEST)

test-notebooks: $(STAMP)  ## run all, and compare with what is committed: 4 to 7 minutes
	$(BIN)/python -m pytest -m slow $(PARALLEL) --dist load tests/system/test_notebooks.py

# nvFuser has wheels for torch 2.10 at most, and for Python 3.10 and 3.12; under pyenv a version must be chosen first.
NVFUSER := .venv-nvfuser
PYTHON312 ?= $(shell for v in system $$(pyenv versions --bare 2>/dev/null | grep '^3\.12'); do \
  PYENV_VERSION=$$v python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)
test-nvfuser: $(NVFUSER)/.installed  ## what the real nvFuser makes of plans, without a GPU: 2 minutes, once 8 GB
	$(NVFUSER)/bin/python -m pytest --confcutdir=tests/with_nvfuser -n 2 --dist load tests/with_nvfuser

# The oldest versions that work, and the newest; what every other target has is between them. Python 3.10 is the oldest,
# too, where there is one. An environment has 6 GB, so each goes when its tests have passed; KEEP=1 leaves it.
VERSIONS := .venv-versions
PAIRS ?= oldest newest
oldest := torch==2.8.0 lightning-thunder==0.2.6
newest := torch==2.14.1 lightning-thunder==0.2.7.dev20260201
PYTHON310 ?= $(shell for v in system $$(pyenv versions --bare 2>/dev/null | grep '^3\.10'); do \
  PYENV_VERSION=$$v python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)
test-versions: $(PAIRS:%=test-%-versions)  ## first steps with the oldest and the newest PyTorch and Thunder: 6 minutes
test-oldest-versions: PYTHON := $(or $(PYTHON310),$(PYTHON))
test-%-versions:
	test -x $(VERSIONS)/$*/bin/python || $(PYTHON) -m venv $(VERSIONS)/$*
	$(VERSIONS)/$*/bin/python -m pip install --quiet $($*) "transformers>=4.50,<5" scipy rich pytest pytest-xdist
	$(VERSIONS)/$*/bin/python -m pip install --quiet --no-deps -e .
	OMP_NUM_THREADS=1 $(VERSIONS)/$*/bin/python -m pytest --confcutdir=tests/with_versions $(PARALLEL) tests/with_versions
	test -n "$(KEEP)" || rm -rf $(VERSIONS)/$*

# The wheels have 150 MB, and stay out of the environment of all other tests.
EIGHT_BIT := .venv-eight-bit
test-eight-bit: $(EIGHT_BIT)/.installed  ## the optimizers of bitsandbytes and torchao, for real, on the CPU: a minute
	PYTHONPATH=$(EIGHT_BIT) $(BIN)/python -c "import bitsandbytes.optim, torchao.optim"  # a test without them is skipped
	PYTHONPATH=$(EIGHT_BIT) $(BIN)/python -m pytest -m "" tests/optimizer/test_eight_bit.py

$(EIGHT_BIT)/.installed: $(STAMP)
	rm -rf $(EIGHT_BIT)
	$(BIN)/python -m pip install --quiet --no-deps --target $(EIGHT_BIT) "bitsandbytes>=0.50,<0.51" "torchao>=0.18,<0.19"
	touch $@

ARGS ?=
# What has passed is not run again. Without a GPU: make gpu ARGS="--device simulate".
gpu: $(STAMP)  ## 45 minutes with a GPU: results, peaks and times, with verdicts in build/gpu/cuda.json
	PYTHON=$(BIN)/python bash benchmarks/gpu/run.sh $(ARGS)

LONG ?= --ignore=tests/system/test_notebooks.py tests
test-long: $(STAMP)  ## all slow tests; LONG="tests/system/test_fuzz.py" for one file, LONG="--part=0 tests" for an eighth
	$(BIN)/python -m pytest -m slow $(PARALLEL) $(LONG)

# Three tenths of what Thunder gets right, two each of checkpoints and of overwritten values, a tenth each of attention
# by groups of heads, of tiles under budgets, and of what ThunderFX splits, which takes ten times as long. FROM is the
# first seed.
# Every second program runs with the default options, the others with some that are drawn for them.
# The counts are kept in FUZZ, so that the same command goes on where it stopped.
N ?= 3000
FROM ?= 0
FUZZ ?= build/fuzz.json
fuzz: $(STAMP)  ## N random programs against eager: make fuzz N=50000; failing ones are saved as tests
	status=0; for profile in thunder checkpoint overwritten heads tiles split; do \
	  tenths=1; configs=; case $$profile in thunder) tenths=3;; checkpoint|overwritten) tenths=2;; \
	    heads) configs="--configs tiles-of-5-and-heads";; tiles) configs="--configs tiles-outside-of-checkpoints";; esac; \
	  $(BIN)/python -m tests.fuzzing --profile $$profile --programs $$(( ($(N) * $$tenths + 9) / 10 )) --seed $(FROM) \
	    $$configs --in-turn --compiled-share 0.004 --json $(FUZZ) --resume || status=1; \
	done; exit $$status

# What ran is kept in build/upstream, so that it goes on where it stopped: make upstream-tests ARGS="--share 0.1"
upstream-tests: $(STAMP)  ## Thunder's own tests with MemEfficient in every thunder.jit; fails if one fails only with it
	$(BIN)/python -m tests.upstream.run $(ARGS)

# What is known is kept in build/mutants*.json, so that it goes on where it stopped. With fewer tests it takes minutes:
# make mutants PACKAGES="partition" ARGS="--tests tests/unit tests/planning --slow --seconds 20"
PACKAGES ?= planning rewrites partition fusion schedule tiling loop_body trace semantics
mutants: $(STAMP)  ## does a test fail where a function does nothing? an hour to see what calls it, seconds for each
	$(BIN)/python -m tests.mutants $(PACKAGES) $(ARGS)

docs: $(STAMP)  ## the site in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

notebooks: $(STAMP)  ## run the notebooks and keep their outputs; ONLY="01 03" for those two
	$(BIN)/python -m notebooks.run $(ONLY)

lint: $(STAMP)
	$(BIN)/ruff check thunder_mem tests benchmarks docs notebooks
	$(BIN)/ruff format --check thunder_mem tests benchmarks docs notebooks
	$(BIN)/mypy
	$(BIN)/lint-imports

dist: $(STAMP)  ## sdist and wheel in dist/, checked, installed into a clean environment where README's block runs
	rm -rf dist build/dist
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/dist/env
	build/dist/env/bin/python -m pip install --quiet torch==2.11.0
	build/dist/env/bin/python -m pip install --quiet dist/*.whl
	$(BIN)/python -m docs.python_blocks README.md > build/dist/readme.py
	cd build/dist && env/bin/python -W ignore readme.py

# torch first and alone, so that nothing resolves it to a version that Thunder does not know. Modules are compiled when
# they are first imported: most never are, and compiling all takes half a minute.
$(DEMO_STAMP): pyproject.toml
	@echo "Setting up $(VENV) with torch 2.11, Thunder and litgpt: two minutes, 5 GB, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile torch==2.11.0
	$(BIN)/python -m pip install --quiet --no-compile -e ".[plot,litgpt]"
	touch $@

$(STAMP): $(DEMO_STAMP)
	@echo "Adding what the tests and the docs need: less than a minute, once."
	$(BIN)/python -m pip install --quiet --no-compile -e ".[test,plot,docs]"
	touch $@

$(NVFUSER)/.installed:
	@test -n "$(PYTHON312)" || { echo "make test-nvfuser needs Python 3.12, which is not here: install it," \
	  "or give PYTHON312=/path/to/python3.12" >&2; exit 1; }
	test -x $(NVFUSER)/bin/python || $(PYTHON312) -m venv $(NVFUSER)
	$(NVFUSER)/bin/python -m pip install --quiet torch==2.10.0
	$(NVFUSER)/bin/python -m pip install --quiet nvfuser-cu128-torch210 lightning-thunder==0.2.6 \
	  litgpt==0.5.13 "transformers>=4.50,<5" scipy rich pytest pytest-xdist
	$(NVFUSER)/bin/python -m pip install --quiet --no-deps -e .
	touch $@
