"""Stand-ins for ssh, scp and adb that do here what the real ones do there."""

from __future__ import annotations

import sys
from pathlib import Path

_SSH = """
import os, subprocess, sys
words, host, options = sys.argv[1:], "", []
while words:
    word = words.pop(0)
    if word in ("-o", "-p", "-O"):
        options.append(word); options.append(words.pop(0))
    elif word == "-T":
        pass
    else:
        host = word.rpartition("@")[2]
        break
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(f"ssh {host} {words}\\n")
if "-O" in options:
    sys.exit(0)
SAYS = {
    "changed": "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\\nHost key verification"
    " failed.",
    "unknown": "Host key verification failed.",
    "denied": "pi@denied: Permission denied (publickey).",
    "away": "ssh: connect to host away port 22: Connection refused",
}
if host in SAYS:
    print(SAYS[host], file=sys.stderr)
    sys.exit(255)
mark = os.path.join(os.path.dirname(os.environ["FAKE_LOG"]), "die")
if "run" in words and os.path.exists(mark):
    os.remove(mark)
    print("client_loop: send disconnect: Broken pipe", file=sys.stderr)
    sys.exit(255)
sys.exit(subprocess.run(["sh", "-c", " ".join(words)]).returncode)
"""

_SCP = """
import os, shutil, sys
words = sys.argv[1:]
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(f"scp {words[words.index('--') + 1:]}\\n")
*sources, target = words[words.index("--") + 1 :]
place = lambda name: name.partition(":")[2] if ":" in name else name
for source in map(place, sources):
    if not os.path.exists(source):
        print(f"scp: {source}: No such file or directory", file=sys.stderr)
        sys.exit(1)
    goal = place(target)
    goal = os.path.join(goal, os.path.basename(source)) if goal.endswith("/") else goal
    if os.path.isdir(source):
        shutil.copytree(source, goal, dirs_exist_ok=True)
    else:
        shutil.copy(source, goal)
"""

_ADB = """
import os, shutil, subprocess, sys
BASE, REAL = "/data/local/tmp", os.environ["FAKE_BASE"]
there = lambda word: word.replace(BASE, REAL)
_, serial, verb, *words = sys.argv[1:]
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(f"adb {serial} {verb} {words}\\n")
if serial == "gone":
    print("error: device 'gone' not found", file=sys.stderr); sys.exit(1)
if serial == "shy":
    print("error: device unauthorized.", file=sys.stderr); sys.exit(1)
if verb == "shell":
    done = subprocess.run(["sh", "-c", there(" ".join(words))], capture_output=True, text=True)
    if serial == "old":  # one stream, and no exit status
        print((done.stdout + done.stderr).replace(REAL, BASE).replace("\\n", "\\r\\n"), end="")
        sys.exit(0)
    print(done.stdout.replace(REAL, BASE), end="")
    print(done.stderr.replace(REAL, BASE), end="", file=sys.stderr)
    sys.exit(done.returncode)
source, target = map(there, words)
if not os.path.exists(source):
    print(f"adb: error: failed to stat remote object '{source}': No such file", file=sys.stderr)
    sys.exit(1)
if target.endswith("/"):
    target = os.path.join(target, os.path.basename(source))
(shutil.copytree if os.path.isdir(source) else shutil.copyfile)(source, target)
"""


def write_fakes(folder: Path) -> None:
    """Write the three programs."""
    folder.mkdir()
    for name, text in (("ssh", _SSH), ("scp", _SCP), ("adb", _ADB)):
        path = folder / name
        path.write_text(f"#!{sys.executable} -SE\n{text}")
        path.chmod(0o755)
