# memeff. `make` lists the targets. Needs python3.11 or newer, make and pip; uses uv where it is there.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test numbers slow clients lint notebooks bench docs sm90a tpu clean

help:
	@echo "make demo       two minutes: memory table, a language model trained on real text, a plot, a few lines by the model"
	@echo "make test       the fast tests (eight to nine minutes on two cores)"
	@echo "make numbers    those of them that compare numbers, as on a CPU without AVX-512 (ISA=AVX512: as on one with it)"
	@echo "make slow       the slow tests: full grids, planted bugs, longer training (a part: TESTS=tests/test_notebooks.py)"
	@echo "make clients    models of Keras, Equinox, Haiku, ... with memeff (4.3 GB of packages into .venv-clients)"
	@echo "make lint       ruff and pyright"
	@echo "make notebooks  executes the notebooks from their sources"
	@echo "make bench      memory and speed tables, as in docs/benchmarks.md"
	@echo "make docs       builds the documentation site into site/ (MkDocs, into .venv-docs)"
	@echo "make sm90a      compiles the GPU kernels, without a GPU (Python 3.12; 250 MB into .venv-sm90a)"
	@echo "make tpu        compiles the TPU kernels, without a TPU (Python 3.12; 250 MB into .venv-tpu)"
	@echo "                (both: a few of them with MARKS='not slow')"
	@echo "make clean      removes what these made"
	@echo "Everything is installed into $(VENV). Another interpreter: make test PYTHON=python3.12 VENV=.venv-3.12"

demo: $(VENV)/.models
	$(BIN)/python -m models.demo

# Two processes take file after file. Xdist would begin with those of many tests, and end with long ones.
TWO = -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(TWO)

# What is compared with the oracle, on a CPU without AVX-512 (XLA adds in another order there), or with ISA=AVX512.
# Below AVX2 XLA compiles nothing in float16.
ISA ?= AVX2
NUMBERS = numbers sizes scale dropout realistic_inputs hard_inputs masks broadcast hidden_values sinks \
  fixed_max halves fused_tiles functions block_masks statistics audit orders
numbers: $(VENV)/.dev
	XLA_FLAGS="--xla_cpu_max_isa=$(ISA) $(XLA_FLAGS)" $(BIN)/python -m pytest $(TWO) $(NUMBERS:%=tests/test_%.py)

slow: $(VENV)/.dev
	$(BIN)/python -m pytest $(TWO) -m slow $(TESTS)

# gemma requires kauldron, whose xmanager pip cannot resolve; gemma's models need neither it nor the rest.
GEMMA = 'gemma>=3.3,<3.4' 'kauldron>=1.4.2,<1.5'
clients:
	$(MAKE) .venv-clients/.clients VENV=.venv-clients
	@if command -v uv >/dev/null 2>&1; then \
	  uv pip install --quiet --python .venv-clients/bin/python --no-deps $(GEMMA); \
	else \
	  .venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(GEMMA); \
	fi
	.venv-clients/bin/python -m pytest -m clients tests/test_clients.py tests/test_replace_clients.py tests/test_readme.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

notebooks: $(VENV)/.dev
	$(BIN)/python tests/test_notebooks.py

bench: $(VENV)/.models
	$(BIN)/python -m memeff.bench memory
	$(BIN)/python -m memeff.bench speed

# NO_MKDOCS_2_WARNING: Material's note about a later MkDocs, which pyproject.toml keeps out.
docs:
	$(MAKE) .venv-docs/.docs VENV=.venv-docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# JAX's CUDA plugin and ptxas without the libraries that a GPU would need; apart, for JAX looks for those when it starts.
SM90A = .venv-sm90a/bin/python
MARKS ?= slow or not slow
sm90a: .venv-sm90a/.stamp
	$(SM90A) -m pytest --noconftest -q -m '$(MARKS)' tests/test_sm90a.py tests/test_ampere_chips.py

.venv-sm90a/.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-sm90a
	$(SM90A) -m pip install --quiet --disable-pip-version-check -e . jax==0.11.2 jaxlib==0.11.2 absl-py 'pytest>=9,<10'
	$(SM90A) -m pip install --quiet --disable-pip-version-check --no-deps jax-cuda13-plugin==0.11.2 \
	  jax-cuda13-pjrt==0.11.2 nvidia-cuda-nvcc==13.0.88
	@touch $@

# XLA's compiler for TPUs, which needs no TPU.
TPU = .venv-tpu/bin/python
tpu: .venv-tpu/.stamp
	$(TPU) -m pytest --noconftest -q -m '$(MARKS)' tests/test_tpu_chips.py

.venv-tpu/.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-tpu
	$(TPU) -m pip install --quiet --disable-pip-version-check -e . jax==0.11.2 jaxlib==0.11.2 libtpu==0.0.52 'pytest>=9,<10'
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist site *.egg-info runs .pytest_cache .ruff_cache .hypothesis

# One virtual environment; a stamp for each set of packages that it holds.
$(VENV)/.models $(VENV)/.dev $(VENV)/.clients $(VENV)/.docs: $(VENV)/.%: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "memeff needs Python 3.11 or newer and $(PYTHON) is %d.%d: make ... PYTHON=python3.11" % v[:2])'
	@if command -v uv >/dev/null 2>&1; then \
	  { test -x $(BIN)/python || uv venv --quiet --python $(PYTHON) $(VENV); } && \
	  uv pip install --quiet --python $(BIN)/python -e '.[$*]'; \
	else \
	  { test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } && \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'; \
	fi
	@touch $@
