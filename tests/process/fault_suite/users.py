"""A second user of the machine."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

__all__ = ["AS_NOBODY", "NOBODY", "another_user"]

NOBODY = 65534
# It may read everything, because the interpreter may lie in a private folder of this user's; write it may not.
_READS = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *_READS, "--")


@cache
def another_user() -> str:
    """Why no run can be started as another user; empty if one can."""
    try:
        subprocess.run([*AS_NOBODY, sys.executable, "-c", "import pytest"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"nothing can be run as another user ({error})"
    return ""
