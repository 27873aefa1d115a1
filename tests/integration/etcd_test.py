# SPDX-License-Identifier: Apache-2.0
"""Several coordinators over one etcd: whoever is killed, the run ends with the
bits of a run that nothing happened to."""

import json
import os
import re
import signal
import subprocess
import unittest

import cluster
from etcd import Etcd, free_port

LEADER = re.compile(r"event=leading .*\bterm=(\d+)")


class Role:
    """One process of a run that the test starts by hand."""

    def __init__(self, test, name, arguments):
        self.name = name
        self.log = test.path(f"{name}.log")
        self.arguments = arguments
        self.process = None
        self.start()

    def start(self):
        with open(self.log, "a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [os.path.join(cluster.BINARIES, self.arguments[0]),
                 *self.arguments[1:]], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log)

    def text(self):
        with open(self.log, encoding="utf-8") as log:
            return log.read()

    def signal(self, number):
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def term(self):
        """The last term that this coordinator led; 0: none."""
        terms = LEADER.findall(self.text())
        return int(terms[-1]) if terms else 0


@unittest.skipUnless(
    Etcd.installed(), "etcd is not installed (deploy/install-deps.sh): standby "
    "coordinators are NOT tested")
class EtcdTest(cluster.ClusterTest):
    def setUp(self):
        super().setUp()
        self.roles = {}
        self.etcd = Etcd(self.folder)
        self.etcd.start()

    def tearDown(self):
        for role in self.roles.values():
            if role.process.poll() is None:
                role.process.send_signal(signal.SIGCONT)
                role.process.kill()
                role.process.wait()
        self.etcd.kill()
        super().tearDown()

    def launch(self, steps):
        """The reference run, then the same job by hand in the folder `ha`."""
        self.reference = self.trained("run", run__steps=steps,
                                      server__durability="step")
        with open(self.path("run", "config.yaml"), encoding="utf-8") as file:
            job = file.read()
        self.write("ha.yaml",
                   job.replace(self.path("run"), self.path("ha")))
        ports = [free_port() for _ in range(2)]
        for index, port in enumerate(ports):
            self.begin(f"coordinator-{index}", "ballast-coordinator",
                       "--continue", "--port", str(port), "--state-store",
                       f"etcd://{self.etcd.address}")
        where = ",".join(f"127.0.0.1:{port}" for port in ports)
        for index in range(2):
            self.begin(f"server-{index}", "ballast-ps", "--coordinator", where,
                       "--index", str(index), "--data-dir",
                       self.path("ha-data", str(index)))
            self.begin(f"worker-{index}", "ballast-worker", "--coordinator",
                       where, "--index", str(index))

    def begin(self, name, program, *arguments):
        self.roles[name] = Role(
            self, name, [program, "--config", self.path("ha.yaml"), *arguments])

    def leader(self):
        """The coordinator that led last, once there is one."""
        pair = [self.roles["coordinator-0"], self.roles["coordinator-1"]]
        self.await_true(lambda: any(role.term() for role in pair),
                        "a coordinator leads", 30)
        return max(pair, key=Role.term)

    def steps_done(self):
        try:
            with open(self.path("ha", "metrics.jsonl"),
                      encoding="utf-8") as file:
                return [json.loads(line)["step"]
                        for line in file.read().splitlines()
                        if line.endswith("}")]
        except OSError:
            return []

    def await_steps(self, count):
        self.await_true(lambda: len(self.steps_done()) >= count,
                        f"{count} steps: {self.logs()}", 60)

    def logs(self):
        return "\n".join(f"--- {role.name}\n{role.text()[-3000:]}"
                         for role in self.roles.values())

    def check_end(self, steps, events):
        for role in self.roles.values():
            try:
                role.process.wait(cluster.RUN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.fail(f"{role.name} does not end\n{self.logs()}")
            self.assertEqual(role.process.returncode, 0,
                             f"{role.name}\n{self.logs()}")
        summary = self.summary("ha")
        self.assertEqual(summary["outcome"], "done")
        self.assertEqual(summary["timeline"], 1)
        self.assertEqual(summary["state_hash"], self.reference["state_hash"])
        self.assertEqual(summary["final_loss"], self.reference["final_loss"])
        self.assertEqual(self.steps_done(), list(range(1, steps + 1)))
        for event in events:
            self.assertIn(event, self.logs())

    def test_a_killed_leader_and_a_killed_etcd_change_no_bit(self):
        steps = 60
        self.launch(steps)
        self.await_steps(5)
        leader = self.leader()
        leader.signal(signal.SIGKILL)
        seen = len(self.steps_done())
        self.await_steps(seen + 5)
        self.assertNotEqual(self.leader().name, leader.name)
        leader.start()  # A supervisor would; it stands by now.
        self.etcd.kill()
        self.etcd.start()
        seen = len(self.steps_done())
        self.await_steps(seen + 5)
        self.leader().signal(signal.SIGKILL)
        self.await_true(lambda: self.leader().name == leader.name,
                        f"the first one leads again: {self.logs()}", 30)
        for role in self.roles.values():
            if role.process.poll() is not None:
                role.start()
        self.check_end(steps, ["standing_by", "leading"])

    def test_a_leader_that_was_paused_changes_nothing_and_stands_by(self):
        steps = 40
        self.launch(steps)
        self.await_steps(5)
        leader = self.leader()
        leader.signal(signal.SIGSTOP)
        self.await_true(lambda: self.leader().name != leader.name,
                        f"the other one leads: {self.logs()}", 30)
        leader.signal(signal.SIGCONT)
        self.await_true(lambda: "event=superseded" in leader.text(),
                        f"the old one steps down: {self.logs()}", 30)
        self.check_end(steps, ["event=superseded"])


if __name__ == "__main__":
    cluster.main()
