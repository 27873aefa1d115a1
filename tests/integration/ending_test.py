#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""However a run ends, every process ends with it and what was saved can be
continued."""

import json
import os
import signal
import time

import cluster

ENDLESS = {"run__steps": 100_000, "checkpoint__every": 5, "eval__every": 0}
# The first death of a member ends the run.
FRAIL = {**ENDLESS, "cluster__restarts_max": 1}


class EndingTest(cluster.ClusterTest):
    def test_a_member_that_is_not_restarted_is_named_within_15_s(self):
        for name in ("server-1", "worker-0", "server-0"):
            with self.subTest(name):
                run = f"killed-{name}"
                running = self.start(run, **FRAIL)
                status = self.await_step(6, run)
                killed = time.monotonic()
                os.kill(self.pid_of(status, name), signal.SIGKILL)
                done = running.finish(15)
                self.assertLess(time.monotonic() - killed, 15)
                self.assertEqual(done.code, 1, done)
                self.assertIn(f"ballast: {name} (pid ", done.err)
                self.assertIn("was killed by signal 9", done.err)
                # The command it says means this run, overrides and all.
                self.assertIn(f"--set run.dir={self.path(run)} ", done.err)
                self.assertIn("--resume", done.err)
                resumed = self.trained(
                    run, "--resume", "--stop-after", "60", **ENDLESS)
                straight = self.trained(
                    f"{run}-straight", "--stop-after", "60", **ENDLESS)
                self.assertEqual(resumed["state_hash"],
                                 straight["state_hash"])

    def test_a_coordinator_that_is_not_restarted_ends_the_run(self):
        running = self.start("run", **FRAIL)
        self.await_step(6)
        pids = [pid for pid in cluster.processes_of(self.folder)
                if self.name_of(pid) == "ballast-coordin"]
        self.assertEqual(len(pids), 1)
        os.kill(pids[0], signal.SIGKILL)
        done = running.finish(15)
        self.assertEqual(done.code, 1, done)
        self.assertIn("ballast: coordinator (pid ", done.err)

    def test_an_interrupt_saves_and_the_resumed_run_has_the_same_bits(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            run = f"run-{number}"
            running = self.start(run, **ENDLESS)
            self.await_step(3, run)
            running.signal(number)
            done = running.finish(30)
            self.assertEqual(done.code, 0, done)
            self.assertIn("stopping after the step in flight", done.out)
            self.assertIn("resume with: ballast train", done.out)
            self.assertEqual(cluster.processes_of(self.folder), [])
            at = self.summary(run)["steps"]
            self.assertGreaterEqual(at, 3)
            target = str(at + 7)
            resumed = self.trained(run, "--resume", "--stop-after", target,
                                   **ENDLESS)
            straight = self.trained(f"{run}-straight", "--stop-after", target,
                                    **ENDLESS)
            self.assertEqual(resumed["state_hash"], straight["state_hash"])

    def test_an_interrupt_while_it_starts(self):
        for log in ("coordinator", "server-0", "worker-1"):
            with self.subTest(log):
                run = f"early-{log}"
                running = self.start(run, **ENDLESS)
                path = self.path(run, "logs", f"{log}.log")
                self.await_true(lambda path=path: os.path.exists(path),
                                "the process is started", 20)
                running.signal(signal.SIGINT)
                done = running.finish(30)
                self.assertEqual(done.code, 0, done)
                self.assertEqual(cluster.processes_of(self.folder), [])
                # What the message says to do works.
                again = ["--resume"] if " --resume" in done.out else []
                summary = self.trained(run, *again, "--stop-after", "20",
                                       **ENDLESS)
                self.assertEqual(summary["steps"], 20)

    def test_a_second_interrupt_ends_at_once(self):
        running = self.start("run", **ENDLESS)
        status = self.await_step(6)
        # A stopped server never finishes the step in flight.
        os.kill(self.pid_of(status, "server-0"), signal.SIGSTOP)
        running.signal(signal.SIGINT)
        self.await_true(lambda: "stopping after" in self.read("train.out"),
                        "the first interrupt is taken", 10)
        running.signal(signal.SIGINT)
        done = running.finish(5)
        self.assertEqual(done.code, 1, done)
        self.assertIn("ended at once", done.err)
        self.assertEqual(cluster.processes_of(self.folder), [])
        self.assertEqual(
            self.trained("run", "--resume", "--stop-after", "30",
                         **ENDLESS)["steps"], 30)

    def test_the_cluster_ends_when_its_launcher_is_killed(self):
        running = self.start("run", **ENDLESS)
        step = self.await_step(6)["step"]
        running.signal(signal.SIGKILL)
        running.process.wait()
        self.await_true(lambda: not cluster.processes_of(self.folder),
                        "every role has ended", 30)
        # In good order, with a checkpoint of where it was.
        listed = self.ballast("checkpoint", "list", "--json", "--run-dir",
                              self.path("run"))
        self.assertEqual(listed.code, 0, listed)
        saved = json.loads(listed.out)["checkpoints"][-1]
        self.assertTrue(saved["whole"])
        self.assertGreaterEqual(saved["step"], step)
        resumed = self.trained("run", "--resume", "--stop-after", "60",
                               **ENDLESS)
        straight = self.trained("straight", "--stop-after", "60", **ENDLESS)
        self.assertEqual(resumed["state_hash"], straight["state_hash"])

    def test_the_cluster_ends_when_its_launcher_is_killed_early(self):
        # Members that have not joined have no coordinator to tell them.
        for log in ("coordinator", "server-0", "server-1", "worker-1"):
            with self.subTest(log):
                run = f"early-{log}"
                running = self.start(run, **ENDLESS)
                path = self.path(run, "logs", f"{log}.log")
                self.await_true(lambda path=path: os.path.exists(path),
                                "the process is started", 20)
                running.signal(signal.SIGKILL)
                running.process.wait()
                self.await_true(
                    lambda: not cluster.processes_of(self.folder),
                    "every role has ended", 10)

    def test_a_second_launcher_on_the_folder_is_refused(self):
        running = self.start("run", **ENDLESS)
        self.await_step(2)
        done = self.train("run", "--resume", **ENDLESS)
        self.assertEqual(done.code, 1, done)
        self.assertIn("in use by another `ballast train`", done.err)
        self.await_step(self.status()["step"] + 1)  # The first one goes on.
        running.signal(signal.SIGINT)
        self.assertEqual(running.finish(30).code, 0)

    def name_of(self, pid):
        with open(f"/proc/{pid}/comm", encoding="utf-8") as file:
            return file.read().strip()

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()


if __name__ == "__main__":
    cluster.main()
