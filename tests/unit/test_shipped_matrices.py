"""The shipped matrices and known-bad list: loadable, clean, of a nightly size, and with what was promised."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path

import pytest

from pytest_gpuserve.engine import argv
from pytest_gpuserve.matrix.expand import expand
from pytest_gpuserve.matrix.find import packaged_dir
from pytest_gpuserve.matrix.known_bad import load_known_bad, matching
from pytest_gpuserve.matrix.schema import load_matrix
from pytest_gpuserve.matrix.validate import validate
from pytest_gpuserve.model.cell import facts_of
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase

PATHS = {path.stem: path for path in sorted(packaged_dir().glob("*.yaml")) if path.stem != "known_bad"}
KNOWN_BAD = packaged_dir() / "known_bad.yaml"
ARCHS = ("cpu", "sm100", "sm103", "sm120", "sm121", "sm89", "sm90")
RELEASES = (*(f"0.5.{patch}" for patch in range(6, 24)), "0.5.10.post1")
ENTRIES = load_known_bad([KNOWN_BAD])
# The day they were written: that an entry is due for review is the validate command's business.
THAT_DAY = date(2026, 11, 30)


def cells_of(name, sglang="0.5.17"):
    return {cell.id: cell for cell in expand(load_matrix(PATHS[name]), name, versions={"sglang": sglang})}


def entry(name):
    return next(entry for entry in ENTRIES if entry.id == name)


def test_there_is_a_matrix_for_each_arch_and_it_is_for_that_arch():
    assert tuple(PATHS) == ARCHS
    assert {name: load_matrix(path).archs for name, path in PATHS.items()} == {arch: (arch,) for arch in ARCHS}


def test_they_are_clean_together_without_a_warning():
    """Warnings too: a level that fits no model, two entries for one failure, an entry that no cell can meet."""
    assert [str(problem) for problem in validate(PATHS.values(), [KNOWN_BAD], today=THAT_DAY)] == []


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("sglang", RELEASES)
def test_a_night_is_at_most_sixty_cells(name, sglang):
    cells = cells_of(name, sglang)
    assert 0 < len(cells) <= 60
    assert any(cell.is_baseline and not cell.not_applicable for cell in cells.values())


@pytest.mark.parametrize("name", ARCHS)
def test_no_model_that_must_be_downloaded_runs_unless_it_is_there(name):
    for model in load_matrix(PATHS[name]).models.values():
        assert model.shape or model.optional, f"{name}: {model.name}"


@pytest.mark.parametrize("name", ARCHS)
def test_minis_leave_memory_for_graph_capture_and_models_at_full_size_are_launched_as_users_do(name):
    """On an H200 a mini without a limit ran out of memory in graph capture (docs/evidence/sm90.md)."""
    for cell in cells_of(name).values():
        given = cell.flags.get("mem-fraction-static")
        if cell.model.shape:
            assert given is not None, cell.id
            assert float(given) <= 0.5, cell.id
        else:
            assert given in (False, 0.92), cell.id


def test_every_entry_says_where_it_comes_from_and_when_it_is_looked_at_again():
    for one in ENTRIES:
        said = (one.source, one.grade, one.issue, one.reason, one.added, one.review_by)
        assert all(said), one.id
        assert set(one.grade.split("+")) <= {"S", "M", "R"}, one.id


def test_an_entry_from_sglangs_own_checks_is_strict_and_one_of_a_single_reporter_is_not():
    for one in ENTRIES:
        if one.expect.kind is Kind.REJECTED:
            assert one.strict, one.id
        if not one.confirmed:
            assert not one.strict, one.id


def test_every_entry_says_for_which_versions_it_holds():
    assert [one.id for one in ENTRIES if not one.versions] == []


def test_what_one_report_alone_says_is_reported():
    """`confirmed` is what was read in source, said by a maintainer, or seen by several."""
    assert [one.id for one in ENTRIES if one.confirmed and not set(one.grade.split("+")) & {"S", "M"}] == []


def test_entries_hold_for_other_peoples_matrices():
    """They name flags, variables and what a model is, never an axis or a model of these files."""
    for one in ENTRIES:
        own = [name for name in one.when.names if name not in ("arch", "gpus") and "." not in name]
        assert not own, one.id


def launch(cell):
    return " ".join(argv(cell, python="python", version="0.5.17", model_path="MODEL"))


# As reported from 8 x RTX PRO 6000 (the flags, and the variables of NCCL).
KIMI = ("--tp-size 8", "--attention-backend triton", "--num-continuous-decode-steps 4", "--disable-custom-all-reduce")
KIMI_NCCL = {"NCCL_MIN_NCHANNELS": "16", "NCCL_NTHREADS": "512", "NCCL_BUFFSIZE": "16777216"}
GLM = (
    "--tp-size 8",
    "--mem-fraction-static 0.92",
    "--max-running-requests 1024",
    "--kv-cache-dtype auto",
    "--quantization modelopt_fp4",
    "--attention-backend flashinfer",
    "--fp8-gemm-backend cutlass",
    "--nsa-decode-backend trtllm",
    "--nsa-prefill-backend trtllm",
    "--moe-runner-backend flashinfer_cutlass",
    "--disable-cuda-graph",
    "--disable-radix-cache",
)
GLM_NCCL = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_LEVEL": "5", "NCCL_MIN_NCHANNELS": "8"}


def missing(cell, flags, env):
    words = launch(cell)
    return [flag for flag in flags if flag not in words], {k: v for k, v in env.items() if cell.env.get(k) != v}


def test_the_launches_from_the_field_are_cells():
    cells = cells_of("sm120")
    assert missing(cells["sm120-kimi-k2.5-decode-steps.4+nccl.tuned"], KIMI, KIMI_NCCL) == ([], {})
    assert missing(cells["sm120-glm-5-nvfp4-dsa.nsa-trtllm"], GLM, GLM_NCCL) == ([], {})
    assert "--mem-fraction-static" not in launch(cells["sm120-kimi-k2.5-decode-steps.4+nccl.tuned"])
    assert not any(cell.not_applicable for cell in cells.values() if cell.model.name in ("kimi-k2.5", "glm-5-nvfp4"))


def test_so_are_the_experiments_that_failed():
    cells = cells_of("sm120")
    flashinfer = cells["sm120-kimi-k2.5-attention.flashinfer+decode-steps.4+nccl.tuned"]
    wanted = [flag.replace("triton", "flashinfer") for flag in KIMI]
    assert missing(flashinfer, wanted, KIMI_NCCL) == ([], {})
    tree = cells["sm120-glm-5-nvfp4-dsa.nsa-trtllm+nccl.tree"]
    assert missing(tree, GLM, {**GLM_NCCL, "NCCL_ALGO": "Tree"}) == ([], {})
    wide = cells["sm120-glm-5-nvfp4-dsa.nsa-trtllm+nccl.wide"]
    changed = {**GLM_NCCL, "NCCL_MIN_NCHANNELS": "32", "NCCL_BUFFSIZE": "8388608"}
    assert missing(wide, GLM, changed) == ([], {})


# GLM-5 came with 0.5.9; the option was called --nsa-* until 0.5.19 and --dsa-* from 0.5.13 on.
@pytest.mark.parametrize("sglang", [release for release in RELEASES if release not in ("0.5.6", "0.5.7", "0.5.8")])
@pytest.mark.parametrize("nccl", ["tree", "wide"])
def test_the_experiments_on_glm_run_in_every_release_that_has_it(sglang, nccl):
    cells = cells_of("sm120", sglang)
    found = [cells[f"sm120-glm-5-nvfp4-dsa.{name}-trtllm+nccl.{nccl}"] for name in ("nsa", "dsa")]
    assert [cell.id for cell in found if not cell.not_applicable]


def test_a_model_is_not_started_on_a_release_that_lacks_it():
    for name, sglang, said in (("glm-5-nvfp4-mini", "0.5.8", ">=0.5.9"), ("deepseek-fp8-mini", "0.5.6", ">=0.5.7")):
        cells = [cell for cell in cells_of("sm120", sglang).values() if cell.model.name == name]
        assert cells
        for cell in cells:
            assert f"model {name} needs sglang{said}, installed is {sglang}" in cell.not_applicable, cell.id


def test_a_kernel_is_not_only_tried_where_it_is_refused():
    """Each FP8 GEMM and MXFP4 runner that a matrix names is expected to pass on some arch, in the newest release."""
    versions = {"sglang": "0.5.23"}
    tried: dict[tuple[str, str], bool] = {}
    for arch in ARCHS:
        for cell in cells_of(arch, "0.5.23").values():
            for flag in ("fp8-gemm-backend", "moe-runner-backend"):
                choice = cell.flags.get(flag)
                if choice and not cell.not_applicable:
                    known = any(one.strict for one in matching(ENTRIES, cell, versions))
                    tried[flag, str(choice)] = tried.get((flag, str(choice)), False) or not known
    assert [key for key, passes in tried.items() if not passes] == []


@pytest.mark.parametrize("name", [arch for arch in ARCHS if arch not in ("cpu", "sm121")])
def test_what_lies_between_gpus_is_varied_wherever_there_are_several(name):
    settings = {variable for cell in cells_of(name).values() for variable in cell.env}
    wanted = {"ALGO", "PROTO", "MIN_NCHANNELS", "NTHREADS", "BUFFSIZE", "P2P_LEVEL", "P2P_DISABLE", "IB_DISABLE"}
    assert {f"NCCL_{variable}" for variable in wanted} - settings == set()


def test_a_flag_that_no_code_reads_carries_a_note_which_the_plan_shows():
    for name in ARCHS:
        for cell in cells_of(name).values():
            if "num-continuous-decode-steps" in cell.flags:
                assert any("no code" in note for note in cell.notes), cell.id


def test_the_hang_that_was_reported_is_expected_as_reported():
    cell = cells_of("sm120")["sm120-kimi-k2.5-attention.flashinfer"]
    hangs = [one for one in matching(ENTRIES, cell, {"sglang": "0.5.17"}) if one.expect.kind is Kind.HANG]
    assert [(one.confirmed, one.strict, one.expect.phases) for one in hangs] == [(False, False, (Phase.GRAPH_CAPTURE,))]


# What SGLang itself printed: the preflight of these releases, and starts on an H200 with 0.5.17.
SAID = [
    (
        "KB-0001",
        Kind.CRASH,
        Phase.KV_CACHE,
        "AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please",
    ),
    (
        "KB-0004",
        Kind.CRASH,
        Phase.GRAPH_CAPTURE,
        "Exception: Capture cuda graph failed: NCCL error: invalid usage (run",
    ),
    (
        "KB-0004",
        Kind.CRASH,
        Phase.DIST_INIT,
        "Error : no algorithm/protocol available for function AllGather with datatype ncclInt8. NCCL_ALGO was set to",
    ),
    (
        "KB-0040",
        Kind.CRASH,
        Phase.DIST_INIT,
        "No algorithm/protocol nor symKernelId available for function Broadcast with datatype ncclInt8.",
    ),
    (
        "KB-0002",
        Kind.REJECTED,
        Phase.IMPORT,
        "launch_server.py: error: unrecognized arguments: --nsa-prefill-backend trtllm --nsa-decode-backend trtllm",
    ),
    (
        "KB-0003",
        Kind.CRASH,
        Phase.WARMUP,
        "tvm.error.InternalError: Error in function 'TllmGenFmhaRunner' at fmhaRunner.cuh:37: Unsupported architecture",
    ),
    (
        "KB-0003",
        Kind.CRASH,
        Phase.GRAPH_CAPTURE,
        "ValueError: multi_ctas_kv_counter_buffer is only supported by the trtllm-gen backend",
    ),
    (
        "KB-0010",
        Kind.CRASH,
        Phase.GRAPH_CAPTURE,
        "cutlass_mla_decode is only supported on compute capability 10.0, but found sm version 90",
    ),
    ("KB-0009", Kind.CRASH, Phase.KV_CACHE, "AttributeError: 'ModelConfig' object has no attribute 'kv_lora_rank'"),
    (
        "KB-0053",
        Kind.CRASH,
        Phase.KV_CACHE,
        "GLM DSA with FP8 KV cache on NVIDIA SM120/SM121 supports only flashinfer_sparse_mla (default) or",
    ),
    (
        "KB-0053",
        Kind.CRASH,
        Phase.KV_CACHE,
        "GLM DSA with FP8 KV cache on NVIDIA SM120/SM121 supports only flashinfer_sparse_mla, but got ['trtllm'].",
    ),
    (
        "KB-0006",
        Kind.REJECTED,
        Phase.IMPORT,
        "TRTLLM MLA backend is only supported on Blackwell GPUs (SM100). Please use a different backend.",
    ),
    ("KB-0029", Kind.CRASH, Phase.WARMUP, "mm_fp4 does not support backend 'trtllm' with capability 120"),
]


@pytest.mark.parametrize(("name", "kind", "phase", "text"), SAID)
def test_an_entry_knows_what_was_really_said(name, kind, phase, text):
    one = entry(name)
    assert one.expect.explains(Failure.of(kind, phase, text))
    assert not one.expect.explains(Failure.of(kind, phase, "CUDA out of memory"))


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["matrix.md", "new-arch.md"])
def test_the_example_of_a_page_is_a_matrix(page, tmp_path):
    file = tmp_path / "sm120.yaml"
    file.write_text(re.search(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[1])
    matrix = load_matrix(file)
    assert len(expand(matrix, matrix.archs[0], versions={"sglang": "0.5.23"})) > 1


def test_the_page_on_known_failures_shows_an_entry_as_it_is(tmp_path):
    file = tmp_path / "known_bad.yaml"
    example = re.search(r"```yaml\n(.*?)```", (DOCS / "known-bad.md").read_text(), re.DOTALL)[1]
    file.write_text("schema: 1\nentries:\n" + re.sub("^", "  ", example, flags=re.MULTILINE))
    (shown,) = load_known_bad([file])
    assert (shown.id, shown.when) == ("KB-0003", entry("KB-0003").when)


def test_the_pages_count_what_there_is():
    text = (DOCS / "known-bad.md").read_text()
    refused = [one for one in ENTRIES if one.expect.kind is Kind.REJECTED]
    checked = [one for one in ENTRIES if one.strict and one.expect.kind is not Kind.REJECTED]
    assert f"{len(ENTRIES)} entries" in text
    assert f"{len(refused)} are refusals by SGLang's arguments, {len(checked)} refusals or swaps" in text
    table = (DOCS / "matrix.md").read_text()
    for name in ARCHS:
        count = len(cells_of(name))
        assert re.search(rf"`{name}`(, `\w+`)* \| {count}\b|`{name}` \| {count}\b", table), (name, count)


def test_the_page_on_known_failures_counts_the_entries_of_each_arch():
    """Entries about a cell of the arch's matrix, in any release; of these the strict ones, and those with a source."""
    rows = []
    for arch in ARCHS:
        facts = [facts_of(cell) for cell in cells_of(arch, "0.5.23").values()]
        about = [one for one in ENTRIES if any(one.when.matches(fact) for fact in facts)]
        graded = [one for one in about if one.source and one.grade]
        rows.append(f"| `{arch}` | {len(facts)} | {len(about)} | {sum(one.strict for one in about)} | {len(graded)} |")
    text = (DOCS / "known-bad.md").read_text()
    assert [row for row in rows if row not in text] == []


def test_the_evidence_names_every_cell_of_sm90_that_no_gpu_has_run():
    records = [json.loads(path.read_text()) for path in sorted((DOCS / "evidence").glob("sm90-*.json"))]
    done = [
        cell["id"] for record in records for cell in record["cells"] if cell["outcome"] not in ("not-run", "blocked")
    ]
    cells = cells_of("sm90")
    assert set(done) - set(cells) == set()
    page = (DOCS / "evidence" / "sm90.md").read_text().partition("## Not run on a GPU")[2]
    named = set(re.findall(r"`([\w.-]+-mini-[\w.-]+|deepseek-v3-baseline)`", page))
    assert named == {name.removeprefix("sm90-") for name in set(cells) - set(done)}
    assert f"{len(set(done))} of the {len(cells)} cells" in page
