# python3, make and g++ are enough: everything else goes into .venv, the CUDA compiler too where the machine has none.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
SAMPLE := --q data/minilm_q.npy --k data/minilm_k.npy --v data/minilm_v.npy

.PHONY: build test demo check coverage sass docs wheel clean

build: .venv/ready
	$(PY) build.py

test: build
	$(PY) -m pytest

# The attention kernel, native PTX on the emulator; --compare fails beyond the kernel's tolerance and the limit.
demo: .venv/ready
	$(PY) build.py --ptx-only --only 'attention_mxfp4_bf16[dim=32]'
	mkdir -p build
	$(PY) cli.py --machine emulator run attention $(SAMPLE) --qk mxfp4 --pv bf16 --quantize in_kernel --out-dtype float32 -o build/demo.npy --compare --format-limit 0.2

check: build
	$(PY) cli.py check

coverage: build
	$(PY) tests/ptx_coverage.py

# make sass KERNEL='attention_mxfp4_bf16[dim=128]'
sass: build
	$(PIP) nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	$(PY) build.py --sass $(if $(KERNEL),--only '$(KERNEL)')

docs: build
	$(PY) docs/generate.py

wheel: .venv/ready
	$(PY) -m pip wheel --no-deps --wheel-dir dist .

clean:
	$(PYTHON) build.py --clean
	rm -rf build dist

# Debian's python3 comes without ensurepip; a machine with pip can do without it.
.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed; run make PYTHON=python3.x"; exit 1; }
	@test -x $(PY) && $(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv 2>/dev/null || $(PYTHON) -m virtualenv --quiet .venv 2>/dev/null \
	|| { $(PYTHON) -m pip install --quiet --target .venv/bootstrap virtualenv && PYTHONPATH=.venv/bootstrap $(PYTHON) -m virtualenv --quiet .venv; } \
	|| { echo "python3 cannot make a virtual environment: install python3-venv (apt-get install python3-venv)"; exit 1; }
	$(PIP) "hatchling>=1.26" editables $$($(PY) build.py --requires)
	$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@
