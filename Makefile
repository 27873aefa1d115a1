# SPDX-License-Identifier: Apache-2.0
# The newcomer's door: each target installs what is missing, then builds.
.PHONY: build train test deps data
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
