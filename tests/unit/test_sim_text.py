"""The hash that stands for a language model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.sim.text import Model, Noise

NOISE = Noise.of("triton", "auto")
prompts = st.lists(st.integers(0, 999), min_size=1, max_size=30)


@given(prompts)
def test_the_greedy_token_is_the_likeliest_and_probabilities_sum_to_at_most_one(prompt):
    model = Model(1000, 4096, NOISE)
    state = model.states(prompt)[-1]
    top = model.top(state, 20, decode=True)
    assert top[0][1] == model.next_token(state)
    assert [pair[0] for pair in top] == sorted((pair[0] for pair in top), reverse=True)
    assert sum(math.exp(logprob) for logprob, _ in top) < 1.03  # noise moves each by 2 % at most
    for logprob, token in top:
        assert model.logprob(state, token, decode=True) == logprob


@given(prompts, st.integers(0, 999))
def test_a_state_stands_for_its_prefix(prompt, token):
    model = Model(1000, 4096, NOISE)
    states = model.states([*prompt, token])
    assert states[:-1] == model.states(prompt)
    assert states[-1] == model.after(states[-2], token)
    assert model.states([*prompt, (token + 1) % 1000])[-1] != states[-1]


@given(prompts)
def test_backends_differ_by_their_noise_only(prompt):
    one, other = Model(1000, 4096, NOISE), Model(1000, 4096, Noise.of("fa3", "auto"))
    state = one.states(prompt)[-1]
    token = one.next_token(state)
    assert other.next_token(state) == token
    gap = abs(one.logprob(state, token, decode=False) - other.logprob(state, token, decode=False))
    assert 0 < gap <= 0.04


@pytest.mark.parametrize("vocabulary", [1, 8, 512, 200_000])
def test_tokens_stay_inside_the_vocabulary(vocabulary):
    model = Model(vocabulary, 4096, NOISE)
    state = model.states([1])[-1]
    for _ in range(200):
        token = model.next_token(state)
        assert 3 <= token < max(8, vocabulary)
        assert model.text(token).startswith(" ")
        state = model.after(state, token)
