# `make train` and `make test` need nothing but this checkout, Python 3.9 to 3.13, a C++ compiler and cmake (the latter two
# for several ranks only): the first of them makes .venv, later ones find it ready. `make help` lists the rest.

RANKS   ?= 2
STEPS   ?= 300
OUT     ?= out/bert_tiny
CONFIG  ?= configs/bert_tiny.toml
ARGS    ?=
WORKERS ?=
PYTHON  ?=
PYTHON37 ?=
HOME_PAGE ?=
CLIENTS ?=
MIRROR  ?=
PATH37  ?=
TF1_EXAMPLES := digits/train_session.py digits/train_estimator.py accelerate/train.py

TF      ?=
export TF

VERSIONS ?= 2.15 2.16 2.18 2.21
TIER    ?= test
# What another TensorFlow may break first: its private names, and what scripts are promised.
ROOMS   ?= tests/test_internals.py tests/test_without_tensorflow.py tests/test_versions.py tests/documented

bin := .venv$(addprefix -tf,$(TF))/bin
# One rank alone needs no distributed optimizer.
distributed := $(if $(filter-out 1,$(RANKS)),--distributed)

.DEFAULT_GOAL := help
.PHONY: help venv venv-for-train venv-tf115 train test test-all test-gpu test-versions test-clusters test-hosts test-soak test-elastic test-tf115 explore lint docs modules dist format bench clean distclean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*  ## /  make \1 @/p' Makefile | awk -F@ '{ printf "%-18s %s\n", $$1, $$2 }'

venv:  ## .venv with TensorFlow, Horovod and this package (PYTHON=python3.10 and TF=2.21 choose which)
	@PYTHON="$(PYTHON)" sh tools/setup_env.sh all

venv-for-train:
	@PYTHON="$(PYTHON)" sh tools/setup_env.sh $(if $(distributed),ranks,alone)

venv-tf115:  ## .venv-tf115 with the genuine TensorFlow 1.15, where Python 3.7 is found (PYTHON37= names one)
	@PYTHON37="$(PYTHON37)" sh tools/setup_tf115.sh

train: venv-for-train  ## a small BERT on RANKS=2 local ranks for STEPS=300 into OUT=out/bert_tiny (CONFIG=, ARGS= too)
	@$(bin)/npu-run -np $(RANKS) examples/bert_pretrain/train.py --config '$(CONFIG)' \
	  --num_train_steps $(STEPS) --output_dir '$(OUT)' $(distributed) $(ARGS)

pytest = $(bin)/python -m pytest --dist loadgroup -n $(or $(WORKERS),$(1))

test: venv  ## every promise once, on real ranks: minutes (ARGS="tests/amp -k scale" go to pytest, WORKERS=0 for one process)
	@$(call pytest,2) -m "not slow" $(ARGS)

test-all: venv  ## the whole test suite, with the cases that are marked slow (ARGS= and WORKERS= too)
	@$(call pytest,3) $(ARGS)

test-versions:  ## ROOMS= that another TensorFlow may break, on each of VERSIONS="2.15 2.16 2.18 2.21" (TIER=test-all: all cases)
	@for version in $(VERSIONS); do echo "== TensorFlow $$version" && \
	  $(MAKE) --no-print-directory $(TIER) TF=$$version ARGS="$(ROOMS) $(ARGS)" || exit 1; done

test-gpu: venv  ## training on a GPU against the CPU, numpy and float32, minutes (ARGS=--on-cpu: the same cases without a GPU)
	@$(bin)/python -m pytest -n 0 tests/gpu $(ARGS)

test-hosts: venv  ## jobs over two hosts that are network namespaces with a link of 1 Gbit/s; needs root
	@$(bin)/python -m pytest -m hosts tests/hosts $(ARGS)

test-soak: venv  ## trainings through random faults, 1,000 by default (ARGS="--faults 30 --seed 2"); needs root for all
	@$(bin)/python -m pytest -q -s -p no:xdist tests/soak $(or $(ARGS),--faults 1000 --seed 1)

test-clusters: venv  ## jobs under Open MPI, MPICH and a Slurm of this machine (apt-get install openmpi-bin mpich slurm-wlm munge)
	@$(bin)/python -m pytest tests/clusters $(ARGS)

test-elastic: venv  ## ranks that come and go, faces x models x seeds, against trainings that nobody disturbs (TF=2.21: Keras 3)
	@$(bin)/python -m tests.npu_run.elastic_matrix $(ARGS)

replay := $(CURDIR)/$(bin)/python $(CURDIR)/tools/replay_on_genuine.py --copy --python $(CURDIR)/.venv-tf115/bin/python \
  $(addprefix --path ,$(PATH37))

test-tf115: venv venv-tf115  ## what we supply of TensorFlow 1.15, and whole trainings, against the genuine one
	@$(bin)/python -m pytest tests/tensorflow1_compat/test_genuine.py tests/tensorflow1_compat/test_whole_scripts.py $(ARGS)
	@[ ! -x .venv-tf115/bin/python ] || for script in $(TF1_EXAMPLES); do (cd examples/$$(dirname $$script) && \
	  $(replay) --out $(CURDIR)/out/genuine/$$script $$(basename $$script)) || exit 1; done
	@# MIRROR= of public scripts, CLIENTS= with run_clients.py and data for them, PATH37= with their packages for Python 3.7
	@[ -z "$(CLIENTS)" ] || { $(bin)/python $(CLIENTS)/run_clients.py --mirror $(MIRROR) --main $(CURDIR) \
	  --python $(CURDIR)/$(bin)/python --keep --work $(CURDIR)/out/clients --launcher \
	  '$(replay) --out replayed {script} {args}' >/dev/null; tail -n 6 out/clients/*/log.txt; }

explore: venv  ## the property tests with new examples each time
	@HYPOTHESIS_PROFILE=explore $(bin)/python -m pytest -m "not hosts" $$(grep -rl '^@given' tests) $(ARGS)

lint: venv  ## ruff: rules and formatting; mypy: types of what scripts import; phrases to avoid
	@$(bin)/ruff check .
	@$(bin)/ruff format --check .
	@$(bin)/python tools/check_types.py
	@$(bin)/python tools/check_words.py --pages

format: venv  ## rewrite the files the way `make lint` wants them
	@$(bin)/ruff check --fix-only --quiet .
	@$(bin)/ruff format .

docs: venv  ## the pages as a site in out/site, with search and the reference; needs no network
	@NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict  # --quiet would keep warnings from being counted
	@echo "out/site/index.html; with search: $(bin)/python -m http.server -d out/site"

modules:  ## every module with the first sentence of its docstring
	@$(or $(PYTHON),python3) tools/module_list.py

dist: venv  ## wheel and sdist in dist/ (HOME_PAGE=https://... is where the links of their README lead)
	@HOME_PAGE="$(HOME_PAGE)" $(bin)/python -c \
	  'from setuptools import build_meta as build; build.build_sdist("dist"); build.build_wheel("dist")' >/dev/null
	@ls dist/*

bench: venv  ## every benchmark in benchmarks/
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(bin)/python "$$script" $(ARGS); done

clean:  ## remove what builds and tests leave behind; .venv and out/ stay
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean  ## `make clean`, and .venv too
	@rm -rf .venv .venv-tf*
