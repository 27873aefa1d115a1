#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The one list of Debian 12 packages that Ballast builds and tests with.
# Installs what is missing. Without root it prints the one command to run.
set -euo pipefail

packages=(
  # Toolchain.
  g++ cmake ninja-build ccache mold pkg-config
  # Wire and words.
  libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev
  libabsl-dev
  # Disk.
  librocksdb-dev liburing-dev libxxhash-dev
  # Arithmetic.
  libdnnl-dev libhwy-dev
  # Job files, command line, JSON.
  libyaml-cpp-dev libcli11-dev nlohmann-json3-dev
  # Tests and benchmarks.
  libgtest-dev libgmock-dev libbenchmark-dev python3
  # Shared state of several coordinators (tests start their own).
  etcd-server
)

missing=()
for package in "${packages[@]}"; do
  if [[ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" \
        != installed ]]; then
    missing+=("$package")
  fi
done
if [[ ${#missing[@]} -eq 0 ]]; then
  exit 0
fi

if [[ "$(id -u)" -ne 0 ]]; then
  echo "Ballast needs packages that are not installed. Run this first:" >&2
  echo "  sudo bash deploy/install-deps.sh" >&2
  echo "(missing: ${missing[*]})" >&2
  exit 1
fi

echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
