"""How devices are named: ``ssh://pi@board``, ``adb://SERIAL``, ``rpc://host:9190/key``, others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from apq_tvm.errors import BadDevice

FORMS = (
    "local",
    "ssh://[user@]host[:port][/folder]",
    "adb://serial",
    "rpc://tracker:port/key",
    "qemu://cpu",
)

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
"""No word of an address begins with ``-``: to ssh and adb that would be an option."""

_HOST = rf"(?:{_NAME}|[0-9A-Fa-f][0-9A-Fa-f:.]*|:[0-9A-Fa-f:.]+)"
_FOLDER = rf"(?:/{_NAME})+"
_KEY = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
_SERIAL = r"[A-Za-z0-9_][A-Za-z0-9_.:-]*"
_CPU = r"[A-Za-z0-9_][A-Za-z0-9_.,=-]*"


@dataclass(frozen=True)
class Address:
    """Where a device is.

    Parameters
    ----------
    kind : str
        ``"local"``, ``"ssh"``, ``"adb"``, ``"rpc"`` or ``"qemu"``.
    host, user : str
        Of ssh and the tracker.
    port : int
        0 for the usual one.
    name : str
        Serial number (adb), key (rpc), processor (qemu), working folder (ssh).
    """

    kind: str
    host: str = ""
    user: str = ""
    port: int = 0
    name: str = ""

    @property
    def emulated(self) -> bool:
        """Whether times there say nothing about a device."""
        return self.kind == "qemu"

    @property
    def login(self) -> str:
        """``user@host`` for ssh."""
        return f"{self.user}@{self.host}" if self.user else self.host

    def __str__(self) -> str:
        if self.kind == "local":
            return "local"
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f"{self.user}@" if self.user else ""
        port = f":{self.port}" if self.port else ""
        path = {"ssh": self.name, "rpc": f"/{self.name}"}.get(self.kind, self.name)
        return f"{self.kind}://{user}{host}{port}{path}"


def parse_device(text: str) -> Address:
    """Read the address of one device.

    Raises
    ------
    BadDevice
        It has none of `FORMS`; the message says what is wrong with it.
    """
    word = text.strip()
    if not word.isprintable() or " " in word:
        raise BadDevice(f"--device {text!r} has blanks or control characters in it")
    if word in ("local", "local://"):
        return Address("local")
    kind, separator, rest = word.partition("://")
    if not separator or kind not in ("ssh", "adb", "rpc", "qemu"):
        raise BadDevice(f"--device {text!r} is none of {', '.join(FORMS)}")
    if kind == "adb":
        return Address("adb", name=_matching(_SERIAL, rest, "serial number", text))
    if kind == "qemu":
        return Address("qemu", name=_matching(_CPU, rest, "processor (such as max)", text))
    try:
        parts = urlsplit(word)
        host, port = parts.hostname or "", parts.port or 0
    except ValueError as error:
        raise BadDevice(f"--device {text!r}: {error}") from error
    if parts.query or parts.fragment or parts.password is not None:
        raise BadDevice(f"--device {text!r}: {kind}:// takes no password, query or fragment")
    _matching(_HOST, host, "host", text)
    # urlsplit makes hosts small; names in an ssh configuration need not be.
    shown = parts.netloc.rpartition("@")[2]
    at = shown.lower().find(host)
    host = shown[at : at + len(host)] if at >= 0 else host
    if kind == "ssh":
        user = _matching(_NAME, parts.username, "user", text) if parts.username is not None else ""
        path = parts.path.rstrip("/")
        folder = _matching(_FOLDER, path, "folder", text) if path else ""
        return Address("ssh", host, user, port, folder)
    if parts.username is not None or not port:
        raise BadDevice(
            f"--device {text!r} is not rpc://tracker:port/key, such as rpc://box:9190/pi"
        )
    key = _matching(_KEY, parts.path.removeprefix("/"), "key", text)
    return Address("rpc", host, port=port, name=key)


def parse_devices(text: str) -> tuple[Address, ...]:
    """Read a comma list of addresses; qemu's processors may have commas of their own.

    Raises
    ------
    BadDevice
        One is wrong, is named twice, or there is none.
    """
    found = [parse_device(part) for part in re.split(r",(?=local\b|\w+://)", text) if part.strip()]
    if not found:
        raise BadDevice(f"--device {text!r} names no device: {', '.join(FORMS)}")
    for address in found:
        if found.count(address) > 1 and address.kind != "qemu":
            raise BadDevice(f"--device names {address} twice: it would disturb itself")
    return tuple(found)


def _matching(pattern: str, word: str, what: str, text: str) -> str:
    if not re.fullmatch(pattern, word, re.ASCII):
        raise BadDevice(f"--device {text!r}: {word!r} is no {what}")
    return word
