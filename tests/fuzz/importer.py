"""The importer on altered models: an error of our tree or a model, soon and in little memory.

A mutation changes fields of the parsed model (numbers above all), or its bytes. With atheris the
mutations that reach new code are kept; without it they start from the corpus every time.
"""

from __future__ import annotations

import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from apq_tvm.errors import ApqError
from apq_tvm.onnx_import import import_onnx
from tests.fuzz.models import models

SECONDS, MEGABYTES = 10, 1500  # of a machine that others use; the tests of single files want less
NUMBERS = (0, 1, -1, 2, 3, -2, 7, 8, 64, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, -(1 << 40),
           (1 << 63) - 1, -(1 << 63))  # fmt: skip
FLOATS = (0.0, -1.0, 1e30, -1e30, float("nan"), float("inf"), 0.5)
TEXTS = ("", "x", "y", "w", "apq.Linear", "apq", "SAME_UPPER", "\0", "n_y", "b", "*/", "-1", "b*b")


class TooMuch(BaseException):
    """An import took too long."""


def fields(message: Any, found: list[tuple[Any, Any, int]], depth: int = 0) -> None:
    """Every field of a protobuf message with its place in a list, -1 for a single one."""
    for field, value in message.ListFields():
        several = field.is_repeated if hasattr(field, "is_repeated") else field.label == 3
        items = list(value) if several else [value]
        for at, item in enumerate(items[:64]):
            found.append((message, field, at if several else -1))
            if field.message_type is not None and depth < 12:
                fields(item, found, depth + 1)


def fresh(field: Any, old: Any, rng: random.Random) -> Any:
    """Another value of a field's kind."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return rng.choice([*NUMBERS, old + 1, old - 1, old * 2, -old])
    if isinstance(old, float):
        return rng.choice(FLOATS)
    if isinstance(old, str):
        return rng.choice([*TEXTS, old + "x"])
    data = bytearray(old)
    for _ in range(rng.randint(1, 4)):
        if data:
            data[rng.randrange(len(data))] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256))
            )
    return bytes(data[: rng.choice((len(data), len(data), rng.randint(0, len(data))))])


def change(model: onnx.ModelProto, rng: random.Random) -> None:
    """One field changed, dropped, doubled or swapped."""
    found: list[tuple[Any, Any, int]] = []
    fields(model, found)
    if not found:
        return
    message, field, at = rng.choice(found)
    value, kind = getattr(message, field.name), rng.randrange(8)
    try:
        if kind == 0:
            message.ClearField(field.name)
        elif at >= 0 and kind == 1:
            del value[at]
        elif at >= 0 and kind == 2 and field.message_type is not None:
            value.add().CopyFrom(rng.choice(value))
        elif field.message_type is not None:
            pass
        elif at >= 0 and kind == 3:
            value.extend([value[at]] * rng.choice((1, 2, 30)))
        elif at >= 0:
            value[at] = fresh(field, value[at], rng)
        else:
            setattr(message, field.name, fresh(field, value, rng))
    except (TypeError, ValueError, OverflowError):
        pass  # the field has no such value


def mutate(data: bytes, rng: random.Random) -> bytes:
    """An altered model: fields where it can be parsed, else bytes."""
    if rng.random() < 0.9:
        try:
            model = onnx.ModelProto.FromString(data)
            for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
                change(model, rng)
            return bytes(model.SerializeToString())
        except (DecodeError, ValueError):
            pass
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        if raw:
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


def try_import(data: bytes, path: Path) -> None:
    """Import a file of these bytes.

    Raises
    ------
    AssertionError
        It took too long or too much memory.
    Exception
        Any error that is not of our tree.
    """
    path.write_bytes(data)

    def late(number: int, frame: FrameType | None) -> None:
        raise TooMuch

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        import_onnx(path)
    except ApqError:
        pass
    except TooMuch:
        raise AssertionError(f"takes more than {SECONDS} s") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown < MEGABYTES, f"takes {grown} MB"


def _plain(seconds: float, folder: Path) -> int:
    """Without atheris: random mutations of the corpus, their number printed."""
    rng = random.Random(time.time_ns())
    corpus = [model.SerializeToString() for model in models()]
    path, end, count = folder / "model.onnx", time.monotonic() + seconds, 0
    while time.monotonic() < end:
        try_import(mutate(rng.choice(corpus), rng), path)
        count += 1
    print(f"{count} models")
    return 0


def fuzz(seconds: int, folder: Path) -> int:
    """Until the time is over or something is found; then ``model.onnx`` in `folder` is it."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed: random mutations only", file=sys.stderr)
        return _plain(seconds, folder)
    import importlib

    with atheris.instrument_imports(include=["apq_tvm.onnx_import"]):
        for name in [n for n in sys.modules if n.startswith("apq_tvm.onnx_import")]:
            del sys.modules[name]
        globals()["import_onnx"] = importlib.import_module("apq_tvm.onnx_import").import_onnx
        importlib.import_module("apq_tvm.onnx_import.normalise")
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for i, model in enumerate(models()):
        (corpus / f"seed{i}").write_bytes(model.SerializeToString())

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        return mutate(data, random.Random(seed))[:most]

    words = [sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-artifact_prefix={folder}/"]
    words += ["-max_len=40000", "-rss_limit_mb=6000", "-timeout=60", "-len_control=0"]
    path = Path(tempfile.mkdtemp(dir=folder)) / "model.onnx"
    atheris.Setup(words, lambda data: try_import(data, path), custom_mutator=mutator)
    atheris.Fuzz()
    return 0
