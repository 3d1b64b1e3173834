"""The randomness of updates: each has its own, however many are compiled into one."""

import itertools

import jax
import numpy as np

from pirl.training.setup import update_keys


def numbers(keys: jax.Array) -> list[list[int]]:
    return np.atleast_2d(jax.random.key_data(keys)).tolist()


def test_every_update_of_every_run_and_after_every_roll_back_has_a_key_of_its_own():
    found = [numbers(update_keys(*which, 1))[0] for which in itertools.product((0, 1), (0, 1, 2), range(5))]
    assert len(set(map(tuple, found))) == len(found)


def test_updates_that_are_compiled_into_one_have_the_keys_that_they_would_have_one_by_one():
    for rollbacks in (0, 2):
        several = numbers(update_keys(3, rollbacks, 5, 4))
        assert several == [numbers(update_keys(3, rollbacks, step, 1))[0] for step in range(5, 9)]
