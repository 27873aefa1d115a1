# SPDX-License-Identifier: Apache-2.0
"""A cluster without a launcher, for the crash loop's rounds on the network."""

import os
import socket
import subprocess
import time

import proxy as proxies

LEASE_S = 1.5
ROUND_TIMEOUT_S = 120


class Mismatch(Exception):
    """A promise did not hold."""


def wait_for(condition, what, seconds=ROUND_TIMEOUT_S):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise Mismatch(f"not within {seconds} s: {what}")


class ByHand:
    """A cluster without a launcher, whose members reach the coordinator and
    each other through proxies."""

    def __init__(self, loop, round_):
        self.loop = loop
        self.round = round_
        self.links = {}
        self.processes = {}
        self.misdeeds = 0
        self.logs = []

    def spawn(self, name, *arguments):
        log = open(self.round.path(f"{name}.log"), "a", encoding="utf-8")
        self.logs.append(log)
        self.processes[name] = subprocess.Popen(
            [self.loop.binary(arguments[0]), "--config",
             self.round.path("job.yaml"), *arguments[1:]],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd=self.round.folder, env=self.round.environment())

    def start(self):
        self.start_coordinator()
        for kind in ("server", "worker"):
            for index in range(2):
                self.start_member(kind, index)

    def start_coordinator(self):
        port = ["--port", self.port] if hasattr(self, "port") else []
        self.spawn("coordinator", "ballast-coordinator", "--continue", *port)
        address = self.round.path("run", "coordinator.address")

        def announced():
            try:
                with open(address, encoding="utf-8") as file:
                    return file.read().strip()
            except OSError:
                return None
        self.address = wait_for(announced, "the coordinator's address", 20)
        self.port = self.address.rsplit(":", 1)[1]

    def start_member(self, kind, index):
        name = f"{kind}-{index}"
        if name not in self.links:
            self.links[name] = proxies.Proxy(self.round.random.random())
            self.links[name].aim(self.address)
        arguments = ["--coordinator", self.links[name].address, "--index",
                     str(index)]
        if kind == "server":
            data = name + "-data"
            if data not in self.links:
                self.links[data] = proxies.Proxy(self.round.random.random())
                port = free_port()
                self.links[data].aim(f"127.0.0.1:{port}")
                self.links[data].port = port
            arguments += ["--listen", f"127.0.0.1:{self.links[data].port}",
                          "--advertise", self.links[data].address,
                          "--data-dir", os.path.join(self.round.data, name)]
        self.spawn(name, "ballast-ps" if kind == "server" else
                   "ballast-worker", *arguments)

    def misbehave(self, rng):
        name = rng.choice(sorted(self.links))
        link = self.links[name]
        what = rng.choice(["delay", "drop replies", "half-open", "reset",
                           "kill"])
        if what == "delay":
            link.delay(rng.uniform(0.01, 0.2))
        elif what == "drop replies":
            link.hold("down")
        elif what == "half-open":
            link.hold("up", "down")
        elif what == "reset":
            link.reset()
        else:
            victim = rng.choice(sorted(self.processes))
            self.round.tell(f"kill {victim}")
            self.processes[victim].kill()
            self.misdeeds += 1
            return
        self.misdeeds += 1
        self.round.tell(f"{what} {name}")
        time.sleep(rng.uniform(0, 1.5 * LEASE_S))
        if what in ("drop replies", "half-open"):
            link.reset()  # What was cut does not come back by itself.
        link.heal()

    def over(self):
        code = self.processes["coordinator"].poll()
        return code is not None and code >= 0

    def code(self):
        return self.processes["coordinator"].poll()

    def revive(self):
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code is None or self.over():
                continue
            if name == "coordinator":
                self.start_coordinator()
            elif code != 0:
                kind, index = name.split("-")
                self.start_member(kind, int(index))

    def close(self):
        for process in self.processes.values():
            if process.poll() is None:
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        for link in self.links.values():
            link.close()
        for log in self.logs:
            log.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
