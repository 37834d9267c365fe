"""What a matrix launches with: one name a flag, null to take away, sizes that take the GPUs, what is not its to set."""

from pathlib import Path

import pytest

from pytest_gpuserve.errors import FileProblems
from pytest_gpuserve.matrix.expand import expand
from pytest_gpuserve.matrix.known_bad import load_known_bad, matching
from pytest_gpuserve.matrix.schema import load_matrix
from pytest_gpuserve.matrix.validate import validate
from pytest_gpuserve.model.cell import Cell

HEAD = "schema: 1\narch: [sm120, sm90]\n"


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`cells(text)`: the cells of a matrix by what follows the model in their ids."""
    monkeypatch.chdir(tmp_path)

    def cells(text: str, strategy: str | None = None) -> dict[str, Cell]:
        Path("m.yaml").write_text(HEAD + text)
        made = expand(load_matrix(Path("m.yaml")), "sm120", strategy=strategy, versions={})
        return {cell.id.removeprefix("sm120-m-"): cell for cell in made}

    return cells


@pytest.fixture
def problems(cells):
    """The problems of a matrix, which `validate` reports as loading does."""

    def problems(text: str) -> list[str]:
        with pytest.raises(FileProblems) as caught:
            cells(text)
        found = str(caught.value).splitlines()
        assert [str(one) for one in validate([Path("m.yaml")], [])] == found
        return found

    return problems


# -- one flag, several spellings ---------------------------------------------------------------------------------------


def test_spellings_of_one_flag_are_one_flag(cells):
    """The later one wins, whatever it is called: else SGLang would get both, and take the last on the command line."""
    made = cells(
        "defaults: {flags: {tensor-parallel-size: 4}}\n"
        "models: {m: {shape: tiny-llama, gpus: 4, flags: {tp: 4, speculative-algo: EAGLE}}}\n"
        "axes: {p: {base: {}, dp: {flags: {tp-size: 2, data-parallel-size: 2}}}}\nbaseline: {p: base}\n"
    )
    assert made["baseline"].flags == {"tp-size": 4, "speculative-algorithm": "EAGLE"}
    assert made["p.dp"].flags == {"tp-size": 2, "dp-size": 2, "speculative-algorithm": "EAGLE"}


def test_a_when_may_use_any_spelling(cells):
    made = cells(
        "models: {m: {shape: tiny-llama, gpus: 4}}\n"
        "axes:\n  p: {base: {}, ep: {flags: {ep: 4}}}\n"
        "  q: {a: {}, b: {flags: {x: 1}, when: {flag.expert-parallel-size: 4}}}\nbaseline: {p: base, q: a}\n"
        "include: [{p: ep, q: b}]\n"
    )
    assert list(made) == ["baseline", "p.ep", "p.ep+q.b"]
    Path("kb.yaml").write_text(
        "schema: 1\nentries:\n- {id: K, when: {flag.ep: 4}, expect: {kind: hang}, issue: 'https://x.y/1'}\n"
    )
    entries = load_known_bad([Path("kb.yaml")])
    assert [name for name, cell in made.items() if matching(entries, cell, {})] == ["p.ep", "p.ep+q.b"]
    assert [str(one) for one in validate([Path("m.yaml")], [Path("kb.yaml")])] == []


def test_one_flag_twice_in_one_place(problems):
    found = problems(
        "models: {m: {shape: tiny-llama, gpus: 2, flags: {tp: 2, tensor-parallel-size: 2}}}\n"
        "exclude: [{when: {flag.tp: 2, flag.tp-size: 2}, reason: r}]\n"
    )
    assert found == [
        (
            "m.yaml:3:57: models.m.flags: 'tensor-parallel-size' and 'tp' (line 3) are one flag of SGLang, tp-size: "
            "keep one of them"
        ),
        "m.yaml:4:31: exclude[0].when: 'flag.tp-size' and 'flag.tp' (line 4) are one flag: flag.tp-size",
    ]


def test_two_deltas_that_contradict_each_other_by_another_spelling(problems):
    found = problems(
        "models: {m: {shape: tiny-llama, gpus: 4}}\n"
        "axes: {p: {base: {}, a: {flags: {ep: 4}}}, q: {base: {}, b: {flags: {ep-size: 2}}}}\n"
        "baseline: {p: base, q: base}\ninclude: [{p: a, q: b}]\n"
    )
    assert found == ["m.yaml:6:11: this cell contradicts itself: p.a and q.b set flag 'ep-size' to 4 and 2"]


# -- null takes away ---------------------------------------------------------------------------------------------------


def test_null_takes_away_what_came_before(cells):
    made = cells(
        "defaults: {flags: {mem: 0.8, page: 64}, env: {A: 1, B: 2}}\n"
        "models: {m: {shape: tiny-llama, flags: {x: 1, page: null}, env: {A: ~, C: 3}}}\n"
        "axes: {p: {base: {}, none: {flags: {x: null, mem: 0.9}, env: {C: null, D: null}}}, q: {base: {env: {D: 4}}}}\n"
        "baseline: {p: base, q: base}\n"
    )
    assert (made["baseline"].flags, made["baseline"].env) == ({"mem": 0.8, "x": 1}, {"B": "2", "C": "3", "D": "4"})
    assert (made["p.none"].flags, made["p.none"].env) == ({"mem": 0.9}, {"B": "2"})


def test_null_and_a_value_contradict_each_other(problems):
    found = problems(
        "models: {m: {shape: tiny-llama, flags: {x: 1}}}\n"
        "axes: {p: {base: {}, a: {flags: {x: null}}}, q: {base: {}, b: {flags: {x: 2}}}}\n"
        "baseline: {p: base, q: base}\ninclude: [{p: a, q: b}]\n"
    )
    assert found == ["m.yaml:6:11: this cell contradicts itself: p.a and q.b set flag 'x' to null and 2"]


def test_null_for_what_nobody_sets_is_most_likely_a_misspelt_name(problems):
    found = problems(
        "defaults: {flags: {a: null}, env: {NCCL_ALGO: Ring}}\n"
        "models: {m: {shape: tiny-llama, env: {NCCL_ALGOS: null}}}\n"
        "axes: {p: {base: {}, one: {flags: {y: null}}, two: {flags: {y: 1}}}}\nbaseline: {p: base}\n"
    )
    assert found == [
        "m.yaml:3:20: null takes the flag 'a' away, and nothing before this sets it: remove the line, or see the name",
        (
            "m.yaml:4:39: models.m: null takes the variable 'NCCL_ALGOS' away, and nothing before it sets that; "
            "did you mean 'NCCL_ALGO'?"
        ),
        # Another level of the same axis is never in the same cell.
        "m.yaml:5:36: level p.one: null takes the flag 'y' away, and nothing before it sets that",
    ]


def test_an_empty_value_is_a_forgotten_one_not_null(problems):
    found = problems(
        "defaults: {env: {A: 1}, flags: {x: 1}}\nmodels: {m: {shape: tiny-llama, env: {A: }, flags: {x: }}}\n"
    )
    assert [line.partition(" must be ")[0] for line in found] == [
        "m.yaml:4:42: models.m.env.A",
        "m.yaml:4:56: models.m.flags.x",
    ]
    assert all("null to take" in line and line.endswith("got nothing") for line in found)


# -- sizes and GPUs ----------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_take_the_models_gpus_are_refused_where_they_are_written(problems):
    """Beside every other problem of the file, and once for all cells and archs that have them."""
    found = problems(
        "titel: x\n"
        "models:\n  m: {shape: tiny-llama, gpus: 4, flags: {tp: 8}}\n  n: {shape: tiny-llama, gpus: 4}\n"
        "axes:\n"
        "  p: {base: {}, two: {flags: {tensor-parallel-size: 2}}, dp: {flags: {dp: 8}}}\n"
        "  q: {base: {}, x: {flags: {y: 1}}}\n"
        "baseline: {p: base, q: base}\n"
    )
    assert found == [
        "m.yaml:3:1: unknown key 'titel'; did you mean 'title'?",
        "m.yaml:5:43: model m: tp-size 8 takes 8 GPUs, more than the model's gpus: 4",
        "m.yaml:8:31: model m: tp-size 2 takes 2 of the model's gpus: 4, and the others would be idle",
        "m.yaml:8:31: model n: tp-size 2 takes 2 of the model's gpus: 4, and the others would be idle",
        "m.yaml:8:71: model m: tp-size 8 x dp-size 8 takes 64 GPUs, more than the model's gpus: 4",
        "m.yaml:8:71: model n: dp-size 8 does not divide the model's gpus: 4",
    ]


def test_sizes_that_only_a_full_product_crosses_are_skipped_with_the_reason(cells):
    text = (
        "models: {m: {shape: tiny-llama, gpus: 4}}\n"
        "axes: {p: {base: {}, pp: {flags: {pp: 4}}}, q: {base: {}, dp: {flags: {dp: 4}}}}\n"
        "baseline: {p: base, q: base}\n"
    )
    made = cells(text, strategy="full")
    assert made["p.pp"].not_applicable is made["q.dp"].not_applicable is None
    assert made["p.pp+q.dp"].not_applicable == "pp-size 4 x dp-size 4 does not divide the model's gpus: 4"


def test_the_cpu_engine_counts_no_gpus(cells):
    """Its tensor parallelism is over NUMA nodes."""
    Path("m.yaml").write_text("schema: 1\narch: cpu\nmodels: {m: {shape: tiny-llama, flags: {tp: 2}}}\n")
    assert len(expand(load_matrix(Path("m.yaml")), "cpu", versions={})) == 1


# -- what is not a matrix' to set --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("nnodes: 2", "nodes"),
        ("node-rank: 1", "nodes"),
        ("base-gpu-id: 4", "leased"),
        ("gpu-id-step: 2", "leased"),
        ("dist-init-addr: 127.0.0.1:29500", "one address"),
        ("nccl-init-addr: 127.0.0.1:29500", "one address"),
        ("grpc-port: 50051", "one address"),
        ("nccl-port: 28000", "itself"),
        ("model: other", "itself"),
        ("admin-api-key: x", "key of its own"),
        ("ssl-certfile: /c.pem", "TLS"),
        ("config: more.yaml", "from a file"),
        ("use-ray: true", "Ray"),
        ("disaggregation-mode: prefill", "one half of a pair"),
        ("gated-launch-port: 1", "sends none"),
        ("nnodes: null", "nodes"),
    ],
)
def test_flags_that_would_break_a_promise_are_refused_with_the_reason(problems, flag: str, why: str):
    (found,) = problems(f"models: {{m: {{shape: tiny-llama, flags: {{{flag}}}}}}}\n")
    name = flag.partition(":")[0]
    assert found.startswith(f"m.yaml:3:41: models.m.flags: the flag '{name}' cannot be set by a matrix: it ")
    assert why in found


@pytest.mark.parametrize("name", ["TMPDIR", "SPT_NOENV", "MASTER_PORT", "LOCAL_RANK", "SGLANG_PORT", "GPUSERVE_LEASE"])
def test_variables_that_gpuserve_sets_or_that_fix_a_port(problems, name: str):
    (found,) = problems(f"models: {{m: {{shape: tiny-llama, env: {{{name}: 1}}}}}}\n")
    assert found.startswith(f"m.yaml:3:39: models.m.env: the variable '{name}' ")
