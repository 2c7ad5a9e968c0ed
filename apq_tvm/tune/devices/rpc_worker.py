"""The half of `apq_tvm.tune.devices.rpc` that has TVM: one session, in a process that can be ended.

Calls of TVM's RPC wait without a time-out, and a connection that breaks may end the process; so it
is one of its own. It reads a JSON document a line and answers each by one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO


def serve(host: str, port: int, word: str, answers: TextIO) -> None:
    """Connect to a server, say so, and do what lines on standard input ask for.

    Parameters
    ----------
    host, port, word
        As the tracker gave them.
    answers : file
        Receives ``{"ok": ...}`` or ``{"error": text}`` for the connection and every line.
    """

    def answer(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    from tvm import rpc

    loaded: Any = None
    session: Any = None
    try:
        session = rpc.connect(host, port, word)
        answer({"ok": True})
    except Exception as error:  # TVM has no class of its own for it
        answer({"error": _last(error)})
        return
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "put" in asked:
                for name, path in asked["put"]:
                    session.upload(bytearray(Path(path).read_bytes()), name)
                answer({"ok": True})
            elif "load" in asked:
                loaded = session.load_module(asked["load"])
                answer({"ok": True})
            elif "call" in asked:
                answer({"ok": int(loaded[asked["call"]]())})
            elif "get" in asked:
                Path(asked["to"]).write_bytes(bytes(session.download(asked["get"])))
                answer({"ok": True})
            else:
                for name in asked["remove"]:
                    session.remove(name)
                answer({"ok": True})
        except Exception as error:  # as above
            answer({"error": _last(error)})


def _last(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:1000]


def main() -> None:
    """Serve a session with the server that the arguments name: HOST PORT WORD."""
    # TVM prints; what it prints is not to be taken for an answer.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        host, port, word = sys.argv[1:]
        serve(host, int(port), word, answers)
