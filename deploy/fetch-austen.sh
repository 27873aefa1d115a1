#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes Jane Austen's six novels, one text of 4,025,029 bytes, to
# OUTDIR/austen.txt. The text comes from Debian's package r-cran-janeaustenr,
# which is unpacked and not installed; no R is needed. Does nothing when the
# file is there and whole.
#
#     fetch-austen.sh OUTDIR
set -euo pipefail

if [[ $# -ne 1 ]]; then
  echo "usage: $0 OUTDIR" >&2
  exit 2
fi
outdir=$1
output=$outdir/austen.txt
package=r-cran-janeaustenr
digest=65b434d16a8755142bfa95ba19c5f9abd0d30cf3dffe3b6793e834f9f56dcc96

if echo "$digest  $output" | sha256sum --check --status 2>/dev/null; then
  exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"  # apt's own user looks inside.

explain() {
  echo "error: the text could not be fetched: $1" >&2
  echo "It is in Debian's package $package; apt said:" >&2
  sed 's/^/  /' "$work/log" >&2
  echo "Run 'apt-get update' as root and try again, or fetch the package on" \
       "another machine and run in its folder:" >&2
  echo "  dpkg-deb -x ${package}_*.deb unpacked" >&2
  echo "  python3 deploy/janeausten.py \\" >&2
  echo "    unpacked/usr/lib/R/site-library/janeaustenr/data/Rdata $output" >&2
  exit 1
}

download() { (cd "$work" && apt-get download "$package") >"$work/log" 2>&1; }

echo "fetching the text of Jane Austen's novels (Debian: $package)"
if ! download; then
  # Package lists are often absent in containers; only root can fetch them.
  if [[ "$(id -u)" -eq 0 ]]; then
    apt-get update -qq >"$work/log" 2>&1 || explain "apt-get update failed"
    download || explain "apt-get download failed"
  else
    explain "apt-get download failed"
  fi
fi
dpkg-deb -x "$work/$package"_*.deb "$work/unpacked"
python3 "$(dirname "$0")/janeausten.py" \
  "$work/unpacked/usr/lib/R/site-library/janeaustenr/data/Rdata" "$output"
if ! echo "$digest  $output" | sha256sum --check --status; then
  rm -f "$output"
  echo "error: the text is not the one this script knows; another version of" \
       "$package?" >&2
  exit 1
fi
