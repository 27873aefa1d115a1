#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Processes that die, stop, leave and come during a run cost time and change no
bit."""

import os
import signal
import time

import cluster

# A step of this job takes some 50 ms here; the run lasts until it is told to
# stop or has seen all the faults of its test.
STEPS = 60
# What a fault may cost on a machine that does other things too; docs say what
# it costs on a calm one.
RECOVERY_MAX_S = 4.0


class WorkerFaultsTest(cluster.ClusterTest):
    reference_hash = None

    def reference(self):
        """The hash of the run that nothing happens to."""
        if WorkerFaultsTest.reference_hash is None:
            WorkerFaultsTest.reference_hash = self.trained(
                "reference", **self.settings())["state_hash"]
        return WorkerFaultsTest.reference_hash

    def settings(self, **more):
        return {"run__steps": STEPS, "server__durability": "step",
                "checkpoint__every": 0, "eval__every": 20,
                "cluster__lease": "1s", "cluster__progress_limit": "1s",
                **more}

    def strike(self, status, name, number=signal.SIGKILL):
        pid = self.pid_of(status, name)
        os.kill(pid, number)
        return pid

    def ended_well(self, running, run="run"):
        done = running.finish()
        self.assertEqual(done.code, 0, done)
        summary = self.summary(run)
        self.assertEqual(summary["steps"], STEPS)
        self.assertEqual(summary["state_hash"], self.reference(), done)
        return summary

    def assert_recovered(self, summary, members, bound=RECOVERY_MAX_S):
        """Each of `members` is named by a fault, whose cost is bounded."""
        faults = summary["faults"]
        for member in members:
            costs = [fault["recovered_seconds"] for fault in faults
                     if fault["member"] == member]
            self.assertTrue(costs, f"no fault of {member} in {faults}")
            self.assertGreaterEqual(min(costs), 0, faults)
            self.assertLess(max(costs), bound, faults)
            print(f"{member}: {', '.join(f'{c:.3f}' for c in costs)} s",
                  flush=True)

    def test_killed_workers(self):
        running = self.start(**self.settings())
        for step, name in ((3, "worker-0"), (10, "worker-1"),
                           (18, "worker-0"), (19, "worker-1")):
            self.strike(self.await_step(step), name)
        summary = self.ended_well(running)
        self.assert_recovered(summary, ["worker-0", "worker-1"])

    def test_workers_that_die_in_narrow_places(self):
        points = self.path("points")
        os.mkdir(points)
        os.environ["BALLAST_CRASH_DIR"] = points
        try:
            running = self.start(**self.settings())
            for step, (first, second) in (
                    (3, ("worker.pass.forward", "worker.pass.backward")),
                    (20, ("worker.pushed.before_end", "worker.done"))):
                # The lives that are up have read their file; the next ones,
                # after a kill, read these.
                status = self.await_step(step)
                for name, point in (("worker-0", first), ("worker-1", second)):
                    with open(os.path.join(points, name), "w",
                              encoding="utf-8") as file:
                        file.write(f"{point} 2\n")
                    self.strike(status, name)
                for point in (first, second):
                    self.await_true(
                        lambda: self.has_crashed(points, point), point, 20)
            self.ended_well(running)
        finally:
            del os.environ["BALLAST_CRASH_DIR"]

    @staticmethod
    def has_crashed(points, point):
        """Whether the point has ended a life, which says so in its counts."""
        for name in os.listdir(points):
            if "." in name:
                with open(os.path.join(points, name), encoding="utf-8") as file:
                    if f"hit {point}" in file.read().splitlines():
                        return True
        return False

    def test_all_workers_killed_at_once(self):
        running = self.start(**self.settings())
        status = self.await_step(5)
        for name in ("worker-0", "worker-1"):
            self.strike(status, name)
        self.ended_well(running)

    def test_killed_servers(self):
        running = self.start(**self.settings())
        for step, name in ((3, "server-0"), (12, "server-1"),
                           (20, "server-0")):
            self.strike(self.await_step(step), name)
        summary = self.ended_well(running)
        self.assert_recovered(summary, ["server-0", "server-1"])

    def test_a_worker_and_a_server_at_once(self):
        running = self.start(**self.settings())
        for step, names in ((4, ("worker-0", "server-1")),
                            (15, ("server-0", "worker-1"))):
            status = self.await_step(step)
            for name in names:
                self.strike(status, name)
        self.ended_well(running)

    def test_a_stopped_worker_is_done_without_and_comes_back(self):
        running = self.start(**self.settings())
        status = self.await_step(5)
        pid = self.strike(status, "worker-0", signal.SIGSTOP)
        try:
            begin = time.monotonic()
            self.await_step(status["step"] + 3)
            print(f"silent worker: {time.monotonic() - begin:.1f} s to the "
                  "third step", flush=True)
        finally:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass  # A supervisor has replaced it.
        summary = self.ended_well(running)
        self.assert_recovered(summary, ["worker-0"])

    def test_a_stopped_server_comes_back_with_what_it_holds(self):
        running = self.start(**self.settings())
        pid = self.strike(self.await_step(5), "server-0", signal.SIGSTOP)
        try:
            self.await_true(
                lambda: any(fault["member"] == "server-0" for fault in
                            (self.status() or {}).get("faults", [])),
                "the stopped server is noticed", 10)
        finally:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass  # A supervisor has replaced it.
        summary = self.ended_well(running)
        self.assert_recovered(summary, ["server-0"], bound=10)

    def test_a_killed_coordinator(self):
        running = self.start(**self.settings())
        for step in (4, 14, 24):
            self.await_step(step)
            pids = [pid for pid in cluster.processes_of(self.path("run"))
                    if self.is_coordinator(pid)]
            self.assertEqual(len(pids), 1)
            os.kill(pids[0], signal.SIGKILL)
        summary = self.ended_well(running)
        self.assert_recovered(summary, ["coordinator"])

    @staticmethod
    def is_coordinator(pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return b"ballast-coordinator" in file.read().split(b"\0")[0]
        except OSError:
            return False

    def test_a_worker_that_is_asked_to_leave_finishes_first(self):
        running = self.start(**self.settings(run__steps=STEPS))
        status = self.await_step(4)
        pid = self.strike(status, "worker-1", signal.SIGTERM)
        self.await_true(lambda: not os.path.exists(f"/proc/{pid}"),
                        "the worker has left", 10)
        self.ended_well(running)
        with open(self.path("run", "logs", "worker-1.log"),
                  encoding="utf-8") as log:
            self.assertIn("event=leaving", log.read())

    def test_workers_come_and_go(self):
        running = self.start(**self.settings())
        self.await_step(3)
        added = self.ballast("worker", "add", "--run-dir", self.path("run"))
        self.assertEqual(added.code, 0, added)
        self.await_true(
            lambda: any(m["name"] == "worker-2" and m["state"] == "active"
                        for m in (self.status() or {"members": []})["members"]),
            "the added worker is in", 10)
        drained = self.ballast("worker", "drain", "worker-0", "--run-dir",
                               self.path("run"))
        self.assertEqual(drained.code, 0, drained)
        self.ended_well(running)


if __name__ == "__main__":
    cluster.main()
