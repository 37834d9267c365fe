"""Which GPUs are taken together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.gpu.topology import choose, nvlink_groups
from pytest_gpuserve.model.gpu import Gpu


def machine(numa: str, groups: str) -> list[Gpu]:
    """`machine("00001111", "aabbcc--")`: one digit and one letter a GPU, `-` for no NVLink."""
    members = {name: [at for at, other in enumerate(groups) if other == name] for name in set(groups) - {"-"}}
    return [
        Gpu(
            index=at,
            uuid=f"GPU-{at}",
            name="any",
            arch="sm90",
            memory_total=None,
            numa=int(numa[at]),
            links=tuple(f"GPU-{other}" for other in members.get(groups[at], ()) if other != at),
        )
        for at in range(len(numa))
    ]


@pytest.mark.parametrize(
    ("numa", "groups", "free", "count", "chosen"),
    [
        ("00001111", "--------", "01234567", 4, "0123"),
        ("00001111", "--------", "14567", 4, "4567"),  # the node that has four free
        ("00001111", "--------", "123567", 4, "1235"),  # no node has: as few as will do
        ("00001111", "--------", "04567", 1, "0"),  # a single one from the emptier node
        ("00001111", "aaaaaaaa", "01234567", 8, "01234567"),
        ("00001111", "aaaaaaaa", "1234567", 2, "12"),  # inside one NVLink group, the emptier node
        ("00001111", "aabbccdd", "01234567", 2, "01"),
        ("00001111", "aabbccdd", "1234567", 1, "1"),  # a broken pair before a whole one
        ("00001111", "aabbccdd", "1367", 2, "67"),  # the pair that is whole
        ("00110011", "aaaabbbb", "01234567", 4, "0123"),  # NVLink before NUMA
        ("0011", "----", "03", 2, "03"),
        ("0011", "----", "03", 3, ""),
        ("0011", "----", "0123", 0, ""),
    ],
)
def test_choice(numa: str, groups: str, free: str, count: int, chosen: str) -> None:
    gpus = machine(numa, groups)
    found = choose([gpus[int(at)] for at in free], count)
    assert "".join(str(gpu.index) for gpu in found) == chosen


def test_preference_decides_between_equals() -> None:
    gpus = machine("0000", "----")
    assert [gpu.index for gpu in choose([gpus[3], gpus[1], gpus[0]], 2)] == [1, 3]


def test_link_that_only_one_side_reports_joins_both() -> None:
    one, other, alone = machine("000", "---")
    joined = Gpu(index=9, uuid="GPU-9", name="any", arch="sm90", memory_total=None, links=("GPU-0", "GPU-1"))
    assert nvlink_groups([one, alone, other, joined]) == [[one, other, joined], [alone]]


@given(
    st.text("01", min_size=8, max_size=8),
    st.text("abc-", min_size=8, max_size=8),
    st.sets(st.integers(0, 7)),
    st.data(),
)
def test_always_finds_as_many_as_asked_where_there_are_as_many(
    numa: str, groups: str, free: set[int], data: st.DataObject
) -> None:
    gpus = [machine(numa, groups)[at] for at in data.draw(st.permutations(sorted(free)))]
    count = data.draw(st.integers(1, 8))
    found = choose(gpus, count)
    assert len(found) == (count if count <= len(gpus) else 0)
    assert set(found) <= set(gpus)
    assert list(found) == sorted(found, key=lambda gpu: gpu.index)
    if any(len(group) >= count for group in nvlink_groups(gpus)):
        assert len(nvlink_groups(found)) == 1
