"""Preflight against a small engine that stands where SGLang would: real processes, no torch."""

import itertools
import os
import random
import sys
import time
from pathlib import Path

import pytest

from pytest_gpuserve.errors import UsageError
from pytest_gpuserve.gpu import sim
from pytest_gpuserve.model.cell import Cell, ModelSpec
from pytest_gpuserve.model.failure import Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.preflight._fakegpu import ARCHS
from pytest_gpuserve.preflight.record import failure_of
from pytest_gpuserve.preflight.run import preflight

TORCH = """
import sys, types
__version__ = "2.0"
version = types.ModuleType("torch.version"); version.cuda = None
cuda = types.ModuleType("torch.cuda")
def unavailable(*_): raise AssertionError("Torch not compiled with CUDA enabled")
cuda.get_device_capability = cuda.get_device_name = unavailable
cuda.is_available = lambda: False
sys.modules["torch.version"], sys.modules["torch.cuda"] = version, cuda
"""

SERVER_ARGS = """
import argparse, dataclasses, functools, importlib, importlib.util, logging, os, random, signal, subprocess, time
import torch
if os.environ.get("TEST_IMPORT") == "hang":
    open(os.environ["TEST_PIDFILE"], "w").write(str(os.getpid()))
    time.sleep(600)
if os.environ.get("TEST_IMPORT") == "fail":
    import a_new_requirement
print("noise on standard output")
READ_EARLY = os.environ.get("SGLANG_EARLY", "unset")
if READ_EARLY == "2":
    os.environ.get("SGLANG_OTHER")
SEEN = []

@functools.lru_cache
def first_caller(_):
    return len(SEEN)

@dataclasses.dataclass
class ServerArgs:
    model_path: str
    attention_backend: str = None
    prefill_attention_backend: str = None
    decode_attention_backend: str = None
    page_size: int = None
    random_seed: int = None
    tp_size: int = 1
    capability: str = ""
    memory: str = ""
    early: str = ""
    late: str = ""
    other: str = ""
    calls: int = 0
    cached: int = 0
    handlers: int = 0

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model")
        parser.add_argument("--attention-backend", choices=["triton", "flashinfer", "fa3", "odd", "gone"])
        parser.add_argument("--page-size", type=int)
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=1)
        parser.add_argument("--do", default="")
        parser.add_argument("--device")
        for ours in ("--host", "--port", "--nccl-port", "--api-key"):
            parser.add_argument(ours)
        parser.add_argument("--enable-metrics", action="store_true")

    def get_model_config(self):
        import types
        return types.SimpleNamespace(attention_arch=types.SimpleNamespace(name="MHA"))

    def check_server_args(self):
        if self.tp_size > torch.cuda.device_count():
            raise ValueError(f"tp_size {self.tp_size} needs more than {torch.cuda.device_count()} GPUs")

def prepare_server_args(argv):
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    raw = parser.parse_args(argv)
    SEEN.append(argv)
    log = logging.getLogger("sglang.srt.server_args")
    args = ServerArgs(raw.model_path, raw.attention_backend, page_size=raw.page_size, tp_size=raw.tensor_parallel_size)
    args.random_seed = random.SystemRandom().randrange(1 << 30)
    args.calls, args.cached = len(SEEN), first_caller(0)
    args.handlers = len(logging.getLogger("sglang").handlers)
    args.early, args.late = READ_EARLY, os.environ.get("SGLANG_LATE", "unset")
    args.other = os.environ.get("SGLANG_OTHER", "unset")
    args.capability = "%d.%d" % torch.cuda.get_device_capability()
    smi = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    args.memory = subprocess.run(smi, capture_output=True, text=True).stdout.split("\\n")[0]
    if args.attention_backend is None:
        args.attention_backend = "flashinfer" if importlib.util.find_spec("flashinfer") else "triton"
        log.info("Attention backend not specified. Use %s.", args.attention_backend)
    if args.attention_backend == "flashinfer" and args.page_size not in (None, 64):
        log.warning("flashinfer changes page_size %s to 64", args.page_size)
        args.page_size = 64
    if args.attention_backend == "flashinfer" and args.tp_size == 4:
        args.decode_attention_backend = "triton"
    if args.attention_backend == "fa3" and args.capability == "12.0" and args.page_size == 7:
        raise ValueError("fa3 with page 7 at " + args.model_path)
    os.environ["SGLANG_SET_BY_SGLANG"] = args.attention_backend
    action = raw.do
    if action == "die": os.kill(os.getpid(), signal.SIGSEGV)
    if action == "hang": time.sleep(600)
    if action == "import": import another_new_requirement
    if action == "ask": torch.cuda.get_device_properties(0).clock_of_the_moon
    if action == "kernel": from flashinfer.deep.er import anything; anything.thing(1)
    return args
"""

REGISTRY = """
ATTENTION_BACKENDS = {}
def register(name):
    return lambda function: ATTENTION_BACKENDS.setdefault(name, function)
@register("triton")
def triton(runner):
    from sglang.srt.layers.attention.triton_backend import Triton
    return Triton(runner)
@register("flashinfer")
def flashinfer(runner):
    return runner.workspace
@register("fa3")
def fa3(runner):
    assert runner.use_mla_backend, "FlashAttention v3 wants something else"
@register("odd")
def odd(runner):
    return runner.model_config.no_such_thing
"""

METADATA = """Metadata-Version: 2.1
Name: sglang
Version: 9.9
Requires-Dist: flashinfer_python[cu13]==0.7.2
Requires-Dist: sglang-kernel==0.4.10
Requires-Dist: torch_memory_saver>=0.0.9; extra == "more"
"""

BACKENDS = (None, "triton", "flashinfer", "fa3", "gone")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    root = tmp_path / "site"
    for name, text in {
        "torch/__init__.py": TORCH,
        "sglang/__init__.py": "",
        "sglang/srt/__init__.py": "",
        "sglang/srt/server_args.py": SERVER_ARGS,
        "sglang/srt/layers/__init__.py": "",
        "sglang/srt/layers/attention/__init__.py": "",
        "sglang/srt/layers/attention/attention_registry.py": REGISTRY,
        "sglang-9.9.dist-info/METADATA": METADATA,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def cell(name: str, env: dict[str, str] | None = None, arch: str = "sm120", **flags: object) -> Cell:
    return Cell(
        id=name,
        arch=arch,
        model=ModelSpec(name="m", gpus=int(str(flags.get("tp_size", 1)))),
        axes={"case": name},
        flags={flag.replace("_", "-"): value for flag, value in flags.items()},  # type: ignore[misc]
        env=env or {},
    )


def run(site: Path, *cells: Cell, arch: str = "sm120", env: dict[str, str] | None = None, **options: object) -> dict:
    model = site.parent / "model"
    model.mkdir(exist_ok=True)
    environment = {"PATH": os.defpath, "PYTHONPATH": str(site), "HOME": str(site.parent), **(env or {})}
    return preflight(
        cells,
        arch=arch,
        python=sys.executable,
        env=environment,
        versions={"sglang": "9.9"},
        model_dirs={"m": model},
        **options,  # type: ignore[arg-type]
    )


def answers(record: dict) -> dict[str, dict]:
    """By cell id, without what may differ from run to run: times."""
    return {one["id"]: {key: value for key, value in one.items() if key != "seconds"} for one in record["cells"]}


def test_accepted_rewritten_and_rejected(site: Path) -> None:
    record = run(
        site,
        cell("plain"),
        cell("kept", attention_backend="triton", page_size=16, tp_size=8),
        cell("changed", attention_backend="flashinfer", page_size=16),
        cell("usage", attention_backend="nowhere"),
        cell("value", attention_backend="fa3", page_size=7),
        cell("check", tp_size=9),
    )
    assert record["status"] == "ok"
    found = answers(record)
    assert {name: one["outcome"] for name, one in found.items()} == {
        "plain": "accepted",
        "kept": "accepted",
        "changed": "rewritten",
        "usage": "rejected",
        "value": "rejected",
        "check": "rejected",
    }
    assert found["changed"]["rewritten"] == {"page_size": {"asked": 16, "resolved": 64}}
    assert found["changed"]["warnings"] == ["flashinfer changes page_size 16 to 64"]
    assert found["plain"]["notes"] == ["Attention backend not specified. Use flashinfer."]
    assert found["plain"]["settings"]["decode_attention_backend"] == "flashinfer"
    assert found["plain"]["env_set"] == {"SGLANG_SET_BY_SGLANG": "flashinfer"}
    usage = found["usage"]["rejection"]
    assert "argument --attention-backend: invalid choice: 'nowhere'" in usage["text"]
    assert (usage["exit"], usage["exception"]) == (2, "SystemExit")
    assert found["value"]["rejection"] == {
        "text": "fa3 with page 7 at <model>",
        "exception": "ValueError",
        "exit": 1,
        "where": "sglang/srt/server_args.py:prepare_server_args",
    }
    assert found["check"]["rejection"]["where"] == "sglang/srt/server_args.py:check_server_args"
    assert record["options"]["--tp-size"]["dest"] == "tensor_parallel_size"
    assert record["options"]["--attention-backend"]["choices"] == ["fa3", "flashinfer", "gone", "odd", "triton"]


def test_a_stage_that_gets_another_backend_is_a_rewrite(site: Path) -> None:
    record = run(site, cell("asked", attention_backend="flashinfer", tp_size=4), cell("default", tp_size=4))
    asked, default = record["cells"]
    assert asked["rewritten"] == {"decode_attention_backend": {"asked": "flashinfer", "resolved": "triton"}}
    assert default["outcome"] == "accepted"
    assert default["settings"]["decode_attention_backend"] == "triton"


def test_nothing_of_this_machine_is_recorded(site: Path) -> None:
    record = run(site, cell("plain"), cell("value", attention_backend="fa3", page_size=7))
    assert str(site.parent) not in repr(record["cells"])
    assert "random_seed" not in record["cells"][0]["resolved"]


def test_no_state_goes_from_cell_to_cell(site: Path) -> None:
    cells = [
        cell(f"{backend}-{page}", attention_backend=backend or "triton", page_size=page)
        for backend, page in itertools.product(BACKENDS, (7, 64))
    ]
    cells += [cell("late", env={"SGLANG_LATE": "1"}), cell("early", env={"SGLANG_EARLY": "1"}), cell("usage", do="x")]
    expected = answers(run(site, *cells))
    # The engine above counts its calls, caches the first and would add a log handler each time.
    resolved = [one["resolved"] for one in expected.values() if one["resolved"]]
    assert {(one["calls"], one["cached"], one["handlers"]) for one in resolved} == {(1, 1, 1)}
    for seed in range(2):
        shuffled = random.Random(seed).sample(cells, len(cells))
        assert answers(run(site, *shuffled)) == expected
    alone = run(site, cells[3])
    assert answers(alone)[cells[3].id] == expected[cells[3].id]


def test_a_variable_read_during_import_gets_a_process_of_its_own(site: Path) -> None:
    record = run(
        site,
        cell("late", env={"SGLANG_LATE": "1"}),
        cell("early", env={"SGLANG_EARLY": "1", "SGLANG_LATE": "2"}),
        cell("plain"),
        cell("early too", env={"SGLANG_EARLY": "1"}),
        cell("other", env={"SGLANG_OTHER": "1"}),
        cell("both", env={"SGLANG_EARLY": "2", "SGLANG_OTHER": "1"}),
    )
    resolved = {name: (one["resolved"]["early"], one["resolved"]["late"]) for name, one in answers(record).items()}
    assert resolved == {
        "late": ("unset", "1"),
        "early": ("1", "2"),
        "plain": ("unset", "unset"),
        "early too": ("1", "unset"),
        "other": ("unset", "unset"),
        "both": ("2", "unset"),
    }
    assert {name: one["resolved"]["other"] for name, one in answers(record).items()} == {
        **dict.fromkeys(("late", "early", "plain", "early too"), "unset"),
        **dict.fromkeys(("other", "both"), "1"),
    }
    # SGLANG_OTHER is read during the import only where SGLANG_EARLY is 2.
    assert record["seconds"]["processes"] == 4


def test_variables_that_all_cells_share_are_there_before_the_import(site: Path) -> None:
    record = run(site, *(cell(name, env={"SGLANG_EARLY": "1"}) for name in "abc"))
    assert {one["resolved"]["early"] for one in record["cells"]} == {"1"}
    assert record["seconds"]["processes"] == 1


@pytest.mark.parametrize(("arch", "capability", "memory"), [("sm90", "9.0", "81920"), ("sm121", "12.1", "[N/A]")])
def test_the_pretended_gpu(site: Path, arch: str, capability: str, memory: str) -> None:
    record = run(site, cell("plain", arch=arch), arch=arch)
    assert record["cells"][0]["resolved"]["capability"] == capability
    assert record["cells"][0]["resolved"]["memory"] == memory
    assert record["pretended"]["gpu"]["capability"] == capability
    assert "torch.cuda.get_device_capability" in record["pretended"]["functions"]


def test_the_kernel_packages_are_those_that_this_sglang_requires(site: Path) -> None:
    record = run(site, cell("plain"), cell("kernel", do="kernel"))
    assert record["pretended"]["modules"] == {
        "flashinfer": "0.7.2",
        "sgl_kernel": "0.4.10",
        "triton_kernels": "0.4.10",
        "deep_gemm": "0.4.10",
    }
    assert record["cells"][1]["outcome"] == "accepted"
    without = run(site, cell("plain"), kernels={})
    assert without["pretended"]["modules"] == {}
    assert without["cells"][0]["settings"]["attention_backend"] == "triton"


def test_what_cannot_be_asked_is_never_accepted(site: Path) -> None:
    record = run(site, cell("a"), cell("b"), env={"TEST_IMPORT": "fail"})
    assert record["status"] == "unavailable"
    assert record["reason"].startswith("preflight unavailable: SGLang 9.9: ModuleNotFoundError")
    assert "a_new_requirement" in record["reason"]
    assert [one["outcome"] for one in record["cells"]] == ["unavailable"] * 2
    failure = failure_of(record["cells"][0])
    assert failure is not None
    assert failure.kind is Kind.INFRA


def test_one_cell_that_dies_hangs_or_lacks_something_leaves_the_others(site: Path) -> None:
    record = run(
        site,
        cell("die", do="die"),
        cell("hang", do="hang"),
        cell("import", do="import"),
        cell("ask", do="ask"),
        cell("plain"),
        cell_timeout=4.0,  # for those that do answer, on a busy machine
    )
    reasons = {one["id"]: one["reason"] for one in record["cells"]}
    assert "ended with -11" in reasons["die"]
    assert "no answer in 4 s" in reasons["hang"]
    assert "another_new_requirement" in reasons["import"]
    assert "clock_of_the_moon" in reasons["ask"]
    assert [one["outcome"] for one in record["cells"]] == ["unavailable"] * 4 + ["accepted"]
    assert record["status"] == "ok"


def test_an_import_that_hangs_is_ended(site: Path, tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    record = run(
        site, cell("a"), env={"TEST_IMPORT": "hang", "TEST_PIDFILE": str(pidfile)}, import_timeout=4.0, cell_timeout=1.0
    )
    assert record["status"] == "unavailable"
    assert "no answer in 4 s" in record["reason"]
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pidfile.read_text()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_interpreter_that_is_not_there_or_has_no_sglang(site: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--gpu-server-python"):
        preflight([cell("a")], arch="sm120", python="/no/python", env={}, versions={}, model_dirs={"m": tmp_path})
    record = run(site, cell("a"), env={"PYTHONPATH": str(tmp_path)})
    assert record["status"] == "unavailable"
    assert "torch" in record["reason"]


def test_cells_that_are_not_asked(site: Path) -> None:
    gated = Cell(id="gated", arch="sm120", model=ModelSpec(name="m"), axes={}, not_applicable="needs sglang >= 10")
    elsewhere = Cell(id="elsewhere", arch="sm120", model=ModelSpec(name="other"), axes={})
    record = run(site, gated, elsewhere)
    assert [one["outcome"] for one in record["cells"]] == ["skipped", "unavailable"]
    assert record["cells"][0]["reason"] == "needs sglang >= 10"
    assert failure_of(record["cells"][0]) is None
    assert record["seconds"]["processes"] == 0


def test_the_registrys_own_gate(site: Path) -> None:
    record = run(site, *(cell(name, attention_backend=name) for name in ("triton", "flashinfer", "fa3", "odd", "gone")))
    gates = {one["id"]: one["gate"][one["id"]] for one in record["cells"]}
    assert gates["triton"] == gates["flashinfer"] == "passes"
    assert gates["fa3"] == "rejected: AssertionError: FlashAttention v3 wants something else"
    assert gates["odd"].startswith("not asked: AttributeError")
    assert gates["gone"] == "absent"
    assert {one["outcome"] for one in record["cells"]} == {"accepted"}
    failures = {one["id"]: failure_of(one) for one in record["cells"]}
    refused = failures.pop("fa3")
    assert refused is not None
    assert (refused.kind, refused.phase) == (Kind.CRASH, Phase.KV_CACHE)
    assert set(failures.values()) == {None}


def test_on_a_cpu_nothing_but_the_missing_kernels_is_pretended(site: Path) -> None:
    record = run(site, cell("a", arch="cpu"), arch="cpu")
    assert record["pretended"]["gpu"] is None
    assert record["pretended"]["functions"] == []
    assert record["pretended"]["modules"] == {"sgl_kernel": "0.4.10"}
    # A rejection for want of a GPU is true there; with a pretended GPU it would be the pretence that failed.
    assert record["cells"][0]["outcome"] == "rejected"
    assert "not compiled with CUDA" in record["cells"][0]["rejection"]["text"]


def test_an_arch_that_cannot_be_pretended_is_said_and_nothing_is_started(tmp_path):
    cell = Cell(id="sm110-m-baseline", arch="sm110", model=ModelSpec(name="m"), axes={})
    nowhere = {"python": str(tmp_path / "none"), "env": {}, "versions": {"sglang": "0.5.23"}}
    record = preflight([cell], arch="sm110", model_dirs={"m": tmp_path}, **nowhere)
    assert record["status"] == "unavailable"
    assert "SGLang 0.5.23: no GPU of sm110 can be pretended, only of sm80, " in record["reason"]
    assert [one["outcome"] for one in record["cells"]] == ["unavailable"]


def test_preflight_and_the_simulation_pretend_the_same_archs():
    assert tuple(ARCHS) == tuple(sim.MODELS)
    page = (Path(__file__).parents[2] / "docs" / "new-arch.md").read_text()
    assert [arch for arch in ARCHS if f"`{arch}`" not in page] == []
