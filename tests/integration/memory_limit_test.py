#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A budget is a limit that the kernel may enforce: examples/deep.yaml with every
process in a cgroup of its budget plus the fixed base (page cache counts there),
and the same bits as with memory for everything."""

import os
import shutil
import sys
import unittest

import cluster

MIB = 2**20
BASE = 96 * MIB  # The cap on the base of an empty process.
STEPS = 2
SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))

ENTER = """#!/bin/sh
group={root}/ballast-{test}-{role}-$$
mkdir "$group" && echo {limit} > "$group/{limit_file}" || exit 1
echo $$ > "$group/cgroup.procs" || exit 1
exec {binary} "$@"
"""


class Groups:
    """Memory cgroups of this test, version 1 or 2; None when there are none."""

    V1 = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes",
          "memory.max_usage_in_bytes", "memory.oom_control")
    V2 = ("/sys/fs/cgroup", "memory.max", "memory.peak", "memory.events")

    def __init__(self, version):
        self.root, self.limit_file, self.peak_file, self.events_file = version
        self.prefix = f"ballast-{os.getpid()}-"

    @classmethod
    def open(cls):
        for version in (cls.V1, cls.V2):
            groups = cls(version)
            probe = os.path.join(groups.root, groups.prefix + "probe")
            try:
                os.mkdir(probe)
            except OSError:
                continue
            usable = os.path.exists(os.path.join(probe, groups.limit_file))
            os.rmdir(probe)
            if usable:
                return groups
        return None

    def paths(self):
        return [os.path.join(self.root, name)
                for name in os.listdir(self.root)
                if name.startswith(self.prefix)]

    def read(self, path, name):
        with open(os.path.join(path, name), encoding="utf-8") as file:
            return file.read()

    def kills(self, path):
        for line in self.read(path, self.events_file).splitlines():
            words = line.split()
            if words[0] == "oom_kill":
                return int(words[1])
        return 0

    def remove(self):
        for path in self.paths():
            os.rmdir(path)


class MemoryLimitTest(cluster.ClusterTest):
    def setUp(self):
        super().setUp()
        self.groups = Groups.open()
        if self.groups is None:
            print("SKIPPED: no memory cgroup can be made here; the budgets were "
                  "not held against the kernel", file=sys.stderr)
            self.skipTest("no memory cgroup can be made here")
        self.addCleanup(self.groups.remove)

    def deep(self, name, binaries, **settings):
        arguments = [os.path.join(binaries, "ballast"), "train",
                     os.path.join(SOURCE, "examples", "deep.yaml")]
        settings = {"run.dir": self.path(name), "run.steps": STEPS,
                    "schedule.warmup_steps": 1, "cluster.port": 0,
                    "data.path": self.path("text.txt"),
                    "data.validation_fraction": 0.3,
                    "eval.micro_batches": 1, **settings}
        for key, value in settings.items():
            arguments += ["--set", f"{key}={value}"]
        running = cluster.Running(arguments, self.folder)
        self.background.append(running)
        done = running.finish(timeout=400)
        self.assertEqual(done.code, 0, done)
        return self.summary(name)

    def limited_binaries(self, limits):
        """A folder whose roles enter a cgroup before they start."""
        folder = self.path("bin")
        os.mkdir(folder)
        shutil.copy(os.path.join(cluster.BINARIES, "ballast"), folder)
        for role, limit in limits.items():
            path = os.path.join(folder, f"ballast-{role}")
            with open(path, "w", encoding="utf-8") as file:
                file.write(ENTER.format(
                    root=self.groups.root, test=os.getpid(), role=role,
                    limit=limit, limit_file=self.groups.limit_file,
                    binary=os.path.join(cluster.BINARIES, f"ballast-{role}")))
            os.chmod(path, 0o755)
        return folder

    def test_no_kill_and_the_same_bits(self):
        limits = {"coordinator": BASE, "ps": 104 * MIB + BASE,
                  "worker": (72 + 512) * MIB + BASE}
        limited = self.deep("limited", self.limited_binaries(limits))
        groups = self.groups.paths()
        self.assertEqual(len(groups), 4, groups)
        for path in groups:
            print(f"{os.path.basename(path)}: peak "
                  f"{int(self.groups.read(path, self.groups.peak_file)) / MIB:.0f}"
                  f" MiB, limit "
                  f"{int(self.groups.read(path, self.groups.limit_file)) / MIB:.0f}"
                  " MiB")
            self.assertEqual(self.groups.kills(path), 0, path)
        self.assertGreater(limited["weights_bytes"],
                           4 * limited["worker_budget_bytes"])
        self.assertGreater(limited["state_bytes"],
                           4 * 2 * limited["server_ram_budget_bytes"])
        self.assertLessEqual(limited["worker_peak_bytes"],
                             limited["worker_budget_bytes"])
        self.assertLessEqual(limited["server_peak_bytes"],
                             limited["server_ram_budget_bytes"])

        ample = self.deep("ample", cluster.BINARIES, **{
            "worker.memory": "4GiB", "server.memory": "2GiB",
            "server.count": 1})
        self.assertEqual(ample["state_hash"], limited["state_hash"])
        self.assertEqual(ample["final_validation_loss"],
                         limited["final_validation_loss"])


if __name__ == "__main__":
    cluster.main()
