"""Folders for programs and their data, of which a tuner that was killed leaves none for long.

Who has a folder holds a lock on it (``flock``), which ends with the process, whatever ends that.
Whoever makes the next one removes those that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "apq-tuner-"
"""Of the folders' names; without a lock that nobody else takes, no other folder may have it."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give a folder that is gone at the end; those of tuners that were killed are removed first.

    Raises
    ------
    OSError
        The folder for temporary files cannot be written.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _remove_unheld(left)
    folder, held = _made()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _made() -> tuple[Path, int]:
    """A new folder, and what holds its lock while it is open."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):  # another one removed it before it was locked
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # where folders have no locks, nobody removes any either
                fcntl.flock(held, fcntl.LOCK_EX)
            if folder.exists():
                return folder, held
            os.close(held)


def _remove_unheld(folder: Path) -> None:
    """Remove a folder of this user's, unless its process lives."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone, or not ours
        return
    try:
        if os.fstat(held).st_uid == os.getuid():
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # held
        pass
    finally:
        os.close(held)
