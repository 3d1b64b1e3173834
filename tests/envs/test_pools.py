"""How a pool is chosen."""

import os
from typing import Any

import gymnasium
import pytest

from fakes import POINT, LocalPool, Point
from pirl.envs import EnvConfig, EnvPool, open_pool
from pirl.envs.pools import default_size
from pirl.errors import ConfigError


class Native(Point):
    """A point with a pool of its own."""

    def __init__(self, *, limit: int = 12) -> None:
        super().__init__(limit=limit)

    @classmethod
    def make_pool(cls, size: int, **options: Any) -> LocalPool:
        return LocalPool(size, **options)


@pytest.fixture(autouse=True)
def native_is_registered() -> None:
    if "fakes/Native-v0" not in gymnasium.registry:
        gymnasium.register("fakes/Native-v0", Native)


def test_an_environment_with_a_pool_of_its_own_gets_it_with_its_options() -> None:
    with open_pool(EnvConfig("fakes/Native-v0", options={"limit": "5"}), 3) as pool:
        assert isinstance(pool, LocalPool)
        assert isinstance(pool, EnvPool)
        assert pool.size == 3
        assert pool.description.max_steps == 5


def test_there_are_no_more_processes_by_default_than_cores_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert default_size(EnvConfig(POINT)) == 2
    assert default_size(EnvConfig("fakes/Native-v0")) == 16, "which need no process each"


def test_a_pool_of_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="a pool of 0 environments"):
        open_pool(EnvConfig("fakes/Native-v0"), 0)
