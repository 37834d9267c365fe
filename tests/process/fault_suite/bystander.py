"""A process that has nothing to do with any run, and notes every signal it gets: `bystander.py LOG`, run by its path.

The fault suite starts some with names like a server's. Whoever signals one has hit a stranger.
"""

import os
import signal
import sys

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, lambda number, _: os.write(log, f"{signal.Signals(number).name}\n".encode()))
print("ready", flush=True)
while True:
    signal.pause()
