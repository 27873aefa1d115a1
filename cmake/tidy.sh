#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs clang-tidy 14 (Debian: clang-tidy) over C++ sources with the compile
# database of a configured build. Not part of make test: it takes minutes.
#
#     tidy.sh [changed | all | FILE...]    default: changed
#
# `changed` means: differs from the branch main, or is not committed. Headers
# are checked through the sources that include them. BUILD_DIR names the build
# folder, build/dev by default.
set -euo pipefail
cd "$(dirname "$0")/.."

build=${BUILD_DIR:-build/dev}
if ! tidy=$(command -v clang-tidy-14 || command -v clang-tidy); then
  echo "clang-tidy is not installed; run: apt-get install clang-tidy" >&2
  exit 1
fi
if [[ ! -f $build/compile_commands.json ]]; then
  cmake --preset dev -Wno-dev >/dev/null
fi
# Generated headers must exist before a source that includes them is read.
cmake --build "$build" --target ballast_proto_files >/dev/null

case ${1:-changed} in
  changed)
    base=$(git merge-base HEAD main 2>/dev/null || git rev-parse HEAD)
    files=$({ git diff --name-only --diff-filter=d "$base"
              git ls-files --others --exclude-standard; } | sort -u)
    ;;
  all) files=$(git ls-files) ;;
  *) files=$(printf '%s\n' "$@") ;;
esac
sources=$(grep -E '\.cc$' <<<"$files" || true)
if [[ -z $sources ]]; then
  echo "no C++ source to check"
  exit 0
fi
xargs -P "$(nproc)" -n 1 "$tidy" -p "$build" --quiet <<<"$sources"
