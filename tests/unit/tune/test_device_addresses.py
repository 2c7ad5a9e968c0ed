"""How devices are spelled, and what is no device."""

from __future__ import annotations

import pytest

from apq_tvm.errors import BadDevice
from apq_tvm.tune.devices.address import Address, parse_device, parse_devices
from apq_tvm.tune.devices.transport import check_names, checked_words


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("local", Address("local")),
        ("ssh://board", Address("ssh", "board")),
        ("ssh://pi@Board.lan:2222", Address("ssh", "Board.lan", "pi", 2222)),
        ("ssh://pi@[fe80::1]:22/home/pi", Address("ssh", "fe80::1", "pi", 22, "/home/pi")),
        ("adb://emulator-5554", Address("adb", name="emulator-5554")),
        ("adb://192.168.0.7:5555", Address("adb", name="192.168.0.7:5555")),
        ("rpc://box:9190/pi4", Address("rpc", "box", port=9190, name="pi4")),
        ("qemu://cortex-a76", Address("qemu", name="cortex-a76")),
        ("qemu://max,sve=off", Address("qemu", name="max,sve=off")),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    assert parse_device(f" {text} ") == address
    assert str(address) == text
    assert parse_device(str(address)) == address
    assert address.emulated == text.startswith("qemu")


@pytest.mark.parametrize(
    "text",
    [
        "", "board", "http://board", "ssh://", "ssh://pi@", "ssh://-oProxyCommand=evil",
        "ssh://-l@board", "ssh://pi:secret@board", "ssh://board;reboot", "ssh://board/a b",
        "ssh://board/$(x)", "ssh://board/../etc", "ssh://board:99999", "ssh://board?x=1",
        "ssh://bo\nard", "adb://", "adb://-s", "adb://a b", "adb://x;y", "rpc://box/pi",
        "rpc://box:9190", "rpc://box:9190/", "rpc://box:9190/a/b", "rpc://me@box:9190/pi",
        "qemu://", "qemu://-version", "qemu://max;x", "sshx://board",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadDevice, match="--device"):
        parse_device(text)


def test_lists_of_devices() -> None:
    found = parse_devices("ssh://a,ssh://b:22 ,qemu://max,sve=off,local")
    assert [str(a) for a in found] == ["ssh://a", "ssh://b:22", "qemu://max,sve=off", "local"]
    with pytest.raises(BadDevice, match="twice"):
        parse_devices("ssh://a,ssh://a")
    with pytest.raises(BadDevice, match="no device"):
        parse_devices(" ")


@pytest.mark.parametrize("word", ["a b", "x;y", "$HOME", "`x`", "a'b", "", "x\n", "*", "a|b", "~x"])
def test_no_word_for_a_device_means_anything_to_a_shell(word: str) -> None:
    with pytest.raises(ValueError, match="may not stand"):
        checked_words(["true", word])


@pytest.mark.parametrize("name", ["-rf", "../x", "/etc/x", "a//b", "a b", ".ssh", "x/..", "a:b"])
def test_names_of_files_are_plain(name: str) -> None:
    with pytest.raises(ValueError, match="no plain name"):
        check_names([name])
    check_names(["data1", "images/a.sm_90"])
