# make demo | make test | make test-all | make check | make bench | make docs | make asan
# make test-megatron | make test-recipes
# Each does all its own set-up through make setup.
# make gpu-wheels, then make gpu on a machine with a GPU, which needs neither setup nor network.
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
# The Megatron versions beside the installed one, for the contract tests.
OTHER_MEGATRON := 0.17.1 0.18.2
BENCHMARKS := $(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[!_]*.py))
RESULTS = benchmarks/results/$(shell $(PY) -c "from accel.testing.bench import machine_name; print(machine_name())")
NATIVE := $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/cuda/*.cu csrc/cuda/bindings/*.* csrc/include/accel/*.h csrc/include/accel/cuda/*.h) setup.py

.PHONY: setup demo test test-all check format bench docs asan explore test-huge test-megatron test-recipes
.PHONY: gpu gpu-wheels gpu-peers gpu-rehearsal compile-table clean
.DELETE_ON_ERROR:

setup: $(VENV)/.native $(VENV)/.megatron $(VENV)/.torch-npu $(VENV)/.data

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v == (3, 12) else \
	    "make setup needs Python 3.12, found %d.%d: make PYTHON=/path/to/python3.12 setup" % v)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.requirements: requirements/dev.txt $(VENV)/.python
	@echo "installing pinned dependencies into $(VENV) (torch is about 5 GB on disk: a minute or two)"
	$(PY) -m pip install --disable-pip-version-check --requirement $<
	@touch $@

$(VENV)/.native: $(VENV)/.requirements $(NATIVE) pyproject.toml
	@echo "building the native library (a few minutes on two cores)"
	@# where the build fails, an older one would be taken for this one
	@rm -f $@ accel/_C*.so
	@# nvcc takes longest: without a GPU one kind proves that the kernels build
	nvidia-smi -L > /dev/null 2>&1 || export ACCEL_CUDA_ARCHS="$${ACCEL_CUDA_ARCHS-90}"; \
	    $(PY) -m pip install --disable-pip-version-check --no-build-isolation --no-deps --quiet --editable .
	@$(PY) -c "import sys; from accel.ops import _native; reason = _native.reason(); \
	    print('native kernels:', reason or 'built'); sys.exit(3 if reason else 0)"; \
	case $$? in 0) touch $@ ;; 3) test "$$ACCEL_REQUIRE_NATIVE" != 1 || exit 1; \
	    echo "going on without: each make tries again, ACCEL_REQUIRE_NATIVE=1 make shows the compiler's words" ;; \
	*) exit 1 ;; esac

$(VENV)/.megatron: $(VENV)/.requirements
	@for version in $(OTHER_MEGATRON); do \
	    $(PY) -m pip install --disable-pip-version-check --quiet --no-deps --upgrade \
	        --target $(VENV)/megatron/$$version megatron-core==$$version || exit 1; done
	@touch $@

# For its op schemas, which tests/npu reads; it cannot be imported without an Ascend machine's CANN.
$(VENV)/.torch-npu: requirements/torch-npu.txt $(VENV)/.requirements
	@rm -rf $(VENV)/torch-npu
	$(PY) -m pip install --disable-pip-version-check --quiet --no-deps \
	    --target $(VENV)/torch-npu --requirement $<
	@touch $@

$(VENV)/.megatron-tests: $(VENV)/.requirements requirements/megatron-tests.txt
	$(PY) -m pip install --disable-pip-version-check --quiet --upgrade --target $(VENV)/megatron-tests \
	    --constraint requirements/dev.txt --requirement requirements/megatron-tests.txt
	@# without its requirements: torch is there
	$(PY) -m pip install --disable-pip-version-check --quiet --upgrade --target $(VENV)/megatron-tests \
	    --no-deps emerging-optimizers==0.3.0
	@touch $@

$(VENV)/.data: examples/demo/corpus.py | $(VENV)/.native
	$(PY) examples/demo/corpus.py
	@touch $@

demo: setup
	$(PY) examples/demo/run.py

# The tests of a file stay together: those of a layout share one launch of its ranks.
# Ranks import accel some thousand times: where the environment forbids it, each would compile all of it.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: setup
	$(PY) -m pytest -n logical --maxprocesses 8 --dist loadfile -m "not thorough" $(PYTEST_ARGS)

# With the trainings that are much like others, and every GPU kernel compiled again.
test-all: setup
	ACCEL_TEST_COMPILE_ALL=1 $(PY) -m pytest -n logical --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)

check: $(VENV)/.requirements
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	@! git grep -nE '^(<{7}|>{7}) ' || { echo "make check: conflict markers"; exit 1; }

format: $(VENV)/.requirements
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup
	@results=$(RESULTS); mkdir -p $$results; for name in $(BENCHMARKS); do \
	    echo "benchmark $$name (a minute or two; keep the machine quiet)"; \
	    $(PY) -m accel bench $$name --json > $$results/$$name.tmp || exit 1; \
	    mv $$results/$$name.tmp $$results/$$name.json; done; \
	$(PY) -m accel.testing.bench $$results
	$(PY) docs/generate.py

docs: setup
	$(PY) docs/generate.py

# The C++ kernels' tests under AddressSanitizer, in a build of their own. AVX-512 intrinsics and three
# instruction sets a file make it slow: on two cores some 4 minutes to compile, and 6 to test.
asan: setup
	ACCEL_SANITIZE=1 ACCEL_REQUIRE_NATIVE=1 $(PY) setup.py -q build_ext \
	    --build-lib build/asan --build-temp build/asan/objects
	ACCEL_NATIVE_LIBRARY=$$(echo $(CURDIR)/build/asan/accel/_C*.so) \
	    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	    ASAN_OPTIONS=detect_leaks=0 \
	    OMP_NUM_THREADS=2 $(PY) -m pytest tests/ops -p no:cacheprovider --numprocesses auto \
	    -k "not compiles_as_one_graph" $(PYTEST_ARGS)

# Hypothesis draws the same examples each time, so that CI judges a change alone; here others, SEED=1 and so on.
explore: setup
	$(PY) -m pytest tests -m hypothesis -n logical --maxprocesses 8 --hypothesis-profile=explore \
	    $(if $(SEED),--hypothesis-seed=$(SEED)) $(PYTEST_ARGS)

# Ops on tensors of more than 2^31 elements: some minutes, and 20 GiB of memory.
test-huge: setup
	ACCEL_TEST_HUGE=1 $(PY) -m pytest tests/huge -p no:cacheprovider $(PYTEST_ARGS)

# Megatron-LM's own unit tests with accel on top; MEGATRON is a clone at a supported version. Some hours;
# interrupted, it goes on where it stopped.
test-megatron:
	@test -n "$(MEGATRON)" || { echo "make test-megatron: give MEGATRON=<a clone of Megatron-LM>"; exit 2; }
	@$(MAKE) --no-print-directory setup $(VENV)/.megatron-tests
	PYTHONPATH=$(VENV)/megatron-tests $(PY) -W ignore -m accel.testing.megatron_tests $(MEGATRON) --report docs/megatron-tests.md

# Its nightly configurations, made small, each trained with accel on top; as long, and goes on likewise.
# RECIPES_ARGS="--only moe --ranks 4" and the like.
test-recipes:
	@test -n "$(MEGATRON)" || { echo "make test-recipes: give MEGATRON=<a clone of Megatron-LM>"; exit 2; }
	@$(MAKE) --no-print-directory setup $(VENV)/.megatron-tests
	PYTHONPATH=$(VENV)/megatron-tests $(PY) -W ignore -m accel.testing.megatron_recipes $(MEGATRON) --report docs/megatron-recipes.md $(RECIPES_ARGS)

# What make gpu takes along: some 4 MB into .gpu-wheels.
gpu-wheels: $(VENV)/.requirements
	rm -rf .gpu-wheels
	$(PY) -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir .gpu-wheels \
	    --requirement requirements/gpu.txt

# After it, QuACK and FlashAttention-4 with their compiler: 57 MB more, some minutes of packing.
gpu-peers: $(VENV)/.requirements
	$(PY) -m benchmarks.gpu.pack_peers

# Build, prove and measure on a GPU, in under nine minutes; repeated, it goes on where it stopped.
# GPU_ARGS="--only ops --again" and the like; GPU_RESULTS is the folder of results.json and results.md.
GPU_PYTHON ?= python3
GPU_RESULTS ?= $(shell $(GPU_PYTHON) -c "from benchmarks.gpu.setting import results; print(results())")
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu --results $(GPU_RESULTS) $(GPU_ARGS)

# The same parts on the CPU at toy sizes: proves the scripts, measures nothing.
gpu-rehearsal: setup
	$(PY) -m benchmarks.gpu --rehearse --folder runs/gpu-rehearsal $(GPU_ARGS)

# What every GPU kernel compiles to: registers, shared memory, spills. Needs no GPU; some minutes.
compile-table: setup
	$(PY) -m accel.testing.compile_table --output benchmarks/results/compile.json

clean:
	rm -rf $(VENV)/.native build accel.egg-info accel/_C*.so .pytest_cache .mypy_cache .ruff_cache
