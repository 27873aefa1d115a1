#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of the tree that a compiler cannot: who includes whom, which
folder may know which library, licence lines, lengths, registered tests.

    check_tree.py ROOT

Prints one line for each violation and exits 1 when there is any.
"""

import os
import re
import sys

# A folder may include its own files and those of lower levels. Folders of one
# level are strangers, except the pairs below.
LEVELS = {
    "common": 0,
    "proto": 0,
    "kernels": 1,
    "storage": 1,
    "rpc": 1,
    "offload": 2,
    "ps": 3,
    "worker": 3,
    "tests": 4,
    "bench": 4,
}
NEIGHBOURS = {("proto", "common")}

# Library headers, and the folders that may know them.
LIBRARIES = (
    (
        "gRPC",
        re.compile(r"^(grpc|grpcpp|grpc\+\+)/|\.grpc\.pb\.h$"),
        (
            "rpc/",
            "ps/coordinator/",
            "ps/shard/",
            "ps/cli/",
            "worker/",
            "storage/etcd_",
        ),
    ),
    ("RocksDB", re.compile(r"^rocksdb/"), ("storage/",)),
    ("oneDNN", re.compile(r"^(oneapi/)?dnnl"), ("kernels/",)),
    ("liburing", re.compile(r"^liburing"), ("storage/",)),
    ("Highway", re.compile(r"^hwy/"), ("kernels/",)),
    ("CUDA or NCCL", re.compile(r"^(cuda|cublas|nccl)"), ()),
    # Its annotations are fine; the class itself misleads TSan.
    ("absl::Mutex", re.compile(r"^absl/synchronization/mutex\.h$"), ()),
)
# These see what they exercise.
EVERYWHERE = ("tests/", "bench/")

COLUMNS = 80
HEADER_LINES = 300
SOURCE_LINES = 600

CPP = (".h", ".cc", ".cu")
SLASHED = CPP + (".proto",)
HASHED = (".py", ".sh", ".cmake", ".yaml", "CMakeLists.txt", "Makefile")
SKIPPED = {"build", "runs", "data", "__pycache__"}
LICENCE = "SPDX-License-Identifier: Apache-2.0"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')


def files_of(root):
    """Paths below root, relative, of every file that has rules."""
    for folder, folders, names in os.walk(root):
        if folder == root:
            folders[:] = [f for f in folders if f not in SKIPPED]
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(names):
            if name.endswith(SLASHED + HASHED):
                yield os.path.relpath(os.path.join(folder, name), root)


def check_include(path, header):
    """Complaints about one include directive of `path`."""
    folder = path.split("/")[0]
    target = header.split("/")[0]
    if folder in LEVELS and target in LEVELS and folder != target:
        lower = LEVELS[target] < LEVELS[folder]
        if not lower and (folder, target) not in NEIGHBOURS:
            yield f"{folder}/ may not include {target}/ ({header})"
    for library, pattern, allowed in LIBRARIES:
        if pattern.search(header) and not path.startswith(allowed + EVERYWHERE):
            where = ", ".join(allowed) or "no folder"
            yield f"{library} is for {where} alone ({header})"


def check_text(path, lines):
    """Complaints about the text of one file."""
    mark = "// " if path.endswith(SLASHED) else "# "
    first = lines[1:2] if lines and lines[0].startswith("#!") else lines[:1]
    if first != [mark + LICENCE]:
        yield 1, f"want '{mark}{LICENCE}' on the first line"
    limit = HEADER_LINES if path.endswith(".h") else SOURCE_LINES
    if len(lines) > limit:
        yield limit, f"has {len(lines)} lines; want at most {limit}"
    if not path.endswith(CPP):
        return
    # Highway includes an -inl.h once for each SIMD target.
    once = path.endswith(".h") and not path.endswith("-inl.h")
    if once and "#pragma once" not in lines:
        yield 1, "want '#pragma once'"
    for number, line in enumerate(lines, 1):
        if len(line) > COLUMNS:
            yield number, f"has {len(line)} columns; want at most {COLUMNS}"
        found = INCLUDE.match(line)
        if found:
            for complaint in check_include(path, found.group(1)):
                yield number, complaint
        if "getenv(" in line and not path.endswith("_main.cc"):
            yield number, "the environment is read in *_main.cc alone"


def check_registered(root, path):
    """Whether a CMakeLists.txt beside or above a test names it."""
    folder = os.path.dirname(path)
    while folder:
        listing = os.path.join(root, folder, "CMakeLists.txt")
        if os.path.exists(listing):
            name = os.path.relpath(path, folder)
            with open(listing, encoding="utf-8") as file:
                text = file.read()
            if re.search(r"(?<![\w/])" + re.escape(name), text):
                return True
            # foreach(name a b) with ${name}_test.cc.
            stem = re.escape(name[: -len("_test.cc")])
            word = re.search(r"foreach\([^)]*(?<![\w/])" + stem + r"\b", text)
            if word and "}_test.cc" in text:
                return True
        folder = os.path.dirname(folder)
    return False


def check(root):
    """Every violation below root, as 'path:line: text'."""
    violations = []
    for path in files_of(root):
        with open(os.path.join(root, path), encoding="utf-8") as file:
            lines = file.read().splitlines()
        for number, complaint in check_text(path, lines):
            violations.append(f"{path}:{number}: {complaint}")
        if path.startswith("tests/") and path.endswith("_test.cc"):
            if not check_registered(root, path):
                violations.append(f"{path}:1: no CMakeLists.txt names this test")
    return violations


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    violations = check(sys.argv[1])
    for violation in violations:
        print(violation)
    sys.exit(1 if violations else 0)


if __name__ == "__main__":
    main()
