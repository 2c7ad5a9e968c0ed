"""TVM's tracker (``python -m tvm.exec.rpc_tracker``): its servers, and a free one of a key.

Its protocol is JSON behind a length (`tvm.rpc.base`); spoken here so that nothing waits for ever.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

from apq_tvm.errors import DeviceLost, DeviceUnreachable, UnknownKey
from apq_tvm.tune.devices.address import Address

TRACKER_MAGIC = 0x2F271
SUCCESS, REQUEST, SUMMARY = 0, 4, 6
"""`tvm.rpc.base.RPC_TRACKER_MAGIC` and `TrackerCode`."""

CONNECT_S = 10.0
FREE_S = 120.0
"""How long a device that others use is waited for."""

_LONGEST = 1 << 24


class Tracker:
    """A connection to a tracker.

    Parameters
    ----------
    address : Address
        Of kind rpc.

    Raises
    ------
    DeviceUnreachable
        Nothing answers, or something that is no tracker.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        where = f"{address.host}:{address.port}"
        try:
            self._socket = socket.create_connection((address.host, address.port), CONNECT_S)
        except OSError as error:
            raise DeviceUnreachable(
                f"{address}: no tracker answers at {where} ({error}); start one: "
                f"python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {address.port}"
            ) from error
        try:
            self._socket.sendall(struct.pack("<i", TRACKER_MAGIC))
            (magic,) = struct.unpack("<i", self._receive(4))
        except (OSError, DeviceLost) as error:
            self.close()
            raise DeviceUnreachable(f"{address}: what answers at {where} is no tracker") from error
        if magic != TRACKER_MAGIC:
            self.close()
            raise DeviceUnreachable(f"{address}: what answers at {where} is no tracker")

    def servers(self) -> dict[str, int]:
        """How many servers there are, by key."""
        summary = self._ask([SUMMARY])
        try:
            keys = [str(info["key"]).removeprefix("server:") for info in summary["server_info"]]
        except (KeyError, TypeError) as error:
            raise DeviceLost(f"{self._address}: the tracker's summary is none: {error}") from error
        return dict(Counter(keys))

    def request(self, wait_s: float = FREE_S) -> tuple[str, int, str]:
        """Host, port and word for a free server of the address's key.

        Raises
        ------
        DeviceLost
            None became free.
        """
        self._socket.settimeout(wait_s)
        found = self._ask([REQUEST, self._address.name, "", 1])
        try:
            host, port, word = found
            return str(host), int(port), str(word)
        except (TypeError, ValueError) as error:
            raise DeviceLost(f"{self._address}: the tracker gave {str(found)[:200]}") from error

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _ask(self, message: list[Any]) -> Any:
        """Send a message; what the answer holds."""
        data = json.dumps(message).encode()
        try:
            self._socket.sendall(struct.pack("<i", len(data)) + data)
            (size,) = struct.unpack("<i", self._receive(4))
            if not 0 < size <= _LONGEST:
                raise DeviceLost(f"{self._address}: the tracker sent {size} bytes")
            answer = json.loads(self._receive(size))
        except TimeoutError as error:
            raise DeviceLost(
                f"{self._address}: no device of this key became free within "
                f"{self._socket.gettimeout():.0f} s"
            ) from error
        except (OSError, ValueError) as error:
            raise DeviceLost(f"{self._address}: the tracker's answer failed: {error}") from error
        if not isinstance(answer, list) or len(answer) < 2 or answer[0] != SUCCESS:
            raise DeviceLost(f"{self._address}: the tracker refused: {str(answer)[:200]}")
        return answer[1]

    def _receive(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._socket.recv(min(size, 1 << 16))
            if not part:
                raise DeviceLost(f"{self._address}: the tracker hung up")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def expand(addresses: Sequence[Address]) -> list[Address]:
    """Addresses, those of a tracker once for each of its servers of the key.

    Raises
    ------
    UnknownKey
        A tracker has none of the key; with those it has.
    DeviceUnreachable
        There is no tracker.
    """
    expanded: list[Address] = []
    for address in addresses:
        if address.kind != "rpc":
            expanded.append(address)
            continue
        tracker = Tracker(address)
        try:
            servers = tracker.servers()
        finally:
            tracker.close()
        if address.name not in servers:
            have = ", ".join(sorted(servers)) or "no device at all"
            raise UnknownKey(
                f"{address}: the tracker has no device of key {address.name!r}; it has {have}"
            )
        expanded += [address] * servers[address.name]
    return expanded
