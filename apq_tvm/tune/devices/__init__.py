"""Devices that code runs on: this machine, others by ssh, adb or TVM's tracker, or an emulator."""

from apq_tvm.tune.devices.remote import RemoteDevice, open_devices

__all__ = ["RemoteDevice", "open_devices"]
