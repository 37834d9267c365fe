"""The canary's comparison and the checks that need none: pure, against made-up servers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.engine import Fallback
from pytest_gpuserve.measure.canary import OUTPUT, Answer, ask, compare, prompts, side_by_side
from pytest_gpuserve.measure.fallback import swaps
from pytest_gpuserve.measure.plausible import answers_problem, text_problem
from pytest_gpuserve.measure.tolerance import TABLE, tolerance_of

PLAN = prompts(1000, 1024)
WANTED = [1 if prompt.cached else OUTPUT for prompt in PLAN]


class Server:
    """A model that is a hash: logprobs and greedy tokens follow from the tokens so far, `noise` nats off."""

    def __init__(self, noise: float = 0.0, seed: int = 0, *, decode: float | None = None, cached: float | None = None):
        self.noise = {"prefill": noise, "decode": noise if decode is None else decode}
        self.noise["cached"] = noise if cached is None else cached
        self.random = random.Random(seed)
        self.known: set[tuple[int, ...]] = set()

    def _row(self, tokens: tuple[int, ...], part: str) -> dict[int, float]:
        generator = random.Random(str(tokens[-8:]))
        values = {token: generator.gauss(0, 2) for token in generator.sample(range(500, 1000), 20)}
        total = math.log(sum(map(math.exp, values.values())))
        return {token: value - total + self.random.gauss(0, self.noise[part]) for token, value in values.items()}

    def __call__(self, body: dict) -> dict:
        tokens = tuple(body["input_ids"])
        cached = max((len(one) for one in self.known if one == tokens[: len(one)]), default=0)
        self.known.add(tokens)
        start = body.get("logprob_start_len", len(tokens))
        asked = body.get("return_logprob", False)
        part = "cached" if start else "prefill"
        inputs = [[None, tokens[start] if start < len(tokens) else 0, None]]
        for at in range(start + 1, len(tokens)):
            noise = self.random.gauss(0, self.noise[part])
            inputs.append([-5 + noise, tokens[at], None])
        outputs, tops = [], []
        for _ in range(body["sampling_params"]["max_new_tokens"]):
            row = self._row(tokens, "decode")
            best = max(row, key=row.__getitem__)
            outputs.append([row[best], best, None])
            tops.append([[value, token, None] for token, value in sorted(row.items(), key=lambda x: -x[1])[:5]])
            tokens = (*tokens, best)
        meta = {"input_token_logprobs": inputs, "output_token_logprobs": outputs, "output_top_logprobs": tops}
        ids = [token for _, token, _ in outputs]
        meta = {"cached_tokens": min(cached, start)} | (meta if asked else {})
        return {"text": "x", "output_ids": ids, "meta_info": meta}


def differences(a: Server, b: Server) -> dict:
    return {one.part: one for one in compare(PLAN, ask(a, PLAN), ask(b, PLAN))}


def test_a_server_is_no_distance_from_itself() -> None:
    found = differences(Server(), Server())
    assert set(found) == {"prefill", "cached", "decode"}
    assert all((one.mean, one.p99) == (0, 0) for one in found.values())
    assert set(found["decode"].equal) == {OUTPUT}
    assert all(one.count > 200 for one in found.values())


def test_two_sound_servers_differ_in_tokens_and_not_in_logprobs() -> None:
    found = differences(Server(0.02, 1), Server(0.02, 2))
    assert min(found["decode"].equal) < OUTPUT
    assert not any(TABLE["16-bit, dense"].exceeded(one) for one in found.values())


@pytest.mark.parametrize("part", ["prefill", "cached", "decode"])
def test_each_part_sees_what_the_others_cannot(part) -> None:
    wrong = {"noise": 0.5, "decode": 0.0, "cached": 0.0} if part == "prefill" else {part: 0.5}
    found = differences(Server(), Server(**wrong))
    assert [name for name, one in found.items() if TABLE["16-bit, dense"].exceeded(one)] == [part]


def test_nothing_is_compared_behind_the_first_token_that_differs() -> None:
    def answer(ids: list[int], outputs: list[float], top: list[dict[int, float]]) -> Answer:
        return Answer(prompt=0, cached=0, inputs=[], ids=ids, outputs=outputs, top=top)

    plan = PLAN[:1]
    a = answer([1, 2, 3], [-1.0, -1.0, -1.0], [{1: -1.0}, {2: -1.0, 9: -1.2}, {3: -1.0}])
    b = answer([1, 9, 3], [-1.5, -1.1, -9.0], [{1: -1.5}, {9: -1.1, 2: -1.3}, {3: -9.0}])
    (found,) = compare(plan, [a], [b])
    # Token 0: 0.5; where they differ: token 2 by 0.3 and token 9 by 0.1; behind it nothing.
    assert (found.part, found.count, found.equal) == ("decode", 3, (1,))
    assert found.mean == pytest.approx((0.5 + 0.3 + 0.1) / 3)


def test_answers_survive_their_file() -> None:
    answers = ask(Server(), PLAN)
    again = [Answer.from_json(one) for one in json.loads(json.dumps([one.to_json() for one in answers]))]
    assert again == answers
    assert sum(answer.cached for answer in answers) == 4 * 192


@settings(deadline=None)
@given(st.integers(8, 300_000), st.integers(64, 5000), st.integers(0, 99))
def test_prompts_fit_the_model_and_are_the_same_every_time(vocabulary, longest, seed) -> None:
    plan = prompts(vocabulary, longest, seed)
    assert plan == prompts(vocabulary, longest, seed)
    for prompt in plan:
        assert 0 < len(prompt.tokens) <= longest - OUTPUT
        assert prompt.cached < len(prompt.tokens)
        assert max(prompt.tokens) < vocabulary


def test_the_evidence_shows_both_sides() -> None:
    a, b = ask(Server(), PLAN), ask(Server(0.5, 3), PLAN)
    text = side_by_side(PLAN, a, b, ("this cell", "sm120-m-baseline"), compare(PLAN, a, b))
    assert "this cell" in text
    assert "sm120-m-baseline" in text
    assert "prefill: mean" in text
    assert text.count("\n") > 100


INPUTS = [prompt.inputs for prompt in PLAN]


def changed(**fields: object) -> list[Answer]:
    answers = ask(Server(), PLAN)
    for name, value in fields.items():
        setattr(answers[2], name, value)
    return answers


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (changed(), None),
        (changed(ids=[]), "prompt 2: an empty answer"),
        (changed(ids=[5] * 16), "prompt 2: 16 of 32 tokens"),
        (changed(outputs=[None] * 32), "prompt 2: 32 of 32 logprobs of its answer are NaN"),
        (changed(inputs=[-1.0, None]), "prompt 2: 1 of 2 logprobs of its prompt are NaN"),
        (changed(inputs=[]), "prompt 2: 0 of 47 logprobs of its prompt"),
        (changed(inputs=[-1.0] * 5), "prompt 2: 5 of 47 logprobs of its prompt"),
        (changed(outputs=[]), "prompt 2: 0 of 32 logprobs of its answer"),
        (changed(outputs=[-1.0] * 31), "prompt 2: 31 of 32 logprobs of its answer"),
        (changed(top=[]), "prompt 2: 0 of 32 lists of the likeliest tokens"),
        (changed(top=[{}] * 32), "prompt 2: 0 of 32 lists of the likeliest tokens"),
        (changed(ids=[7] * 32), None),  # one loop is what random weights may do
    ],
    ids=[
        *("sound", "empty", "short", "nan", "nan prompt", "no prompt", "part of the prompt", "no answer"),
        *("part of the answer", "no top", "empty top", "one loop"),
    ],
)
def test_what_is_wrong_without_a_reference(answers, told) -> None:
    assert answers_problem(answers, WANTED, INPUTS) == told


def test_logprobs_that_were_not_asked_for_are_not_missed() -> None:
    answers = ask(Server(), PLAN, logprobs=False)
    assert not any(answer.inputs for answer in answers)
    assert answers_problem(answers, WANTED) is None
    answers[2].ids = []
    assert answers_problem(answers, WANTED) == "prompt 2: an empty answer"


def test_answers_that_nothing_is_wrong_with_are_compared_in_every_part() -> None:
    counts = {one.part: one.count for one in compare(PLAN, ask(Server(), PLAN), ask(Server(), PLAN))}
    assert counts == {"prefill": 1736, "cached": 380, "decode": 8 * OUTPUT}


def test_the_same_token_in_every_answer_is_wrong() -> None:
    answers = ask(Server(), PLAN)
    for answer in answers:
        answer.ids, answer.text = [0] * len(answer.ids), "!" * len(answer.ids)
    assert "token 0 over and over: '!!!!" in (answers_problem(answers, WANTED) or "")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (" Paris. The city lies on the Seine, and has been the capital since the tenth century.", False),
        (" 1. Water\n2. A map\n3. Warm clothes\n4. Bread, cheese, and apples", False),
        ("天空之所以是蓝色的，是因为阳光在大气中发生瑞利散射。" * 2, False),
        (" yes", False),
        (" a cut chara\ufffd", False),
        ("!" * 64, True),
        ("the the the the the the the the the the the the the the the the the the the the the the the the", True),
        (" a \ufffd\ufffd broken one", True),
        ("", True),
        ("  \n ", True),
        (")$#@ {}{}|| ~~ ^^ &&** ((%% $$ ## @@ !! ++ == -- ;; ::", True),
        ("ababababababababababababababababab", True),
    ],
)
def test_text_of_real_weights(text, wrong) -> None:
    assert (text_problem(text) is not None) is wrong


@pytest.mark.parametrize(
    ("kv", "moe", "attention", "quantization", "row"),
    [
        ("auto", False, "gqa", "none", "16-bit, dense"),
        ("bf16", True, "gqa", "none", "16-bit, MoE"),
        ("auto", True, "mla", "none", "16-bit, MLA"),
        ("fp8_e4m3", False, "gqa", "none", "fp8_e4m3 KV cache, dense"),
        ("fp8_e5m2", False, "", "none", "fp8_e5m2 KV cache, dense"),
        ("fp8_e5m2", True, "gqa", "", "fp8 KV cache, MoE"),
        ("fp8_e4m3", True, "dsa", "none", "fp8 KV cache, MLA"),
        ("auto", True, "mla", "fp8", "fp8 weights"),
        ("auto", False, "gqa", "w8a8_fp8", "fp8 weights"),
        ("nvfp4", False, "gqa", "none", "other quantized weights or fp4 KV cache"),
        ("auto", True, "gqa", "modelopt_fp4", "other quantized weights or fp4 KV cache"),
    ],
)
def test_the_tolerance_of_a_server(kv, moe, attention, quantization, row) -> None:
    found = tolerance_of(kv, moe=moe, attention=attention, quantization=quantization, backend="triton")
    assert found is TABLE[row]
    assert found.source


@pytest.mark.parametrize(("kv", "quantization"), [("fp8_e4m3", "none"), ("fp8_e5m2", "none"), ("fp8_e4m3", "fp8")])
def test_a_backend_that_computes_prefill_in_fp8_may_differ_there_as_much_as_behind_a_cached_prefix(
    kv, quantization
) -> None:
    """fa3 on an H200: 0.279 in prefill, where triton moves not one bit (docs/evidence/sm90.md)."""
    rows = {
        backend: tolerance_of(kv, moe=False, attention="gqa", quantization=quantization, backend=backend)
        for backend in ("triton", "fa3")
    }
    assert rows["fa3"].prefill == rows["triton"].cached
    assert rows["fa3"].decode == rows["triton"].decode
    assert rows["fa3"].name != rows["triton"].name


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measurement.md").read_text()
    for row in TABLE.values():
        limits = " | ".join(f"{mean:g} / {p99:g}" for mean, p99 in (row.prefill, row.cached, row.decode))
        assert f"| {row.name} | {limits} | {row.source} |\n" in page


@pytest.mark.parametrize(
    ("row", "least"),
    [
        ("fp8_e4m3 KV cache, dense", "16-bit, dense"),
        ("fp8_e5m2 KV cache, dense", "fp8_e4m3 KV cache, dense"),
        ("fp8 KV cache, MLA", "16-bit, MLA"),
        ("fp8 KV cache, MoE", "16-bit, MoE"),
        ("16-bit, MoE", "16-bit, dense"),
        ("fp8 weights", "16-bit, MoE"),
        ("fp8 weights", "16-bit, MLA"),
        ("other quantized weights or fp4 KV cache", "fp8 weights"),
        ("other quantized weights or fp4 KV cache", "fp8_e5m2 KV cache, dense"),
    ],
)
def test_no_row_is_tighter_than_that_of_a_finer_format(row, least) -> None:
    for part in ("prefill", "cached", "decode"):
        assert all(mine >= theirs for mine, theirs in zip(TABLE[row].of(part), TABLE[least].of(part), strict=True))


def test_every_row_says_what_it_was_measured_by_and_is_tightest_where_no_cache_is_read() -> None:
    for row in TABLE.values():
        assert row.source
        assert all(fresh <= cached for fresh, cached in zip(row.prefill, row.cached, strict=True))


REPLACED = Fallback("attention-backend", "attention backend replaced by triton", "Setting attention backend to triton.")
ALL_REDUCE = Fallback("custom-all-reduce", "custom all-reduce is off", "Setup Custom allreduce failed with …")

NO_PREFILL_GRAPHS = Fallback("cuda-graph", "prefill CUDA graphs are off", "Disable prefill CUDA graph because …")


@pytest.mark.parametrize(
    ("flags", "resolved", "log", "told"),
    [
        ({"attention-backend": "fa3"}, {"attention_backend": "fa3"}, (), None),
        (
            {"attention-backend": "fa3"},
            {"attention_backend": "triton"},
            (REPLACED,),
            "asked for fa3, the server uses triton\n  its log: Setting attention backend to triton.",
        ),
        ({"attention-backend": "fa3"}, {}, (REPLACED,), "fa3"),
        ({"attention-backend": "triton"}, {"attention_backend": "triton"}, (REPLACED,), None),
        ({}, {"attention_backend": "triton"}, (REPLACED, ALL_REDUCE), None),
        ({"attention-backend": False}, {"attention_backend": "triton"}, (), None),
        ({"attention-backend": "auto"}, {"attention_backend": "triton"}, (), None),
        ({"disable-custom-all-reduce": False}, {}, (ALL_REDUCE,), "custom all-reduce is off"),
        ({"disable-custom-all-reduce": True}, {"disable_custom_all_reduce": True}, (ALL_REDUCE,), None),
        ({"disable-custom-all-reduce": False}, {"disable_custom_all_reduce": True}, (), "the server uses True"),
        ({"kv-cache-dtype": "bf16"}, {"kv_cache_dtype": "bfloat16"}, (), None),
        ({"kv-cache-dtype": "fp8_e4m3"}, {"kv_cache_dtype": "auto"}, (), "the server uses auto"),
        ({"nsa-decode-backend": "trtllm"}, {"dsa_decode_backend": "flashmla_kv"}, (), "the server uses flashmla_kv"),
        ({"page-size": 64}, {"page_size": 64}, (), None),
        ({"page-size": 64}, {"page_size": 1}, (), "asked for 64, the server uses 1"),
        ({"moe-runner-backend": "triton"}, {"moe_runner_backend": None}, (), "the server uses none"),
        ({"speculative-algorithm": "EAGLE"}, {"speculative_algorithm": None}, (), "for EAGLE, the server uses none"),
        ({"speculative-algorithm": "NEXTN"}, {"speculative_algorithm": "EAGLE"}, (), None),
        ({"speculative-algorithm": "NEXTN"}, {"speculative_algorithm": "FROZEN_KV_MTP"}, (), None),
        (
            {"speculative-algorithm": "EAGLE3", "enable-return-aux-hidden-states": True},
            {"speculative_algorithm": None},
            (),
            None,
        ),
        ({"quantization": "fp8"}, {"quantization": None}, (), "asked for fp8, the server uses none"),
        ({"quantization": "unquant"}, {"quantization": None}, (), None),
        ({"quantization": "unquant"}, {"quantization": "fp8"}, (), "asked for unquant, the server uses fp8"),
        ({"quantization": False}, {"quantization": None}, (), None),
        ({"cuda-graph-backend-decode": "full"}, {"cuda_graph_decode": "disabled"}, (), "the server uses disabled"),
        ({"cuda-graph-backend-prefill": "full"}, {"cuda_graph_prefill": "breakable"}, (), "the server uses breakable"),
        ({"cuda-graph-backend-decode": "full"}, {"cuda_graph_decode": "full"}, (NO_PREFILL_GRAPHS,), None),
        ({"cuda-graph-backend-prefill": "full"}, {}, (NO_PREFILL_GRAPHS,), "prefill CUDA graphs are off"),
    ],
)  # fmt: skip
def test_what_was_asked_for_and_is_not_used(flags, resolved, log, told) -> None:
    found = swaps(flags, resolved, log)
    assert len(found) == (told is not None)
    if told:
        assert told in str(found[0])


def test_each_flag_that_was_swapped_is_told() -> None:
    flags = {"prefill-attention-backend": "fa3", "decode-attention-backend": "flashmla"}
    resolved = {"prefill_attention_backend": "triton", "decode_attention_backend": "triton"}
    assert [str(swap).partition("\n") for swap in swaps(flags, resolved, (REPLACED,))] == [
        (f"--{flag} asked for {asked}, the server uses triton", "\n", f"  its log: {REPLACED.line}")
        for flag, asked in flags.items()
    ]
