"""Phases from interleaved logs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.engine import patterns
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.serve.phases import PhaseTracker

START = [
    "/env/site-packages/sglang/launch_server.py:71: UserWarning: 'python -m sglang.launch_server' is still supported",
    "[2026-11-29 16:33:01] server_args=ServerArgs(model_path='m')",
    "[2026-11-29 16:33:24 TP0] Init torch distributed begin.",
    "[2026-11-29 16:33:25 TP0] Load weight begin. avail mem=139.09 GB",
    "[2026-11-29 16:33:25 TP0] Load weight end. elapsed=0.08 s, type=LlamaForCausalLM",
    "[2026-11-29 16:33:26 TP0] Capture target decode CUDA graph begin. backend=full",
    "[2026-11-29 16:33:28 TP0] max_total_num_tokens=100, chunked_prefill_size=8192, max_prefill_tokens=1",
    "[2026-11-29 16:33:29] The server is fired up and ready to roll!",
]
ALL = [
    Phase.IMPORT,
    Phase.DIST_INIT,
    Phase.WEIGHTS,
    Phase.KV_CACHE,
    Phase.GRAPH_CAPTURE,
    Phase.WARMUP,
    Phase.READY,
]


def tracker() -> PhaseTracker:
    return PhaseTracker(patterns("0.5.23"), now=0.0)


def test_a_whole_start() -> None:
    phases = tracker()
    entered = [phases.feed(line, float(second)) for second, line in enumerate(START, start=1)]
    assert [phase for phase in entered if phase] == ALL
    assert phases.timings(20.0) == {
        Phase.SPAWN: 1.0,
        Phase.IMPORT: 2.0,
        Phase.DIST_INIT: 1.0,
        Phase.WEIGHTS: 1.0,
        Phase.KV_CACHE: 1.0,
        Phase.GRAPH_CAPTURE: 1.0,
        Phase.WARMUP: 1.0,
        Phase.READY: 12.0,
    }


def test_a_straggling_rank_does_not_lead_back() -> None:
    phases = tracker()
    for line in START[:5]:
        phases.feed(line, 1.0)
    assert phases.feed("[2026-11-29 TP1] Load weight begin. avail mem=139.09 GB", 2.0) is None
    assert phases.phase is Phase.KV_CACHE


def test_graphs_may_never_come() -> None:
    phases = tracker()
    lines = [line for line in START if "Capture" not in line]
    assert [phase for line in lines if (phase := phases.feed(line, 1.0))] == [
        p for p in ALL if p != Phase.GRAPH_CAPTURE
    ]


def test_overlapped_weights_come_after_each_capture() -> None:
    phases = tracker()
    lines = [
        "server_args=ServerArgs(startup_weight_load_mode='overlap')",
        "Load weight begin. avail mem=1 GB",
        "Prepared capture-safe model in 2.00 s",
        "Memory pool end. avail mem=1 GB",
        "Capture target prefill CUDA graph begin. backend=breakable",
        "Capture target prefill CUDA graph end. elapsed=2.20 s",
        "Capture target decode CUDA graph begin. backend=full",
        "Capture target decode CUDA graph end. bs=[1]",
        "Load weight end. Committed real weights after CUDA graph capture in 9.00 s (capture overlap window 1.0 s)",
        "max_total_num_tokens=1, chunked_prefill_size=1, max_prefill_tokens=1",
    ]
    entered = [phases.feed(line, float(second)) for second, line in enumerate(lines, start=1)]
    assert [phase for phase in entered if phase] == [
        Phase.IMPORT,
        Phase.WEIGHTS,
        Phase.KV_CACHE,
        Phase.GRAPH_CAPTURE,
        Phase.WEIGHTS,
        Phase.GRAPH_CAPTURE,
        Phase.WEIGHTS,
        Phase.WARMUP,
    ]
    assert phases.timings(10.0)[Phase.WEIGHTS] == 2.0 + 1.0 + 2.0


def test_without_overlap_a_graphs_end_stays_in_capture() -> None:
    phases = tracker()
    for line in START[:6]:
        phases.feed(line, 1.0)
    assert phases.feed("Capture target decode CUDA graph end. bs=[1], elapsed=1.22 s", 2.0) is None
    assert phases.phase is Phase.GRAPH_CAPTURE


def test_phases_no_line_tells_of() -> None:
    phases = tracker()
    assert phases.enter(Phase.IMPORT, 1.0) is Phase.IMPORT
    assert phases.enter(Phase.IMPORT, 2.0) is None
    assert phases.enter(Phase.SERVING, 3.0) is Phase.SERVING
    assert phases.feed(START[-1], 4.0) is None
    assert phases.feed("[x] SIGTERM received. signum=None frame=None. Draining requests", 5.0) is Phase.DRAINING


def test_a_progress_bar_glued_behind_other_text_is_read() -> None:
    phases = tracker()
    for line in START[:5]:
        phases.feed(line, 1.0)
    glued = "Loading safetensors checkpoint shards: 100%|██| 1/1 [00:00][2026 TP1] Capture cuda graph begin. This can"
    assert phases.feed(glued, 2.0) is Phase.GRAPH_CAPTURE


def feed(phases: PhaseTracker, *lines: str) -> list[Phase]:
    return [phase for line in lines if (phase := phases.feed(line, 1.0))]


SECOND = [
    "[2026-11-29 16:33:27 TP0] Capture target decode CUDA graph end. bs=[1], elapsed=1.22 s",
    "[2026-11-29 16:33:27 TP0] Init torch distributed begin.",
    "[2026-11-29 16:33:28 TP0] Load weight begin. avail mem=9.09 GB",
]


def test_a_draft_model_is_loaded_after_the_targets_graphs() -> None:
    phases = tracker()
    feed(phases, *START[:6])
    assert phases.phase is Phase.GRAPH_CAPTURE
    assert feed(phases, *SECOND)[0] is Phase.WEIGHTS
    assert phases.phase is Phase.WEIGHTS
    assert phases.draft
    rest = (
        "[2026-11-29 16:33:29 TP0] Load weight end. elapsed=0.08 s, type=LlamaForCausalLMEagle3",
        "[2026-11-29 16:33:29 TP0] Capture draft decode CUDA graph begin. backend=full",
        *START[6:],
    )
    assert feed(phases, *rest) == [Phase.KV_CACHE, Phase.GRAPH_CAPTURE, Phase.WARMUP, Phase.READY]
    assert not phases.draft


def test_a_draft_model_without_graphs() -> None:
    phases = tracker()
    feed(phases, *START[:5], *SECOND[2:])
    assert (phases.phase, phases.draft) == (Phase.WEIGHTS, True)


def test_another_ranks_first_model_is_no_draft() -> None:
    """Ranks of data parallelism load by themselves: one may capture while another begins."""
    phases = tracker()
    first = [line.replace("TP0", "DP0 TP0") for line in START[:6]]
    feed(phases, *first, *(line.replace("TP0", "DP1 TP0") for line in START[2:4]))
    assert (phases.phase, phases.draft) == (Phase.GRAPH_CAPTURE, False)
    feed(phases, *(line.replace("TP0", "DP1 TP0") for line in SECOND))
    assert (phases.phase, phases.draft) == (Phase.WEIGHTS, True)


def test_weights_that_are_loaded_anew_while_serving_are_no_start() -> None:
    phases = tracker()
    feed(phases, *START)
    assert feed(phases, SECOND[2]) == []
    assert (phases.phase, phases.draft) == (Phase.READY, False)


@given(st.lists(st.sampled_from([*START, "noise", "", "Capture target decode CUDA graph end. bs=[1]"]), max_size=40))
def test_phases_only_go_forward_except_to_a_draft_models_weights_and_no_second_is_lost(lines: list[str]) -> None:
    phases = tracker()
    before = phases.phase
    for second, line in enumerate(lines):
        phases.feed(line, float(second))
        assert phases.phase.rank >= before.rank or phases.draft
        before = phases.phase
    assert sum(phases.timings(100.0).values()) == 100.0
