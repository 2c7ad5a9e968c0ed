"""A compiled module as a decoder: by its sessions, or with caches that are arrays of its runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from apq_tvm.bench.generate.decoder import Ports, find_ports
from apq_tvm.errors import BadInput, BadTarget
from apq_tvm.module import damaged, load_module, ports, read_manifest
from apq_tvm.types import Array


def module_ports(folder: Path) -> Ports:
    """The ports of a compiled module."""
    manifest = read_manifest(folder)
    inputs, outputs = (ports(folder, manifest, kind) for kind in ("inputs", "outputs"))
    return find_ports(inputs, outputs, folder)


def weight_bytes(manifest: Mapping[str, Any]) -> int:
    """Bytes of the linear layers, all of which every token reads; of a table it reads one row."""
    return sum(int(x["bytes"]) for x in manifest["layers"] if x["op"] == "apq.Linear")


def has_sessions(manifest: Mapping[str, Any]) -> bool:
    """Whether a module keeps caches itself, in sessions."""
    return bool(manifest.get("session"))


def check_decoder(folder: Path) -> None:
    """Refuse what is no decoder before anything is timed.

    Raises
    ------
    BadInput
        It has neither sessions nor caches.
    BadTarget
        It is a GPU's.
    """
    manifest = read_manifest(folder)
    with damaged(folder):
        if manifest["library"].get("gpu"):
            raise BadTarget(f"{folder} is for a GPU; decoders are timed on processors")
    if not has_sessions(manifest):
        module_ports(folder)


def open_decoder(folder: Path, threads: int, longest: int) -> ModuleDecoder | SessionDecoder:
    """A module as a decoder, by its sessions where it has them."""
    check_decoder(folder)
    manifest = read_manifest(folder)
    module: Any = load_module(folder)
    module.set_num_threads(threads)
    if has_sessions(manifest):
        return SessionDecoder(module, manifest, longest)
    return ModuleDecoder(module, manifest, module_ports(folder))


class _Ours:
    """What both ways of decoding know of a module.

    Parameters
    ----------
    module : module
        Of Python.
    manifest : mapping
    """

    def __init__(self, module: Any, manifest: Mapping[str, Any]) -> None:
        self._module = module
        self.weight_bytes = weight_bytes(manifest)
        logits = manifest["outputs"][0]["shape"][-1]
        self.vocabulary = logits if isinstance(logits, int) else None

    def arena(self) -> int | None:
        """Bytes of working memory that the module holds."""
        return int(self._module.memory()["arena"])

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """The module's errors are ours."""
        try:
            yield
        except self._module.ModuleError as error:
            raise BadInput(str(error)) from error


class SessionDecoder(_Ours):
    """A module that keeps its caches itself, in a session.

    Parameters
    ----------
    module, manifest
        As of the other.
    longest : int
        The most tokens that it will hold.
    """

    how = "session"

    def __init__(self, module: Any, manifest: Mapping[str, Any], longest: int) -> None:
        super().__init__(module, manifest)
        with self._refusals():
            self._session = module.session(longest)
        self.cache_bytes = int(self._session.memory()["cache"]) // longest

    def prefill(self, ids: Sequence[int]) -> None:
        """Take a prompt, with nothing before it."""
        with self._refusals():
            self._session.reset()
            self._session.prefill(np.array(ids, np.int64))

    def step(self, token: int) -> None:
        """Take one more token."""
        with self._refusals():
            self._session.step(token)

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        with self._refusals():
            self._session.rewind(self._session.length - length)

    def arena(self) -> int | None:
        """Bytes of caches and of working memory."""
        memory = self._session.memory()
        return int(memory["cache"]) + int(memory["arena"])


class ModuleDecoder(_Ours):
    """A module whose caches are arrays of its runs, which copy them.

    Parameters
    ----------
    module, manifest
        As of the other.
    ports : Ports
    """

    how = "caches in and out of every run"

    def __init__(self, module: Any, manifest: Mapping[str, Any], ports: Ports) -> None:
        super().__init__(module, manifest)
        self.ports, self.cache_bytes = ports, ports.cache_bytes(1)
        self._caches: dict[str, Array] = {}
        self._length = 0

    def prefill(self, ids: Sequence[int]) -> None:
        """Take a prompt, with nothing before it."""
        self._length = 0
        self._caches = {spec.name: self.ports.empty(spec) for spec, _ in self.ports.caches}
        self._run(ids)

    def step(self, token: int) -> None:
        """Take one more token."""
        self._run((token,))

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        cut = [slice(None)] * self.ports.axis + [slice(0, length)]
        self._caches = {
            name: np.ascontiguousarray(cache[tuple(cut)]) for name, cache in self._caches.items()
        }
        self._length = length

    def _run(self, ids: Sequence[int]) -> None:
        feeds = self.ports.feeds(ids, self._length)
        with self._refusals():
            outputs = self._module.run({**feeds, **self._caches})
        self._caches = {spec.name: outputs[name] for spec, name in self.ports.caches}
        self._length += len(ids)
