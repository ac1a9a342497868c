"""A real etcd of one member, for tests."""

import shutil
import signal
import socket
import subprocess
import time
import urllib.request

PATIENCE_S = 30.0
BINARY = shutil.which("etcd")


class EtcdServer:
    """One member on free ports of this machine, which keeps its data when it is stopped and started again."""

    def __init__(self, folder):
        self.folder = folder
        self.port, self.peer_port = free_ports(2)
        self.url = f"etcd://127.0.0.1:{self.port}"
        self.process = None
        self.start()

    def start(self):
        clients, peers = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        command = [BINARY, "--name=only", f"--data-dir={self.folder / 'etcd'}", "--log-level=error"]
        command += [f"--listen-client-urls={clients}", f"--advertise-client-urls={clients}"]
        command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
        with (self.folder / "etcd.log").open("a") as log:
            self.process = subprocess.Popen(
                [*command, f"--initial-cluster=only={peers}"], stdout=log, stderr=subprocess.STDOUT
            )
        until_s = time.monotonic() + PATIENCE_S
        while not self.is_healthy(clients):
            assert time.monotonic() < until_s, (self.folder / "etcd.log").read_text()[-4000:]
            time.sleep(0.05)

    @staticmethod
    def is_healthy(url):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False

    def stop(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)


def free_ports(count):
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
