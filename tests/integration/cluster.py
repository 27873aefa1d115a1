# SPDX-License-Identifier: Apache-2.0
"""What the whole-run tests share: a temporary folder with a text and a job, the
real binaries run in it, and the check that nothing is left behind.

The folder of the binaries is the first argument of every test.
"""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

# A run of a tiny job takes a second or two; this bounds one that hangs.
RUN_TIMEOUT_S = 120
BINARIES = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else ""

JOB = """
run: {{name: tiny, steps: 30, dir: {folder}/run}}
model: {{layers: 2, heads: 4, width: 192, context: 32}}
data: {{path: {folder}/text.txt}}
batch: {{micro_batches: 4, micro_batch_size: 2}}
optimizer: {{lr: 3e-3}}
schedule: {{warmup_steps: 3}}
worker: {{memory: 16MiB, host_memory: 64MiB, count: 2}}
server: {{memory: 32MiB, count: 2}}
checkpoint: {{every: 10}}
eval: {{every: 10, micro_batches: 4}}
cluster: {{port: 0}}
"""


def processes_of(folder):
    """Ids of processes whose command line names the folder, but this one."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                if folder.encode() in file.read():
                    found.append(int(entry))
        except OSError:
            pass  # It has ended meanwhile.
    return found


def shared_memory():
    return {name for name in os.listdir("/dev/shm") if "ballast" in name}


def read_safetensors(path):
    """(metadata, {name: (shape, values)}) of a file of F32 tensors."""
    with open(path, "rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
        data = file.read()
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert entry["dtype"] == "F32", name
        values = struct.unpack(f"<{(end - begin) // 4}f", data[begin:end])
        tensors[name] = (entry["shape"], values)
    return metadata, tensors


class Finished:
    """Exit code and outputs of a command that has ended."""

    def __init__(self, code, out, err):
        self.code = code
        self.out = out
        self.err = err

    def __repr__(self):
        return f"exit {self.code}\n{self.out}\n{self.err}"


class Running:
    """A `ballast train` in the background."""

    def __init__(self, arguments, folder):
        self.out = open(os.path.join(folder, "train.out"), "w+")
        self.err = open(os.path.join(folder, "train.err"), "w+")
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=self.out,
            stderr=self.err, cwd=folder)

    def signal(self, number):
        self.process.send_signal(number)

    def finish(self, timeout=RUN_TIMEOUT_S):
        """Waits for the end; raises when it does not come."""
        self.process.wait(timeout)
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read())
        self.close()
        return Finished(self.process.returncode, *texts)

    def close(self):
        self.out.close()
        self.err.close()


class ClusterTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="ballast-run-")
        self.shared = shared_memory()
        self.background = []
        self.write_text(120_000)
        self.job = self.path("job.yaml")
        self.write("job.yaml", JOB.format(folder=self.folder))

    def tearDown(self):
        for running in self.background:
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait()
            running.close()
        try:
            left = self.await_true(lambda: not processes_of(self.folder),
                                   "every process has ended", 15,
                                   fail=False)
            for pid in processes_of(self.folder):
                os.kill(pid, signal.SIGKILL)
            self.assertTrue(left, "a process was left behind")
            self.assertEqual(shared_memory() - self.shared, set())
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def write_text(self, size):
        """Words of a small vocabulary, so that there is something to learn."""
        words = "the ship carries ballast low and keeps its deck light".split()
        generator = random.Random(7)
        text = " ".join(generator.choice(words) for _ in range(size // 4))
        self.write("text.txt", text[:size])

    def ballast(self, *arguments, timeout=RUN_TIMEOUT_S):
        """Runs a command of the tool to its end."""
        done = subprocess.run(
            [os.path.join(BINARIES, "ballast"), *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=timeout, cwd=self.folder, check=False)
        return Finished(done.returncode, done.stdout, done.stderr)

    def train(self, run="run", *options, **settings):
        """Trains to the end in the run folder `run`; settings are keys with
        two underscores for the dot."""
        return self.ballast(*self.train_arguments(run, *options, **settings))

    def start(self, run="run", *options, **settings):
        """The same in the background."""
        running = Running(
            [os.path.join(BINARIES, "ballast"),
             *self.train_arguments(run, *options, **settings)], self.folder)
        self.background.append(running)
        return running

    def train_arguments(self, run, *options, **settings):
        arguments = ["train", self.job, *options,
                     "--set", f"run.dir={self.path(run)}"]
        for key, value in settings.items():
            arguments += ["--set", f"{key.replace('__', '.')}={value}"]
        return arguments

    def summary(self, run="run"):
        with open(self.path(run, "summary.json"), encoding="utf-8") as file:
            return json.load(file)

    def trained(self, run, *options, **settings):
        """Trains to a good end; returns the summary."""
        done = self.train(run, *options, **settings)
        self.assertEqual(done.code, 0, done)
        return self.summary(run)

    def status(self, run="run"):
        """The run's status, or None while nobody answers."""
        done = self.ballast("status", "--json", "--run-dir", self.path(run))
        return json.loads(done.out) if done.code == 0 else None

    def await_true(self, condition, what, seconds, fail=True):
        """Asks until the condition holds; bounded."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.02)
        if fail:
            self.fail(f"not within {seconds} s: {what}")
        return False

    def await_step(self, step, run="run"):
        """Waits until the run has committed `step`; returns its status."""
        seen = []

        def reached():
            seen.append(self.status(run))
            return seen[-1] is not None and seen[-1]["step"] >= step

        self.await_true(reached, f"step {step}", 60)
        return seen[-1]

    def pid_of(self, status, name):
        for member in status["members"]:
            if member["name"] == name:
                return member["pid"]
        self.fail(f"{name} is not a member: {status['members']}")
        return 0


def main():
    sys.argv = sys.argv[:1] + sys.argv[2:]  # unittest reads the rest.
    unittest.main(module="__main__", verbosity=2)
