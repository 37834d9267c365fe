"""Order, groups and estimates."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve import schedule
from pytest_gpuserve.model.cell import Cell, ModelSpec
from pytest_gpuserve.schedule import Place


def cell(model: str, *deltas: str, gpus: int = 1) -> Cell:
    suffix = "+".join(f"{delta}.x" for delta in deltas) or "baseline"
    return Cell(
        id=f"sm120-{model}-{suffix}",
        arch="sm120",
        model=ModelSpec(name=model, gpus=gpus),
        axes=dict.fromkeys(deltas, "x"),
        deltas=deltas,
        matrix="m",
    )


CELLS = st.lists(
    st.builds(
        lambda model, deltas: cell(model, *sorted(deltas)),
        st.sampled_from(["a", "b-c", "b"]),
        st.sets(st.sampled_from(["attention", "graphs", "nccl"])),
    ),
    unique_by=lambda one: one.id,
)


@given(CELLS, st.randoms())
def test_launch_order_keeps_every_cell_and_puts_each_models_baseline_first(cells: list[Cell], random) -> None:
    random.shuffle(cells)
    ordered = schedule.in_launch_order(cells)
    assert sorted(one.id for one in ordered) == sorted(one.id for one in cells)
    assert [one.is_baseline for one in ordered] == sorted((one.is_baseline for one in cells), reverse=True)
    models = [one.model.name for one in ordered if not one.is_baseline]
    assert len(list(dict.fromkeys(models))) == sum(1 for i, m in enumerate(models) if i == 0 or models[i - 1] != m)
    for position, one in enumerate(ordered):
        base = schedule.baseline_of(one, cells)
        assert base is None or ordered.index(base) < position


@given(CELLS, st.data())
def test_what_a_cell_is_compared_with_comes_before_it(cells: list[Cell], data: st.DataObject) -> None:
    """References that point backwards in some order can all be kept; a cycle must still lose no cell."""
    ids = [one.id for one in cells]
    shuffled = data.draw(st.permutations(ids))
    references = {
        one: data.draw(st.lists(st.sampled_from(shuffled[:i]), max_size=2)) for i, one in enumerate(shuffled) if i
    }
    ordered = [one.id for one in schedule.in_launch_order(cells, references)]
    assert sorted(ordered) == sorted(ids)
    deltas = {one.id for one in cells if not one.is_baseline}
    for one, wanted in references.items():
        assert one not in deltas or all(ordered.index(other) < ordered.index(one) for other in wanted)
    # A delta waits for its baseline, whatever the baseline is compared with.
    assert not {*ordered[: len(ids) - len(deltas)]} & deltas
    cyclic = dict.fromkeys(ids, ids)
    assert sorted(one.id for one in schedule.in_launch_order(cells, cyclic)) == sorted(ids)


def test_a_long_chain_of_references_needs_no_recursion() -> None:
    cells = [cell(f"m{number:05}", "graphs") for number in range(3000)]
    references = {one.id: [following.id] for one, following in itertools.pairwise(cells)}
    assert schedule.in_launch_order(cells, references) == tuple(reversed(cells))


def test_a_node_id_without_its_cell_keeps_its_other_parameters() -> None:
    for inside, left in (("c-1", ""), ("c-1-8", "[8]"), ("8-c-1", "[8]"), ("8-c-1-9", "[8--9]")):
        assert schedule.without_cell(f"t.py::test_x[{inside}]", "c-1") == f"t.py::test_x{left}"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 2))))
def test_items_are_arranged_so_that_each_cell_is_entered_once(places: list[tuple[int, int, int]]) -> None:
    items = list(enumerate(places))
    arranged = schedule.arrange(items, lambda item: Place(*item[1]))
    entered = [
        place[0]
        for position, (_, place) in enumerate(arranged)
        if position == 0 or arranged[position - 1][1][0] != place[0]
    ]
    assert len(entered) == len(set(entered))
    # Stable: equal places stay as they were collected.
    assert arranged == sorted(items, key=lambda item: (item[1], item[0]))


def test_the_cell_is_found_among_other_parameters() -> None:
    ids = frozenset({"sm120-m-baseline", "sm120-m", "sm120-m-a.b+c.d"})
    assert schedule.cell_in("t.py::test_x[sm120-m-baseline]", ids) == "sm120-m-baseline"
    assert schedule.cell_in("t.py::test_x[8-sm120-m-a.b+c.d-fp8]", ids) == "sm120-m-a.b+c.d"
    assert schedule.cell_in("t.py::test_x[sm120-other-baseline]", ids) is None
    assert schedule.cell_in("t.py::test_x", ids) is None


@given(CELLS, st.lists(st.sampled_from(["1", "fp8-x", "sm120"]), max_size=2), st.booleans())
def test_a_cells_id_is_found_whatever_stands_around_it(cells: list[Cell], others: list[str], first: bool) -> None:
    ids = {one.id: one for one in cells}
    for one in cells:
        inside = "-".join([one.id, *others] if first else [*others, one.id])
        assert schedule.cell_in(f"a/b.py::T::test_[{inside}]", ids) == one.id


def test_groups_keep_the_order_and_the_positions() -> None:
    ids = frozenset({"c1", "c2"})
    nodeids = ["f::a[c1]", "f::b[c1]", "f::a[c2]", "f::lonely"]
    assert schedule.group(nodeids, ids) == {"c1": [0, 1], "c2": [2], "f::lonely": [3]}


@given(CELLS, st.integers(1, 8), st.integers(1, 8))
def test_more_workers_or_gpus_never_take_longer_than_one_after_another(
    cells: list[Cell], gpus: int, workers: int
) -> None:
    alone = schedule.makespan(cells, gpus, 1)
    assert alone == sum(map(schedule.estimate, cells)) or not cells
    assert max(map(schedule.estimate, cells), default=0.0) <= schedule.makespan(cells, gpus, workers) <= alone


def test_the_last_runs_time_is_a_better_estimate() -> None:
    one = cell("a")
    assert schedule.estimate(one, {one.id: 12.5}) == 12.5
    assert schedule.estimate(cell("a", gpus=8)) > schedule.estimate(one, {})


@given(CELLS, st.integers(min_value=1, max_value=6))
def test_shares_are_a_partition_that_splits_no_model(cells: list[Cell], count: int) -> None:
    found = schedule.shares(cells, count)
    assert found == schedule.shares(cells, count)
    assert len(found) == count
    assert sorted(one.id for share in found for one in share) == sorted(one.id for one in cells)
    for name in {one.model.name for one in cells}:
        assert sum(any(one.model.name == name for one in share) for share in found) == 1


def test_shares_are_balanced_by_what_the_history_says() -> None:
    cells = [cell(name) for name in "abcd"]
    seconds = {"a": 100.0, "b": 60.0, "c": 50.0, "d": 10.0}
    history = {f"sm120-{name}-baseline": value for name, value in seconds.items()}
    found = [[one.model.name for one in share] for share in schedule.shares(cells, 2, history)]
    assert found == [["a", "d"], ["b", "c"]]
