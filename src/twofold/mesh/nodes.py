"""What the agents of several machines tell each other: a handshake before the workers, and why they failed after.

Machine 0 holds a `TCPStore`, which torch's static rendezvous and the workers then share. Nothing here is needed on
one machine.
"""

import fcntl
import json
import os
import platform
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from twofold.errors import UserError
from twofold.mesh.cluster import Node
from twofold.mesh.guard import read_records
from twofold.mesh.report import Death

_NOTICE_SECONDS = 15  # after which the machines that are missing are named
_TELL_SECONDS = 15  # longer than a victim waits for a root, and an agent for its workers to stop
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Meeting:
    """The machines of a run, met. hosts: their names; log_dir: that of machine 0."""

    node: Node
    store: Store
    hosts: Sequence[str]
    log_dir: Path

    def tell_failure(self, deaths: Sequence[Death], log_dir: Path) -> list[Death]:
        """Shares this machine's failures with the others, whose records are written to log_dir; all the deaths.

        Waits some seconds for machines that have not failed yet: they soon lose the connection.
        """
        mine = {"records": read_records(log_dir / "errors"), "deaths": [asdict(death) for death in deaths]}
        found = list(deaths)
        with suppress(DistError, RuntimeError):  # machine 0 is gone
            self.store.set(f"failure-{self.node.rank}", json.dumps(mine))
            others = [f"failure-{n}" for n in range(self.node.count) if n != self.node.rank]
            for key in _wait_for(self.store, others, _TELL_SECONDS):
                theirs = json.loads(self.store.get(key))
                found += [Death(**death) for death in theirs["deaths"]]
                _keep_records(theirs["records"], log_dir / "errors")
            self.store.set(f"read-{self.node.rank}", "")
            if self.node.rank == 0:  # the store ends with this process
                _wait_for(self.store, [f"read-{n}" for n in range(self.node.count)], _TELL_SECONDS)
        return sorted(found, key=lambda death: death.seconds)


def meet(node: Node, devices: int, log_dir: Path, seconds: float) -> Meeting:
    """Waits until the agents of all machines are there, and agrees with them.

    devices: workers on this machine, the same on all; log_dir: of this machine; seconds: how long to wait.
    Points gloo to the network between the machines, unless GLOO_SOCKET_IFNAME is set.

    Raises UserError for machines that do not come, a port that is taken, and settings that differ.
    """
    end = time.monotonic() + seconds
    store = PrefixStore(f"twofold/{node.run_id}", _open_store(node, seconds))
    mine = {"devices": devices, "log_dir": str(log_dir.resolve()), "host": platform.node()}
    mine["address"] = _address_towards(node.host, node.port)
    store.set(f"node-{node.rank}", json.dumps(mine))
    keys = [f"node-{n}" for n in range(node.count)]
    try:
        if len(there := _wait_for(store, keys, min(_NOTICE_SECONDS, seconds))) < node.count:
            print(f"waiting for {_missing(keys, there)} of {node.count} …", file=sys.stderr, flush=True)
            there = _wait_for(store, keys, end - time.monotonic())
        if len(there) < node.count:
            raise UserError(
                f"{_missing(keys, there)} of {node.count} did not come within {seconds:g} s. Start the same command "
                f"on each machine, with MASTER_ADDR={node.host}."
            )
        told: list[dict[str, Any]] = [json.loads(store.get(key)) for key in keys]
        if node.rank == 0:  # the store ends with this process, and the others are to read it
            _wait_for(store, [f"met-{n}" for n in range(1, node.count)], seconds)
        else:
            store.set(f"met-{node.rank}", "")
    except DistError as problem:
        raise UserError(f"lost node 0 at {node.host}:{node.port} before the start: {_line(problem)}") from None
    counts = [one["devices"] for one in told]
    if len(set(counts)) > 1:
        named = ", ".join(f"{one['devices']} on {one['host']}" for one in told)
        raise UserError(f"run.devices must be the same on each node; it is {named}.")
    _set_interface(told[1]["address"] if node.rank == 0 else node.host)
    return Meeting(node, store, [one["host"] for one in told], Path(told[0]["log_dir"]))


def _open_store(node: Node, seconds: float) -> Store:
    place = f"{node.host}:{node.port}"
    try:
        wait = timedelta(seconds=seconds)
        # multi_tenant: torch's rendezvous in this process takes the same port
        return TCPStore(node.host, node.port, is_master=node.rank == 0, timeout=wait, multi_tenant=True)
    except DistError as problem:
        if node.rank == 0:
            raise UserError(
                f"node 0 cannot listen on port {node.port}: {_line(problem)}. Set MASTER_PORT to a free port, the same "
                f"on all nodes."
            ) from None
        raise UserError(
            f"node {node.rank} cannot reach node 0 at {place} within {seconds:g} s: is it started, is MASTER_ADDR its "
            f"name in this network, and is MASTER_PORT open? ({_line(problem)})"
        ) from None


def _wait_for(store: Store, keys: Sequence[str], seconds: float) -> list[str]:
    """The keys that are there once all are, or when the time is over."""
    end = time.monotonic() + seconds
    while True:
        there = [key for key in keys if store.check([key])]
        if len(there) == len(keys) or time.monotonic() > end:
            return there
        time.sleep(0.1)


def _missing(keys: Sequence[str], there: Sequence[str]) -> str:
    numbers = [key.rpartition("-")[2] for key in keys if key not in there]
    return f"node{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _keep_records(records: Sequence[dict[str, Any]], errors: Path) -> None:
    """Writes the records of other machines beside our own; with a shared folder they are there."""
    with suppress(OSError):
        for record in records:
            path = errors / f"rank-{record['rank']}.json"
            if not path.exists():
                path.write_text(json.dumps(record))


def _address_towards(host: str, port: int) -> str:
    """This machine's address in the network in which `host` lies; "" if that is not known. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _set_interface(peer: str) -> None:
    """Tells gloo which network the other machines are in: by itself it takes the one of the host's name, which
    /etc/hosts often makes the loopback."""
    address = _address_towards(peer, 9) if peer else ""
    if not sys.platform.startswith("linux") or not address:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                    return


def _line(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0].rstrip(".")
