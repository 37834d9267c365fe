"""What `gpuserve validate` finds over all files at once, and that the shipped files are clean."""

import time
from datetime import date
from pathlib import Path

import pytest

from pytest_gpuserve.matrix.expand import expand
from pytest_gpuserve.matrix.find import available, packaged_dir
from pytest_gpuserve.matrix.known_bad import ISSUE_PLACEHOLDER, load_known_bad, matching
from pytest_gpuserve.matrix.schema import load_matrix
from pytest_gpuserve.matrix.validate import validate

ONE = """schema: 1
arch: [sm120]
defaults: {env: {E: 1}}
models:
  mla: {shape: tiny-mla, gpus: 2}
  gqa: {shape: tiny-llama}
axes:
  attention:
    triton: {flags: {attention-backend: triton}}
    fa3: {flags: {attention-backend: fa3}}
    mla: {flags: {attention-backend: trtllm_mla}, when: {model.attention: mla}}
  graphs: {on: {}, off: {flags: {disable-cuda-graph: true}}}
  page: {small: {}, large: {flags: {disable-cuda-graph: false}, when: {attention: [fa3, mla]}}}
  nccl: {default: {}, tree: {env: {NCCL_ALGO: Tree}, when: {gpus: ">1"}}, tuned: {env: {NCCL_ALGO: Ring}}}
baseline: {attention: triton, graphs: on, page: small, nccl: default}
exclude: [{when: {model: gqa, graphs: off}, reason: r}]
"""
OTHER = """schema: 1
arch: sm10x
models: {big: {path: /models/big, attention: dsa, gpus: 8}}
axes:
  moe: {auto: {}, cutlass: {flags: {moe: cutlass}, when: {gpus: 1}}}
baseline: {moe: auto}
"""
EXPECT = "{kind: crash, phase: warmup, match: boom}"


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("one.yaml").write_text(ONE)
    Path("other.yaml").write_text(OTHER)

    def check(*entries: str, today: date = date(2026, 12, 1)) -> list[str]:
        lines = [f"  - {{id: K{number}, issue: https://x.y/1, {entry}}}\n" for number, entry in enumerate(entries)]
        Path("kb.yaml").write_text(f"schema: 1\nentries:\n{''.join(lines)}" if lines else "schema: 1\nentries: []\n")
        found = validate([Path("one.yaml"), Path("other.yaml")], [Path("kb.yaml")], today=today)
        return [str(problem) for problem in found if problem.where.file == "kb.yaml"]

    return check


@pytest.mark.parametrize(
    ("when", "reachable"),
    [
        ("{attention: fa3}", True),
        ("{flag.attention-backend: trtllm_mla, model.attention: mla}", True),
        ("{flag.attention-backend: trtllm_mla, model.attention: gqa}", False),  # the level's own `when`
        ("{env.NCCL_ALGO: Tree, graphs: off, attention: fa3}", True),  # three deltas at once
        ("{env.NCCL_ALGO: Tree, gpus: 1}", False),
        ("{graphs: off, model: gqa}", False),  # excluded
        ("{graphs: off, model: mla}", True),
        ("{page: large}", True),  # its own `when` asks for another delta
        ("{page: large, attention: triton}", False),
        ("{page: large, graphs: off}", False),  # the two levels contradict each other
        ("{arch: sm103, moe: auto}", True),  # a member of the family sm10x
        ("{arch: sm120, moe: auto}", False),
        ("{moe: cutlass}", False),  # fits no model
        ("{env.E: 1}", True),
        ("{env.E: 1, arch: sm100}", False),
        ('{flag.attention-backend: "!=triton", gpus: 1}', True),
    ],
)
def test_an_entry_must_match_some_cell_in_any_combination(check, when, reachable):
    found = check(f"when: {when}, expect: {EXPECT}")
    assert (not any("matches no cell" in line for line in found)) is reachable
    assert reachable or len(found) == 1


def test_what_an_entry_may_name(check):
    assert check(
        f"when: {{atention: fa3}}, expect: {EXPECT}",
        f"when: {{attention: [triton, fa4]}}, expect: {EXPECT}",
        f"when: {{model: mlla}}, expect: {EXPECT}",
        f"when: {{model.atention: mla}}, expect: {EXPECT}",
        f"when: {{flag.no-such-flag: 1, env.NONE: 1}}, expect: {EXPECT}",
        f"when: {{flag.attention-backend: flashmla}}, expect: {EXPECT}",
    ) == [
        "kb.yaml:3:43: K0: no matrix has an axis 'atention'; did you mean 'attention'?",
        "kb.yaml:4:43: K1: no axis 'attention' has a level 'fa4'; did you mean 'fa3'?",
        "kb.yaml:5:43: K2: no matrix has a model 'mlla'; did you mean 'mla'?",
        "kb.yaml:6:43: K3: no model has 'model.atention'; did you mean 'model.attention'?",
        "kb.yaml:7:5: K4 matches no cell of any matrix: nothing sets flag.no-such-flag, env.NONE",
        "kb.yaml:8:5: K5 matches no cell of any matrix: nothing has flag.attention-backend: flashmla",
    ]


def test_entries_past_their_review_are_warned_of(check):
    entry = f"when: {{attention: fa3}}, expect: {EXPECT}, added: 2026-01-01, review-by: 2026-12-01"
    assert check(entry, today=date(2026, 12, 1)) == []
    assert check(entry, today=date(2026, 12, 2)) == [
        "kb.yaml:3:141: warning: K0 was to be reviewed by 2026-12-01: see whether it still fails, then move the date"
    ]


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ("{kind: crash, match: boom}", "{kind: crash, match: boom}", True),
        ("{kind: crash, match: boom}", "{kind: crash, match: a boom in the kernel}", True),
        ("{kind: crash, match: boom}", "{kind: crash, match: bang}", False),
        ("{kind: crash, match: boom}", '{kind: crash, match-re: "b[o]+m"}', True),
        ('{kind: crash, match-re: "^x(y|z) [0-9]+$"}', "{kind: crash, match: bang}", False),
        ("{kind: hang}", "{kind: hang}", True),
        ("{kind: hang}", "{kind: crash, match: boom}", False),
        ("{kind: hang, phase: warmup}", "{kind: hang, phase: [weights, import]}", False),
        ("{kind: hang, phase: warmup}", "{kind: hang, phase: [weights, warmup]}", True),
    ],
)
def test_entries_that_expect_the_same_failure_of_one_cell(check, one, other, overlap):
    found = check(f"when: {{attention: fa3}}, expect: {one}", f"when: {{graphs: off, model: mla}}, expect: {other}")
    assert len(found) == overlap
    if overlap:
        assert found == [
            (
                "kb.yaml:4:5: warning: K1 and K0 (kb.yaml:3:5) expect the same failure of "
                "sm120-mla-attention.fa3+graphs.off; K1 would explain it"
            )
        ]


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ("<0.5.10", ">=0.5.10", False),
        ("<=0.5.10", ">=0.5.10", True),
        (">0.5.10", "<0.5.11", True),
        (">=0.5.10,<0.5.12", ">=0.5.12", False),
        ("==0.5.*", ">=0.5.23", True),
        ("==0.5.*", ">=0.6", False),
        ("!=0.5.10", "==0.5.10", False),
        (">0.5.10.post1", "<0.5.11", True),
    ],
)
def test_version_ranges_that_do_not_meet_do_not_overlap(check, one, other, meet):
    hang = "when: {attention: fa3}, expect: {kind: hang}"
    found = check(f'{hang}, versions: {{sglang: "{one}", torch: ">=2"}}', f'{hang}, versions: {{sglang: "{other}"}}')
    assert bool(found) is meet


def test_entries_that_can_never_meet_do_not_overlap(check):
    assert check(f"when: {{arch: sm120}}, expect: {EXPECT}", f"when: {{arch: sm100}}, expect: {EXPECT}") == []


def test_a_level_that_fits_no_model(check):
    check()
    found = validate([Path("one.yaml"), Path("other.yaml")], [])
    assert [str(problem) for problem in found] == [
        "other.yaml:5:19: warning: level moe.cutlass fits no model of this matrix: it needs gpus: 1"
    ]


FLOORS = """schema: 1
arch: [sm120, sm121]
models:
  m: {shape: tiny-llama}
  n: {shape: tiny-llama, gpus: 2}
axes:
  attention: {triton: {}, fa3: {flags: {attention-backend: fa3}}}
  graphs: {on: {}, off: {flags: {disable-cuda-graph: true}}}
  nccl: {default: {}, tree: {env: {NCCL_ALGO: Tree}, when: {gpus: ">1"}}}
baseline: {attention: triton, graphs: on, nccl: default}
include: [{model: m, attention: fa3, graphs: off}]
exclude: [{when: {graphs: off, nccl: tree}, reason: r}]
floors:
"""
LIMIT = "{at-least: 1, unit: tok/s}"


@pytest.mark.parametrize(
    ("floors", "told"),
    [
        ([("{attention: fa3, graphs: off, model: m}", LIMIT)], []),  # `include` makes it
        ([("{graphs: off}", "{at-least-ratio: 0.9, of: {attention: fa3}}")], []),  # of some cells
        (
            [("{attention: fa3, graphs: off, model: n}", LIMIT)],
            ["warning: this floor is never judged: neither the strategy 'one-at-a-time' nor `include` makes a cell"],
        ),
        ([("{gpus: 4}", LIMIT)], ["no cell of this matrix can have gpus: 4"]),
        ([("{nccl: tree, gpus: 1}", LIMIT)], ["no cell of this matrix can have nccl: tree, gpus: 1"]),
        ([("{graphs: off, nccl: tree}", LIMIT)], ["no cell of this matrix can have graphs: off, nccl: tree"]),
        (
            [("{attention: fa3, graphs: on}", "{at-least-ratio: 1, of: {nccl: tree}}")],
            ["it compares sm120-n-attention.fa3 with sm120-n-attention.fa3+nccl.tree, and neither the strategy"],
        ),
        (
            [("{graphs: off, model: n}", "{at-least-ratio: 1, of: {nccl: tree}}")],
            ["compares sm120-n-graphs.off with sm120-n-graphs.off+nccl.tree, and no such cell can be"],
        ),
        (
            [("{attention: triton, graphs: on, nccl: default}", "{at-least-ratio: 1, of: baseline}")],
            ["this floor is never judged: it compares sm120-m-baseline with itself"],
        ),
        (
            [
                ("{attention: fa3, graphs: on}", "{at-least-ratio: 1, of: {attention: triton, graphs: off}}"),
                ("{graphs: off, attention: triton}", "{at-least-ratio: 1, of: {attention: fa3, graphs: on}}"),
            ],
            ["sm120-m-attention.fa3 for sm120-m-graphs.off (line 14), sm120-m-graphs.off for sm120-m-attention.fa3"],
        ),
        (
            [("{attention: triton, graphs: on, nccl: default}", "{at-least-ratio: 1, of: {graphs: off}}")],
            ["-m-baseline for sm120-m-graphs.off (line 14), sm120-m-graphs.off for sm120-m-baseline (its baseline)"],
        ),
        ([("{}", "{at-least-ratio: 0.9, of: baseline}")], []),
        ([("{}", "{at-least-of-history: 0.9, last: 3}")], []),
    ],
)
def test_floors_that_are_never_judged(tmp_path, monkeypatch, floors, told):
    monkeypatch.chdir(tmp_path)
    lines = [f"  - {{when: {when}, load: batch, output_throughput: {bound}}}\n" for when, bound in floors]
    Path("x.yaml").write_text(FLOORS + "".join(lines))
    found = [str(problem) for problem in validate([Path("x.yaml")], [])]
    assert len(found) == len(told), found
    for line, wanted in zip(found, told, strict=True):
        assert line.startswith("x.yaml:14:")
        assert wanted in line
        assert ("warning: " in line) == ("neither the strategy" in line)


def test_a_time_between_tokens_of_answers_that_have_one_token(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bounds = "".join(f", {metric}: {{at-most: 9, unit: ms}}" for metric in ("median_tpot_ms", "p99_itl_ms"))
    loads = "loads: {one: {concurrency: 1, input: 8, output: 1}, two: {concurrency: 1, input: 8, output: 2}}\n"
    lines = [f"  - {{load: {load}, median_ttft_ms: {{at-most: 9, unit: ms}}{bounds}}}\n" for load in ("two", "one")]
    Path("x.yaml").write_text(FLOORS.replace("floors:\n", f"{loads}floors:\n") + "".join(lines))
    tpot, itl = map(str, validate([Path("x.yaml")], []))
    assert tpot.startswith(f"x.yaml:16:{lines[1].index('{at-most', lines[1].index('tpot')) + 1}: this floor is never")
    assert "median_tpot_ms" in tpot
    assert "p99_itl_ms" in itl
    assert itl.endswith("load 'one' has no second one: give the load an output of at least 2")


def test_floors_over_many_cells_are_checked_in_time(tmp_path):
    axes = "".join(f"  a{n}: {{off: {{}}, on: {{env: {{A{n}: 1}}}}}}\n" for n in range(13))
    base = ", ".join(f"a{n}: off" for n in range(13))
    path = tmp_path / "x.yaml"
    path.write_text(
        f"schema: 1\narch: sm120\nmodels: {{m: {{shape: tiny-llama}}}}\nstrategy: full\n"
        f"axes:\n{axes}baseline: {{{base}}}\n"
        "floors:\n  - {when: {}, load: batch, output_throughput: {at-least-ratio: 0.9, of: {a0: off}}}\n"
        "  - {when: {}, load: batch, output_throughput: {at-least-ratio: 0.9, of: baseline}}\n"
    )
    began = time.process_time()
    assert validate([path], []) == []
    assert time.process_time() - began < 10


def test_files_that_cannot_be_read_do_not_hide_the_others(check):
    Path("broken.yaml").write_text("schema: 1\narch: sm120\nmodls: {}\n")
    Path("kb.yaml").write_text(
        "schema: 1\nentries:\n"
        f"  - {{id: A, when: {{x: y}}, expect: {{kind: hang}}, issue: {ISSUE_PLACEHOLDER}}}\n"
        f"  - {{id: B, when: {{attention: fa9}}, expect: {{kind: hang}}, issue: https://x.y/1}}\n"
    )
    found = [str(problem) for problem in validate([Path("one.yaml"), Path("broken.yaml")], [Path("kb.yaml")])]
    # fa9 may well be a level of the matrix that cannot be read: nothing is said of it.
    assert [line.partition(": ")[0] for line in found] == ["broken.yaml:1:1", "broken.yaml:3:1", "kb.yaml:3:56"]


def test_a_conjunction_over_many_axes_is_answered_in_time(tmp_path):
    axes = "\n".join(
        f"  a{i}: {{{', '.join(f'l{j}: {{flags: {{f{i}: {j}}}}}' for j in range(10))}}}" for i in range(12)
    )
    base = ", ".join(f"a{i}: l0" for i in range(12))
    matrix, known = tmp_path / "m.yaml", tmp_path / "kb.yaml"
    matrix.write_text(
        f"schema: 1\narch: sm120\nmodels: {{m: {{shape: tiny-llama}}}}\naxes:\n{axes}\nbaseline: {{{base}}}\n"
    )
    when = ", ".join(f"a{i}: l9, flag.f{i}: 9" for i in range(12))
    known.write_text(
        f"schema: 1\nentries:\n  - {{id: A, when: {{{when}}}, expect: {{kind: hang}}, issue: https://x.y/1}}\n"
    )
    began = time.process_time()
    assert validate([matrix], [known]) == []
    assert time.process_time() - began < 2


def test_the_shipped_files_have_no_problem():
    root = packaged_dir().parent
    found = validate(available(root).values(), [packaged_dir() / "known_bad.yaml"], today=date(2026, 11, 29))
    assert [str(problem) for problem in found if not problem.warning] == []


def test_the_reference_launches_are_cells():
    matrix = load_matrix(packaged_dir() / "sm120.yaml")
    cells = {cell.id: cell for cell in expand(matrix, "sm120", versions={"sglang": "0.5.17"})}
    kimi = cells["sm120-kimi-k2.5-decode-steps.4+nccl.tuned"]
    assert kimi.flags["attention-backend"] == "triton"
    assert kimi.flags["num-continuous-decode-steps"] == 4
    assert kimi.flags["disable-custom-all-reduce"] is True
    assert (kimi.gpus, kimi.env["NCCL_BUFFSIZE"]) == (8, str(16 << 20))
    assert cells["sm120-kimi-k2.5-attention.flashinfer"].flags["attention-backend"] == "flashinfer"
    glm = cells["sm120-glm-5-nvfp4-dsa.nsa-trtllm"]
    assert glm.not_applicable is None
    assert glm.flags == {
        "mem-fraction-static": 0.92,
        "max-running-requests": 1024,
        "kv-cache-dtype": "auto",
        "quantization": "modelopt_fp4",
        "attention-backend": "flashinfer",
        "fp8-gemm-backend": "cutlass",
        "nsa-decode-backend": "trtllm",
        "nsa-prefill-backend": "trtllm",
        "moe-runner-backend": "flashinfer_cutlass",
        "disable-cuda-graph": True,
        "disable-radix-cache": True,
    }
    assert glm.env == {"NCCL_IB_DISABLE": "1", "NCCL_P2P_LEVEL": "5", "NCCL_MIN_NCHANNELS": "8"}
    tree = cells["sm120-glm-5-nvfp4-dsa.nsa-trtllm+nccl.tree"]
    known = load_known_bad([packaged_dir() / "known_bad.yaml"])
    assert any("NCCL" in entry.reason for entry in matching(known, tree, {"sglang": "0.5.17", "nccl": "2.28.9"}))
    assert cells["sm120-glm-5-nvfp4-dsa.nsa-trtllm+nccl.wide"].env["NCCL_MIN_NCHANNELS"] == "32"


def test_a_log_level_that_hides_the_phases_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "quiet.yaml"
    path.write_text(
        """schema: 1
arch: [sm120]
defaults: {flags: {log-level: warning}}
models: {m: {shape: tiny-llama, flags: {log-level: info}}}
axes: {a: {old: {}, new: {flags: {log-level: ERROR}}}}
baseline: {a: old}
"""
    )
    found = [problem for problem in validate([path], []) if "log-level" in problem.what]
    assert [(problem.where.line, problem.warning) for problem in found] == [(3, True), (5, True)]
    assert "logs no line that tells its phase" in found[0].what
    load_matrix(path)  # a warning keeps nobody from running it
