#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants one violation of each rule in a small tree and expects check_tree to
name it, and nothing else."""

import os
import tempfile
import unittest

import check_tree

SLASHED = "// SPDX-License-Identifier: Apache-2.0\n"
HASHED = "# SPDX-License-Identifier: Apache-2.0\n"
HEADER = SLASHED + "#pragma once\n"


class CheckTreeTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.plant("common/a.h", HEADER)
        self.plant("proto/b.h", HEADER + '#include "common/a.h"\n')
        self.plant("storage/c.cc", SLASHED + "#include <rocksdb/db.h>\n")
        self.plant("ps/shard/d.cc", SLASHED + "#include <grpcpp/grpcpp.h>\n")
        self.plant("ps/e_main.cc", SLASHED + 'getenv("HOME");\n')
        self.plant("tests/ps/f_test.cc", SLASHED + '#include "ps/d.h"\n')
        self.plant("tests/ps/CMakeLists.txt", HASHED + "SRCS f_test.cc\n")
        self.plant("tool.py", "#!/usr/bin/env python3\n" + HASHED)
        self.plant("build/x.cc", "not ours\n")

    def plant(self, path, text):
        full = os.path.join(self.folder.name, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="utf-8") as file:
            file.write(text)

    def expect_one(self, *parts):
        violations = check_tree.check(self.folder.name)
        self.assertEqual(len(violations), 1, violations)
        for part in parts:
            self.assertIn(part, violations[0])

    def test_a_tree_that_keeps_the_rules_has_no_violation(self):
        self.assertEqual(check_tree.check(self.folder.name), [])

    def test_an_include_upwards_is_caught(self):
        self.plant("common/x.cc", SLASHED + '#include "rpc/status.h"\n')
        self.expect_one("common/x.cc:2", "common/ may not include rpc/")

    def test_common_may_not_include_proto(self):
        self.plant("common/x.cc", SLASHED + '#include "proto/b.h"\n')
        self.expect_one("common/ may not include proto/")

    def test_folders_of_one_level_are_strangers(self):
        self.plant("ps/x.cc", SLASHED + '#include "worker/loop.h"\n')
        self.expect_one("ps/ may not include worker/")
        self.plant("ps/x.cc", SLASHED)
        self.plant("worker/x.cc", SLASHED + '#  include "ps/shard/d.h"\n')
        self.expect_one("worker/ may not include ps/")

    def test_nothing_includes_tests(self):
        self.plant("worker/x.cc", SLASHED + '#include "tests/fake.h"\n')
        self.expect_one("worker/ may not include tests/")

    def test_a_library_outside_its_folders_is_caught(self):
        for path, header, library in (
            ("common/x.cc", "grpcpp/grpcpp.h", "gRPC"),
            ("ps/membership/x.cc", "grpc/grpc.h", "gRPC"),
            ("ps/membership/x.cc", "proto/ballast.grpc.pb.h", "gRPC"),
            ("ps/shard/x.cc", "rocksdb/db.h", "RocksDB"),
            ("worker/x.cc", "oneapi/dnnl/dnnl.hpp", "oneDNN"),
            ("worker/x.cc", "dnnl.hpp", "oneDNN"),
            ("rpc/x.cc", "liburing.h", "liburing"),
            ("worker/x.cc", "cuda_runtime.h", "CUDA"),
            ("rpc/x.cc", "absl/synchronization/mutex.h", "absl::Mutex"),
        ):
            with self.subTest(path=path, header=header):
                self.plant(path, SLASHED + f"#include <{header}>\n")
                self.expect_one(path + ":2", library, header)
                self.plant(path, SLASHED)

    def test_a_missing_licence_line_is_caught(self):
        for path in ("rpc/x.cc", "proto/x.proto", "rpc/CMakeLists.txt", "x.sh"):
            with self.subTest(path=path):
                self.plant(path, "\n")
                self.expect_one(path, "SPDX")
                os.unlink(os.path.join(self.folder.name, path))

    def test_files_may_be_as_long_as_the_limit_and_no_longer(self):
        for path, text, limit in (
            ("rpc/x.h", HEADER, 300),
            ("rpc/x.cc", SLASHED, 600),
        ):
            text += "\n" * (limit - text.count("\n"))
            self.plant(path, text)
            self.assertEqual(check_tree.check(self.folder.name), [])
            self.plant(path, text + "\n")
            self.expect_one(path, f"{limit + 1} lines")
            self.plant(path, text)

    def test_lines_may_have_80_columns_and_no_more(self):
        self.plant("rpc/x.cc", SLASHED + "é" * 80 + "\n")
        self.assertEqual(check_tree.check(self.folder.name), [])
        self.plant("rpc/x.cc", SLASHED + "é" * 81 + "\n")
        self.expect_one("rpc/x.cc:2", "81 columns")

    def test_a_header_without_pragma_once_is_caught(self):
        self.plant("rpc/x.h", SLASHED)
        self.expect_one("rpc/x.h", "#pragma once")

    def test_the_environment_is_read_in_main_files_alone(self):
        self.plant("rpc/x.cc", SLASHED + 'std::getenv("HOME");\n')
        self.expect_one("rpc/x.cc:2", "environment")

    def test_a_test_that_no_listing_names_is_caught(self):
        self.plant("tests/ps/other_f_test.cc", SLASHED)
        self.expect_one("tests/ps/other_f_test.cc", "no CMakeLists.txt names")
        self.plant("tests/CMakeLists.txt", HASHED + "SRCS ps/other_f_test.cc\n")
        self.assertEqual(check_tree.check(self.folder.name), [])

    def test_a_loop_over_names_registers_them(self):
        loop = HASHED + "foreach(name f g)\n  SRCS ${name}_test.cc\n"
        self.plant("tests/ps/CMakeLists.txt", loop)
        self.assertEqual(check_tree.check(self.folder.name), [])
        self.plant("tests/ps/h_test.cc", SLASHED)
        self.expect_one("tests/ps/h_test.cc", "no CMakeLists.txt names")

    def test_a_longer_name_does_not_register_a_shorter_one(self):
        self.plant("tests/ps/CMakeLists.txt", HASHED + "SRCS my_f_test.cc\n")
        self.expect_one("tests/ps/f_test.cc", "no CMakeLists.txt names")


if __name__ == "__main__":
    unittest.main()
