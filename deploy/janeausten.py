#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Joins Jane Austen's six novels into one text file.

Reads the lazy-load database of the R package janeaustenr without R: an index
(Rdata.rdx, gzip) and the values (Rdata.rdb, zlib), both R serialization in XDR
form ("R Internals", section 1.8, "Serialization Formats").

    janeausten.py RDATA_WITHOUT_SUFFIX OUTPUT
"""

import gzip
import os
import struct
import sys
import zlib

# Alphabetical, as the package lists them.
NOVELS = (
    "emma",
    "mansfieldpark",
    "northangerabbey",
    "persuasion",
    "prideprejudice",
    "sensesensibility",
)
TEXT_BYTES = 4025029

# Type codes of R's serialization that a list of character vectors can hold.
SYMBOL, PAIRLIST, CHARACTER, LOGICAL, INTEGER = 1, 2, 9, 10, 13
STRINGS, LIST = 16, 19
REFERENCE, END = 255, 254


class Reader:
    """One serialized R value."""

    def __init__(self, data):
        self.data = data
        self.at = 0
        self.references = []
        if self.take(2) != b"X\n":
            raise ValueError("not R serialization in XDR form")
        version = self.integer()
        self.take(8)  # R versions: of the writer, and the oldest reader.
        if version == 3:
            self.take(self.integer())  # Native encoding.
        elif version != 2:
            raise ValueError(f"R serialization version {version}; want 2 or 3")

    def take(self, count):
        if count < 0 or self.at + count > len(self.data):
            raise ValueError("R serialization is cut short")
        self.at += count
        return self.data[self.at - count : self.at]

    def integer(self):
        return struct.unpack(">i", self.take(4))[0]

    def value(self):
        flags = self.integer()
        kind = flags & 255
        if kind == END:
            return None
        if kind == REFERENCE:
            return self.references[(flags >> 8) - 1]
        if kind == SYMBOL:
            self.references.append(self.value())
            return self.references[-1]
        if kind == CHARACTER:
            length = self.integer()
            return b"" if length == -1 else self.take(length)
        if kind == PAIRLIST:
            return self.pairs(flags)
        if kind in (LOGICAL, INTEGER):
            result = [self.integer() for _ in range(self.integer())]
        elif kind in (STRINGS, LIST):
            result = [self.value() for _ in range(self.integer())]
        else:
            raise ValueError(f"R type {kind} is not expected here")
        if flags & 0x200:  # Has attributes; only names matter.
            names = self.value().get(b"names")
            if names is not None:
                result = dict(zip(names, result))
        return result

    def pairs(self, flags):
        """A pairlist as a dict by tag."""
        result = {}
        while flags & 255 == PAIRLIST:
            if flags & 0x200:
                self.value()
            tag = self.value() if flags & 0x400 else None
            result[tag] = self.value()
            flags = self.integer()
        if flags & 255 != END:
            raise ValueError("a pairlist has no end")
        return result


def read_novel(values, offset, length):
    """Lines of one character vector: a 4-byte length, then zlib data."""
    packed = values[offset + 4 : offset + length]
    return Reader(zlib.decompress(packed)).value()


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    base, output = sys.argv[1:]
    with open(base + ".rdx", "rb") as file:
        index = Reader(gzip.decompress(file.read())).value()[b"variables"]
    with open(base + ".rdb", "rb") as file:
        values = file.read()
    lines = []
    for novel in NOVELS:
        lines += read_novel(values, *index[novel.encode()])
    text = b"".join(line + b"\n" for line in lines)
    if len(text) != TEXT_BYTES:
        sys.exit(
            f"error: the novels are {len(text)} bytes; want {TEXT_BYTES}: "
            "another version of the package?"
        )
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
    # Whoever sees the final name sees the whole text.
    partial = f"{output}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(partial, output)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError, KeyError, EOFError, zlib.error) as error:
        sys.exit(f"error: {sys.argv[1]}.rdx and .rdb cannot be read: {error}")
