"""The fault suite: what happens to runs, servers and machines, and what is left afterwards.

Every fault is a function in the table; each module below holds those of one kind.
"""

from . import deaths, endings, hangs, machines, places, servers
from .table import FAULTS, Fault, Result

__all__ = ["FAULTS", "Fault", "Result", "deaths", "endings", "hangs", "machines", "places", "servers"]
