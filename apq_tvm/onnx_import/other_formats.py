"""Files that people take for ONNX, by their first bytes, and what to do about each."""

from __future__ import annotations

HEAD = 64
"""Bytes that tell."""

_EXPORT = "export the model it belongs to with torch.onnx.export"
_CONVERT = "convert it with tf2onnx"
_FORMATS = (
    (0, b"version https://git-lfs", "a pointer of Git LFS: fetch the file itself, 'git lfs pull'"),
    (0, b"GGUF", "GGUF: compile an ONNX export of the model, with these codes by --codes"),
    (0, b"\x1f\x8b", "compressed (gzip): decompress it"),
    (0, b"PK\x03\x04", f"a zip archive, as torch.save writes: unpack it, or {_EXPORT}"),
    (0, b"\x80", f"a pickle, as torch.save wrote: {_EXPORT}"),
    (0, b"\x89HDF", f"HDF5, as Keras writes: {_CONVERT}"),
    (4, b"TFL3", f"TFLite: {_CONVERT}"),
    (4, b"ORTM", "ONNX Runtime's own format (.ort): compile the ONNX file it was made of"),
    (8, b'{"', f"safetensors, which holds weights alone: {_EXPORT}"),
)
_PAGES = (b"<!doctype", b"<html", b"<?xml")


def other_format(head: bytes) -> str:
    """What a file that begins so is, and the remedy; ``""`` if it may be ONNX."""
    if head.startswith(b"\x08"):  # ``ModelProto.ir_version``: behind it are names that one chooses
        return ""
    for at, magic, name in _FORMATS:
        if head[at:].startswith(magic):
            return name
    if head.lstrip().lower().startswith(_PAGES):
        return "a web page: download the file itself"
    return ""
