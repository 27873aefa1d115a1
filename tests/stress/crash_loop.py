#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Real processes, real sockets, real disks, and something goes wrong in every
round: kills at random moments and at named crash points, processes stopped past
their lease, a network that loses replies, a disk that is full or fails, servers
and workers that come and go. Each round ends in comparing the state's hash with
that of a run that nothing happened to.

    crash_loop.py BINARIES [--rounds N] [--seed S] [--kinds kills,network,...]

The first line names the seed; a round is replayed with its own seed and kind and
--rounds 1. The jobs
make narrow windows wide: a log of two steps, RAM for a quarter of the state, a
checkpoint every third step.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import crash_points
from by_hand import ByHand, LEASE_S, ROUND_TIMEOUT_S, Mismatch, wait_for

STEPS = 18
JOB = """
run: {{name: stress, steps: {steps}, dir: {folder}/run}}
model: {{layers: 5, heads: 4, width: 192, context: 16}}
data: {{path: {text}}}
batch: {{micro_batches: 4, micro_batch_size: 1}}
optimizer: {{lr: 3e-3}}
schedule: {{warmup_steps: 3}}
worker: {{memory: 3MiB, host_memory: 64MiB, count: 2}}
server: {{memory: {memory}, count: 2, chunk_elems: 65536, durability: {durability},
         log_limit: {log_limit}, data_dir: {data}}}
checkpoint: {{every: 3, keep: 2}}
eval: {{every: 6, micro_batches: 4}}
cluster: {{port: 0, lease: {lease}s, progress_limit: {lease}s, give_up_after: 60s,
          restarts_max: 50}}
"""


class Round:
    """One job in a folder of its own, and what is done to it."""

    def __init__(self, loop, seed):
        self.loop = loop
        self.random = random.Random(seed)
        self.folder = tempfile.mkdtemp(prefix="ballast-stress-")
        self.points = os.path.join(self.folder, "points")
        os.mkdir(self.points)
        self.data = os.path.join(self.folder, "data")
        self.process = None
        self.story = []

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def write_job(self, **changes):
        values = {"steps": STEPS, "folder": self.folder, "text": self.loop.text,
                  "durability": "step", "lease": LEASE_S, "data": self.data,
                  "memory": self.loop.server_memory,
                  "log_limit": self.loop.log_limit, **changes}
        with open(self.path("job.yaml"), "w", encoding="utf-8") as file:
            file.write(JOB.format(**values))

    def environment(self, **more):
        return {**os.environ, "BALLAST_CRASH_DIR": self.points, **more}

    def start(self, *options, **environment):
        self.out = open(self.path("train.out"), "a+", encoding="utf-8")
        self.process = subprocess.Popen(
            [self.loop.binary("ballast"), "train", self.path("job.yaml"),
             *options], stdin=subprocess.DEVNULL, stdout=self.out,
            stderr=subprocess.STDOUT, cwd=self.folder,
            env=self.environment(**environment))

    def finish(self):
        """The exit code; what it printed is in `text`."""
        try:
            self.process.wait(ROUND_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise Mismatch(
                f"no end after {ROUND_TIMEOUT_S} s: {self.status()}") from error
        self.out.seek(0)
        self.text = self.out.read()
        self.out.close()
        return self.process.returncode

    def tool(self, *arguments, timeout=30):
        return subprocess.run(
            [self.loop.binary("ballast"), *arguments, "--run-dir",
             self.path("run")], stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=timeout, cwd=self.folder, check=False)

    def status(self):
        done = self.tool("status", "--json")
        try:
            return json.loads(done.stdout) if done.returncode == 0 else None
        except ValueError:
            return None

    def running(self):
        return self.process.poll() is None

    def await_step(self, step):
        """The status at `step` or later; None when the run is over before."""
        def reached():
            status = self.status()
            if not self.running():
                return "over"
            return status if status and status["step"] >= step else None
        found = wait_for(reached, f"step {step}")
        return None if found == "over" else found

    def pids(self):
        """Role name to pid, of the processes that are there."""
        found = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    words = file.read().decode(errors="replace").split("\0")
            except OSError:
                continue
            name = os.path.basename(words[0])
            if self.folder not in " ".join(words):
                continue
            if name == "ballast-coordinator":
                found["coordinator"] = int(entry)
            elif name in ("ballast-ps", "ballast-worker"):
                role = "server" if name == "ballast-ps" else "worker"
                index = words[words.index("--index") + 1]
                found[f"{role}-{index}"] = int(entry)
        return found

    def kill(self, name, number=signal.SIGKILL):
        pid = self.pids().get(name)
        if pid is not None:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return False
        return pid is not None

    def arm(self, name, point, times):
        with open(os.path.join(self.points, name), "w",
                  encoding="utf-8") as file:
            file.write(f"{point} {times}\n")

    def tell(self, what):
        self.story.append(what)

    def check(self, code):
        if code != 0:
            raise Mismatch(f"exit {code}:\n{self.text[-2000:]}")
        with open(self.path("run", "summary.json"), encoding="utf-8") as file:
            summary = json.load(file)
        if summary["state_hash"] != self.loop.reference:
            raise Mismatch(f"state_hash {summary['state_hash']}, want "
                           f"{self.loop.reference}")
        steps = [json.loads(line)["step"]
                 for line in open(self.path("run", "metrics.jsonl"),
                                  encoding="utf-8")]
        if steps != list(range(1, STEPS + 1)):
            raise Mismatch(f"metrics.jsonl holds the steps {steps}")
        for fault in summary.get("faults", []):
            self.loop.count_fault(fault)

    def close(self):
        for name, pid in self.pids().items():
            self.tell(f"left behind: {name}")
            os.kill(pid, signal.SIGKILL)
        if self.process is not None and self.running():
            self.process.kill()
            self.process.wait()
        self.loop.count_points(self.points)
        subprocess.run(["umount", "-l", self.data], check=False,
                       stderr=subprocess.DEVNULL)
        shutil.rmtree(self.folder, ignore_errors=True)


class Loop:
    def __init__(self, arguments):
        self.binaries = os.path.abspath(arguments.binaries)
        self.random = random.Random(arguments.seed)
        self.folder = tempfile.mkdtemp(prefix="ballast-stress-")
        self.text = os.path.join(self.folder, "text.txt")
        words = "the ship carries ballast low and keeps its deck light".split()
        generator = random.Random(7)
        with open(self.text, "w", encoding="utf-8") as file:
            file.write(" ".join(generator.choice(words)
                                for _ in range(30_000)))
        self.server_memory = "8MiB"
        self.log_limit = "0"
        self.reference = None
        self.points = collections.Counter()
        self.passes = collections.Counter()
        self.faults = collections.defaultdict(list)
        self.skipped = collections.Counter()

    def binary(self, name):
        return os.path.join(self.binaries, name)

    def count_fault(self, fault):
        role = fault["member"].split("-")[0]
        if fault["recovered_seconds"] >= 0:
            self.faults[role, fault["kind"]].append(fault["recovered_seconds"])

    def count_points(self, folder):
        for name in os.listdir(folder):
            if "." not in name:
                continue  # Armed and not reached.
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                for line in file:
                    if line.startswith("hit "):
                        self.points[line.split()[1]] += 1
                    else:
                        point, count = line.split()
                        self.passes[point] += int(count)

    def measure_windows(self):
        """The undisturbed run, and budgets that just work."""
        quiet = Round(self, 0)
        try:
            quiet.write_job()
            quiet.start()
            if quiet.finish() != 0:
                raise Mismatch(quiet.text)
            with open(quiet.path("run", "summary.json"),
                      encoding="utf-8") as file:
                summary = json.load(file)
            self.reference = summary["state_hash"]
            state = summary["state_bytes"]
            gradient = summary["parameters"] * 4
        finally:
            quiet.close()
        # A quarter of the state, and two steps, over two servers.
        self.server_memory = str(state // 4 // 2)
        self.log_limit = str(int(gradient * 2.3) + (2 << 20))

    # --- Kinds of rounds ---

    def kills(self, round_):
        rng = round_.random
        round_.write_job(durability=rng.choice(["step", "step", "step",
                                                "checkpoint", "replica"])
                         if self.has_replica else
                         rng.choice(["step", "step", "step", "checkpoint"]))
        for _ in range(rng.choice([1, 2, 2, 3])):
            # Those that were hit least come first.
            names = sorted(crash_points.NAMES,
                           key=lambda name: (self.points[name], rng.random()))
            point = names[0]
            role = point.split(".")[0]
            name = (role if role == "coordinator"
                    else f"{role}-{rng.randrange(2)}")
            if not os.path.exists(os.path.join(round_.points, name)):
                times = rng.randint(1, crash_points.NAMES[point])
                round_.arm(name, point, times)
                round_.tell(f"{name} at {point} the {times}. time")
        round_.start()
        for step in sorted(rng.randrange(1, STEPS - 1)
                           for _ in range(rng.randint(1, 3))):
            if round_.await_step(step) is None:
                break
            self.one_fault(round_, step)
        round_.check(round_.finish())

    def one_fault(self, round_, step):
        rng = round_.random
        name = rng.choice(["coordinator", "server-0", "server-1", "worker-0",
                           "worker-1"])
        kind = rng.choice(["kill", "kill", "kill", "stop", "add", "drain"])
        if kind == "kill":
            round_.kill(name)
            round_.tell(f"step {step}: kill {name}")
        elif kind == "stop":
            if round_.kill(name, signal.SIGSTOP):
                round_.tell(f"step {step}: stop {name}")
                time.sleep(rng.uniform(0.2, 2 * LEASE_S))
                round_.kill(name, signal.SIGCONT)
        elif kind == "add":
            role = rng.choice(["worker", "server"])
            done = round_.tool(role, "add", "--no-wait")
            round_.tell(f"step {step}: {role} add: {done.returncode}")
        else:
            status = round_.status() or {"members": []}
            names = [member["name"] for member in status["members"]
                     if member["state"] == "active"
                     and not member["name"].endswith("-0")]
            if names:
                victim = rng.choice(names)
                role = victim.split("-")[0]
                done = round_.tool(role, "drain", victim, "--no-wait")
                round_.tell(f"step {step}: drain {victim}: {done.returncode}")

    def all_at_once(self, round_):
        """Everything is killed, the launcher too, and the run resumed."""
        rng = round_.random
        round_.write_job()
        round_.start()
        if round_.await_step(rng.randrange(1, STEPS - 1)) is not None:
            round_.process.kill()
            round_.process.wait()
            for name in round_.pids():
                round_.kill(name)
            round_.tell("kill everything")
            wait_for(lambda: not round_.pids(), "all are gone", 15)
            round_.out.close()
            round_.start("--resume", "--servers", str(rng.choice([1, 2, 3])),
                         "--workers", str(rng.choice([1, 2, 3])))
        round_.check(round_.finish())

    def full_disk(self, round_):
        rng = round_.random
        os.mkdir(round_.data)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", round_.data],
            check=False, capture_output=True)
        if mounted.returncode != 0:
            self.skipped["full_disk: no right to mount a tmpfs"] += 1
            return
        round_.write_job()
        round_.start()
        if round_.await_step(rng.randrange(1, STEPS - 5)) is not None:
            filler = os.path.join(round_.data, "filler")
            with open(filler, "wb") as file:
                try:
                    while True:
                        file.write(bytes(1 << 20))
                        file.flush()
                except OSError:
                    pass
            round_.tell("the disk is full")
            time.sleep(rng.uniform(0.5, 3))
            os.unlink(filler)
        round_.check(round_.finish())

    def bad_disk(self, round_):
        """Writes fail: the run ends with a named error and resumes."""
        rng = round_.random
        switch = round_.path("eio")
        round_.write_job()
        round_.start(LD_PRELOAD=self.shim(), BALLAST_EIO_SWITCH=switch)
        if round_.await_step(rng.randrange(1, STEPS - 5)) is None:
            round_.check(round_.finish())
            return
        with open(switch + ".tmp", "w", encoding="utf-8") as file:
            file.write(os.path.join(round_.data,
                                    f"server-{rng.randrange(2)}"))
        os.rename(switch + ".tmp", switch)
        round_.tell("EIO")
        code = round_.finish()
        os.unlink(switch)
        if code == 0:
            round_.check(code)  # It was over before the next write.
            return
        if "error" not in round_.text.lower() and \
                "DATA_LOSS" not in round_.text:
            raise Mismatch(f"EIO is not named:\n{round_.text[-2000:]}")
        round_.start("--resume")
        round_.check(round_.finish())

    def shim(self):
        path = os.path.join(self.folder, "disk_faults.so")
        if not os.path.exists(path):
            source = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                                  "disk_faults.c")
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", path,
                            source, "-ldl"], check=True)
        return path

    def network(self, round_):
        """Members by hand, each behind a proxy of its own."""
        rng = round_.random
        round_.write_job()
        cluster = ByHand(self, round_)
        try:
            cluster.start()
            deadline = time.monotonic() + ROUND_TIMEOUT_S
            while not cluster.over():
                if time.monotonic() > deadline:
                    raise Mismatch(f"no end: {round_.status()}")
                time.sleep(rng.uniform(0.05, 0.4))
                if cluster.misdeeds < 6:
                    cluster.misbehave(rng)
                cluster.revive()
            for link in cluster.links.values():
                link.heal()
            round_.text = "by hand"
            round_.check(cluster.code())
        finally:
            cluster.close()

    def run(self, rounds, kinds, first_seed, keep_going):
        self.measure_windows()
        print(f"server.memory {self.server_memory} bytes, log_limit "
              f"{self.log_limit} bytes, state_hash {self.reference}",
              flush=True)
        failed = 0
        for number in range(rounds):
            # Large seeds are those of a round, as printed.
            replay = first_seed > 1_000_000
            seed = first_seed if replay else first_seed * 1_000_003 + number
            kind = kinds[number % len(kinds)]
            round_ = Round(self, seed)
            began = time.monotonic()
            try:
                getattr(self, kind)(round_)
                verdict = "ok"
            except Mismatch as error:
                failed += 1
                verdict = f"MISMATCH {error}"
                kept = f"/tmp/ballast-stress-failed-{seed}"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(round_.folder, kept,
                                ignore=shutil.ignore_patterns("data"))
                verdict += f"\n  kept in {kept}"
            finally:
                round_.close()
            print(f"round {number} seed {seed} {kind} "
                  f"{time.monotonic() - began:.1f} s [{'; '.join(round_.story)}]"
                  f" {verdict}", flush=True)
            if failed and not keep_going:
                break
        return failed

    def report(self, rounds, failed, whole):
        print(f"\n{rounds} rounds, {failed} mismatches")
        print("\ncrash point                       hits  passes")
        for name in crash_points.NAMES:
            print(f"{name:<32} {self.points[name]:>6} {self.passes[name]:>7}")
        print("\nseconds to the next committed step")
        print("role         kind      count     min  median     max")
        for (role, kind), seconds in sorted(self.faults.items()):
            print(f"{role:<12} {kind:<8} {len(seconds):>6} {min(seconds):>7.2f}"
                  f" {statistics.median(seconds):>7.2f} {max(seconds):>7.2f}")
        for what, count in self.skipped.items():
            print(f"SKIPPED {count} times: {what}")
        missed = [name for name in crash_points.NAMES
                  if self.points[name] == 0]
        if whole and missed:
            print(f"never hit: {', '.join(missed)}")
            return 1
        return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binaries")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kinds", default="kills,kills,kills,network,kills,all_at_once,"
        "kills,full_disk,kills,bad_disk")
    parser.add_argument("--keep-going", action="store_true")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    loop = Loop(arguments)
    loop.has_replica = False
    failed = 0
    try:
        failed = loop.run(arguments.rounds, arguments.kinds.split(","),
                          arguments.seed, arguments.keep_going)
        # Twenty rounds cannot hit everything.
        code = loop.report(arguments.rounds, failed,
                           whole=arguments.rounds >= 200)
    finally:
        shutil.rmtree(loop.folder, ignore_errors=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
