"""CUDA_VISIBLE_DEVICES as the driver reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.gpu.visible import bound
from pytest_gpuserve.model.gpu import Gpu


def gpu(index: int, uuid: str, parent: str | None = None) -> Gpu:
    return Gpu(index=index, uuid=uuid, name="any", arch="sm90", memory_total=1 << 36, parent=parent)


FOUR = tuple(gpu(index, f"GPU-{index}{index}{index}a-b{index}") for index in range(4))
# GPU 1 of this machine is in MIG mode and shows as its two instances.
MIG = (
    FOUR[0],
    gpu(1, "MIG-aaaa-1", parent="GPU-111a-b1"),
    gpu(1, "MIG-aabb-2", parent="GPU-111a-b1"),
    FOUR[2],
)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("2", [2]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("+1", [1]),
        ("1gpu,2nd", [1, 2]),
        ("0,9,1", [0]),
        ("0,,1", [0]),
        ("0,-1,1", [0]),
        ("0,0", []),
        ("0,1,0", []),
        ("0,9,0", [0]),
        ("GPU-222", [2]),
        ("GPU-222a-b2,GPU-0", [2, 0]),
        ("GPU-", []),
        ("GPU-222,1", [2]),
        ("1,GPU-222", [1]),
        ("GPU-222,GPU-222a-b2", []),
        ("GPU-222,GPU-nope,GPU-000", [2]),
        ("222a", []),
        ("gpu-222", []),
    ],
)
def test_value_is_read_as_the_driver_reads_it(visible: str | None, indices: list[int]) -> None:
    assert [found.index for found in bound(visible, FOUR)] == indices


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("MIG-aaaa", ["MIG-aaaa-1"]),
        ("MIG-aa", []),
        ("MIG-aabb-2,GPU-000", ["MIG-aabb-2", "GPU-000a-b0"]),
        ("1", ["MIG-aaaa-1"]),
        ("GPU-111a-b1", ["MIG-aaaa-1"]),
        ("0,1,2", ["GPU-000a-b0", "MIG-aaaa-1", "GPU-222a-b2"]),
    ],
)
def test_mig_instances_go_by_uuid_and_their_gpu_means_the_first(visible: str, uuids: list[str]) -> None:
    assert [found.uuid for found in bound(visible, MIG)] == uuids


NAMES = st.lists(
    st.one_of(
        st.integers(-1, 5).map(str),
        st.sampled_from(FOUR).flatmap(lambda one: st.integers(3, len(one.uuid)).map(lambda cut: one.uuid[:cut])),
        st.text(alphabet="-0123456789GPUx ", max_size=4),
    ),
    max_size=6,
).map(",".join)


@given(NAMES)
def test_any_value_gives_each_gpu_at_most_once_and_binding_again_changes_nothing(visible: str) -> None:
    found = bound(visible, FOUR)
    assert len(set(found)) == len(found)
    assert set(found) <= set(FOUR)
    if "GPU-" not in visible:
        assert bound(visible, found) == found


@given(st.permutations(range(4)).flatmap(lambda order: st.integers(0, 4).map(lambda count: order[:count])))
def test_indices_uuids_and_unique_prefixes_name_the_same_gpus_in_the_same_order(order: list[int]) -> None:
    wanted = tuple(FOUR[index] for index in order)
    assert bound(",".join(map(str, order)), FOUR) == wanted
    assert bound(",".join(one.uuid for one in wanted), FOUR) == wanted
    assert bound(",".join(one.uuid[:6] for one in wanted), FOUR) == wanted


@given(NAMES, NAMES)
def test_what_follows_the_first_invalid_entry_counts_only_as_nothing(before: str, after: str) -> None:
    kind = "GPU-nowhere" if before.lstrip().startswith("GPU-") else "x"
    assert bound(f"{before},{kind},{after}", FOUR) == bound(f"{before},{kind}", FOUR)
