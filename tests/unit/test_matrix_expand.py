"""From matrices to cells: which combinations are cells, what they launch with, and their ids."""

import time
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from pytest_gpuserve.errors import FileProblems, UsageError
from pytest_gpuserve.matrix.expand import expand, expand_all
from pytest_gpuserve.matrix.schema import load_matrix
from pytest_gpuserve.matrix.types import Matrix

TWO_MODELS = """schema: 1
arch: [sm120, sm90]
defaults: {flags: {mem: 0.85}, env: {A: default}}
models:
  small: {shape: tiny-llama, env: {A: model}}
  large: {shape: tiny-mla, gpus: 8, flags: {mem: 0.9}}
axes:
  attention:
    triton: {flags: {attention-backend: triton}}
    fa3: {flags: {attention-backend: fa3}, when: {model.attention: gqa}}
  graphs:
    on: {}
    off: {flags: {disable-cuda-graph: true}, note: slow}
  nccl:
    default: {}
    tuned: {env: {A: level}, when: {gpus: ">1"}}
baseline: {attention: triton, graphs: on, nccl: default}
limits: {warmup: {stall: 7}}
"""


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str) -> Matrix:
        (tmp_path / "m.yaml").write_text(text)
        return load_matrix(tmp_path / "m.yaml")

    return load


def ids(matrix: Matrix, **options) -> list[str]:
    return [cell.id for cell in expand(matrix, "sm120", **{"versions": {}, **options})]


def test_one_at_a_time_is_the_baseline_then_each_delta_that_fits(load):
    assert ids(load(TWO_MODELS)) == [
        "sm120-small-baseline",
        "sm120-small-attention.fa3",
        "sm120-small-graphs.off",
        "sm120-large-baseline",
        "sm120-large-graphs.off",
        "sm120-large-nccl.tuned",
    ]


def test_full_is_every_combination_that_fits_and_ids_show_only_deltas(load):
    assert ids(load(TWO_MODELS), strategy="full") == [
        "sm120-small-baseline",
        "sm120-small-graphs.off",
        "sm120-small-attention.fa3",
        "sm120-small-attention.fa3+graphs.off",
        "sm120-large-baseline",
        "sm120-large-nccl.tuned",
        "sm120-large-graphs.off",
        "sm120-large-graphs.off+nccl.tuned",
    ]


def test_listed_is_the_baseline_and_what_is_included_once(load):
    include = """strategy: listed
include:
  - {model: small, attention: fa3, graphs: off}
  - {graphs: off, nccl: default}
  - {model: [small], graphs: off}
  - {nccl: tuned}
"""
    assert ids(load(TWO_MODELS + include)) == [
        "sm120-small-baseline",
        "sm120-small-attention.fa3+graphs.off",
        "sm120-small-graphs.off",
        "sm120-large-baseline",
        "sm120-large-graphs.off",
        "sm120-large-nccl.tuned",
    ]


def test_what_a_cell_launches_with(load):
    cells = {cell.id: cell for cell in expand(load(TWO_MODELS), "sm120", versions={})}
    small, tuned = cells["sm120-small-graphs.off"], cells["sm120-large-nccl.tuned"]
    assert small.flags == {"mem": 0.85, "attention-backend": "triton", "disable-cuda-graph": True}
    assert small.env == {"A": "model"}
    assert small.axes == {"attention": "triton", "graphs": "off", "nccl": "default"}
    assert (small.deltas, small.is_baseline, small.notes) == (("graphs",), False, ("graphs.off: slow",))
    assert (tuned.flags["mem"], tuned.env, tuned.gpus) == (0.9, {"A": "level"}, 8)
    assert (tuned.matrix, tuned.limits) == ("m", {"warmup": {"stall": 7}})
    assert cells["sm120-small-baseline"].is_baseline


def test_a_delta_wins_over_the_baseline_of_a_later_axis(load):
    # In the order of the axes alone, `quality` would undo what `mode.fast` says and its cell would test the baseline.
    cells = expand(
        load(
            """schema: 1
arch: sm120
models: {m: {shape: tiny-llama}}
axes:
  mode: {normal: {}, fast: {flags: {kv-cache-dtype: fp8}}}
  quality: {high: {flags: {kv-cache-dtype: bf16}}, low: {flags: {kv-cache-dtype: fp4}}}
baseline: {mode: normal, quality: high}
"""
        ),
        "sm120",
        strategy="full",
        versions={},
    )
    found = {cell.id: (cell.flags["kv-cache-dtype"], cell.not_applicable) for cell in cells}
    assert found == {
        "sm120-m-baseline": ("bf16", None),
        "sm120-m-quality.low": ("fp4", None),
        "sm120-m-mode.fast": ("fp8", None),
        "sm120-m-mode.fast+quality.low": (
            "fp4",
            "mode.fast and quality.low set flag 'kv-cache-dtype' to 'fp8' and 'fp4'",
        ),
    }


def test_a_delta_replaces_the_baseline_level_of_its_own_axis(load):
    matrix = load(
        "schema: 1\narch: sm120\nmodels: {m: {shape: tiny-llama}}\n"
        "axes: {a: {x: {flags: {f: 1}, env: {E: 1}}, plain: {}}}\nbaseline: {a: x}\n"
    )
    plain = expand(matrix, "sm120", versions={})[1]
    assert (plain.flags, plain.env) == ({}, {})


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"sglang": "0.5.10.post1"}, None),
        ({"sglang": "0.5.11.dev3+gabc"}, None),
        ({"sglang": "0.5.9"}, "level a.new needs sglang>=0.5.10, installed is 0.5.9"),
        ({"sglang": "0.5.10rc1"}, "level a.new needs sglang>=0.5.10, installed is 0.5.10rc1"),
        ({"sglang": "main"}, "level a.new needs sglang>=0.5.10: its version here, 'main', cannot be compared"),
        ({"torch": "2.14"}, "level a.new needs sglang>=0.5.10: the version of sglang is not known"),
    ],
)
def test_requirements(load, versions, reason):
    matrix = load(
        "schema: 1\narch: sm120\nmodels: {m: {shape: tiny-llama}}\n"
        'axes: {a: {x: {}, new: {requires: {SGLang: ">=0.5.10"}}}}\nbaseline: {a: x}\n'
    )
    baseline, new = expand(matrix, "sm120", versions=versions)
    assert (baseline.not_applicable, new.not_applicable) == (None, reason)


def test_several_requirements_are_all_named(load):
    matrix = load(
        "schema: 1\narch: sm120\nmodels: {m: {shape: tiny-llama}}\n"
        'axes: {a: {x: {requires: {torch: "<3", driver: ">=595"}}}, b: {x: {}, y: {requires: {nccl: "<1"}}}}\n'
        "baseline: {a: x, b: x}\n"
    )
    cells = expand(matrix, "sm120", versions={"torch": "3.0", "driver": "580.95.05", "nccl": "2.27.7"})
    assert [cell.not_applicable for cell in cells] == [
        "level a.x needs torch<3, installed is 3.0; level a.x needs driver>=595, installed is 580.95.05",
        (
            "level a.x needs torch<3, installed is 3.0; level a.x needs driver>=595, installed is 580.95.05; "
            "level b.y needs nccl<1, installed is 2.27.7"
        ),
    ]


def test_excluded_cells_are_kept_for_the_plan_with_the_reason(load):
    exclude = """include: [{model: small, attention: fa3, graphs: off}]
exclude:
  - {when: {model: small, graphs: off}, reason: known to be slow}
  - {when: {flag.attention-backend: fa3, arch: sm12x}, reason: no kernel}
"""
    matrix = load(TWO_MODELS + exclude)
    expansion = expand_all(matrix, "sm120", versions={})
    assert [cell.id for cell in expansion.cells] == [
        "sm120-small-baseline",
        "sm120-large-baseline",
        "sm120-large-graphs.off",
        "sm120-large-nccl.tuned",
    ]
    assert [(out.id, out.reason) for out in expansion.left_out] == [
        ("sm120-small-attention.fa3", "no kernel"),
        ("sm120-small-graphs.off", "known to be slow"),
        ("sm120-small-attention.fa3+graphs.off", "known to be slow"),
    ]
    assert "sm90-small-attention.fa3" in [cell.id for cell in expand(matrix, "sm90", versions={})]


def test_a_delta_that_changes_nothing_is_not_launched_twice(load):
    matrix = load(
        "schema: 1\narch: sm120\nmodels:\n  a: {shape: tiny-llama, flags: {f: 1}}\n  b: {shape: tiny-llama}\n"
        "axes: {x: {default: {}, one: {flags: {f: 1}}, off: {flags: {f: false}}, same: {}}}\nbaseline: {x: default}\n"
    )
    expansion = expand_all(matrix, "sm120", versions={})
    # A level that sets nothing is the file's own choice (a dummy axis in a test) and stays.
    assert [cell.id for cell in expansion.cells] == [
        "sm120-a-baseline",
        "sm120-a-x.off",
        "sm120-a-x.same",
        "sm120-b-baseline",
        "sm120-b-x.one",
        "sm120-b-x.same",
    ]
    assert [(out.id, out.reason) for out in expansion.left_out] == [
        ("sm120-a-x.one", "the same launch as this model's baseline"),
        ("sm120-b-x.off", "the same launch as this model's baseline"),
    ]


def test_a_level_may_depend_on_another_axis(load):
    matrix = load(
        "schema: 1\narch: sm120\nmodels: {m: {shape: tiny-llama}}\naxes:\n"
        "  a: {x: {}, y: {flags: {f: 1}}}\n  b: {x: {}, y: {when: {a: y}}, z: {when: {flag.f: 1}}}\n"
        "baseline: {a: x, b: x}\ninclude: [{a: y, b: z}]\n"
    )
    assert ids(matrix) == ["sm120-m-baseline", "sm120-m-a.y", "sm120-m-a.y+b.z"]
    assert ids(matrix, strategy="full") == ["sm120-m-baseline", "sm120-m-a.y", "sm120-m-a.y+b.y", "sm120-m-a.y+b.z"]


def test_a_model_whose_baseline_does_not_fit_this_arch(load):
    matrix = load(
        "schema: 1\narch: [sm120, sm90]\nmodels: {m: {shape: tiny-llama}}\n"
        "axes: {a: {x: {when: {arch: sm90}}, y: {}}}\nbaseline: {a: x}\n"
    )
    expansion = expand_all(matrix, "sm120", versions={})
    assert (expansion.cells, [out.reason for out in expansion.left_out]) == (
        (),
        ["the baseline's level a.x needs arch: sm90"],
    )
    assert len(expand(matrix, "sm90", versions={})) == 2


def test_ids_are_words_for_minus_k(load):
    for identifier in ids(load(TWO_MODELS), strategy="full"):
        matched = []
        assert Expression.compile(identifier).evaluate(lambda name, seen=matched: seen.append(name) or True)
        assert matched == [identifier]


def test_two_models_that_would_share_an_id(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileProblems) as caught:
        load(
            "schema: 1\narch: sm120\nmodels:\n  m: {shape: tiny-llama}\n  m-a.x: {shape: tiny-llama}\n"
            "axes: {a: {w: {}, x-b.z: {}}, b: {w: {}, z: {}}}\nbaseline: {a: w, b: w}\n"
        )
    assert str(caught.value) == (
        "m.yaml:5:3: models m and m-a.x both make a cell 'sm120-m-a.x-b.z': rename one of them"
    )


def test_what_cannot_be_expanded(load):
    matrix = load(TWO_MODELS)
    with pytest.raises(UsageError, match=r"m\.yaml is for sm120, sm90, not for sm100"):
        expand(matrix, "sm100", versions={})
    with pytest.raises(UsageError, match="unknown strategy 'ful'; did you mean 'full'"):
        expand(matrix, "sm120", strategy="ful", versions={})


def many(axes: int, levels: int) -> str:
    text = "schema: 1\narch: sm12x\nmodels: {m: {shape: tiny-llama}}\n"
    text += f"baseline: {{{', '.join(f'x{i}: l0' for i in range(axes))}}}\naxes:\n"
    for axis in range(axes):
        text += f"  x{axis}:\n"
        text += "".join(f"    l{j}: {{flags: {{flag-{axis}: {j}}}, env: {{V{axis}: {j}}}}}\n" for j in range(levels))
    return text


def test_a_product_too_large_is_refused_before_it_is_made(load):
    matrix = load(many(axes=12, levels=10))
    began = time.process_time()
    with pytest.raises(UsageError, match=r"'full' would make 1,000,000,000,000 cells of model m alone"):
        expand(matrix, "sm121", strategy="full", versions={})
    assert time.process_time() - began < 1


def test_twenty_thousand_cells_expand_in_well_under_a_second(load):
    matrix = load(many(axes=3, levels=27))
    best = 10.0
    for _ in range(3):
        began = time.process_time()
        cells = expand(matrix, "sm120", strategy="full", versions={})
        best = min(best, time.process_time() - began)
    assert len({cell.id for cell in cells}) == 27**3
    assert best < 2  # 0.2 s on an idle core: the bound leaves room for a busy machine, not for a quadratic step
