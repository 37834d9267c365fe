"""Checks of what a server answers: the backend it uses, its logprobs against the baseline's, many requests, a long one.

Each takes the manager and the cell, and says what it found; evidence goes to the cell's folder.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from pytest_gpuserve import engine
from pytest_gpuserve.errors import GpuserveError
from pytest_gpuserve.manager.measuring import Finding, fallbacks_of
from pytest_gpuserve.measure.canary import OUTPUT, Answer, answer_of, ask, body_of, compare, prompts, side_by_side
from pytest_gpuserve.measure.fallback import swaps
from pytest_gpuserve.measure.plausible import answers_problem, text_problem
from pytest_gpuserve.measure.post import post_all
from pytest_gpuserve.measure.target import target_of
from pytest_gpuserve.measure.tolerance import tolerance_of
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.report.store import read_json, write_json_atomic, write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pytest_gpuserve.manager import Manager
    from pytest_gpuserve.manager.handle import ServerHandle
    from pytest_gpuserve.measure.canary import Difference, Prompt
    from pytest_gpuserve.measure.tolerance import Tolerance
    from pytest_gpuserve.model.cell import Cell

__all__ = ["backend", "concurrency", "long_context", "output"]

ANSWERS = "canary.json"
_LONGEST_PROMPT = 1024  # of the canary: the same for every cell of a model, whatever its KV cache holds
_MANY = 64
_AT_MOST = 131_072
_STEPS = (8_192, 32_768)
_LONGEST_WAIT = 40.0  # s; without a moving counter a minute is a hang (`model.launch.DEFAULT_LIMITS`)
_TAIL = 64
_TIMEOUT = 600.0
_WORDS = (
    "The capital of France is",
    "Explain in two sentences why the sky is blue.",
    "Write a short list of things to take on a walk in the mountains:",
)


def backend(manager: Manager, cell: Cell) -> Finding:
    """What the server reports of itself, and its log, against the flags that the cell set."""
    handle, record = manager.server(cell), manager.state(cell).record
    version = manager.plan.versions.get("sglang", "")
    fallbacks = fallbacks_of(handle.log_path)
    found = swaps(cell.flags, engine.resolved_of(handle.info, version), fallbacks)
    record.notes += [f"the log says: {one.what}" for one in fallbacks if one.line not in {swap.line for swap in found}]
    if not found:
        return Finding()
    text = "\n".join(map(str, found))
    line = next((swap.line for swap in found if swap.line), "")
    return Finding(failure=Failure.of(Kind.FALLBACK, Phase.SERVING, text, line=line or text, text=text))


def output(manager: Manager, cell: Cell) -> Finding:
    """The canary: this server's answers by themselves, then against the baseline's."""
    handle = manager.server(cell)
    plan = _plan(handle)
    refused = ""
    try:
        answers = ask(_sender(handle), plan)
    except (ConnectionError, TimeoutError):
        raise
    except OSError as error:
        # Some modes of speculative decoding know no logprobs: a thing to know, and no wrong output.
        if "HTTP 400" not in str(error):
            raise
        refused = f"the server refuses to give logprobs: {error}"
        answers = ask(_sender(handle), plan, logprobs=False)
    finding = _checked(manager, cell, plan, answers, refused)
    # Written only now: answers that are wrong, or were not checked, are no reference for another cell's.
    unfit = _first(finding.failure) if finding.failure else finding.skipped
    saved = {"prompts": _name(plan), "unfit": unfit, "answers": [one.to_json() for one in answers]}
    write_json_atomic(manager.folder(cell) / ANSWERS, saved)
    return finding


def _checked(manager: Manager, cell: Cell, plan: Sequence[Prompt], answers: Sequence[Answer], refused: str) -> Finding:
    """What is wrong with the answers, or why they cannot be compared: `refused` logprobs, or no reference for them."""
    handle, record = manager.server(cell), manager.state(cell).record
    inputs = None if refused else [prompt.inputs for prompt in plan]
    problem = answers_problem(answers, [prompt.output for prompt in plan], inputs)
    if problem is not None:
        return _wrong(problem, ANSWERS)
    if record.resolved.get("load_format") == "dummy":
        # Uniform weights make every output uniform: a rope theta that is 10 % off changes not one bit.
        return Finding(skipped="output not checked: with dummy weights a wrong answer looks like a right one")
    if cell.model.path is not None:
        for text in _WORDS:
            problem = text_problem(handle.generate(text, max_new_tokens=_TAIL).text)
            if problem is not None:
                return _wrong(f"{text!r}: {problem}")
    if refused:
        return Finding(skipped=f"output not checked: {refused}")
    name, reference, missing = _reference(manager, cell, plan)
    if reference is None:
        name, reference = "itself", ask(_sender(handle), plan)
    differences = compare(plan, answers, reference)
    tolerance = _tolerance(cell, record.resolved)
    record.output = {
        "compared_with": name,
        "tolerance": tolerance.name,
        "cached_tokens": sum(answer.cached for answer in answers),
        "parts": {one.part: _figures(one, tolerance) for one in differences},
    }
    names = ("this cell", name)
    finding = _judged(manager.folder(cell), plan, (answers, reference), names, differences, tolerance)
    if finding.failure is None and missing:
        return Finding(skipped=f"output not checked: compared with itself only, since {missing}")
    return finding


def _reference(manager: Manager, cell: Cell, plan: Sequence[Prompt]) -> tuple[str, list[Answer] | None, str]:
    """The baseline's id and answers; None for a baseline itself, and where they are no reference, with the reason."""
    if cell.is_baseline:
        return "", None, ""
    baseline = manager.plan.baseline_of(cell)
    if baseline is None:
        return "", None, "this run has no baseline of it"
    if not manager.runs(baseline.id):
        return "", None, f"the baseline {baseline.id} is deselected: run it in the same session"
    answers, unfit = _saved(manager.folder(baseline), plan)
    if not answers:
        return "", None, f"the baseline {baseline.id} has no answers in this run"
    result = manager.result_of(baseline.id)
    if not unfit and result is not None and result.failure is not None and result.failure.kind is Kind.WRONG_OUTPUT:
        # Another check than this one saw it.
        unfit = _first(result.failure)
    if unfit:
        return "", None, f"the baseline {baseline.id} is no reference: {unfit}"
    return baseline.id, answers, ""


def concurrency(manager: Manager, cell: Cell) -> Finding:
    """64 requests of many sizes at once; eight of them are the canary's, and must answer as they did alone."""
    handle, record = manager.server(cell), manager.state(cell).record
    plan = [prompt for prompt in _plan(handle) if not prompt.cached]
    alone = _alone(manager, cell)
    target = target_of(handle.info)
    generator = random.Random("mixed")
    longest = min(256, target.longest // 4)
    sizes = [(generator.randint(1, longest), generator.randint(1, OUTPUT)) for _ in range(_MANY - len(plan))]
    mixed = [body_of(generator.choices(range(target.vocabulary // 2, target.vocabulary), k=n), m) for n, m in sizes]
    # A server that gave no logprobs to the canary is not asked for them here.
    bodies = [*(body_of(prompt.tokens, OUTPUT, logprobs=0 if alone else None) for prompt in plan), *mixed]
    raw = post_all(f"{handle.url}/generate", bodies, api_key=handle.api_key, timeout=_TIMEOUT, alive=handle.end)
    failed = [answer for answer in raw if isinstance(answer, str)]
    if failed:
        manager.inspect(cell, seconds=3.0)
        return _wrong(f"{len(failed)} of {_MANY} requests at once failed: {'; '.join(dict.fromkeys(failed))[:500]}")
    wanted = [body["sampling_params"]["max_new_tokens"] for body in bodies]
    short = [
        f"{got} of {count} tokens"
        for answer, count in zip(raw, wanted, strict=True)
        if isinstance(answer, dict) and (got := _count(answer)) != count
    ]
    if short:
        return _wrong(f"{len(short)} of {_MANY} requests at once came short: {', '.join(short[:5])}")
    answers = [answer_of(number, one) for number, one in enumerate(raw[: len(plan)]) if isinstance(one, dict)]
    inputs = [prompt.inputs for prompt in plan] if alone else None
    problem = answers_problem(answers, wanted[: len(plan)], inputs)
    if problem is not None:
        return _wrong(f"among {_MANY} requests at once, {problem}")
    if not alone:
        record.notes.append(f"the answers among {_MANY} at once were not compared: there are no logprobs of them alone")
    if not alone or record.resolved.get("load_format") == "dummy":
        return Finding()
    reference = alone[: len(plan)]
    tolerance = _tolerance(cell, record.resolved)
    differences = compare(plan, answers, reference)
    return _judged(
        manager.folder(cell), plan, (answers, reference), (f"among {_MANY}", "alone"), differences, tolerance
    )


def long_context(manager: Manager, cell: Cell) -> Finding:
    """A prompt near the longest that the server takes is answered, with numbers for its last tokens.

    In steps, each the beginning of the next: a prompt of a hundred thousand tokens moves no counter while it is read,
    so a step that would take as long as a hang is not taken, and the record says where it ended.
    """
    handle, record = manager.server(cell), manager.state(cell).record
    target = target_of(handle.info)
    room = min(target.longest, _AT_MOST)
    size = room - max(_TAIL, room // 16)
    tokens = random.Random("long").choices(range(target.vocabulary // 2, target.vocabulary), k=size)
    done, seconds = 0, 0.0
    has_logprobs = bool(_alone(manager, cell))
    for step in (*(step for step in _STEPS if step < size), size):
        # Attention grows with the square: twice what the tokens alone would take.
        if done and 2 * seconds * step / done > _LONGEST_WAIT:
            record.notes.append(f"the long prompt ended at {done} of {size} tokens: {done} took {seconds:.0f} s")
            break
        began = time.monotonic()
        start = max(step - _TAIL, 0) if has_logprobs else None
        raw = _sender(handle)(body_of(tokens[:step], 8, logprobs=start))
        done, seconds = step, time.monotonic() - began
        problem = answers_problem([answer_of(0, raw)], [8], None if start is None else [step - start - 1])
        if problem is not None:
            return _wrong(f"a prompt of {step} tokens (of {target.longest}): {problem}")
    record.output["long_context"] = done
    return Finding()


def _sender(handle: ServerHandle) -> Any:
    return lambda body: handle.request("/generate", body, timeout=_TIMEOUT)


def _plan(handle: ServerHandle) -> tuple[Prompt, ...]:
    target = target_of(handle.info)
    return prompts(target.vocabulary, min(target.longest, _LONGEST_PROMPT))


def _name(plan: Sequence[Prompt]) -> list[list[int]]:
    """Enough to know the prompts by: answers to others are not compared."""
    return [[len(prompt.tokens), prompt.cached, *prompt.tokens[:2]] for prompt in plan]


def _saved(folder: Path, plan: Sequence[Prompt]) -> tuple[list[Answer], str]:
    """The answers the output check left there, and why they are no reference, if so; none if to other prompts."""
    try:
        data = read_json(folder / ANSWERS)
    except (GpuserveError, OSError):
        return [], ""
    if data["prompts"] != _name(plan):
        return [], ""
    return [Answer.from_json(one) for one in data["answers"]], str(data["unfit"])


def _alone(manager: Manager, cell: Cell) -> list[Answer]:
    """The cell's own answers to the canary; none where it was not asked, or gave no logprobs."""
    answers, _ = _saved(manager.folder(cell), _plan(manager.server(cell)))
    return answers if any(answer.inputs for answer in answers) else []


def _count(answer: Mapping[str, Any]) -> int:
    return int((answer.get("meta_info") or {}).get("completion_tokens") or 0)


def _tolerance(cell: Cell, resolved: Mapping[str, Any]) -> Tolerance:
    properties = cell.model.properties
    return tolerance_of(
        str(resolved.get("kv_cache_dtype") or cell.flags.get("kv-cache-dtype") or "auto"),
        moe=str(properties.get("moe", "")).lower() == "true",
        attention=str(properties.get("attention", "")),
        quantization=str(resolved.get("quantization") or properties.get("quantization") or "none"),
        backend=str(resolved.get("prefill_attention_backend") or resolved.get("attention_backend") or ""),
    )


def _figures(one: Difference, tolerance: Tolerance) -> dict[str, Any]:
    mean, p99 = tolerance.of(one.part)
    found: dict[str, Any] = {"mean": round(one.mean, 5), "p99": round(one.p99, 5), "tokens": one.count}
    if one.equal:
        found["first_difference"] = list(one.equal)
    return found | {"mean_limit": mean, "p99_limit": p99}


def _judged(
    folder: Path,
    plan: Sequence[Prompt],
    answers: tuple[Sequence[Answer], Sequence[Answer]],
    names: tuple[str, str],
    differences: Sequence[Difference],
    tolerance: Tolerance,
) -> Finding:
    beyond = [one for one in differences if tolerance.exceeded(one)]
    if not beyond:
        return Finding()
    told = [
        f"{one} (limits for {tolerance.name}: {tolerance.of(one.part)[0]:g}, {tolerance.of(one.part)[1]:g})"
        for one in beyond
    ]
    file = f"outputs-{names[1].replace(' ', '-')[:60]}.txt"
    write_text_atomic(folder / file, side_by_side(plan, *answers, names, beyond))
    return _wrong(f"{names[0]} and {names[1]} are too far apart: {'; '.join(told)}. Side by side: {file}", file)


def _first(failure: Failure) -> str:
    """Enough of its message to know it by."""
    return failure.message.partition("\n")[0][:200]


def _wrong(message: str, *evidence: str) -> Finding:
    return Finding(failure=Failure.of(Kind.WRONG_OUTPUT, Phase.SERVING, message, evidence=tuple(evidence)))
