"""Scenarios: what simulated servers do, scripted by a file or taken from the known-bad list."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpuserve.matrix.sample import sample_of
from pytest_gpuserve.matrix.walk import Reader, did_you_mean
from pytest_gpuserve.matrix.when import Vocabulary, read_when
from pytest_gpuserve.model.failure import Kind
from pytest_gpuserve.model.phase import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pytest_gpuserve.errors import Where
    from pytest_gpuserve.matrix.source import Node
    from pytest_gpuserve.model.knownbad import KnownBad
    from pytest_gpuserve.model.predicate import Predicate

__all__ = ["Rule", "Scenario", "load_scenario", "scenario_from_known_bad"]

_PHASES = tuple(str(phase) for phase in Phase)
_Value = Any  # a plain JSON value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`then` holds in the cells that `when` matches, in the share `flaky` of their starts. A None unsets a key."""

    when: Predicate
    then: Mapping[str, _Value]
    flaky: float = 1.0
    where: Where | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`defaults`, then every matching rule in order."""

    defaults: Mapping[str, _Value] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()

    def behaviour(self, facts: Mapping[str, object], seed: int) -> dict[str, _Value]:
        """What one start does, with the file's own keys and plain JSON values.

        `facts` are the cell's (`cell.facts_of`), and `gpu`: the index of the GPU it got, or a list of indices, any of
        which may match. `seed` decides the flaky rules: give each start its own.
        """
        merged = dict(self.defaults)
        for index, rule in enumerate(self.rules):
            if not _matches(rule.when, facts):
                continue
            # A generator of its own for each rule: a rule added below must not change the draws of those above.
            if rule.flaky >= 1.0 or random.Random(f"{seed}/{index}").random() < rule.flaky:
                merged |= rule.then
        return {key: value for key, value in merged.items() if value is not None}


def _matches(when: Predicate, facts: Mapping[str, object]) -> bool:
    gpus = facts.get("gpu")
    if isinstance(gpus, (list, tuple)):
        return any(when.matches({**facts, "gpu": gpu}) for gpu in gpus)
    return when.matches(facts)


def load_scenario(path: Path, *, vocabularies: Sequence[Vocabulary] = ()) -> Scenario:
    """The scenario of a file. FileProblems with every problem in it.

    With `vocabularies` (see `schema.vocabulary_of`: those of the matrices of the run), a `when` that names a fact or
    level of none of them is a problem too: the rule could never apply.
    """
    reader = Reader()
    root = reader.open(path)
    fields = reader.fields(root, ("schema", "defaults", "rules")) if root is not None else {}
    defaults = _read_then(reader, fields["defaults"], "defaults") if "defaults" in fields else {}
    vocabulary = _joined(vocabularies)
    rules = []
    for node in reader.items(fields["rules"]) if "rules" in fields else ():
        rule = reader.fields(node, ("when", "then"), required=("then",))
        then = _read_then(reader, rule["then"], "then") if "then" in rule else {}
        flaky = then.pop("flaky", 1.0)
        if "then" in rule and rule["then"].fields is not None and set(rule["then"].fields) <= {"flaky"}:
            reader.add(rule["then"], f"{node.path}.then does nothing{did_you_mean('', _THEN)}")
        rules.append(
            Rule(when=read_when(reader, rule.get("when"), vocabulary), then=then, flaky=flaky, where=node.where)
        )
    reader.finish()
    return Scenario(defaults=defaults, rules=tuple(rules))


def _joined(vocabularies: Sequence[Vocabulary]) -> Vocabulary:
    """What at least one of them knows, and `gpu`."""
    values: dict[str, Any] = {"gpu": None}
    for vocabulary in vocabularies:
        for name, known in vocabulary.values.items():
            before = values.get(name, ())
            values[name] = None if before is None or known is None else (*before, *known)
    return Vocabulary(values, closed=bool(vocabularies))


def _read_then(reader: Reader, node: Node, what: str) -> dict[str, _Value]:
    known = {key: read for key, read in _THEN.items() if what == "then" or key != "flaky"}
    then: dict[str, _Value] = {}
    for key, value in reader.fields(node, known).items():
        read = known[key](reader, value)
        if read is not None:
            then[key] = read
    return then


def _phase(reader: Reader, node: Node) -> _Value:
    return reader.one_of(node, _PHASES)


def _crash(reader: Reader, node: Node) -> _Value:
    fields = reader.fields(node, ("phase", "text", "exit"), required=("phase",))
    crash: dict[str, _Value] = {"phase": reader.one_of(fields.get("phase"), _PHASES)}
    if "text" in fields:
        crash["text"] = reader.text(fields["text"])
    if "exit" in fields:
        crash["exit"] = reader.whole(fields["exit"])
        if crash["exit"] is not None and crash["exit"] > 255:
            reader.wrong(fields["exit"], "an exit code from 0 to 255")
    return crash


def _compile(reader: Reader, node: Node) -> _Value:
    fields = reader.fields(node, ("phase", "seconds"), required=("phase", "seconds"))
    seconds = reader.number(fields.get("seconds"), positive=False)
    return {"phase": reader.one_of(fields.get("phase"), _PHASES), "seconds": seconds}


def _hold(reader: Reader, node: Node) -> _Value:
    if isinstance(node.value, str) and node.text != "forever":
        reader.wrong(node, "forever, or a number of seconds")
        return None
    return "forever" if node.text == "forever" else reader.number(node, positive=False)


def _port_taken(reader: Reader, node: Node) -> _Value:
    if node.value == "once":
        return "once"
    if not isinstance(node.value, bool):
        reader.wrong(node, "true or once")
        return None
    return node.value


def _flaky(reader: Reader, node: Node) -> _Value:
    share = reader.number(node, positive=False)
    if share is not None and share > 1:
        reader.wrong(node, "a probability from 0 to 1")
    return share


def _among(*known: str) -> Callable[[Reader, Node], _Value]:
    return lambda reader, node: reader.one_of(node, known)


def _number(*, positive: bool) -> Callable[[Reader, Node], _Value]:
    return lambda reader, node: reader.number(node, positive=positive)


def _text(reader: Reader, node: Node) -> _Value:
    return reader.text(node)


def _boolean(reader: Reader, node: Node) -> _Value:
    return reader.boolean(node)


_THEN: dict[str, Callable[[Reader, Node], _Value]] = {
    "phase-seconds": _number(positive=False),
    "tokens-per-second": _number(positive=True),
    "memory-gib": _number(positive=False),
    "reject": _text,
    "crash": _crash,
    "hang": _phase,
    "compile": _compile,
    "slow": _number(positive=True),
    "output": _among("garbage", "nan", "repeat", "empty", "short"),
    "fallback": _text,
    "exit-zero": _boolean,
    "ignore-sigterm": _boolean,
    "escape-session": _boolean,
    "zombies": lambda reader, node: reader.whole(node),
    "hold-memory": _hold,
    "port-taken": _port_taken,
    "log": _among("flood", "no-newline", "binary", "silent"),
    "flaky": _flaky,
}

_FAULTS = ("reject", "crash", "hang", "output", "slow", "fallback")
# A first look at a matrix of sixty cells should take seconds; a scenario says a rate of its own where it matters.
_QUICK: dict[str, _Value] = {"tokens-per-second": 5000}


def scenario_from_known_bad(entries: Iterable[KnownBad]) -> Scenario:
    """A machine on which everything works except what the entries expect, each failing as its entry says.

    Where several match a cell, the most specific one decides alone. Give the entries whose version ranges hold
    (`known_bad.in_range`); a rule knows no versions.
    """
    rules = []
    # Later rules win; each unsets the other faults, since a server that hangs at start-up cannot also talk garbage.
    for entry in sorted(entries, key=lambda entry: entry.specificity):
        fault = _fault(entry)
        if fault is not None:
            rules.append(Rule(when=entry.when, then={**dict.fromkeys(_FAULTS), **fault}, where=entry.where))
    return Scenario(defaults=_QUICK, rules=tuple(rules))


def _fault(entry: KnownBad) -> dict[str, _Value] | None:
    expect = entry.expect
    text = expect.match
    if text is None and expect.match_re is not None:
        text = sample_of(expect.match_re)
    if text is None:
        text = entry.reason or f"simulated failure of {entry.id}"

    def phase(default: Phase) -> str:
        return str(expect.phases[0] if expect.phases else default)

    if expect.kind is Kind.REJECTED:
        return {"reject": text}
    if expect.kind is Kind.CRASH:
        return {"crash": {"phase": phase(Phase.WARMUP), "text": _raised(text, expect.match_re)}}
    if expect.kind is Kind.OOM:
        memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
        return {"crash": {"phase": phase(Phase.KV_CACHE), "text": memory if text in memory else f"{memory} {text}"}}
    if expect.kind is Kind.HANG:
        return {"hang": phase(Phase.GRAPH_CAPTURE)}
    if expect.kind is Kind.WRONG_OUTPUT:
        return {"output": "garbage"}
    if expect.kind is Kind.SLOW:
        return {"slow": 8}
    if expect.kind is Kind.FALLBACK:
        return {"fallback": _other_backend(entry)}
    return None


def _raised(text: str, pattern: str | None) -> str:
    """As the last line of a traceback, unless the pattern wants the text at a line's beginning."""
    line = f"RuntimeError: {text}"
    return line if pattern is None or re.search(pattern, line, re.MULTILINE) else text


def _other_backend(entry: KnownBad) -> str:
    """The backend the server takes instead: the one the entry's text names, else any that it does not ask for."""
    if entry.expect.match and entry.expect.match.replace("_", "").isalnum():
        return entry.expect.match
    asked = {wanted for term in entry.when.terms for wanted in term.wanted}
    return "triton" if "triton" not in asked else "torch_native"
