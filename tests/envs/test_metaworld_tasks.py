"""What can be said of Meta-World without the package: names of tasks, and errors where it is missing."""

import importlib.util

import pytest

from pirl.envs.metaworld.env import MetaWorldEnv
from pirl.envs.metaworld.tasks import PROMPTS, choose_tasks
from pirl.errors import ConfigError


def test_tasks_are_named_as_people_type_them() -> None:
    assert choose_tasks("pick-place-v3,drawer-close-v3") == ("pick-place-v3", "drawer-close-v3")
    assert choose_tasks(" Reach, push-v3 ,reach-v3,") == ("reach-v3", "push-v3")
    assert choose_tasks("all") == tuple(PROMPTS)
    assert len(choose_tasks("mt10")) == 10
    assert choose_tasks("hammer,mt10")[0] == "hammer-v3"


def test_there_are_fifty_tasks_and_no_two_prompts_are_the_same() -> None:
    assert len(PROMPTS) == len(set(PROMPTS.values())) == 50


@pytest.mark.parametrize(("text", "said"), [("pick-plac", "pick-place-v3"), ("xyz", "assembly-v3"), (" ,", "mt10")])
def test_an_unknown_task_is_answered_with_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_tasks(text)


@pytest.mark.parametrize("max_steps", [0, 501])
def test_an_episode_longer_than_the_package_allows_is_refused(max_steps: int) -> None:
    with pytest.raises(ConfigError, match=f"max_steps = {max_steps}"):
        MetaWorldEnv(max_steps=max_steps)


@pytest.mark.skipif(importlib.util.find_spec("metaworld") is not None, reason="metaworld is installed")
def test_a_missing_package_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'pirl\[metaworld\]'"):
        MetaWorldEnv()
