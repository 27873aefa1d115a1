# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that behaves badly on request: delays, holds back, half-open
connections, resets. Everything it does by chance comes from its seed."""

import random
import select
import socket
import struct
import threading
import time

CHUNK = 64 * 1024


class _Link:
    """One accepted connection and its other side."""

    def __init__(self, near, far):
        self.sides = {near: far, far: near}
        self.near = near
        self.held = {near: b"", far: b""}  # Bytes that wait to be sent there.
        self.due = {near: 0.0, far: 0.0}
        self.ended = set()  # Sides that send nothing more.

    def close(self, reset=False):
        for side in self.sides:
            if reset:
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER,
                                struct.pack("ii", 1, 0))
            side.close()


class Proxy:
    """Forwards a loopback port of the system's choice to `target`, in a thread
    of its own. Every mode acts on all connections, also on later ones."""

    def __init__(self, seed, target=None):
        self._random = random.Random(seed)
        self._target = target  # (host, port), or set later.
        self._lock = threading.Lock()
        self._delay_s = 0.0
        self._hold = set()  # "up" (to the target), "down" (from it).
        self._reset = False
        self._stopping = False
        self.forwarded = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        self._links = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def aim(self, address):
        host, port = address.rsplit(":", 1)
        with self._lock:
            self._target = (host, int(port))

    def delay(self, seconds):
        """Each piece waits for up to so long; 0 ends it."""
        with self._lock:
            self._delay_s = seconds

    def hold(self, *directions):
        """Forwards nothing in these directions and closes nothing: with one a
        reply is lost, with both the peers are half-open."""
        with self._lock:
            self._hold = set(directions)

    def reset(self):
        """Resets every connection there is."""
        with self._lock:
            self._reset = True

    def heal(self):
        self.delay(0.0)
        self.hold()

    def close(self):
        with self._lock:
            self._stopping = True
        self._thread.join()

    def _run(self):
        while True:
            with self._lock:
                delay, hold = self._delay_s, set(self._hold)
                reset, self._reset = self._reset, False
                target, stopping = self._target, self._stopping
            if stopping or reset:
                for link in self._links:
                    link.close(reset=True)
                self._links = []
            if stopping:
                self._listener.close()
                return
            self._turn(target, delay, hold)

    def _turn(self, target, delay, hold):
        sources = {}
        for link in self._links:
            for side in link.sides:
                direction = "up" if side is link.near else "down"
                full = len(link.held[link.sides[side]]) > 16 * CHUNK
                if side not in link.ended and direction not in hold and not full:
                    sources[side] = link
        readable, _, _ = select.select([self._listener, *sources], [], [],
                                       0.01)
        now = time.monotonic()
        for side in readable:
            if side is self._listener:
                self._accept(target)
                continue
            link = sources[side]
            other = link.sides[side]
            try:
                data = side.recv(CHUNK)
            except OSError:
                self._drop(link)
                continue
            if not data:
                link.ended.add(side)
            link.held[other] += data
            if delay:
                link.due[other] = max(link.due[other],
                                      now + self._random.uniform(0, delay))
        for link in list(self._links):
            self._send(link, hold, now)

    def _accept(self, target):
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        try:
            far = socket.create_connection(target, timeout=1)
        except (OSError, TypeError):
            near.close()  # Nobody there: refused, as it would be.
            return
        for side in (near, far):
            side.setblocking(False)
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.append(_Link(near, far))

    def _send(self, link, hold, now):
        for side, other in link.sides.items():
            direction = "down" if side is link.near else "up"
            if direction in hold or now < link.due[side]:
                continue
            if link.held[side]:
                try:
                    sent = side.send(link.held[side])
                except BlockingIOError:
                    continue
                except OSError:
                    self._drop(link)
                    return
                self.forwarded += sent
                link.held[side] = link.held[side][sent:]
            if not link.held[side] and other in link.ended:
                self._drop(link)
                return

    def _drop(self, link):
        if link in self._links:
            self._links.remove(link)
            link.close()
