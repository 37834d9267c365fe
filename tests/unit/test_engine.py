"""The SGLang seam: command line, log patterns, endpoints, metrics, resolved configuration."""

from __future__ import annotations

import re

import pytest

from pytest_gpuserve import engine
from pytest_gpuserve.engine.flags import told_elsewhere
from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.model.cell import Cell, ModelSpec
from pytest_gpuserve.model.phase import Phase


def cell(*, arch: str = "sm120", gpus: int = 1, **flags: object) -> Cell:
    return Cell(
        id="c",
        arch=arch,
        model=ModelSpec(name="m", gpus=gpus),
        axes={},
        flags={name.replace("_", "-"): value for name, value in flags.items()},  # type: ignore[misc]
    )


def words(target: Cell, version: str = "0.5.23") -> list[str]:
    return list(engine.argv(target, python="/env/bin/python", version=version, model_path="/models/m"))


def test_every_start_has_its_places_for_ports_host_and_key() -> None:
    line = words(cell(attention_backend="triton"))
    assert line[0] == "/env/bin/python"
    text = " ".join(line)
    assert "--model-path /models/m --host {host} --port {port} --nccl-port {nccl_port} --api-key {api_key}" in text
    assert text.endswith("--enable-metrics --attention-backend triton")


@pytest.mark.parametrize(
    ("version", "serve"),
    [
        ("0.5.6", False),
        ("0.5.9.post2", False),
        ("0.5.10.post1", True),
        ("0.5.23", True),
        ("0.6.0rc1", True),
        ("0.0.0.dev1+g1a2b", True),
        ("main", True),
    ],
)
def test_the_launcher_is_the_one_the_release_recommends(version: str, serve: bool) -> None:
    line = words(cell(), version)
    assert ("serve" in line) is serve
    assert ("sglang.launch_server" in line) is not serve


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {"tp": 8}),
        ({"tp": 8}, {"tp": 8}),
        ({"tensor_parallel_size": 8}, {"tp": 8}),
        ({"tp_size": 2, "pipeline_parallel_size": 2, "dp": 2}, {"tp": 2, "pp": 2, "dp": 2}),
        # What multiplies leaves the rest to tensor parallelism, and a size of 1 is no reason to leave it out.
        ({"data_parallel_size": 1}, {"tp": 8, "dp": 1}),
        ({"dp_size": 8}, {"dp": 8}),
        ({"dp_size": 2}, {"tp": 4, "dp": 2}),
        ({"pp": 2}, {"tp": 4, "pp": 2}),
        ({"pp": 2, "dp": 2}, {"tp": 2, "pp": 2, "dp": 2}),
        # Experts, and attention's data parallelism in its old and its new spelling, work inside the same GPUs.
        ({"ep": 4}, {"tp": 8, "ep": 4}),
        ({"dp_size": 8, "enable_dp_attention": True}, {"tp": 8, "dp": 8}),
        ({"dp_size": 8, "enable_dp_attention": False}, {"dp": 8}),
        ({"attn_dp_size": 4}, {"tp": 8}),
        ({"attn_dp_size": 4, "dp_size": 2, "enable_dp_attention": True}, {"tp": 4, "dp": 2}),
    ],
)
def test_a_server_takes_all_gpus_of_its_cell(flags: dict[str, int], expected: dict[str, int]) -> None:
    """And no size is written as an abbreviation, which argparse may find ambiguous."""
    line = words(cell(gpus=8, **flags))
    sizes = {
        name: line[line.index(f"--{name}-size") + 1] for name in ("tp", "pp", "dp", "ep") if f"--{name}-size" in line
    }
    assert sizes == {name: str(size) for name, size in expected.items()}
    assert not {"--tp", "--pp", "--dp", "--ep", "--tensor-parallel-size", "--data-parallel-size"} & set(line)


@pytest.mark.parametrize(
    ("gpus", "flags", "problem"),
    [
        (4, {"tp_size": 8}, "tp-size 8 takes 8 GPUs, more than the model's gpus: 4"),
        (4, {"tp": 2}, "tp-size 2 takes 2 of the model's gpus: 4, and the others would be idle"),
        (1, {"dp": 2}, "dp-size 2 does not divide the model's gpus: 1"),
        (4, {"tp": 4, "dp": 2}, "tp-size 4 x dp-size 2 takes 8 GPUs, more than the model's gpus: 4"),
        (4, {"pp": 3}, "pp-size 3 does not divide the model's gpus: 4"),
        (4, {"ep": 8}, "ep-size 8 is inside the tensor parallel group, and does not divide its tp-size 4"),
        (
            4,
            {"dp": 4, "attn_cp_size": 2, "enable_dp_attention": True},
            "dp-size 4 x attn-cp-size 2 is inside the tensor parallel group, and does not divide its tp-size 4",
        ),
        (4, {"tp": "auto"}, "tp-size must be a whole number of at least 1, got 'auto'"),
        (4, {"tp": 0}, "tp-size must be a whole number of at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_take_the_cells_gpus(gpus: int, flags: dict[str, object], problem: str) -> None:
    named = {engine.canonical(name.replace("_", "-")): value for name, value in flags.items()}
    assert engine.size_problem(named, gpus) == problem  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=re.escape(problem)):
        words(cell(gpus=gpus, **flags))


def test_attentions_data_parallelism_by_its_older_name_is_no_other_setting() -> None:
    """What SGLang 0.5.23 resolves `--dp-size 4 --enable-dp-attention` to."""
    resolved = {"dp_size": 1, "attn_dp_size": 4}
    assert told_elsewhere("dp-size", {"dp-size": 4, "enable-dp-attention": True}, resolved)
    assert not told_elsewhere("dp-size", {"dp-size": 4}, resolved)
    assert not told_elsewhere("dp-size", {"dp-size": 4, "enable-dp-attention": True}, {"dp_size": 1, "attn_dp_size": 2})
    assert not told_elsewhere("tp-size", {"tp-size": 4, "enable-dp-attention": True}, resolved)


def test_a_single_gpu_needs_no_parallel_size() -> None:
    assert "--tp-size" not in words(cell(gpus=1))


def test_values_by_type() -> None:
    line = words(cell(disable_cuda_graph=True, disable_radix_cache=False, cuda_graph_bs=[1, 2, 8], seed=-1, x="-abc"))
    assert line[line.index("--disable-cuda-graph") + 1 :][:4] == ["--cuda-graph-bs", "1", "2", "8"]
    assert "--disable-radix-cache" not in line
    assert line[line.index("--seed") + 1] == "-1"
    assert "--x=-abc" in line


def test_a_cell_may_switch_metrics_off_and_choose_its_device() -> None:
    line = words(cell(arch="cpu", enable_metrics=False))
    assert "--enable-metrics" not in line
    assert line[line.index("--device") + 1] == "cpu"
    assert words(cell(arch="cpu", device="cuda")).count("--device") == 1


@pytest.mark.parametrize("name", ["port", "host", "nccl_port", "api_key", "model_path", "model", "nnodes"])
def test_what_the_supervisor_chooses_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}.* cannot be a flag of a matrix: it "):
        words(cell(**{name: "1"}))


# One line of each release for each phase; `#` is a rank prefix put in front of it.
PHASE_LINES = [
    ("Init torch distributed begin.", Phase.DIST_INIT),
    ("Init parallel begin.", Phase.DIST_INIT),
    ("Load weight begin. avail mem=139.09 GB", Phase.WEIGHTS),
    ("Load weight end. elapsed=0.08 s, type=LlamaForCausalLM, avail mem=138.9 GB, mem usage=0.1 GB.", Phase.KV_CACHE),
    ("KV Cache is allocated. #tokens: 4096, K size: 0.00 GB, V size: 0.00 GB", Phase.KV_CACHE),
    ("draft KV Cache is allocated. dtype: torch.bfloat16, #tokens: 3, KV size: 0.1 GB", Phase.KV_CACHE),
    ("KV Cache VA upper bound. #tokens: 4096", Phase.KV_CACHE),
    ("Memory pool end. avail mem=13.11 GB", Phase.KV_CACHE),
    ("Running FlashInfer autotune...", Phase.GRAPH_CAPTURE),
    ("Capture cuda graph begin. This can take up to several minutes. avail mem=13.1 GB", Phase.GRAPH_CAPTURE),
    ("Capture piecewise CUDA graph begin. avail mem=13.10 GB", Phase.GRAPH_CAPTURE),
    ("Capture draft extend cuda graph begin (step 0). This can take", Phase.GRAPH_CAPTURE),
    ("Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=1 GB", Phase.GRAPH_CAPTURE),
    ("Capture target verify CUDA graph begin. backend=full", Phase.GRAPH_CAPTURE),
    ("Capture single-CG draft extend begin. This can take several minutes.", Phase.GRAPH_CAPTURE),
    ("Capturing batches (bs=160 avail_mem=12.87 GB):   0%|          | 0/24 [00:00<?, ?it/s]", Phase.GRAPH_CAPTURE),
    ("Capturing num tokens (num_tokens=8192 avail_mem=12.9 GB):  2%|▏ | 1/58 [00:00<00:10]", Phase.GRAPH_CAPTURE),
    ("max_total_num_tokens=32911483, chunked_prefill_size=8192, max_prefill_tokens=16384, max_", Phase.WARMUP),
    ("INFO:     Started server process [22155]", Phase.WARMUP),
    ("INFO:     Uvicorn running on http://127.0.0.1:30001 (Press CTRL+C to quit)", Phase.WARMUP),
    ("The server is fired up and ready to roll!", Phase.READY),
    ("SIGTERM received. signum=None frame=None. Draining requests and shutting down...", Phase.DRAINING),
]
NO_PHASE = [
    "server_args=ServerArgs(model_path='m', chunked_prefill_size=8192, max_total_tokens=None, cuda_graph_max_bs=8)",
    "Load weight end. Committed real weights after CUDA graph capture in 2.10 s (capture overlap window 9.1 s)",
    "Capture target decode CUDA graph end. bs=[1], elapsed=1.22 s, mem usage=0.1 GB, avail mem=12.8 GB.",
    "Exception: Capture cuda graph failed: NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)",
    'INFO:     127.0.0.1:36138 - "GET /health HTTP/1.1" 503 Service Unavailable',
    "Using KV cache dtype: torch.bfloat16",
    "Init parallel ends. elapsed=0.08 s",
    "",
]


@pytest.mark.parametrize(
    "prefix", ["", "[2026-11-29 16:33:24] ", "[2026-11-29 16:33:24 TP0] ", "[2026-01-01 DP1 TP3] "]
)
@pytest.mark.parametrize(("line", "phase"), PHASE_LINES)
def test_phase_lines_of_all_releases(prefix: str, line: str, phase: Phase) -> None:
    assert engine.patterns("0.5.23").phase_of(prefix + line) is phase


@pytest.mark.parametrize("line", NO_PHASE)
def test_lines_that_begin_no_phase(line: str) -> None:
    assert engine.patterns("0.5.23").phase_of(line) is None


def test_only_a_taken_port_is_fatal() -> None:
    fatal = engine.patterns("0.5.23").fatal
    assert fatal(
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 31011): address already in use"
    )
    assert fatal("The server socket has failed to listen: errno: 98 - Address already in use")
    assert not fatal("[2026-11-29 16:33:98] mapped address 0x98")
    assert not fatal("Received sigquit from a child process. It usually means the child failed.")


def test_endpoints_by_release() -> None:
    assert engine.endpoints("0.5.20").ready == "/ready"
    assert engine.endpoints("0.5.19.post1").ready is None
    assert engine.endpoints("0.5.10.post1").server_info == "/server_info"
    assert engine.endpoints("0.5.5").server_info == "/get_server_info"


METRICS = """\
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{engine_type="unified",model_name="m",dp_rank="0"} 120.0
sglang:generation_tokens_total{engine_type="unified",model_name="m",dp_rank="1"} 1.5e+02
sglang:prompt_tokens_total{model_name="m"} 1000.0
sglang:prompt_tokens_total_created{model_name="m"} 1.7e+09
sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="m"} NaN
sglang:http_requests_active{endpoint="/metrics",method="GET"} 1.0
sglang:http_requests_active{endpoint="/generate",method="POST"} 7.0
"""


def test_load_is_summed_over_ranks() -> None:
    load = engine.load_of(METRICS)
    assert (load.tokens, load.running, load.queued, load.posts) == (1270, 3, None, 7)
    assert load.in_flight == 7


@pytest.mark.parametrize("text", ["", "<html>404</html>", "sglang:num_running_reqs\nsglang:", "\0" * 100])
def test_no_metrics_is_no_knowledge(text: str) -> None:
    load = engine.load_of(text)
    assert (load.tokens, load.in_flight) == (None, 0)


def test_resolved_has_one_set_of_names() -> None:
    old = engine.resolved_of({"attention_backend": "fa3", "nsa_decode_backend": "trtllm", "version": "0.5.10"})
    assert (old["attention_backend"], old["dsa_decode_backend"], old["version"]) == ("fa3", "trtllm", "0.5.10")
    new = engine.resolved_of(
        {
            "fp8_gemm_runner_backend": "cutlass",
            "disable_cuda_graph": False,
            "cuda_graph_config": {"decode": {"backend": "disabled"}, "prefill": {"backend": "breakable"}},
        },
        "0.5.23",
    )
    assert new["fp8_gemm_backend"] == "cutlass"
    assert new["disable_cuda_graph"] is True
    assert new["cuda_graph_prefill"] == "breakable"
    assert new["version"] == "0.5.23"


FALLBACK_LINES = [
    (
        (
            "Setup Custom allreduce failed with invalid literal for int() with base 10: 'GPU-5f'. To silence this "
            "warning, specify --disable-custom-all-reduce explicitly."
        ),
        "custom-all-reduce",
    ),
    (
        (
            "CustomAllreduce is disabled because it's not supported on more than two PCIe-only GPUs. To silence this "
            "warning, specify disable_custom_all_reduce=True explicitly."
        ),
        "custom-all-reduce",
    ),
    ("CustomAllReduceV2 is disabled because your platform lacks GPU P2P capability or P2P test", "custom-all-reduce"),
    ("FlashAttention3 only supports fp8_e4m3 if using FP8; Setting attention backend to triton.", "attention-backend"),
    ("The current platform does not support Intel AMX, will fallback to torch_native backend.", "attention-backend"),
    ("Cuda graph is disabled because of using torch native attention backend", "cuda-graph"),
    ("Disable prefill CUDA graph because some layers do not apply Standard GQA", "cuda-graph"),
    ("Disable piecewise CUDA graph because the model is not a language model", "cuda-graph"),
    (
        "Failed to initialize FlashInfer workspace: x. Disabling flashinfer allreduce fusion permanently.",
        "allreduce-fusion",
    ),
    ("mxfp8 quantization supports only triton, cutlass backends. Overriding 'deep_gemm'.", "moe-runner-backend"),
    ("--kv-cache-dtype falls back to 'auto' because this torch version does not support torch.", "kv-cache-dtype"),
    (
        (
            "Using default MoE kernel config. Performance might be sub-optimal! Config file not found at /x/configs/"
            "triton_3_5_1/E=512,N=128,device_name=NVIDIA_L40S.json, you can create them with https://github.com/x"
        ),
        "kernels",
    ),
    (
        "Using MoE kernel config with down_moe=False. Performance might be sub-optimal! Config file not found at /x",
        "kernels",
    ),
    ("Down MoE config file not found at /x; reusing the tuned up-projection config without TMA.", "kernels"),
    ("Config file not found at /x. Fallback to triton version 3.2.0 and use MoE kernel config from /y.", "kernels"),
    (
        "Using default W8A8 Block FP8 kernel config. Performance might be sub-optimal! Config file not found at /x",
        "kernels",
    ),
    (
        "Using default W8A8 Block INT8 kernel config. Performance might be sub-optimal! Config file not found at /x",
        "kernels",
    ),
    (
        (
            "Your GPU does not have native support for FP8 computation but FP8 quantization is being used. "
            "Weight-only FP8 compression will be used leveraging the Marlin kernel. This may degrade performance for x"
        ),
        "kernels",
    ),
    ("Only use 24 SMs for DeepEP communication. This may result in highly suboptimal performance.", "kernels"),
    ("X has no SGLang implementation, falling back to Transformers implementation. Some features may not", "kernels"),
    ("Setting this may lead to suboptimal performance with small page sizes.", "speed"),
    ("TensorRT-LLM MHA only supports page_size of 16, 32 or 64, changing page_size from 1 to 64.", "page-size"),
]


@pytest.mark.parametrize(("line", "subject"), FALLBACK_LINES)
def test_fallbacks_are_named(line: str, subject: str) -> None:
    (found,) = engine.fallback_lines([f"[2026-11-29 16:33:24 TP0] {line}", "Load weight begin. avail mem=1 GB"])
    assert found.subject == subject
    assert line in found.line


def test_a_fallback_of_every_rank_is_one_fallback() -> None:
    line = FALLBACK_LINES[0][0]
    assert len(engine.fallback_lines([f"[TP{rank}] {line}" for rank in range(8)])) == 1


def test_what_replaced_the_backend_is_in_the_text() -> None:
    (found,) = engine.fallback_lines([FALLBACK_LINES[3][0]])
    assert found.what == "attention backend replaced by triton"


def test_which_quantization_is_not_tuned_is_in_the_text() -> None:
    lines = [line for line, _ in FALLBACK_LINES if "W8A8" in line]
    assert [one.what for one in engine.fallback_lines(lines)] == [
        "untuned Block FP8 GEMM configuration",
        "untuned Block INT8 GEMM configuration",
    ]


@pytest.mark.parametrize(
    ("flags", "draft"),
    [
        ({}, ""),
        ({"speculative-draft-model-path": "/models/eagle"}, "/models/eagle"),
        ({"--speculative-draft-model": "org/eagle"}, "org/eagle"),
        ({"speculative-draft-model-path": False}, ""),
    ],
)
def test_the_draft_model_of_a_cell(flags: dict[str, str], draft: str) -> None:
    assert engine.draft_model(flags) == draft


@pytest.mark.parametrize(
    ("level", "hides"), [("warning", True), ("ERROR", True), ("critical", True), ("info", False), ("debug", False)]
)
def test_a_log_level_may_hide_the_phases(level: str, hides: bool) -> None:
    assert engine.hides_phases({"log-level": level}) == (f"--log-level {level}" if hides else "")
    assert engine.hides_phases({"log-level-http": level}) == ""


def test_a_normal_start_has_no_fallback() -> None:
    assert engine.fallback_lines([line for line, _ in PHASE_LINES] + NO_PHASE) == ()
