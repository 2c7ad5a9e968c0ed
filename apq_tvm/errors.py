"""Every error apq_tvm raises on purpose.

::

    ApqError
    ├── ImportFailed         the ONNX file cannot be read: not ONNX, truncated, unsafe external data
    ├── UnsupportedModel     the file is sound but holds what no stage can compile
    ├── BadScheme            a scheme, format or group size that does not exist or does not fit
    ├── BadTarget            an unknown device name
    ├── BadLog               a device's tuning log is no JSON, or has rules for what does not exist
    ├── BadInput             data given to ``eval`` or ``bench`` does not fit the model
    ├── MissingPackage       a package of an extra is not installed: onnxruntime, torch, matplotlib
    ├── NotApplicable        one rule or kernel declines one layer; never reaches a user
    ├── PackError            codes do not fit the layout they are packed into
    ├── BuildError           TVM, the C compiler or the linker failed
    ├── BadDevice            a ``--device`` is spelled wrongly
    ├── DeviceFailed         what code is to run on cannot be reached, was lost, or lacks features
    │   ├── DeviceToolMissing    ssh, scp, adb or what else reaches it is not installed here
    │   ├── DeviceUnreachable    nothing answers there, or it lets nobody in
    │   ├── HostKeyRefused       its host key is unknown, or not the one that is known
    │   ├── UnknownKey           a tracker has no device of this key
    │   ├── DeviceUnfit          it has another architecture, or lacks what the code needs
    │   └── DeviceLost           it died, or no longer answers, in the middle of the work
    ├── OutputExists         the output is there already and ``force`` was not given
    └── OutputFailed         the output could not be written (disk full); the old one is intact

A compiled module imports nothing of apq_tvm: it raises its own ``ModuleError`` family, drawn in
``codegen/templates/package.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ApqError(Exception):
    """Base of every error apq_tvm raises on purpose."""


class ImportFailed(ApqError):
    """The ONNX file cannot be read."""


class UnsupportedModel(ApqError):
    """The ONNX file is sound but cannot be compiled."""


class BadScheme(ApqError):
    """A scheme string, format or group size is unknown or does not fit."""


class BadTarget(ApqError):
    """The device name is unknown."""


class BadLog(ApqError):
    """A tuning log of a device cannot be read, or no kernel is what one of its rules is for."""


class BadInput(ApqError):
    """Data given to a command does not fit the model."""


class MissingPackage(ApqError):
    """A package that one of apq-tvm's extras installs is not there."""


class NotApplicable(ApqError):
    """A kernel or rule declines a layer; the message is the reason ``explain`` prints."""


class PackError(ApqError):
    """Codes or scales do not fit the layout they are packed into."""


class BuildError(ApqError):
    """TVM, the C compiler or the linker failed."""


class BadDevice(ApqError):
    """The address of a device is spelled wrongly."""


class DeviceFailed(ApqError):
    """A device that code is to run on cannot be reached, was lost, or lacks features."""


class DeviceToolMissing(DeviceFailed):
    """A program of this machine that reaches the device is not installed."""


class DeviceUnreachable(DeviceFailed):
    """Nothing answers at the address, or it lets nobody in."""


class HostKeyRefused(DeviceFailed):
    """The device's host key is unknown, or not the one that is known."""


class UnknownKey(DeviceFailed):
    """A tracker has no device of this key."""


class DeviceUnfit(DeviceFailed):
    """The device has another architecture, or lacks what the code needs."""


class DeviceLost(DeviceFailed):
    """The device died, or no longer answers, in the middle of the work."""


class OutputExists(ApqError):
    """The output exists and must not be overwritten."""


class OutputFailed(ApqError):
    """The output could not be written; an existing one is left intact."""


def gist(error: Exception) -> str:
    """The line of a message of TVM that says what is wrong.

    Schedules and checks of a whole function mark it, among listings; else it is the last one, and
    those before it tell where.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for mark in ("Error message: ", "failed"):
        for line in lines:
            if mark in line:
                return line.removeprefix(mark)
    return lines[-1] if lines else type(error).__name__


def fixed_sizes(shapes: Iterable[Sequence[int | str]]) -> str:
    """What may help where TVM fails on a model whose inputs have these shapes."""
    dims = sorted({dim for shape in shapes for dim in shape if isinstance(dim, str)})
    fixed = " ".join(f"--dim {dim}=SIZE" for dim in dims)
    return f"dimensions of a fixed size may help ({fixed})" if dims else "please report it"
