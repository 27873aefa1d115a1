#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a run holds can be asked for while it trains and after it has ended, and
the answers agree with each other."""

import json
import os

import cluster

TENSOR = "h.0.attn.c_attn.weight"


class QueryTest(cluster.ClusterTest):
    def query(self, *arguments):
        done = self.ballast(*arguments, "--json", "--run-dir",
                            self.path("run"))
        self.assertEqual(done.code, 0, done)
        return json.loads(done.out)

    def hold(self, *options, **settings):
        """Trains with --keep and returns once the last step is done."""
        running = self.start("run", "--keep", *options, **settings)
        self.await_true(
            lambda: (self.status() or {"phase": ""})["phase"] == "done",
            "the last step is done", 60)
        return running

    def test_a_slice_equals_the_export(self):
        for chunk_elems in (65536, 1 << 20):
            with self.subTest(chunk_elems):
                self.check_slices(chunk_elems)

    def check_slices(self, chunk_elems):
        running = self.hold("--servers", "3", run__steps=8,
                            server__chunk_elems=chunk_elems)
        output = self.path(f"{chunk_elems}.safetensors")
        exported = self.query("checkpoint", "export", "--format",
                              "safetensors", "--full", "--output", output)
        self.assertEqual(exported["step"], 8)
        metadata, tensors = cluster.read_safetensors(output)
        self.assertEqual(metadata["format"], "pt")
        shape, values = tensors[TENSOR]
        self.assertEqual(shape, [192, 576])
        # Both sides of the boundary of a block, which may be one of a chunk.
        for begin, end in ((0, 4), (65530, 65542), (110_580, 110_592)):
            got = self.query("shard", "get", TENSOR, "--slice",
                             f"{begin}:{end}")
            self.assertEqual(got["step"], 8)
            self.assertEqual(got["shape"], shape)
            self.assertEqual(tuple(got["values"]), values[begin:end])
        for field in ("exp_avg", "exp_avg_sq"):
            got = self.query("shard", "get", "h.1.ln_2.bias", "--field", field)
            self.assertEqual(tuple(got["values"]),
                             tensors[f"{field}.h.1.ln_2.bias"][1])
            self.assertNotEqual(set(got["values"]), {0.0})
        stopped = self.ballast("stop", "--run-dir", self.path("run"))
        self.assertEqual(stopped.code, 0, stopped)
        self.assertEqual(running.finish(30).code, 0)
        self.assertEqual(cluster.processes_of(self.folder), [])
        offline = self.path("offline.safetensors")
        self.query("checkpoint", "export", "--output", offline, "--force")
        self.assertEqual(cluster.read_safetensors(offline)[1][TENSOR][1],
                         values)
        os.rename(self.path("run"), self.path(f"old-{chunk_elems}"))

    def test_every_tensor_is_listed_exported_and_located(self):
        running = self.hold(run__steps=3)
        listed = self.query("shard", "list")["tensors"]
        output = self.path("all.safetensors")
        self.query("checkpoint", "export", "--output", output)
        tensors = cluster.read_safetensors(output)[1]
        self.assertEqual({entry["name"] for entry in listed}, set(tensors))
        self.assertIn("wte.weight", tensors)
        servers = set()
        for entry in listed:
            self.assertEqual(entry["shape"], tensors[entry["name"]][0])
            at = 0
            for chunk in entry["chunks"]:
                self.assertEqual(chunk["begin"], at)
                at = chunk["end"]
                servers.add(chunk["server"])
            self.assertEqual(at, entry["elements"])
            located = self.query("shard", "locate", entry["name"])
            self.assertEqual(located["chunks"], entry["chunks"])
        self.assertEqual(servers, {"server-0", "server-1"})
        running.signal(2)
        self.assertEqual(running.finish(30).code, 0)

    def test_status_names_members_budgets_and_progress(self):
        running = self.hold(run__steps=10)
        status = self.status()
        self.assertEqual(status["step"], 10)
        self.assertEqual(status["steps"], 10)
        self.assertEqual({member["name"] for member in status["members"]},
                         {"server-0", "server-1", "worker-0", "worker-1"})
        for member in status["members"]:
            stats = member["stats"]
            self.assertGreater(stats["memory_peak_bytes"], 0)
            self.assertLessEqual(stats["memory_peak_bytes"],
                                 stats["memory_budget_bytes"])
        text = self.ballast("status", "--run-dir", self.path("run"))
        self.assertIn("10 of 10", text.out)
        self.assertIn("worker-1", text.out)
        running.signal(2)
        self.assertEqual(running.finish(30).code, 0)

    def test_a_query_while_training_reads_one_step(self):
        running = self.start("run", run__steps=100_000, checkpoint__every=0,
                             eval__every=0)
        self.await_step(3)
        steps = []
        for _ in range(5):
            got = self.query("shard", "get", "wte.weight")
            self.assertEqual(len(got["values"]), 256 * 192)
            steps.append(got["step"])
        self.assertEqual(steps, sorted(steps))
        self.assertGreaterEqual(steps[0], 3)
        for arguments, word in ((("no.such.tensor",), "no tensor"),
                                (("wte.weight", "--slice", "0:99999999"),
                                 "beyond the tensor"),
                                (("wte.weight", "--field", "momentum"),
                                 "--field")):
            done = self.ballast("shard", "get", *arguments, "--run-dir",
                                self.path("run"))
            self.assertEqual(done.code, 1, done)
            self.assertIn(word, done.err)
        stopped = self.ballast("stop", "--run-dir", self.path("run"))
        self.assertEqual(stopped.code, 0, stopped)
        self.assertEqual(running.finish(30).code, 0)

    def test_checkpoints_are_listed_kept_and_not_overwritten(self):
        self.trained("run", checkpoint__every=5, checkpoint__keep=3)
        listed = self.query("checkpoint", "list")["checkpoints"]
        self.assertEqual([entry["step"] for entry in listed], [20, 25, 30])
        verified = self.query("checkpoint", "verify")
        self.assertEqual(verified["damaged"], 0)
        self.assertEqual(verified["checkpoints"][-1]["state_hash"],
                         self.summary("run")["state_hash"])
        output = self.path("out.safetensors")
        self.query("checkpoint", "export", "--step", "25", "--output", output)
        again = self.ballast("checkpoint", "export", "--run-dir",
                             self.path("run"), "--output", output)
        self.assertEqual(again.code, 1, again)
        self.assertEqual(cluster.read_safetensors(output)[0]["ballast_step"],
                         "25")
        missing = self.ballast("checkpoint", "export", "--run-dir",
                               self.path("run"), "--step", "7", "--output",
                               self.path("x"))
        self.assertEqual(missing.code, 1)
        self.assertIn("20, 25, 30", missing.err)


if __name__ == "__main__":
    cluster.main()
