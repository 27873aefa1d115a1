# SPDX-License-Identifier: Apache-2.0
# The newcomer's door: each target installs what is missing, then builds.
.PHONY: build train test deps data tidy format format-check
.DEFAULT_GOAL := build

deps:
	@bash deploy/install-deps.sh

build: deps
	@cmake --preset release -Wno-dev >/dev/null
	@cmake --build --preset release

data: deps
	@bash deploy/fetch-austen.sh data/austen

train: build data
	@build/release/bin/ballast train examples/austen.yaml

test: build data
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
