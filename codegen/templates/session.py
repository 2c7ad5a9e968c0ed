"""Sessions of a decoder: the tokens so far, and caches of their keys and values that grow in place.

>>> s = smollm2.session(max_tokens=1024)
>>> logits = s.prefill(ids)  # of the last token
>>> while not done:
...     logits = s.step(choose(logits))
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def whole_number(name: str, value: Any, refuse: Callable[[str], Exception], bits: int = 64) -> int:
    """An argument that the library takes as a signed integer of so many bits.

    Raises
    ------
    InputError
        It is an integer that has more: ctypes would cut it off.
    TypeError
        It is none.
    """
    number = operator.index(value)
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        raise refuse(f"{name}={number} is too large")
    return number


class Session:
    """Caches of equally long sequences in the library's memory; `session` of the module makes it.

    One thread at a time may use a session, several sessions may run at once. A call that raises an
    error leaves the session as it was.

    Attributes
    ----------
    batch, capacity : int
        Sequences, and how many tokens of each there is room for.
    """

    def __init__(
        self,
        library: SessionLibrary,
        logits: np.dtype[Any],
        handle: ctypes.c_void_p,
        batch: int,
        capacity: int,
    ) -> None:
        self._library, self._logits, self._handle = library, logits, handle
        self.batch, self.capacity = batch, capacity
        self._width = int(library.session_width(handle))

    def _c(self) -> ctypes.c_void_p:
        """The library's session."""
        if not self._handle:
            raise self._library.refuse("the session is closed")
        return self._handle

    @property
    def length(self) -> int:
        """Tokens of each sequence so far."""
        return int(self._library.session_length(self._c()))

    def prefill(self, ids: Any, last: int | None = None, bits: int = 0) -> Array:
        """Run new tokens, many at once.

        Parameters
        ----------
        ids : array_like of int [batch, tokens] or [tokens]
        last : int, optional
            Of how many of them, counted from the end, logits are wanted: 0 to all. By default of
            the last one, without an axis for it.
        bits : int
            Of the weights in this call, where the model was compiled for a range; 0 is what
            `set_precision` said.

        Returns
        -------
        ndarray [batch, vocabulary] or [batch, last, vocabulary]
            Without `batch` where `ids` have none.

        Raises
        ------
        InputError
            Ids that are none, more tokens than there is room for, a session that is closed or that
            another thread uses.
        RunError
            Not enough memory.
        """
        library = self._library
        try:
            given = np.asarray(ids)
        except (ValueError, OverflowError) as error:
            raise library.refuse(f"ids are no array: {error}") from error
        if given.dtype.kind not in "iu":
            raise library.refuse(f"ids are of {given.dtype}, wanted integers")
        if given.dtype == np.uint64 and given.size and int(given.max()) >= 2**63:
            raise library.refuse(f"id {given.max()} is no token")
        rows = np.ascontiguousarray(given, np.int64)
        rows = rows.reshape(1, -1) if rows.ndim < 2 else rows
        if rows.ndim != 2 or rows.shape[0] != self.batch:
            raise library.refuse(f"ids have shape {given.shape}, wanted [{self.batch}, tokens]")
        tokens = rows.shape[1]
        asked = 1 if last is None else operator.index(last)
        bits = whole_number("bits", bits, library.refuse, 32)
        if not 0 <= asked <= tokens:
            raise library.refuse(f"last={asked}: there are {tokens} tokens")
        logits = library.empty((self.batch, asked, self._width), self._logits)
        code = library.session_run(
            self._c(), rows.ctypes.data, tokens, asked, logits.ctypes.data, bits
        )
        library.check(code)
        if last is None:
            logits = logits[:, 0]
        return logits if given.ndim == 2 else logits[0]

    def step(self, ids: Any, bits: int = 0) -> Array:
        """Run one new token of each sequence.

        Parameters
        ----------
        ids : int, or array_like of int [batch]
        bits : int
            As of `prefill`.

        Returns
        -------
        ndarray [vocabulary] or [batch, vocabulary]
            The latter where `ids` is an array. Errors are those of `prefill`.
        """
        try:
            column = np.reshape(ids, (-1, 1))
        except (ValueError, OverflowError) as error:
            raise self._library.refuse(f"ids are no array: {error}") from error
        logits = self.prefill(column, bits=bits)
        return logits if np.ndim(ids) else logits[0]

    def rewind(self, tokens: int) -> None:
        """Take the last `tokens` of every sequence back.

        Raises
        ------
        InputError
            There are not so many.
        """
        count = whole_number("tokens", tokens, self._library.refuse)
        self._library.check(self._library.session_rewind(self._c(), count))

    def reset(self) -> None:
        """Take all tokens back."""
        self.rewind(self.length)

    def fork(self) -> Session:
        """Copy the session: both go on from here, each by itself."""
        copy = ctypes.c_void_p()
        self._library.check(self._library.session_fork(self._c(), ctypes.byref(copy)))
        return Session(self._library, self._logits, copy, self.batch, self.capacity)

    def memory(self) -> dict[str, int]:
        """Measure memory in bytes: ``"cache"`` when it is full, and ``"arena"`` of runs."""
        cache, arena = ctypes.c_uint64(), ctypes.c_uint64()
        library = self._library
        library.check(library.session_memory(self._c(), ctypes.byref(cache), ctypes.byref(arena)))
        return {"cache": cache.value, "arena": arena.value}

    def close(self) -> None:
        """Give the memory back; Python's end of the object does as well."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._library.session_destroy(handle)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) and ctypes is not None:
            self.close()


class SessionLibrary:
    """A module's C functions for sessions, with their types."""

    session_create: Any
    session_fork: Any
    session_destroy: Any
    session_run: Any
    session_rewind: Any
    session_length: Any
    session_width: Any
    session_memory: Any

    def __init__(
        self,
        function_of: Callable[[str], Any],
        check: Callable[[int], None],
        empty: Callable[[tuple[int, ...], np.dtype[Any]], Array],
        refuse: Callable[[str], Exception],
    ) -> None:
        self.check, self.empty, self.refuse = check, empty, refuse
        i64, pointer = ctypes.c_int64, ctypes.c_void_p
        for name, result, arguments in (
            ("create", ctypes.c_int, (pointer, i64, i64, pointer, pointer)),
            ("fork", ctypes.c_int, (pointer, pointer)),
            ("destroy", None, (pointer,)),
            ("run", ctypes.c_int, (pointer, pointer, i64, i64, pointer, ctypes.c_int32)),
            ("rewind", ctypes.c_int, (pointer, i64)),
            ("length", i64, (pointer,)),
            ("width", i64, (pointer,)),
            ("memory", ctypes.c_int, (pointer, pointer, pointer)),
        ):
            function = function_of(f"session_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, f"session_{name}", function)
