"""Becomes the server: `python -I -S shim.py PARENT STATUS_FD CWD ARGV...`, run by path in a new session.

Asks the kernel to kill this process when the supervisor dies, which survives `exec`; then runs ARGV. STATUS_FD closes
when that succeeded, else the reason is written to it. Imports nothing of this package: the server's own interpreter
takes over, and a shim that fails to import would look like a server that fails to start.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns: the process becomes ARGV, or ends with 127 (not runnable) or 126 (the supervisor is gone)."""
    parent, status, cwd, *argv = sys.argv[1:]
    fd = int(status)
    os.set_inheritable(fd, False)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os._exit(126)
    try:
        os.chdir(cwd)
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        os.write(fd, f"{argv[0]}: {error.strerror}".encode())
        os._exit(127)


if __name__ == "__main__":
    main()
