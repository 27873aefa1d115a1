#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bad input gets a clear error with its exit code, in bounded time, and nothing
is lost or left behind."""

import json
import os
import shutil
import socket
import stat

import cluster

CONFIG = 78


class BadInputTest(cluster.ClusterTest):
    def test_a_job_that_cannot_run_names_the_key(self):
        cases = (
            # Settings, words of the message.
            ({"worker__memry": "1MiB"}, ["did you mean worker.memory?"]),
            ({"model__width": 191}, ["model.width", "model.heads = 4"]),
            ({"worker__count": 5}, ["worker.count", "batch.micro_batches"]),
            ({"optimizer__momentum": 0.5}, ["optimizer.momentum has no effect"]),
            ({"server__durability": "replica"}, ["not built yet"]),
            ({"run__steps": "many"}, ["run.steps is `many`"]),
            ({"worker__memory": "64KiB"}, ["worker.memory", "embedding",
                                           "smallest worker.memory"]),
            ({"worker__memory": "1MiB"}, ["worker.memory", "h.0",
                                          "smallest worker.memory"]),
            ({"server__memory": "64KiB"}, ["server.memory", "want at least"]),
            ({"cluster__host": "0"}, ["cluster.host is `0`", "IPv4"]),
            ({"cluster__host": "::1"}, ["cluster.host is `::1`", "IPv4"]),
            ({"data__path": "none.txt"}, ["data.path none.txt is not there"]),
            ({"eval__micro_batches": 9999}, ["eval.micro_batches"]),
        )
        for settings, words in cases:
            with self.subTest(settings):
                done = self.train("bad", **settings)
                self.assertIn(done.code, (1, CONFIG), done)
                for word in words:
                    self.assertIn(word, done.err)
                shutil.rmtree(self.path("bad"), ignore_errors=True)

    def test_a_text_that_is_empty_or_short(self):
        for size, word in ((0, "is empty"), (32, "model.context"),
                           (200, "held-out")):
            with self.subTest(size):
                self.write_text(size)
                done = self.train("bad")
                self.assertEqual(done.code, CONFIG, done)
                self.assertIn(word, done.err)
                shutil.rmtree(self.path("bad"), ignore_errors=True)

    def test_a_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            done = self.train("run", cluster__port=port)
            self.assertIn(done.code, (1, CONFIG), done)
            self.assertIn(str(port), done.err)
        # A start that came to nothing is no obstacle.
        self.trained("run", run__steps=3)

    def test_an_earlier_run_is_kept(self):
        first = self.trained("run", run__steps=5)
        done = self.train("run", run__steps=5)
        self.assertEqual(done.code, 1, done)
        self.assertIn("holds an earlier run", done.err)
        self.assertIn("--resume", done.err)
        self.assertEqual(self.summary("run"), first)

    def test_a_resume_with_other_numerics(self):
        self.trained("run", "--stop-after", "10")
        done = self.train("run", "--resume", optimizer__lr=0.5)
        self.assertEqual(done.code, CONFIG, done)
        self.assertIn("optimizer.lr is 0.5", done.err)
        self.assertIn("0.003", done.err)
        self.assertEqual(self.trained("run", "--resume")["steps"], 30)

    def test_a_resume_with_another_text(self):
        self.trained("run", "--stop-after", "10")
        with open(self.path("text.txt"), encoding="utf-8") as file:
            text = file.read()
        for changed in (text[:1000] + "X" + text[1001:], text[:-1],
                        text + "."):
            self.write("text.txt", changed)
            done = self.train("run", "--resume")
            self.assertEqual(done.code, CONFIG, done)
            self.assertIn("text.txt has changed", done.err)
        self.write("text.txt", text)
        self.assertEqual(self.trained("run", "--resume")["steps"], 30)
        done = self.train("other", data__hash="0" * 32)
        self.assertEqual(done.code, CONFIG, done)
        self.assertIn("data.hash is 0000", done.err)

    def test_a_count_that_is_none_says_what_is_wanted(self):
        for option in ("--stop-after", "--servers", "--workers"):
            for value in ("0", "-1", "many"):
                done = self.train("run", option, value)
                self.assertEqual(done.code, 2, done)
                self.assertIn(f"`{value}`; want a whole number from 1",
                              done.err)

    def test_the_reason_of_an_end_is_said_once(self):
        done = self.train("run", run__steps=100, optimizer__lr=1e30,
                          cluster__skip_max=2)
        self.assertEqual(done.code, 1, done)
        self.assertEqual(done.err.count("are not finite"), 1, done)
        self.assertNotIn("last lines of", done.err)

    def test_an_export_replaces_files_only(self):
        self.trained("run", run__steps=3)
        os.mkfifo(self.path("pipe"))
        for path in (self.path("pipe"), self.folder):
            done = self.ballast("checkpoint", "export", "--force", "--run-dir",
                                self.path("run"), "--output", path)
            self.assertEqual(done.code, 1, done)
            self.assertIn("is no file", done.err)
        self.assertTrue(stat.S_ISFIFO(os.stat(self.path("pipe")).st_mode))

    def test_a_list_of_nothing_is_an_error(self):
        done = self.ballast("checkpoint", "list", "--run-dir",
                            self.path("none"))
        self.assertEqual(done.code, 1, done)
        self.assertIn("no checkpoint in", done.err)

    def test_a_resume_of_nothing(self):
        done = self.train("none", "--resume")
        self.assertEqual(done.code, 1, done)
        self.assertIn("nothing to resume", done.err)
        self.assertFalse(os.path.exists(self.path("none")))

    def test_a_data_directory_of_another_run(self):
        self.trained("first", "--stop-after", "5")
        before = self.contents("first/servers")
        done = self.train("second", server__data_dir=self.path("first/servers"))
        self.assertEqual(done.code, 1, done)
        self.assertIn("another run", done.err)
        # Also when the launcher cannot know: the servers look themselves.
        self.trained("third", "--stop-after", "5")
        done = self.train("third", "--resume",
                          server__data_dir=self.path("first/servers"))
        self.assertNotEqual(done.code, 0, done)
        self.assertIn("server-", done.err)
        self.assertIn("run", done.err)
        self.assertEqual(self.contents("first/servers"), before)
        self.assertEqual(self.trained("first", "--resume")["steps"], 30)

    def test_a_damaged_checkpoint_is_refused_by_name(self):
        # Under durability step a resume need not read what a checkpoint pins.
        kept = {"server__durability": "checkpoint"}
        self.trained("run", "--stop-after", "10", "--servers", "1", **kept)
        slab, record = self.largest_record("run")
        with open(slab, "rb") as file:
            whole = file.read()
        verified = self.ballast("checkpoint", "verify", "--run-dir",
                                self.path("run"))
        self.assertEqual(verified.code, 0, verified)
        self.assertIn(self.summary("run")["state_hash"], verified.out)
        middle = record["offset"] + record["bytes"] // 2
        flipped = bytearray(whole)
        flipped[middle] ^= 0x10
        for what, damaged in (("truncated", whole[:middle]),
                              ("one bit flipped", bytes(flipped))):
            with self.subTest(what):
                with open(slab, "wb") as file:
                    file.write(damaged)
                verified = self.ballast("checkpoint", "verify", "--run-dir",
                                        self.path("run"))
                self.assertEqual(verified.code, 1, verified)
                self.assertIn("checkpoint of step 10", verified.err)
                self.assertIn(os.path.basename(slab), verified.err)
                exported = self.ballast(
                    "checkpoint", "export", "--full", "--run-dir",
                    self.path("run"), "--output", self.path("out.safetensors"))
                self.assertEqual(exported.code, 1, exported)
                self.assertFalse(os.path.exists(self.path("out.safetensors")))
                resumed = self.train("run", "--resume", **kept)
                self.assertNotEqual(resumed.code, 0, resumed)
                self.assertIn(os.path.basename(slab), resumed.err)
        with open(slab, "wb") as file:
            file.write(whole)
        self.assertEqual(self.trained("run", "--resume", **kept)["steps"], 30)

    def test_a_damaged_manifest_is_refused_by_name(self):
        self.trained("run", "--stop-after", "10")
        manifest = self.path("run/checkpoints/step-00000010/manifest.json")
        with open(manifest, "rb") as file:
            whole = file.read()
        for damaged in (whole[:-100], whole.replace(b'"step"', b'"stop"', 1)):
            with open(manifest, "wb") as file:
                file.write(damaged)
            for command in (("checkpoint", "verify", "--run-dir",
                             self.path("run")),
                            tuple(self.train_arguments("run", "--resume"))):
                done = self.ballast(*command)
                self.assertNotEqual(done.code, 0, done)
                self.assertIn("step-00000010", done.err)
        with open(manifest, "wb") as file:
            file.write(whole)
        self.assertEqual(self.trained("run", "--resume")["steps"], 30)

    def contents(self, folder):
        """Names and sizes of all files below it, locks and logs left out."""
        found = {}
        for at, _, names in os.walk(self.path(folder)):
            for name in names:
                if "slab" in name or name == "identity":
                    path = os.path.join(at, name)
                    found[path] = os.path.getsize(path)
        return found

    def largest_record(self, run):
        """Path of a slab, and the largest record that step 10 has in it."""
        path = self.path(run, "checkpoints/step-00000010/manifest.json")
        with open(path, encoding="utf-8") as file:
            manifest = json.load(file)
        record = max(manifest["records"], key=lambda entry: entry["bytes"])
        folder = manifest["directories"][record["directory"]]
        return os.path.join(folder, "slab"), record


if __name__ == "__main__":
    cluster.main()
