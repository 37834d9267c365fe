"""The order in which GPUs are granted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpuserve.gpu.turnstile import Ticket, grant
from pytest_gpuserve.model.gpu import Gpu

GPUS = {
    name: Gpu(index=at, uuid=name, name="any", arch="sm120", memory_total=None, numa=at // 4)
    for at, name in enumerate("abcdefgh")
}
ALL = "abcdefgh"


def granted(earlier: list[tuple[int, str]], mine: tuple[int, str], free: str, avoid: str = "") -> str:
    tickets = [Ticket(count, tuple(allowed)) for count, allowed in earlier]
    found = grant(tickets, Ticket(mine[0], tuple(mine[1])), set(free), set(avoid), GPUS)
    return "".join(gpu.uuid for gpu in found)


@pytest.mark.parametrize(
    ("earlier", "mine", "free", "avoid", "chosen"),
    [
        ([], (1, ALL), ALL, "", "a"),
        ([], (8, ALL), ALL, "", ALL),
        ([], (8, ALL), "abcdefg", "", ""),
        ([(8, ALL)], (1, ALL), "abcdefg", "", ""),  # kept for the wide one
        ([(8, ALL)], (1, ALL), ALL, "", ""),
        ([(4, "abcd")], (1, ALL), "abef", "", "e"),  # what the wide one cannot use is free for all
        ([(2, ALL)], (1, ALL), "ab", "", ""),
        ([(2, ALL)], (1, ALL), "abc", "", "c"),
        ([(1, "a")], (1, "b"), "b", "", "b"),  # nobody waits behind a request for other GPUs
        ([(1, "a")], (1, "a"), "a", "", ""),
        ([], (1, ALL), "ab", "a", "b"),  # one that is used without a lock is avoided
        ([], (1, ALL), "a", "a", ""),  # … as long as others may come free
        ([], (1, "a"), "a", "a", "a"),  # … but a request that has only this one goes to the gate with it
        ([], (8, ALL), ALL, "c", ALL),
        ([(1, "ab")], (1, "ab"), "ab", "a", ""),  # the one before does not take `a` either
        ([(1, "xy")], (1, ALL), "abx", "", "a"),  # a GPU this process does not know
    ],
)
def test_grant(earlier: list[tuple[int, str]], mine: tuple[int, str], free: str, avoid: str, chosen: str) -> None:
    assert granted(earlier, mine, free, avoid) == chosen


ALLOWED = st.lists(st.sampled_from(ALL), min_size=1, unique=True)
TICKETS = ALLOWED.flatmap(lambda names: st.integers(1, len(names)).map(lambda count: Ticket(count, tuple(names))))


@settings(max_examples=200)
@given(st.lists(TICKETS, min_size=1, max_size=12), st.data())
def test_queue_is_served_to_its_end_and_nobody_is_overtaken_for_what_he_waits_for(
    queue: list[Ticket], data: st.DataObject
) -> None:
    """Played out: in each step somebody looks (any ticket, as processes are scheduled) or gives his GPUs up."""
    waiting = list(queue)
    held: list[tuple[Ticket, tuple[Gpu, ...]]] = []
    free = set(ALL)
    for _ in range(400):
        if not waiting and not held:
            return
        if held and data.draw(st.booleans()):
            _, gpus = held.pop(data.draw(st.integers(0, len(held) - 1)))
            free |= {gpu.uuid for gpu in gpus}
        elif waiting:
            at = data.draw(st.integers(0, len(waiting) - 1))
            head_before = grant([], waiting[0], free, (), GPUS)
            gpus = grant(waiting[:at], waiting[at], free, (), GPUS)
            if gpus:
                taken = {gpu.uuid for gpu in gpus}
                assert len(gpus) == waiting[at].count
                assert taken <= free & set(waiting[at].allowed)
                free -= taken
                if at:
                    # The head of the queue lost nothing by it: the GPUs it would have chosen are free still, and so is
                    # all that was free for it if it must wait.
                    assert {gpu.uuid for gpu in head_before} <= free
                    assert head_before or not taken & set(waiting[0].allowed)
                held.append((waiting.pop(at), gpus))
        elif held:
            _, gpus = held.pop()
            free |= {gpu.uuid for gpu in gpus}
    # Whatever was left to chance above, serving in order always ends.
    while waiting or held:
        if waiting and (gpus := grant([], waiting[0], free, (), GPUS)):
            free -= {gpu.uuid for gpu in gpus}
            held.append((waiting.pop(0), gpus))
        else:
            assert held, "a request waits for ever"
            free |= {gpu.uuid for gpu in held.pop()[1]}
