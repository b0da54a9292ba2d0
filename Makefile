# The example, the tests, the checks and the benchmark, each in the environment .venv, which is made on first use.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
RANKS ?= 2
ARGS ?=
PIP = .venv/bin/pip --disable-pip-version-check install -c constraints.txt

.PHONY: train test test-full fuzz lint docs bench clean

train: .venv/installed
	OMP_NUM_THREADS=1 .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train.py $(ARGS)

test: .venv/installed-hf
	.venv/bin/python -m pytest $(ARGS)

test-full: .venv/installed-hf
	.venv/bin/python -m pytest --full $(ARGS)

# EXAMPLES random models, drawn by SEED, or by another one each time
fuzz: .venv/installed
	OMP_NUM_THREADS=1 .venv/bin/python -m tests.fuzz $(if $(EXAMPLES),--examples $(EXAMPLES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict --quiet -f docs/mkdocs.yml

bench: .venv/installed-bench
	.venv/bin/python -m tests.bench --ranks $(RANKS) $(ARGS)

clean:
	rm -rf .venv .cache

# torch comes first and alone: resolved together with the rest, pip may settle on another build of it.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e '.[test]'
	touch $@

.venv/installed-hf: .venv/installed
	$(PIP) -e '.[test,hf]'
	touch $@

.venv/installed-bench: .venv/installed
	$(PIP) -e '.[test,bench]'
	touch $@

.venv/installed-docs: .venv/installed
	$(PIP) -e '.[test,docs]'
	touch $@
