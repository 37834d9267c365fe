"""A bug report for one failed cell, in the sections that SGLang's issue form asks for.

What names a machine or a person is taken out: the host's name, home folders, addresses, and everything that a record
hides anyway. A person reads it, adds what only they know, and files it; nothing is sent from here.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.report.describe import blame, versions_of
from pytest_gpuserve.report.scrub import scrub_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["bug_report"]

# Flags that every start of this tool sets for itself: a reader's own port and key do as well.
_OURS = ("--host", "--port", "--nccl-port", "--api-key")
# Variables that this tool sets for the sake of its own book-keeping.
_OUR_VARIABLES = ("TMPDIR", "SPT_NOENV", "TORCHINDUCTOR_CACHE_DIR", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# An error and its traceback fit; what is longer is the log's end, which follows.
_FEW_LINES = 30
_LOG_LINES = 40
_HOME = re.compile(r"(?:/home/|/Users/)[^/\s'\"]+|/root(?=/|\b)")
_ADDRESS = re.compile(r"\b(?!127\.0\.0\.1\b|0\.0\.0\.0\b)\d{1,3}(?:\.\d{1,3}){3}\b")
_FENCE = re.compile(r"`{3,}")


def bug_report(run: Mapping[str, Any], cell: dict[str, Any], log_end: str = "") -> str:
    """The report as Markdown: description, reproduction and environment of the cell's failure.

    `run` is the record that holds `cell`; `log_end` the last lines of the server's log.
    """
    failure = cell.get("failure") or {}
    hide = _hider(str(run.get("host") or ""))
    title = f"[Bug] {cell['arch']}, {_asked(cell)}: {blame(cell) or cell['outcome']}"
    lines = [f"Title: {hide(title)}", "", "### Describe the bug", ""]
    if run.get("simulated"):
        lines += ["**SIMULATED: no GPU and no SGLang were used. There is nothing to report.**", ""]
    message = str(failure.get("message") or cell.get("reason") or "(this cell has no failure)")
    lines += [hide(message), "", *_against(run, cell), ""]
    said = str(failure.get("text") or "")
    if said and said.count("\n") < _FEW_LINES:
        lines += ["What the server said:", "", *_block(hide(said))]
    if end := "\n".join((log_end or said).rstrip().split("\n")[-_LOG_LINES:]):
        lines += ["End of its log:", "", *_block(hide(end))]
    lines += ["### Reproduction", "", *_block(hide(_command(cell)), "bash")]
    lines += [f"Model: {hide(_model(cell))}", "", "### Environment", ""]
    lines += [f"- {name} {version}" for name, version in versions_of(run).items()]
    gpus = [str(gpu.get("name")) for gpu in cell.get("gpus") or run.get("gpus") or ()]
    lines += [f"- {len(gpus)} x {', '.join(dict.fromkeys(gpus))}"] if gpus else []
    lines += ["", "(Add the output of `python3 -m sglang.check_env` of the same environment.)"]
    return "\n".join(lines) + "\n"


def _asked(cell: Mapping[str, Any]) -> str:
    """What differs from the baseline, by the flags and variables that differ in the launch."""
    baseline = cell.get("baseline") or {}
    changed = [f"{axis} {level}" for axis, level in cell["axes"].items() if level != baseline.get(axis, level)]
    return f"{cell['model']} with {', '.join(changed) or 'the baseline'}"


def _against(run: Mapping[str, Any], cell: Mapping[str, Any]) -> list[str]:
    """What the baseline of the same model did in the same run: the expectation that the failure breaks."""
    baseline = cell.get("baseline") or {}
    for other in run["cells"]:
        same = other["arch"] == cell["arch"] and other["model"] == cell["model"]
        if same and baseline and other["id"] != cell["id"] and other["axes"] == {**other["axes"], **baseline}:
            word = "works" if other["outcome"] == "passed" else f"is {other['outcome']}"
            lines = [f"Expected: as the baseline of the same model, which {word} in the same run"]
            return [lines[0] + (f", on the same machine (its flags: `{_flags(other)}`)." if _flags(other) else ".")]
    return ["Expected: a server that starts and answers. No baseline of the same model is in this record."]


def _flags(cell: Mapping[str, Any]) -> str:
    words = []
    for name, value in (cell.get("flags") or {}).items():
        words += [f"--{name}"] if value is True else [] if value is False else [f"--{name} {value}"]
    return scrub_text(" ".join(words))


def _command(cell: Mapping[str, Any]) -> str:
    """The launch as a person would type it: without this tool's own host, ports and key, and its own variables."""
    words = list(cell.get("argv") or ())
    if words:
        words[0] = "python"
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in _OURS:
            skip = True
        elif word.partition("=")[0] not in _OURS:
            kept.append(word)
    env = {
        name: value
        for name, value in (cell.get("env") or {}).items()
        if name not in _OUR_VARIABLES and not name.startswith("GPUSERVE_") and value != "***"
    }
    assignments = [f"{name}={shlex.quote(str(value))}" for name, value in env.items()]
    text = " ".join([*assignments, *map(shlex.quote, kept)])
    return text or "(no server was launched for this cell)"


def _model(cell: Mapping[str, Any]) -> str:
    words: Sequence[str] = list(cell.get("argv") or ())
    if "--model-path" in words[:-1]:
        return words[words.index("--model-path") + 1]
    return str(cell["model"])


def _hider(host: str) -> Callable[[str], str]:
    named = re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])") if len(host) > 1 else None

    def hide(text: str) -> str:
        text = _ADDRESS.sub("<address>", _HOME.sub("~", scrub_text(text)))
        return named.sub("<host>", text) if named else text

    return hide


def _block(text: str, language: str = "") -> list[str]:
    """A fenced block whose fence is longer than any in the text."""
    longest = max((len(match.group()) for match in _FENCE.finditer(text)), default=2)
    fence = "`" * max(longest + 1, 3)
    return [f"{fence}{language}", text.rstrip("\n"), fence, ""]
