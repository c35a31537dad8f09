# Each target makes the environment that it needs first, if it is not there or older than what it depends on.
# The Python of .venv; without it the first one that is here: 3.11, an older one, or one for PyTensor.
PYTHON ?=
# Three processes for two cores, as many tests wait, each with sessions of its own, which a file's
# tests share: see tests/conftest.py.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder
SPHINX_ARGS ?=
BENCH ?=
PYTHONS ?=
FIGURES ?=

py := .venv/bin/python
ready := .venv/.ready
# PyTensor needs a newer Python than Theano, and so an environment of its own. PYTENSOR_PYTHON names
# the one with which it is made.
export PYTENSOR_PYTHON
# Tests start interpreters by the hundred: each finds compiled modules.
unexport PYTHONDONTWRITEBYTECODE
its_version := -c 'import sys; print(sys.version)'
# PYTENSOR=3.1 and PYMC=6.1 name minor versions: each choice has an environment of its own.
PYTENSOR ?=
PYMC ?=
venv_pytensor := .venv-pytensor$(PYTENSOR:%=-%)$(PYMC:%=-pymc-%)
py_pytensor := $(venv_pytensor)/bin/python
ready_pytensor := $(venv_pytensor)/.ready
# Compiled functions stay there, so a second run is faster.
on_pytensor := PYTENSOR_FLAGS=base_compiledir=$(CURDIR)/$(venv_pytensor)/compiled SYNKHRONOS_HOST=pytensor

samplers := $(patsubst %,tests/likelihood/test_%.py,nutpie jax bambi second_derivatives bench_pymc bench_gallery pymc_demo) tests/jax_devices

.DEFAULT_GOAL := help
# What `make test` leaves out, and test-rest runs.
rest := slow or thorough or opencl
.PHONY: help venv opencl demo bench figures test test-pytensor test-numba test-samplers test-theano test-all test-rest lint docs release clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

venv: $(ready) ## make .venv, with all that demos, tests, docs and lint need (PYTHON=python3.11)
	@test -z "$(PYTHON)" || test "$$($(PYTHON) $(its_version))" = "$$($(py) $(its_version))" \
	|| { echo ".venv has another Python than $(PYTHON): remove it first" >&2; exit 1; }

$(ready): setup.py pyproject.toml synkhronos/_host/pythons.py synkhronos/_host/theano/import_support.py .ci/find-python
	@test -x $(py) || { \
	python="$(PYTHON)"; test -n "$$python" || python=$$(.ci/find-python 3.11 3.10 3.9 3.8 3.13 3.12 3.14); \
	command -v "$$python" > /dev/null || { echo "$${python:-Python 3.8 to 3.14} not found: install one, or name it: make PYTHON=..." >&2; exit 1; }; \
	"$$python" synkhronos/_host/pythons.py && "$$python" -m venv .venv; }
	@echo "Installing packages into .venv, once, which takes about 2 minutes:"
	$(py) -m pip install --editable '.[dev]'
	@touch $@

opencl: venv ## install OpenCL and pygpu for .venv, which needs Debian's apt-get and root
	@.ci/opencl $(py)

demo: venv ## train a network on handwritten digits with all cores, and compare with one process
	$(py) demos/train_digits.py

bench: venv ## run a benchmark of tests/benchmarks (BENCH="collectives --sizes 1K"), or list them
	PYTHONPATH=tests $(py) -m benchmarks $(BENCH)

figures: venv ## measure what the documentation quotes, in 20 minutes (FIGURES="call busy"): docs/figures.json
	PYTHONPATH=tests $(py) -m benchmarks figures $(FIGURES)

test: venv ## run the tests, in 5 minutes (PYTEST_ARGS="-k gate -x")
	@echo "The tests take about 5 minutes on two cores, and longer the first time, when they compile."
	$(py) -m pytest -m "not ($(rest))" $(PYTEST_ARGS)

test-pytensor: $(ready_pytensor) ## run the suites of both hosts on PyTensor (PYTENSOR=3.1 PYMC=6.1 PYTENSOR_PYTHON=python3.12)
	@test -z "$$PYTENSOR_PYTHON" || test "$$("$$PYTENSOR_PYTHON" $(its_version))" = "$$($(py_pytensor) $(its_version))" \
	|| { echo "$(venv_pytensor) has another Python than $$PYTENSOR_PYTHON: remove it first" >&2; exit 1; }
	$(on_pytensor) $(py_pytensor) -m pytest -m "not ($(rest))" $(PYTEST_ARGS)

test-numba: $(ready_pytensor) ## run those that need PyTensor's default mode, which compiles for seconds
	$(on_pytensor) SYNKHRONOS_TEST_MODE=NUMBA $(py_pytensor) -m pytest -m "numba and not ($(rest))" $(PYTEST_ARGS) $$(grep -rl --include='*.py' mark.numba tests)

test-samplers: .venv-samplers/.ready ## run those that need nutpie, JAX, bambi or pymc-extras, with packages of their own
	PYTENSOR_FLAGS=base_compiledir=$(CURDIR)/.venv-samplers/compiled SYNKHRONOS_HOST=pytensor .venv-samplers/bin/python -m pytest -m "" $(PYTEST_ARGS) $(samplers)

.venv-samplers/.ready: setup.py pyproject.toml synkhronos/_host/pythons.py .ci/python-for-pytensor .ci/find-python
	test -x .venv-samplers/bin/python || { python=$$(.ci/python-for-pytensor) && "$$python" -m venv .venv-samplers; }
	@echo "Installing packages into .venv-samplers, once, which takes some minutes:"
	.venv-samplers/bin/python -m pip install --editable '.[test-pytensor,test-samplers]'
	@touch $@

$(ready_pytensor): setup.py pyproject.toml synkhronos/_host/pythons.py .ci/python-for-pytensor .ci/find-python
	test -x $(py_pytensor) || { python=$$(.ci/python-for-pytensor) && "$$python" -m venv $(venv_pytensor); }
	@echo "Installing packages into $(venv_pytensor), once, which takes about 2 minutes:"
	$(py_pytensor) -m pip install --editable '.[test-pytensor]' $(PYTENSOR:%='pytensor==%.*') $(PYMC:%='pymc==%.*')
	@touch $@

# The environment first: without a Python for PyTensor it fails before the tests, which take long.
test-all: $(ready_pytensor) test-theano test-pytensor test-numba test-samplers ## run these and all others: all parameters, OpenCL, thousands of calls and interrupts

test-theano: venv ## run what test-all has for Theano (PYTEST_ARGS="tests/stress")
	$(py) -m pytest $(PYTEST_ARGS)

test-rest: venv ## run what test-all has and test has not
	$(py) -m pytest -m "$(rest)" $(PYTEST_ARGS)

lint: venv ## check style, spelling, type hints, imports, budgets of lines, and what Python 3.8 has
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(py) -m codespell_lib
	$(py) -m mypy
	.venv/bin/lint-imports --no-cache --no-logo
	$(py) .ci/budgets.py
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	.venv/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[a-z]*_*.yml
	.venv/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	.venv/bin/vermin -t=3.8- --no-tips --violations --exclude-regex synkhronos/_host/pytensor/ --exclude-regex synkhronos/extensions/pymc/ synkhronos

docs: venv ## build the documentation into docs/_build/html
	@echo "Building the pages, which takes about a minute:"
	$(py) -m sphinx -W --keep-going -q -b html $(SPHINX_ARGS) docs docs/_build/html
	@echo "docs/_build/html/index.html"

release: venv ## build what is uploaded, check it, and try it on each Python that is here (PYTHONS="3.8 3.13")
	$(py) -m pip install --quiet --editable '.[release]'
	$(py) .ci/release.py $(PYTHONS)

clean: ## remove what was built, but for environments
	rm -rf build dist *.egg-info docs/_build .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -exec rm -rf {} +

distclean: clean ## remove the environments too
	rm -rf .venv .venv-pytensor* .venv-samplers
