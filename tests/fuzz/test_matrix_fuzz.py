"""Whatever a file holds: it is read or refused, with places inside the file, in bounded time."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_gpuserve.errors import FileProblems
from pytest_gpuserve.matrix.expand import expand_all
from pytest_gpuserve.matrix.known_bad import load_known_bad
from pytest_gpuserve.matrix.sample import sample_of
from pytest_gpuserve.matrix.satisfy import find_cell
from pytest_gpuserve.matrix.scenario import load_scenario
from pytest_gpuserve.matrix.schema import load_matrix
from pytest_gpuserve.matrix.source import read_yaml
from pytest_gpuserve.matrix.types import Matrix
from pytest_gpuserve.model.cell import facts_of
from pytest_gpuserve.model.predicate import Predicate

ROOT = Path(__file__).resolve().parents[2]
quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def outcome(read, data: bytes) -> object:
    """What `read` makes of a file with these bytes; any exception but the user's errors is a bug and propagates."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "f.yaml"
        path.write_bytes(data)
        try:
            return read(path)
        except FileProblems as refused:
            lines = data.decode("utf-8", "replace").splitlines()
            for problem in refused.problems:
                assert problem.what
                assert 1 <= problem.where.line <= len(lines) + 1
                assert problem.where.col >= 1
            return refused


@quick
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(data):
    outcome(read_yaml, data)


soup = st.lists(
    st.sampled_from(
        [": ", "- ", "\n", "\n  ", "\n    ", "{", "}", "[", "]", ", ", "&a ", "*a", "!t ", "<<", "? ", "|", ">", "'",
         '"', "#", "---\n", "...\n", "%YAML 1.2\n", "\t", "a", "on", "1", "~", "schema: 1\n", "arch: sm120\n",
         "models:\n", "axes: {a: {x: {}, y: {}}}\n", "baseline: {a: x}\n", "  m: {shape: tiny-llama}\n", "\x00",
         "\ufeff", "é"]
    ),
    max_size=40,
).map("".join)  # fmt: skip


@quick
@given(soup)
def test_any_soup_of_yaml(text):
    for read in (load_matrix, load_scenario, lambda path: load_known_bad([path])):
        outcome(read, text.encode())


scalars = st.none() | st.booleans() | st.integers(-3, 99) | st.floats(-1, 9) | st.sampled_from(
    ["mla", "sm120", "sm12x", ">1", "baseline", "a", "x", "TODO", "triton", "https://x.y/1", "warmup", "crash",
     ">=0.5", "on"]
)  # fmt: skip
keys = st.sampled_from(
    ["schema", "arch", "title", "defaults", "models", "axes", "baseline", "strategy", "include", "exclude", "loads",
     "limits", "floors", "flags", "env", "when", "requires", "note", "shape", "path", "gpus", "a", "x", "y", "model",
     "reason", "load", "output_throughput", "at-least", "at-least-ratio", "of", "unit", "entries", "id", "expect",
     "kind", "phase", "match", "match-re", "issue", "versions", "rules", "then", "crash", "hang", "flaky", "warmup"]
)  # fmt: skip
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=6), max_leaves=25
)
documents = st.dictionaries(keys, trees, max_size=8).map(lambda top: {"schema": 1, **top})


@quick
@given(documents)
def test_any_tree_under_the_known_keys(tree):
    for read in (load_matrix, load_scenario, lambda path: load_known_bad([path])):
        outcome(read, yaml.safe_dump(tree, allow_unicode=True).encode())


SHIPPED = [path.read_text() for path in sorted((ROOT / "matrices").glob("*.yaml"))]


@quick
@given(st.sampled_from(SHIPPED), st.data())
def test_any_damage_to_a_shipped_file(text, data):
    lines = text.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    damage = data.draw(st.sampled_from(["drop", "double", "cut", "swap", "indent"]))
    line = lines[at]
    lines[at : at + 1] = {
        "drop": [],
        "double": [line, line],
        "cut": [line[: data.draw(st.integers(0, len(line)))]],
        "swap": [line.replace(":", "", 1)],
        "indent": [f"  {line}"],
    }[damage]
    for read in (load_matrix, lambda path: load_known_bad([path])):
        outcome(read, "\n".join(lines).encode())


@st.composite
def matrices(draw) -> str:
    """A sound matrix: up to four axes, levels that set shared flags, and whens over models, gpus and other axes."""
    axes = {f"a{i}": draw(st.integers(2 if i == 0 else 1, 4)) for i in range(draw(st.integers(0, 4)))}
    whens = st.sampled_from(
        [
            "",
            "",
            "",
            "when: {gpus: '>1'}",
            "when: {model.attention: mla}",
            "when: {a0: l0}",
            "when: {a0: l1}",
            "when: {flag.f: 1}",
        ]
    )
    text = "schema: 1\narch: [sm120, sm90]\ndefaults: {flags: {f: 0}}\nmodels:\n"
    text += "  one: {shape: tiny-llama}\n  two: {shape: tiny-mla, gpus: 2, flags: {g: 1}}\n"
    if not axes:
        return text
    text += f"baseline: {{{', '.join(f'{axis}: l0' for axis in axes)}}}\naxes:\n"
    for axis, count in axes.items():
        text += f"  {axis}:\n    l0: {{}}\n"
        for level in range(1, count):
            flags = draw(st.sampled_from(["", "flags: {f: 1}", f"flags: {{{axis}: {level}}}", "flags: {f: false}"]))
            text += f"    l{level}: {{{', '.join(part for part in (flags, draw(whens)) if part)}}}\n"
    if draw(st.booleans()):
        text += "exclude: [{when: {model: two, a0: l1}, reason: r}]\n"
    return text


@quick
@given(matrices(), st.sampled_from(["sm120", "sm90"]))
def test_laws_of_expansion(text, arch):
    matrix = outcome(load_matrix, text.encode())
    assert isinstance(matrix, Matrix), matrix
    full = expand_all(matrix, arch, strategy="full", versions={})
    single = expand_all(matrix, arch, strategy="one-at-a-time", versions={})
    ids = [cell.id for cell in full.cells]
    assert len(set(ids)) == len(ids)
    assert {cell.id for cell in single.cells} == {cell.id for cell in full.cells if len(cell.deltas) <= 1}
    for cell in full.cells:
        assert list(cell.axes) == list(matrix.axes)
        assert cell.deltas == tuple(axis for axis in matrix.axes if cell.axes[axis] != matrix.baseline[axis])
        assert re.fullmatch(r"[\w.+-]+", cell.id)
        facts = facts_of(cell)
        for axis, name in cell.axes.items():
            assert matrix.axes[axis][name].when.matches(facts)


@quick
@given(matrices(), st.data())
def test_a_cell_is_found_where_the_full_product_has_one(text, data):
    matrix = outcome(load_matrix, text.encode())
    assert isinstance(matrix, Matrix), matrix
    facts = {
        "gpus": [1, 2, ">1"],
        "model.attention": ["mla", "gqa"],
        "flag.f": [0, 1],
        "flag.a1": [1, 2],
        "arch": ["sm90"],
    }
    facts |= {axis: list(levels) for axis, levels in matrix.axes.items()}
    names = data.draw(st.lists(st.sampled_from(sorted(facts)), max_size=3, unique=True))
    predicate = Predicate.of({name: data.draw(st.sampled_from(facts[name])) for name in names})
    cells = [
        cell
        for arch in matrix.archs
        for cell in expand_all(matrix, arch, strategy="full", versions={}).cells
        if cell.not_applicable is None and predicate.matches(facts_of(cell))
    ]
    found = find_cell(matrix, predicate)
    if cells:
        assert found is not None
    elif found is not None:  # it may name a combination that is the baseline's launch again, never another
        outs = [
            out.id for arch in matrix.archs for out in expand_all(matrix, arch, strategy="full", versions={}).left_out
        ]
        assert found in outs


patterns = st.recursive(
    st.sampled_from(["a", "7", r"\d", r"\w", r"\s", ".", "[a-f]", "[^x7]", r"\.", "Error"]),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | inner.map(lambda part: f"(?:{part})+")
        | inner.map(lambda part: f"({part})?")
        | inner.map(lambda part: f"(?:{part}){{2,3}}")
        | st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})")
    ),
    max_leaves=8,
)


@quick
@given(patterns)
def test_a_sample_is_made_for_every_ordinary_pattern(pattern):
    sample = sample_of(pattern)
    assert sample is not None
    assert re.search(pattern, sample, re.MULTILINE)
