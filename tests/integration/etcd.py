# SPDX-License-Identifier: Apache-2.0
"""An etcd of a test's own, on loopback ports that the system chose."""

import os
import socket
import subprocess
import time
import urllib.request

PROGRAM = "/usr/bin/etcd"
START_TIMEOUT_S = 30


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Etcd:
    @staticmethod
    def installed():
        return os.access(PROGRAM, os.X_OK)

    def __init__(self, folder):
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.peer = f"127.0.0.1:{free_port()}"
        self.process = None

    def start(self):
        client = f"http://{self.address}"
        peer = f"http://{self.peer}"
        with open(os.path.join(self.folder, "etcd.log"), "a",
                  encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [PROGRAM, "--data-dir", os.path.join(self.folder, "etcd"),
                 "--listen-client-urls", client,
                 "--advertise-client-urls", client,
                 "--listen-peer-urls", peer,
                 "--initial-advertise-peer-urls", peer,
                 "--initial-cluster", f"default={peer}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.healthy():
            if (self.process.poll() is not None
                    or time.monotonic() > deadline):
                raise RuntimeError("etcd did not start; see etcd.log")
            time.sleep(0.05)

    def healthy(self):
        try:
            with urllib.request.urlopen(f"http://{self.address}/health",
                                        timeout=2) as reply:
                return b"true" in reply.read()
        except OSError:
            return False

    def kill(self):
        """As kill -9 does; the data stay."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
