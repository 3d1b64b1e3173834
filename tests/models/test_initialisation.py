"""Fresh parameters are distributed as OpenPI's are."""

import jax
import numpy as np
import pytest

from builders import MICRO
from golden import TINY_MODELS, content, model_config, needs_golden
from pirl.models import create_model, get_parameters


@needs_golden
@pytest.mark.parametrize("name", TINY_MODELS)
def test_initial_statistics_equal_openpi(name):
    recorded = content("models", name, "init_stats.json")
    ours = get_parameters(create_model(model_config(name), jax.random.key(0)))
    assert set(ours) == set(recorded)
    for path, stats in recorded.items():
        value = np.asarray(ours[path])
        assert list(value.shape) == stats["shape"]
        if stats["all_zero"] or stats["all_one"]:
            np.testing.assert_array_equal(value, np.full_like(value, 1.0 if stats["all_one"] else 0.0), err_msg=path)
            continue
        # Two samples of the same distribution: their deviations differ by about 1 / sqrt(2 n) each.
        assert value.std() == pytest.approx(stats["std"], rel=6 / np.sqrt(value.size)), path
        assert abs(value.mean()) <= 5 * stats["std"] / np.sqrt(value.size), path
        # The same kind of distribution: uniform and truncated ones end where they should.
        assert np.abs(value).max() <= 1.5 * max(abs(stats["min"]), abs(stats["max"])), path


def test_layers_differ_and_seeds_repeat():
    first, again, other = (get_parameters(create_model(MICRO, jax.random.key(seed))) for seed in (0, 0, 1))
    for path, value in first.items():
        np.testing.assert_array_equal(value, again[path])
    weight = np.asarray(first["PaliGemma/llm/layers/mlp/linear"])
    assert np.abs(weight[0] - weight[1]).max() > 0.01
    assert np.abs(weight - np.asarray(other["PaliGemma/llm/layers/mlp/linear"])).max() > 0.01
