"""Matrix files: what they mean, and every problem at once with what was probably meant."""

from pathlib import Path

import pytest

from pytest_gpuserve.errors import FileProblems
from pytest_gpuserve.matrix.schema import load_matrix
from pytest_gpuserve.matrix.types import Floor, Matrix

GOLDEN = Path(__file__).parent / "golden/matrix"


class Shapes:
    """Two shapes, so that the texts below do not change with the shipped ones."""

    def names(self):
        return ("llama", "kimi")

    def properties(self, shape):
        return {"attention": "mla" if shape == "kimi" else "gqa", "moe": "true" if shape == "kimi" else "false"}


HEAD = "schema: 1\narch: sm120\nmodels:\n  mini: {shape: kimi}\n"
AXES = """axes:
  attention:
    triton: {flags: {attention-backend: triton}}
    flashinfer: {flags: {attention-backend: flashinfer}}
  nccl:
    default: {}
    tuned: {env: {NCCL_MIN_NCHANNELS: 16}}
baseline: {attention: triton, nccl: default}
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def load(text: str) -> Matrix:
        (tmp_path / "m.yaml").write_text(text)
        return load_matrix(tmp_path / "m.yaml", shapes=Shapes())

    return load


@pytest.fixture
def problems(load):
    def problems(text: str) -> list[str]:
        with pytest.raises(FileProblems) as caught:
            load(text)
        return str(caught.value).splitlines()

    return problems


def test_the_design_example(load):
    matrix = load(
        """
schema: 1
arch: [sm120]
title: RTX PRO 6000 Blackwell, RTX 5090
defaults:
  flags: {mem-fraction-static: 0.85}
  env: {}
models:
  kimi-mini: {shape: kimi, layers: 2, gpus: 1}
  kimi-k2.5: {path: moonshotai/Kimi-K2.5, attention: mla, gpus: 8, min-memory-gib: 90, optional: true}
axes:
  attention:
    triton:     {flags: {attention-backend: triton}}
    trtllm_mla: {flags: {attention-backend: trtllm_mla}, when: {model.attention: mla}, requires: {sglang: ">=0.5.10"}}
  graphs:
    on:  {}
    off: {flags: {disable-cuda-graph: true}}
  nccl:
    default: {}
    tuned:   {env: {NCCL_MIN_NCHANNELS: "16", NCCL_BUFFSIZE: 16777216, V: 1.10}, when: {gpus: ">1"}, note: faster}
baseline: {attention: triton, graphs: on, nccl: default}
strategy: one-at-a-time
include: []
exclude: []
loads:
  chat: {concurrency: 16, input: 1024, output: 256}
limits: {graph-capture: {stall: 120}}
floors:
  - when: {model: kimi-k2.5, nccl: default, attention: triton}
    load: single-stream
    output_throughput: {at-least: 60, unit: tok/s}
  - when: {model: kimi-k2.5, nccl: tuned}
    load: chat
    output_throughput: {at-least-ratio: 1.2, of: {nccl: default}}
    median_ttft_ms: {at-most-of-history: 1.1, last: 5}
"""
    )
    assert (matrix.name, matrix.archs, matrix.title) == ("m", ("sm120",), "RTX PRO 6000 Blackwell, RTX 5090")
    assert matrix.models["kimi-mini"].properties == {"attention": "mla", "moe": "true"}
    big = matrix.models["kimi-k2.5"]
    assert (big.gpus, big.min_memory_gib, big.optional, big.properties) == (8, 90, True, {"attention": "mla"})
    assert list(matrix.axes["graphs"]) == ["on", "off"]
    assert matrix.axes["graphs"]["off"].flags == {"disable-cuda-graph": True}
    tuned = matrix.axes["nccl"]["tuned"]
    assert tuned.env == {"NCCL_MIN_NCHANNELS": "16", "NCCL_BUFFSIZE": "16777216", "V": "1.10"}
    assert tuned.note == "faster"
    assert matrix.axes["attention"]["trtllm_mla"].requires == {"sglang": ">=0.5.10"}
    assert matrix.loads["chat"].input == 1024
    assert matrix.limits == {"graph-capture": {"stall": 120}}
    at_least, ratio, history = matrix.floors
    assert (at_least.limit, at_least.metric.unit, at_least.metric.bound) == (60, "tok/s", "at-least")
    assert (ratio.ratio, ratio.of) == (1.2, {"nccl": "default"})
    assert (history.history_ratio, history.history_last, history.metric.bound) == (1.1, 5, "at-most")


def test_every_problem_of_a_file_at_once(problems):
    assert problems((GOLDEN / "schema.yaml").read_text()) == (GOLDEN / "schema.txt").read_text().splitlines()


def test_duplicate_keys_do_not_hide_the_rest(problems):
    assert problems("schema: 1\narch: sm120\narch: sm90\nmodles: {}\n") == [
        "m.yaml:1:1: the file lacks the key 'models'",
        "m.yaml:3:1: arch is given twice (first at line 2)",
        "m.yaml:4:1: unknown key 'modles'; did you mean 'models'?",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("arch: sm120\nmodels: {m: {shape: kimi}}\n", "m.yaml:1:1: the key 'schema' is missing: write 'schema: 1'"),
        ("schema: 2\n", "m.yaml:1:9: schema must be 1, got 2: this version reads no other"),
        ("schema: true\n", "m.yaml:1:9: schema must be 1, got true: this version reads no other"),
        (
            "schema: 1\narch: []\nmodels: {m: {shape: kimi}}\n",
            "m.yaml:2:7: arch must be a value or a list of values, at least one, got an empty list",
        ),
        (
            "schema: 1\narch: cpu\nmodels: {}\n",
            "m.yaml:3:9: models must be a mapping with at least one model, got an empty mapping",
        ),
        (
            HEAD + "axes: {a: {x: {}}}\n",
            "m.yaml:1:1: the file lacks the key 'baseline': it names the known-good level of every axis",
        ),
        (
            HEAD + "axes: {a.b: {x: {}}}\nbaseline: {}\n",
            (
                "m.yaml:5:8: 'a.b' cannot be the name of an axis: at most 80 letters, digits, _ and - "
                "(pytest -k must take it)"
            ),
        ),
        (
            HEAD + "axes: {a: {x+y: {}}}\nbaseline: {a: x}\n",
            (
                "m.yaml:5:12: 'x+y' cannot be the name of a level of axis a: at most 80 letters, digits, _ . and - "
                "(pytest -k must take it)"
            ),
        ),
    ],
)
def test_single_problems(problems, text, expected):
    assert expected in problems(text)


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("{atention: triton}", "unknown fact 'atention' in exclude[0].when; did you mean 'attention'?"),
        ("{flag.attention-backnd: triton}", "did you mean 'flag.attention-backend'?"),
        ("{flag.--attention-backend: triton}", "write flags without dashes in front"),
        ("{env.NCCL_ALGO: Tree}", "did you mean 'env.NCCL_MIN_NCHANNELS'?"),
        ("{model.atention: mla}", "did you mean 'model.attention'?"),
        ("{arch: ada}", "'ada' is not an arch: ada is a marketing name"),
        ("{gpus: many}", "exclude[0].when.gpus must be a number or a comparison with one, got 'many'"),
        ('{gpus: ">"}', "exclude[0].when.gpus: '>' compares with no number"),
        ('{gpus: ">x"}', "exclude[0].when.gpus: '>x' compares with no number"),
        ("{nccl: []}", "exclude[0].when.nccl must be a value or a list of values, at least one, got an empty list"),
        ("{nccl: {a: 1}}", "exclude[0].when.nccl must be a value or a list of values, got a mapping"),
        ("{model: mimi}", "unknown value 'mimi'; did you mean 'mini'?"),
        ('{attention: "!=trition"}', "unknown value 'trition'; did you mean 'triton'?"),
        ("{}", "exclude[0].when is empty: that would exclude every cell"),
    ],
)
def test_when_names_only_what_can_be(problems, when, expected):
    found = problems(f"{HEAD}{AXES}exclude:\n  - {{when: {when}, reason: r}}\n")
    assert len(found) == 1
    assert expected in found[0]


def test_an_unquoted_comparison_on_its_own_line_is_a_folded_text(problems):
    found = problems(f"{HEAD}{AXES}exclude:\n  - reason: r\n    when:\n      gpus: >1\n")
    assert found == ['m.yaml:16:13: exclude[0].when.gpus: a comparison must be quoted, as in ">1"']


@pytest.mark.parametrize(
    ("floor", "expected"),
    [
        ("output_throughput: {at-least: 60}", "floors[0].output_throughput lacks the key 'unit'"),
        ("output_throughput: {at-least: 60, unit: ms}", "output_throughput is in tok/s, not 'ms'"),
        (
            "output_throughput: {at-least: 60, unit: tok/s, of: baseline}",
            "unknown key 'of' in floors[0].output_throughput",
        ),
        ("output_throughput: {at-least-ratio: 1.2}", "floors[0].output_throughput lacks the key 'of'"),
        (
            "output_throughput: {at-least-ratio: 1.2, of: basline}",
            "must be 'baseline', or a mapping of axes to levels, got 'basline'",
        ),
        (
            "output_throughput: {at-least-ratio: 1.2, of: {nccl: tunde}}",
            "axis nccl has no level 'tunde'; did you mean 'tuned'?",
        ),
        (
            "output_throughput: {at-least: 6, unit: tok/s, at-least-ratio: 1, of: baseline}",
            "must have exactly one of at-least, at-least-ratio, at-least-of-history",
        ),
        ("output_throughput: {at-least-of-history: 0.9}", "lacks the key 'last'"),
        (
            "output_throughput: {at-least: fast, unit: tok/s}",
            "floors[0].output_throughput.at-least must be a number above zero, got 'fast'",
        ),
        ("median_ttft_ms: {at-least: 60, unit: ms}", "less median_ttft_ms is better, so write 'at-most'"),
        ("output_throughputs: {at-least: 60, unit: tok/s}", "did you mean 'output_throughput'?"),
        ("mean_tpot_ms: 5", "floors[0].mean_tpot_ms must be a mapping, got 5"),
    ],
)
def test_floors_are_checked(problems, floor, expected):
    found = problems(f"{HEAD}{AXES}floors:\n  - load: batch\n    {floor}\n")
    assert any(expected in line for line in found), found


def test_floor_references():
    floors = {"of": {"nccl": "default"}, "baseline": None}
    axes, baseline = {"attention": "fa3", "nccl": "tuned"}, {"attention": "triton", "nccl": "default"}
    from pytest_gpuserve.errors import Where
    from pytest_gpuserve.matrix.types import METRICS
    from pytest_gpuserve.model.predicate import ALWAYS

    made = {
        name: Floor(when=ALWAYS, load="batch", metric=METRICS["output_throughput"], ratio=1.2, of=of, where=Where("m"))
        for name, of in floors.items()
    }
    assert made["of"].reference(axes, baseline) == {"attention": "fa3", "nccl": "default"}
    assert made["baseline"].reference(axes, baseline) == baseline


def test_a_baseline_that_contradicts_itself(problems):
    text = HEAD + "axes: {a: {x: {flags: {f: 1}}}, b: {y: {flags: {f: 2}}}}\nbaseline: {a: x, b: y}\n"
    assert problems(text) == ["m.yaml:5:12: the baseline contradicts itself: a.x and b.y set flag 'f' to 1 and 2"]


def test_a_baseline_that_does_not_fit_a_model(problems):
    text = HEAD + "axes: {nccl: {tuned: {when: {gpus: '>1'}}}}\nbaseline: {nccl: tuned}\n"
    assert problems(text) == [
        (
            "m.yaml:5:15: the baseline's level nccl.tuned does not fit model mini: it needs gpus: >1. "
            "Every model starts from the baseline: choose a level there that fits all, or drop the `when`"
        )
    ]


def test_an_included_cell_that_cannot_be(problems):
    axes = "axes: {a: {x: {}, y: {flags: {f: 1}}}, b: {x: {}, y: {flags: {f: 2}}, z: {when: {gpus: 8}}}}\n"
    axes += "baseline: {a: x, b: x}\n"
    assert problems(f"{HEAD}{axes}include:\n  - {{a: y, b: y}}\n  - {{model: mini, b: z}}\n") == [
        "m.yaml:8:5: this cell contradicts itself: a.y and b.y set flag 'f' to 1 and 2",
        "m.yaml:9:5: this cell cannot be: level b.z needs gpus: 8, model mini does not have it",
    ]


def test_a_setting_that_no_cell_would_use(problems):
    text = "schema: 1\narch: cpu\nmodels:\n  m: {shape: kimi, flags: {f: 1}}\n"
    text += "axes: {a: {x: {flags: {f: 2}}, y: {flags: {f: 3}}}}\nbaseline: {a: x}\n"
    assert problems(text) == ["m.yaml:4:3: models.m.flags.f is never used: every level of axis a sets it itself"]


def test_a_shape_keeps_its_attention_but_not_its_quantization(problems, load):
    assert (
        load("schema: 1\narch: cpu\nmodels: {m: {shape: kimi, quantization: fp8}}\n")
        .models["m"]
        .properties["quantization"]
        == "fp8"
    )
    assert problems("schema: 1\narch: cpu\nmodels: {m: {shape: kimi, attention: gqa}}\n") == [
        "m.yaml:3:38: models.m.attention: the shape has attention 'mla', not 'gqa'"
    ]


def test_the_packaged_shapes_are_the_default(tmp_path):
    (tmp_path / "m.yaml").write_text("schema: 1\narch: cpu\nmodels: {m: {shape: tiny-llama}}\n")
    assert load_matrix(tmp_path / "m.yaml").models["m"].properties["attention"] == "gqa"
