#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kill anything, lose nothing: whoever is killed or stopped, whoever comes or
goes, the run goes on by itself and ends in the bits of an undisturbed one."""

import json
import os
import signal

import cluster

# Long enough for several faults of each role, on two busy cores too.
STEPS = 120
SETTINGS = {"run__steps": STEPS, "server__durability": "step",
            "checkpoint__every": 50, "eval__every": 100,
            "cluster__lease": "1s", "cluster__progress_limit": "1s",
            "cluster__restarts_max": 20}


class ChaosTest(cluster.ClusterTest):
    reference = {}

    def undisturbed(self, steps):
        """The state's hash after so many steps in which nothing happens;
        neither durability nor the checkpoints change it."""
        if steps not in self.reference:
            summary = self.trained(f"undisturbed{steps}",
                                   **{**SETTINGS, "run__steps": steps})
            self.assertEqual(summary["faults"], [])
            self.reference[steps] = summary["state_hash"]
        return self.reference[steps]

    def check_end(self, done, run="run", **settings):
        """It ended well, with the bits and the log of an undisturbed run."""
        self.assertEqual(done.code, 0, done)
        summary = self.summary(run)
        self.assertEqual(summary["steps"], settings["run__steps"])
        self.assertEqual(summary["state_hash"],
                         self.undisturbed(settings["run__steps"]), done)
        with open(self.path(run, "metrics.jsonl"), encoding="utf-8") as file:
            steps = [json.loads(line)["step"] for line in file]
        self.assertEqual(steps, list(range(1, settings["run__steps"] + 1)))
        chain = self.ballast("checkpoint", "verify", "--json", "--chain",
                             self.path(run))
        self.assertEqual(chain.code, 0, chain)
        self.assertEqual(json.loads(chain.out)["last_step"],
                         settings["run__steps"])
        return summary

    def test_a_rehearsal_ends_in_the_same_bits(self):
        for seed in (7, 8):
            with self.subTest(seed=seed):
                run = f"chaos{seed}"
                done = self.train(
                    run, "--chaos", f"seed={seed},kill=worker:1300ms,"
                    "kill=server:1900ms,kill=coordinator:2300ms", **SETTINGS)
                summary = self.check_end(done, run, **SETTINGS)
                faults = summary["faults"]
                self.assertGreaterEqual(len(faults), 6, faults)
                for fault in faults:
                    self.assertEqual(
                        fault["role"], fault["member"].split("-")[0], fault)
                    self.assertTrue(fault["kind"], fault)
                    self.assertGreaterEqual(fault["step"], 0, fault)
                self.assertEqual({fault["role"] for fault in faults},
                                 {"worker", "server", "coordinator"})
                # Each was followed by a step, but for those at the very end.
                recovered = [fault["recovered_seconds"] for fault in faults]
                self.assertLessEqual(
                    sum(seconds < 0 for seconds in recovered), 2, faults)
                for role in ("worker", "server", "coordinator"):
                    self.assertRegex(done.out, rf"(?m)^{role} +\d+ +[\d.]+")
                self.assertIn("by --chaos", done.out)

    def test_a_stopped_member_is_replaced_and_comes_back(self):
        done = self.train("run", "--chaos", "seed=3,stop=worker:3s", **SETTINGS)
        summary = self.check_end(done, **SETTINGS)
        self.assertIn("is stopped by --chaos for 2s", done.out)
        self.assertGreaterEqual(len(summary["faults"]), 1)

    def test_faults_from_outside_are_handled_the_same_way(self):
        for durability in ("step", "checkpoint"):
            with self.subTest(durability=durability):
                run = f"outside-{durability}"
                settings = {**SETTINGS, "checkpoint__every": 10,
                            "server__durability": durability}
                running = self.start(run, **settings)
                for name in ("worker-1", "server-0", "coordinator"):
                    status = self.await_step(1, run)
                    os.kill(self.pid_of_any(status, name), signal.SIGKILL)
                    faults = len(status["faults"])
                    self.await_true(
                        lambda faults=faults: self.recovered(run) > faults,
                        f"a step after the death of {name}", 30)
                summary = self.check_end(running.finish(), run, **settings)
                members = [fault["member"] for fault in summary["faults"]]
                self.assertEqual(members[:3],
                                 ["worker-1", "server-0", "coordinator"])

    def test_members_come_and_go_while_it_trains(self):
        endless = {**SETTINGS, "run__steps": 100_000}
        running = self.start("run", **endless)
        self.await_step(2)
        for arguments, name in ((("worker", "add"), "worker-2"),
                                (("server", "add"), "server-2"),
                                (("worker", "drain", "0"), "worker-0"),
                                (("server", "drain", "server-0"), "server-0")):
            done = self.ballast(*arguments, "--json", "--timeout", "60s",
                                "--run-dir", self.path("run"))
            if done.code != 0:
                running.signal(signal.SIGTERM)
                self.fail((arguments, done, running.finish()))
            self.assertEqual(json.loads(done.out),
                             {"names": [name], "done": True})
        status = self.await_step(self.status()["step"] + 5)
        self.assertEqual(sorted(status["wanted"]),
                         ["server-1", "server-2", "worker-1", "worker-2"])
        running.signal(signal.SIGINT)
        done = running.finish()
        self.assertEqual(done.code, 0, done)
        summary = self.summary()
        straight = self.trained("straight", "--stop-after",
                                str(summary["steps"]), **endless)
        self.assertEqual(summary["state_hash"], straight["state_hash"])

    def test_a_member_that_always_dies_is_given_up_by_name(self):
        running = self.start("run", **{**SETTINGS, "cluster__restarts_max": 3,
                                       "run__steps": 100_000})
        self.await_step(2)
        # The server's folder is taken away, so no life of it gets far.
        pid = self.pid_of(self.status(), "server-1")
        folder = self.path("run", "servers", "server-1")
        os.rename(folder, folder + ".away")
        with open(folder, "w", encoding="utf-8"):
            pass
        os.kill(pid, signal.SIGKILL)
        done = running.finish(30)
        self.assertIn(done.code, (1, 78), done)
        self.assertIn("ballast: server-1 (pid ", done.err)
        self.assertIn("logs/server-1.log", done.err)
        self.assertIn("--resume", done.err)

    def recovered(self, run):
        """How many faults have been followed by a step."""
        status = self.status(run)
        return 0 if status is None else sum(
            fault["recovered_seconds"] >= 0 for fault in status["faults"])

    def pid_of_any(self, status, name):
        if name != "coordinator":
            return self.pid_of(status, name)
        for pid in cluster.processes_of(self.folder):
            with open(f"/proc/{pid}/comm", encoding="utf-8") as file:
                if file.read().strip() == "ballast-coordin":
                    return pid
        self.fail("no coordinator")
        return 0


if __name__ == "__main__":
    cluster.main()
