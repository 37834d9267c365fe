"""Known-bad lists: what is accepted, and which entries hold for which cell."""

import time
from pathlib import Path

import pytest

from pytest_gpuserve.errors import FileProblems
from pytest_gpuserve.matrix.known_bad import ISSUE_PLACEHOLDER, load_known_bad, matching
from pytest_gpuserve.model.cell import Cell, ModelSpec
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.knownbad import Mode
from pytest_gpuserve.model.phase import Phase

GOLDEN = Path(__file__).parent / "golden/matrix"

ISSUE = "https://github.com/sgl-project/sglang/issues/24633"


def entry(**keys: str) -> str:
    """One entry as text, a valid one but for `keys` (a value of "" leaves the key out)."""
    base = {
        "id": "KB-1",
        "when": "{flag.attention-backend: fa3}",
        "expect": "{kind: hang}",
        "issue": ISSUE,
    }
    merged = {**base, **{key.replace("_", "-"): value for key, value in keys.items()}}
    lines = [f"{key}: {value}" for key, value in merged.items() if value]
    return "  - " + "\n    ".join(lines) + "\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def load(*entries: str):
        (tmp_path / "kb.yaml").write_text("schema: 1\nentries:\n" + ("".join(entries) or "  []\n"))
        return load_known_bad([tmp_path / "kb.yaml"])

    return load


@pytest.fixture
def problems(load):
    def problems(*entries: str) -> list[str]:
        with pytest.raises(FileProblems) as caught:
            load(*entries)
        return str(caught.value).splitlines()

    return problems


def cell(flags=None, *, axes=None, arch="sm120", gpus=1, **properties: str) -> Cell:
    model = ModelSpec(name="m", shape="x", gpus=gpus, properties=properties)
    return Cell(id="c", arch=arch, model=model, axes=axes or {}, flags=flags or {})


def test_an_entry_of_the_design(load):
    (found,) = load(
        """  - id: KB-0007
    when: {arch: [sm120, sm121], flag.attention-backend: trtllm_mla, model.attention: mla}
    versions: {sglang: ">=0.5.10", Flashinfer.Python: "<1"}
    expect: {kind: crash, phase: [warmup, serving], match: "Unsupported architecture"}
    mode: skip
    confidence: reported
    source: sgl-project/sglang#24633, log in the report
    grade: R+S
    issue: https://github.com/sgl-project/sglang/issues/24633
    reason: trtllm-gen kernels have no SM12x build
    added: 2026-11-29
    review-by: 2027-02-28
"""
    )
    assert (found.id, found.mode, found.confirmed, found.strict) == ("KB-0007", Mode.SKIP, False, False)
    assert found.versions == {"sglang": ">=0.5.10", "flashinfer-python": "<1"}
    assert found.expect.phases == (Phase.WARMUP, Phase.SERVING)
    assert (found.added, found.review_by, found.grade) == ("2026-11-29", "2027-02-28", "R+S")
    assert str(found.where) == "kb.yaml:3:5"
    assert found.expect.explains(Failure.of(Kind.CRASH, Phase.WARMUP, "x", text="… Unsupported architecture …"))


def test_strict_is_the_default_for_rejections_only(load):
    rejected = entry(id="A", expect="{kind: rejected, match: unrecognized arguments}")
    loose = entry(id="B", expect="{kind: rejected, match: unrecognized arguments}", strict="false")
    assert [found.strict for found in load(rejected, loose, entry(id="C"))] == [True, False, False]


def test_every_problem_of_every_entry_at_once(problems):
    text = (GOLDEN / "known_bad.yaml").read_text()
    assert problems(text.removeprefix("schema: 1\nentries:\n")) == (GOLDEN / "known_bad.txt").read_text().splitlines()


@pytest.mark.parametrize(
    "issue",
    [
        ISSUE_PLACEHOLDER,
        "https://github.com/TODO",
        "https://github.com/a/b/issues/<number>",
        "https://x.y/…",
        "http://example.com/1",
    ],
)
def test_a_placeholder_is_no_issue(problems, issue):
    assert problems(entry(issue=issue)) == [
        f"kb.yaml:6:12: entries[0].issue: '{issue}' is a placeholder: open an issue, or find it, and write its URL here"
    ]


@pytest.mark.parametrize("issue", ["sglang#24633", "https://github.com", "file:///etc/passwd", "42", "http://[::1"])
def test_an_issue_is_a_url(problems, issue):
    assert problems(entry(issue=issue)) == [
        f"kb.yaml:6:12: entries[0].issue must be the URL of an issue (https://…), got '{issue}'"
    ]


@pytest.mark.parametrize("pattern", ['".*"', '"a*"', '"^"', '"."', '"(error)?"', '"[a-zA-Z0-9]"'])
def test_a_pattern_that_explains_any_failure(problems, pattern):
    (found,) = problems(entry(expect=f"{{kind: crash, match-re: {pattern}}}"))
    assert "matches everything, so it would explain any failure" in found


@pytest.mark.parametrize("kind", ["crash", "rejected", "assertion"])
def test_what_always_has_a_text_is_expected_by_it(problems, load, kind):
    (found,) = problems(entry(expect=f"{{kind: {kind}}}"))
    assert f"needs match or match-re: without a text, any {kind} would count as this one" in found
    (found,) = load(entry(expect=f"{{kind: {kind}, match: the answer is empty}}"))
    assert str(found.expect.kind) == kind


def test_a_literal_is_no_pattern(load):
    (found,) = load(entry(expect='{kind: crash, match: "x.cuh:30 (a|b)"}'))
    assert not found.expect.explains(Failure.of(Kind.CRASH, Phase.WARMUP, "x", text="xxcuh:30 a"))
    assert found.expect.explains(Failure.of(Kind.CRASH, Phase.WARMUP, "x", text="in x.cuh:30 (a|b)!"))


def test_ids_are_unique_over_all_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.yaml"):
        Path(name).write_text("schema: 1\nentries:\n" + entry())
    with pytest.raises(FileProblems) as caught:
        load_known_bad([Path("a.yaml"), Path("b.yaml")])
    assert str(caught.value) == "b.yaml:3:5: the id KB-1 is given twice (first at a.yaml:3:5)"


def test_an_empty_list_is_fine(load):
    assert load() == ()


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ("{arch: sm120}", True),
        ("{arch: [sm90, sm12x]}", True),
        ("{arch: sm121}", False),
        ('{gpus: ">1"}', True),
        ('{gpus: "<8"}', False),
        ("{gpus: 8}", True),
        ("{flag.mem-fraction-static: 0.90}", True),
        ("{flag.disable-cuda-graph: true}", True),
        ("{flag.disable-cuda-graph: false}", False),
        ("{model.attention: mla, model: m}", True),
        ("{model.attention: gqa}", False),
        ('{attention: "!=triton"}', True),
        ("{nccl: default}", False),  # the cell has no such axis
        ('{nccl: "!=default"}', False),
        ("{env.NCCL_ALGO: Tree}", False),
    ],
)
def test_predicates_over_cells(load, when, holds):
    here = cell(
        {"mem-fraction-static": 0.9, "disable-cuda-graph": True}, axes={"attention": "fa3"}, gpus=8, attention="mla"
    )
    assert bool(matching(load(entry(when=when)), here, {})) is holds


@pytest.mark.parametrize(
    ("range_", "version", "holds"),
    [
        (">=0.5.10", "0.5.10", True),
        (">=0.5.10", "0.5.10.post1", True),
        (">=0.5.10", "0.5.10rc1", False),
        (">=0.5.10", "0.5.11rc1", True),
        (">=0.5.10", "0.5.11.dev7+g1a2b3c", True),
        ("<=0.5.10", "0.5.10.post1", False),
        ("<0.5.10", "0.5.10rc1", True),
        ("<=0.5.10rc9", "0.5.10rc1", True),
        ("==2.14.*", "2.14.1+cu130", True),
        (">=0.5.10", "a-branch", False),
        (">=0.5.10", None, False),
    ],
)
def test_versions_by_pep_440(load, range_, version, holds):
    entries = load(entry(when="{arch: sm120}", versions=f'{{SGLang: "{range_}"}}'))
    assert bool(matching(entries, cell(), {"sglang": version} if version else {})) is holds


def test_drivers_and_libraries_have_versions_too(load):
    entries = load(entry(when="{arch: sm120}", versions='{driver: ">=595", cuda: "<13.1", nccl: ">=2.31"}'))
    assert matching(entries, cell(), {"driver": "595.84", "cuda": "13.0", "nccl": "2.31.2"})
    assert not matching(entries, cell(), {"driver": "580.95.05", "cuda": "13.0", "nccl": "2.31.2"})


def test_the_most_specific_entry_comes_first(load):
    entries = load(
        entry(id="A", when="{arch: sm120}", confidence="reported"),
        entry(id="B", when="{arch: sm120}"),
        entry(id="C", when="{arch: sm120}", expect="{kind: crash, match: some text}"),
        entry(id="D", when="{arch: sm120, flag.f: 1}"),
        entry(id="E", when="{arch: sm120}", versions='{sglang: ">=0.5", torch: ">=2"}'),
    )
    found = matching(entries, cell({"f": 1}), {"sglang": "0.5.23", "torch": "2.14"})
    assert [one.id for one in found] == ["E", "D", "C", "B", "A"]


def test_20_000_cells_times_100_entries(load):
    entries = load(
        *(
            entry(id=f"K{i}", when=f'{{arch: [sm120, sm121], flag.f{i % 5}: {i % 9}, a: l{i % 8}, gpus: ">1"}}')
            for i in range(100)
        )
    )
    cells = [
        cell({f"f{j}": (i + j) % 9 for j in range(5)}, axes={"a": f"l{i % 8}", "b": "x"}, gpus=8) for i in range(2000)
    ]
    best = 10.0
    for _ in range(3):
        began = time.process_time()
        found = sum(len(matching(entries, one, {})) for one in cells)
        best = min(best, time.process_time() - began)
    assert found > 0
    assert best * 10 < 4  # 20,000 cells: 0.9 s on an idle core
