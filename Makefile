# SPDX-License-Identifier: Apache-2.0
# The newcomer's door: each target installs what is missing, then builds.
.PHONY: configure build train test deps data tidy format format-check
.DEFAULT_GOAL := build

deps:
	@bash deploy/install-deps.sh

configure: deps
	@cmake --preset release -Wno-dev >/dev/null

build: configure
	@cmake --build --preset release --target ballast ballast-coordinator \
	  ballast-ps ballast-worker

data: deps
	@bash deploy/fetch-austen.sh data/austen

train: build data
	@build/release/bin/ballast train examples/austen.yaml

test: configure data
	@cmake --build --preset release
	@ctest --preset release

# For those who change the code; clang-format and clang-tidy are Debian's.
sources = $$(git ls-files '*.h' '*.cc')

format:
	@clang-format -i $(sources)

format-check:
	@clang-format --dry-run --Werror $(sources)

# FILES="a.cc b.cc" or FILES=all; by default what differs from main.
tidy: deps
	@cmake/tidy.sh $(FILES)
