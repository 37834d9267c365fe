"""Reading YAML: what values it has, what is refused, and that a hostile file costs nothing."""

import os
import time
from pathlib import Path

import pytest

from pytest_gpuserve.errors import FileProblems
from pytest_gpuserve.matrix.source import Node, read_yaml


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def read(text: str | bytes) -> Node:
        (tmp_path / "m.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_yaml(tmp_path / "m.yaml")

    return read


@pytest.fixture
def problems(read):
    def problems(text: str | bytes) -> list[str]:
        with pytest.raises(FileProblems) as caught:
            read(text)
        return str(caught.value).splitlines()

    return problems


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("False", False),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("n", "n"),
        ("010", "010"),
        ("0x1f", "0x1f"),
        ("0o17", "0o17"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-11-29", "2026-11-29"),
        ("=", "="),
        ("12", 12),
        ("-3", -3),
        ("0", 0),
        ("1.10", 1.1),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.2.3", "1.2.3"),
        ("1e999", "1e999"),
        (".inf", ".inf"),
        ("9" * 30, "9" * 30),
        ("null", None),
        ("~", None),
        ("", None),
        ('"true"', "true"),
        ("'12'", "12"),
    ],
)
def test_scalars_follow_yaml_1_2(read, written, value):
    node = read(f"key: {written}\n").fields["key"]
    assert node.value == value
    assert type(node.value) is type(value)


def test_keys_are_text_whatever_they_look_like(read):
    assert list(read("on: 1\n1: 2\ntrue: 3\n0.90: 4\n").fields) == ["on", "1", "true", "0.90"]


def test_every_node_knows_its_place_and_path(read):
    root = read("a:\n  b:\n    - x\n    - {c: 1}\n")
    inner = root.fields["a"].fields["b"].items[1].fields["c"]
    assert (inner.path, str(inner.where)) == ("a.b[1].c", "m.yaml:4:11")
    assert str(root.fields["a"].keys["b"]) == "m.yaml:2:3"


def test_columns_count_characters_not_bytes(problems):
    assert problems('a: "ü€", b\n')[0].startswith("m.yaml:1:8: is not YAML: ")


def test_all_duplicates_are_reported_with_their_first_line(problems):
    assert problems("a: 1\nb: {c: 1, c: 2}\na: 2\n") == [
        "m.yaml:2:11: b.c is given twice (first at line 2)",
        "m.yaml:3:1: a is given twice (first at line 1)",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: &x 1\n", "m.yaml:1:4: anchor '&x': anchors are not allowed, write the value out"),
        ("a: *x\n", "m.yaml:1:4: alias '*x': aliases are not allowed, write the value out"),
        ("a: 1\n<<: {b: 1}\n", "m.yaml:2:1: merge keys ('<<') are not allowed, write the keys out"),
        (
            "a: !!python/object:os.system 1\n",
            "m.yaml:1:4: tag 'tag:yaml.org,2002:python/object:os.system': tags are not allowed",
        ),
        ("a: !=4\n", "m.yaml:1:4: tag '!=4': tags are not allowed; a comparison must be quoted"),
        ("a: 1\n---\nb: 1\n", "m.yaml:2:1: a second YAML document begins here: a file holds one"),
        ("? [a]\n: 1\n", "m.yaml:1:3: a key must be text, got a list"),
        ("- a\n", "m.yaml:1:1: the file must be a mapping of keys, got a list"),
        ("---\n", "m.yaml:2:1: the file must be a mapping of keys, got nothing"),
        ("", "m.yaml:1:1: is empty"),
        ("# only a comment\n", "m.yaml:1:1: is empty"),
        (b"a: 1\nb: \xff\n", "m.yaml:2:4: byte 0xff is not UTF-8 text"),
        (b"\x7fELF\n\0\0", "m.yaml:2:1: holds a NUL byte: a binary file (or UTF-16), not YAML in UTF-8"),
        ("a: 1".encode("utf-16"), "m.yaml:1:1: holds a NUL byte: a binary file (or UTF-16), not YAML in UTF-8"),
        ("a: \x07\n", "m.yaml:1:4: character 7 is not allowed in YAML"),
        (f"a: {'[' * 60}{']' * 60}\n", "m.yaml:1:53: is nested deeper than 50 levels"),
    ],
)
def test_what_could_mean_something_else_is_refused(problems, text, expected):
    assert problems(text) == [expected]


def test_usual_slips_are_named(problems):
    assert "; YAML is indented with spaces, this is a tab" in problems("a:\n\tb: 1\n")[0]
    assert '; a value that begins with > must be quoted, as in ">1"' in problems("a: {gpus: >1}\n")[0]


def test_a_byte_order_mark_is_no_key(read):
    assert list(read(b"\xef\xbb\xbfa: 1\n").fields) == ["a"]


def test_what_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "dir.yaml").mkdir()
    expected = {
        "none.yaml": "none.yaml:1:1: there is no such file",
        "dir.yaml": "dir.yaml:1:1: is a directory, not a YAML file",
        "pipe.yaml": "pipe.yaml:1:1: is not a regular file (a pipe or a device): give a YAML file",
        "/dev/zero": "/dev/zero:1:1: is not a regular file (a pipe or a device): give a YAML file",
    }
    for name, message in expected.items():
        with pytest.raises(FileProblems) as caught:
            read_yaml(Path(name))
        assert str(caught.value) == message


def test_a_file_of_100_mb_is_not_read(tmp_path):
    path = tmp_path / "huge.yaml"
    with path.open("wb") as stream:
        stream.truncate(100 << 20)
    began = time.process_time()
    with pytest.raises(FileProblems, match=r"is 100\.0 MiB: such a file may have at most 1 MiB"):
        read_yaml(path)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
        "[" * 1_000_000,
        "? " * 500_000,
        "- *x\n" * 200_000,
        "a: 1\n" * 200_000,
        "a: [" + "x," * 500_000 + "]\n",
        '"' + "a\n" * 500_000,
    ],
    ids=["bomb", "brackets", "question-marks", "aliases", "duplicates", "items", "open-quote"],
)
def test_hostile_files_are_refused_at_once(problems, text):
    began = time.process_time()
    found = problems(text)
    # Reading all of it, let alone expanding it, takes tens of seconds or for ever.
    assert time.process_time() - began < 3
    assert 1 <= len(found) <= 130
