#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Servers that are added to and drained from a run that goes on: the bits are
those of a run that nobody touched, and only the chunks that must move do."""

import json

import cluster

# More than it will make: it is told to stop when all has moved.
STEPS = 100_000


class ServerScaleTest(cluster.ClusterTest):
    def settings(self):
        # Many small chunks, so that there is something to choose from.
        return {"run__steps": STEPS, "server__durability": "step",
                "server__chunk_elems": 65536, "checkpoint__every": 25,
                "eval__every": 40}

    def owners(self, run="run"):
        """The owner of each chunk, and the version of the placement."""
        done = self.ballast("shard", "list", "--json", "--run-dir",
                            self.path(run))
        self.assertEqual(done.code, 0, done)
        placement = json.loads(done.out)
        owners = {}
        for tensor in placement["tensors"]:
            for chunk in tensor["chunks"]:
                owners[chunk["chunk"]] = chunk["server"]
        return owners, placement["placement_version"]

    def scale(self, *arguments):
        done = self.ballast("server", *arguments, "--run-dir",
                            self.path("run"), "--timeout", "60s")
        self.assertEqual(done.code, 0, done)

    def await_owners(self, condition, what):
        """Waits until the owners are as wanted; returns them."""
        seen = []

        def holds():
            seen.append(self.owners()[0])
            return condition(set(seen[-1].values()))

        self.await_true(holds, what, 60)
        return seen[-1]

    def test_a_server_is_added_and_another_drained_while_it_trains(self):
        running = self.start("run", **self.settings())
        self.await_step(5)
        first, version = self.owners()
        self.assertEqual(set(first.values()), {"server-0", "server-1"})

        self.scale("add")
        added = self.await_owners(lambda names: "server-2" in names,
                                  "server-2 owns something")
        status = self.status()
        self.assertIn("server-2", status["wanted"])
        # It took from both and nobody gave to anyone else.
        for chunk, server in added.items():
            self.assertIn(server, (first[chunk], "server-2"), chunk)

        self.scale("drain", "server-0")
        drained = self.await_owners(lambda names: "server-0" not in names,
                                    "server-0 owns nothing")
        self.assertEqual(set(drained.values()), {"server-1", "server-2"})
        for chunk, server in drained.items():
            # What was server-1's stays, or went on to the new one.
            if first[chunk] == "server-1":
                self.assertIn(server, ("server-1", "server-2"), chunk)
        self.assertGreater(self.owners()[1], version)
        status = self.status()
        self.assertNotIn("server-0", status["wanted"])

        self.await_step(status["step"] + 5)
        stopped = self.ballast("stop", "--run-dir", self.path("run"))
        self.assertEqual(stopped.code, 0, stopped)
        done = running.finish()
        self.assertEqual(done.code, 0, done)
        summary = self.summary("run")
        reference = self.trained("reference", "--stop-after",
                                 str(summary["steps"]), **self.settings())
        self.assertEqual(summary["steps"], reference["steps"])
        self.assertEqual(summary["state_hash"], reference["state_hash"])


if __name__ == "__main__":
    cluster.main()
