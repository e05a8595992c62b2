"""The group in which ranks exchange tensors: gloo for those on the CPU, NCCL for those on GPUs."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from tandem.model.ranks import Ranks

# A rank may wait long for another one that has more to do. Those that wait for a dead one do not come to this limit:
# the controller ends them.
_COLLECTIVE_TIMEOUT = timedelta(minutes=60)
_MEETING_TIMEOUT = timedelta(minutes=5)  # until all ranks have come
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of netdevice(7)


def open_meeting(host: str, size: int) -> dist.TCPStore:
    """Where `size` ranks find each other: served by this process, on a port that the system chooses."""
    return dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=_MEETING_TIMEOUT)


def join_process_group(ranks: Ranks, store: dist.TCPStore | tuple[str, int], *, device_type: str, host: str) -> None:
    """Join, as `ranks.rank` of `ranks.size`.

    Args:
        ranks: Who this process is.
        store: That of `open_meeting` on the rank that serves it, its address on the others.
        device_type: "cuda" = GPU tensors, too: by NCCL, on the only GPU that this process sees.
        host: Address of this machine that the other ranks can reach.
    """
    if isinstance(store, tuple):
        store = dist.TCPStore(*store, ranks.size, is_master=False, timeout=_MEETING_TIMEOUT)
    if device_type == "cuda":
        torch.cuda.set_device(0)
    # gloo would take the interface of the host's name, which on many machines is one that others cannot reach.
    interface = interface_of(host)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=_COLLECTIVE_TIMEOUT,
    )


def interface_of(host: str) -> str | None:
    """Name of the network interface that has the IPv4 address `host`. None where it cannot be told."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(any_socket, _GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(reply[20:24]) == host:
                return name
    return None
