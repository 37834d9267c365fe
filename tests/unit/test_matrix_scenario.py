"""Scenarios: what a simulated start does."""

import json
from pathlib import Path

import pytest

from pytest_gpuserve.errors import FileProblems
from pytest_gpuserve.matrix.known_bad import load_known_bad
from pytest_gpuserve.matrix.scenario import Scenario, load_scenario, scenario_from_known_bad
from pytest_gpuserve.matrix.schema import load_matrix, vocabulary_of
from pytest_gpuserve.model.failure import Failure, Kind
from pytest_gpuserve.model.phase import Phase
from pytest_gpuserve.sim.behaviour import Behaviour

GOLDEN = Path(__file__).parent / "golden/matrix"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def load(text: str, **options) -> Scenario:
        (tmp_path / "s.yaml").write_text(text)
        return load_scenario(tmp_path / "s.yaml", **options)

    return load


@pytest.fixture
def problems(load):
    def problems(text: str, **options) -> list[str]:
        with pytest.raises(FileProblems) as caught:
            load(text, **options)
        return str(caught.value).splitlines()

    return problems


DESIGN = """schema: 1
defaults: {phase-seconds: 0.2, tokens-per-second: 500, memory-gib: 40}
rules:
  - when: {attention: flashinfer, model.attention: mla}
    then: {hang: graph-capture, slow: 2}
  - when: {nccl: tree}
    then: {crash: {phase: dist-init, text: "no algorithm", exit: 3}, phase-seconds: 0}
  - when: {attention: flashinfer, nccl: tree}
    then: {hang: warmup}
"""


def test_all_matching_rules_apply_and_the_later_one_wins_per_key(load):
    scenario = load(DESIGN)
    defaults = {"phase-seconds": 0.2, "tokens-per-second": 500, "memory-gib": 40}
    assert scenario.behaviour({"attention": "triton"}, 0) == defaults
    assert scenario.behaviour({"attention": "flashinfer", "model.attention": "mla", "nccl": "tree"}, 0) == {
        **defaults,
        "phase-seconds": 0,
        "slow": 2,
        "hang": "warmup",
        "crash": {"phase": "dist-init", "text": "no algorithm", "exit": 3},
    }


EVERYTHING = """schema: 1
rules:
  - then:
      reject: bad flag
      crash: {phase: weights, text: boom, exit: 1}
      hang: warmup
      compile: {phase: warmup, seconds: 1.5}
      slow: 8
      output: nan
      fallback: triton
      exit-zero: true
      ignore-sigterm: true
      escape-session: true
      zombies: 2
      hold-memory: forever
      port-taken: once
      log: flood
      tokens-per-second: 100
      phase-seconds: 0
      memory-gib: 12
"""


def test_every_key_is_one_that_the_simulated_server_knows(load):
    behaviour = load(EVERYTHING).behaviour({}, 0)
    assert len(behaviour) == 17
    assert Behaviour.of(json.loads(json.dumps(behaviour))).hang is Phase.WARMUP


def test_every_problem_at_once(problems):
    assert problems((GOLDEN / "scenario.yaml").read_text()) == (GOLDEN / "scenario.txt").read_text().splitlines()


def test_rules_must_name_what_some_matrix_has(load, problems, tmp_path):
    matrices = {
        "one": "axes: {attention: {triton: {flags: {x: 1}}, fa3: {}}}\nbaseline: {attention: triton}\n",
        "two": "axes: {attention: {fa4: {}}, nccl: {tree: {env: {V: 1}}}}\nbaseline: {attention: fa4, nccl: tree}\n",
    }
    vocabularies = []
    for name, axes in matrices.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"schema: 1\narch: cpu\nmodels: {{{name}: {{shape: tiny-llama}}}}\n{axes}")
        vocabularies.append(vocabulary_of(load_matrix(path)))
    when = "{attention: fa4, flag.x: 1, env.V: 1, nccl: tree, gpu: 0, model: two, model.attention: gqa, arch: sm90}"
    assert load(f"schema: 1\nrules:\n  - {{when: {when}, then: {{slow: 2}}}}\n", vocabularies=vocabularies).rules
    wrong = "schema: 1\nrules:\n  - {when: {attention: fa5, ncll: tree, flag.y: 1}, then: {slow: 2}}\n"
    assert [line.partition(": ")[2] for line in problems(wrong, vocabularies=vocabularies)] == [
        "rules[0].when.attention: unknown value 'fa5'; did you mean 'fa4'?",
        "unknown fact 'ncll' in rules[0].when; did you mean 'nccl'?",
        "unknown fact 'flag.y' in rules[0].when; did you mean 'flag.x'?",
    ]


def test_a_rule_for_one_gpu(load):
    scenario = load("schema: 1\nrules: [{when: {gpu: 3}, then: {hold-memory: 5}}]\n")
    assert scenario.behaviour({"gpu": 3}, 0) == {"hold-memory": 5}
    assert scenario.behaviour({"gpu": [2, 3]}, 0) == {"hold-memory": 5}
    assert scenario.behaviour({"gpu": [0, 1]}, 0) == {}
    assert scenario.behaviour({}, 0) == {}


def test_flaky_rules_apply_to_their_share_of_the_starts_and_the_same_ones_again(load):
    scenario = load(
        "schema: 1\nrules:\n  - then: {hang: warmup, flaky: 0.25}\n  - then: {slow: 2, flaky: 0.25}\n"
        "  - then: {zombies: 1, flaky: 0}\n  - then: {exit-zero: true, flaky: 1}\n"
    )
    starts = [scenario.behaviour({}, seed) for seed in range(2000)]
    assert starts == [scenario.behaviour({}, seed) for seed in range(2000)]
    shares = {key: sum(key in start for start in starts) / 2000 for key in ("hang", "slow", "zombies", "exit-zero")}
    assert 0.2 < shares["hang"] < 0.3
    assert 0.2 < shares["slow"] < 0.3
    assert (shares["zombies"], shares["exit-zero"]) == (0, 1)
    both = sum("hang" in start and "slow" in start for start in starts) / 2000
    assert 0.03 < both < 0.1  # drawn independently


KNOWN = """schema: 1
entries:
  - {id: R, when: {flag.a: 1}, issue: https://x.y/1, expect: {kind: rejected, match: no such flag}}
  - {id: C, when: {flag.a: 2}, issue: https://x.y/1, expect: {kind: crash, phase: [dist-init, warmup],
      match-re: "^No [a-z]+ for (AllGather|x) [0-9]{2}$"}}
  - {id: O, when: {flag.a: 3}, issue: https://x.y/1, expect: {kind: oom, match: CUDA out of memory}}
  - {id: H, when: {flag.a: 4}, issue: https://x.y/1, expect: {kind: hang}}
  - {id: W, when: {flag.a: 5}, issue: https://x.y/1, expect: {kind: wrong-output}, confidence: reported}
  - {id: S, when: {flag.a: 6}, issue: https://x.y/1, expect: {kind: slow}}
  - {id: F, when: {flag.a: 7, flag.attention-backend: triton}, issue: https://x.y/1, expect: {kind: fallback}}
  - {id: A2, when: {flag.a: 2, arch: sm120}, issue: https://x.y/1, expect: {kind: hang, phase: weights}}
"""


def test_without_a_scenario_servers_fail_as_the_known_bad_list_expects(tmp_path):
    (tmp_path / "kb.yaml").write_text(KNOWN)
    scenario = scenario_from_known_bad(load_known_bad([tmp_path / "kb.yaml"]))
    found = {a: scenario.behaviour({"flag.a": a, "flag.attention-backend": "triton"}, 0) for a in range(8)}
    assert {one.pop("tokens-per-second") for one in found.values()} == {5000}
    crash = found[2].pop("crash")
    assert crash["phase"] == "dist-init"
    assert found == {
        0: {},
        1: {"reject": "no such flag"},
        2: {},
        3: {
            "crash": {
                "phase": "kv-cache",
                "text": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            }
        },
        4: {"hang": "graph-capture"},
        5: {"output": "garbage"},
        6: {"slow": 8},
        7: {"fallback": "torch_native"},
    }
    # The more specific entry decides alone: a server that hangs cannot also crash.
    assert scenario.behaviour({"flag.a": 2, "arch": "sm120"}, 0) == {"tokens-per-second": 5000, "hang": "weights"}


def test_the_simulated_text_is_what_the_entry_expects(tmp_path):
    (tmp_path / "kb.yaml").write_text(KNOWN)
    entries = load_known_bad([tmp_path / "kb.yaml"])
    crash = scenario_from_known_bad(entries).behaviour({"flag.a": 2}, 0)["crash"]
    expect = next(entry.expect for entry in entries if entry.id == "C")
    assert expect.explains(Failure.of(Kind.CRASH, Phase(crash["phase"]), "x", text=f"log\n{crash['text']}\nlog"))
