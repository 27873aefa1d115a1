#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints elements of one tensor of a safetensors file as a JSON list.

read_safetensors.py FILE TENSOR [BEGIN:END]
"""

import json
import struct
import sys


def read(path, name, begin=0, end=None):
    """Elements [begin, end) of a row-major tensor, as floats."""
    with open(path, "rb") as file:
        header_bytes = struct.unpack("<Q", file.read(8))[0]
        entry = json.loads(file.read(header_bytes))[name]
        first, last = entry["data_offsets"]
        file.seek(8 + header_bytes + first)
        data = file.read(last - first)
    if entry["dtype"] == "F32":
        values = struct.unpack(f"<{len(data) // 4}f", data)
    elif entry["dtype"] == "BF16":  # The upper half of a float.
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        words = struct.pack(f"<{len(halves)}I", *(h << 16 for h in halves))
        values = struct.unpack(f"<{len(halves)}f", words)
    else:
        raise ValueError(f"dtype {entry['dtype']} is not read here")
    return list(values[begin:end])


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    limits = [int(x) for x in sys.argv[3].split(":")] if sys.argv[3:] else []
    print(json.dumps(read(sys.argv[1], sys.argv[2], *limits)))
