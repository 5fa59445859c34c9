# Everything a person types. Each target sets up what it needs and does nothing twice.
.PHONY: help setup demo test test-rust test-python test-long fault-matrix bench bench-peers format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup:  ## .venv with the release wheel and what tests and demo need
	@scripts/setup.sh

# The recipe reads DATA from its environment: a path may hold spaces and quotes.
export DATA
demo: setup  ## the whole promise in a few minutes: data, training, kills, resume, report
	@.venv/bin/python examples/demo.py $(if $(DATA),--data "$$DATA")

test: setup test-rust test-python  ## formatting, lints, Rust and Python tests

FEATURES := $(shell command -v nasm >/dev/null && echo --features drivetrain/turbojpeg)
export PATH := $(CURDIR)/.venv/bin:$(PATH)

test-rust: setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets $(FEATURES) -- -D warnings
	cargo test --workspace $(FEATURES)

test-python: setup
	.venv/bin/ruff check python examples scripts benches
	.venv/bin/ruff format --check python examples scripts benches
	.venv/bin/mypy
	.venv/bin/python -m pytest python/tests

test-long: setup  ## what is too slow for every change
	DRIVETRAIN_LONG=1 cargo test --release --workspace $(FEATURES) -- --include-ignored
	DRIVETRAIN_LONG=1 .venv/bin/python -m pytest python/tests

fault-matrix: setup  ## writes docs/fault-matrix.md anew from what the tests find
	DRIVETRAIN_BLESS=1 cargo test $(FEATURES) -p drivetrain --test suite fault_matrix

bench: setup  ## criterion benches of the kernels
	cargo bench $(FEATURES)

bench-peers: setup  ## other loaders and checkpoint libraries against ours, interleaved
	benches/peers/run.sh

format:
	cargo fmt --all
	.venv/bin/ruff format python examples scripts benches

clean:
	rm -rf target .venv .demo
