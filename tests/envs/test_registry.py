"""Environments by name: what is made, and what is said about names, adapters and options that do not fit."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes import POINT, Point
from pirl.envs import EnvAdapter, EnvConfig, make_env
from pirl.envs.registry import KNOWN, find_env_class, list_options
from pirl.errors import ConfigError


def make_point(**options: Any) -> Point:
    env = make_env(EnvConfig(POINT, options=options))
    assert isinstance(env, Point)
    return env


def test_texts_become_what_the_constructor_wants() -> None:
    env = make_point(size="16", speed="0.5", color="gray", names="a, b", limit="none", shy="false")
    assert (env.size, env.speed, env.color, env.names, env.max_steps) == (16, 0.5, "gray", ("a", "b"), 1000)
    assert make_point(size="1.6e1").size == make_point(size=16.0).size == 16
    env = make_point(size=16, speed=1, color="gray", names=["a"], limit=None)
    assert (env.size, env.speed, env.names, env.max_steps) == (16, 1.0, ("a",), 1000)
    assert type(env.speed) is float


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sise": 3}, r"no option 'sise'. Did you mean size\? It has size, speed, color, shy, slow, names, limit\."),
        ({"size": "3.5"}, r"size should be a whole number; it is '3\.5'\."),
        ({"speed": "fast"}, r"speed should be a number; it is 'fast'\."),
        ({"shy": "maybe"}, r"shy should be true or false; it is 'maybe'\."),
        ({"color": "red"}, r"color should be white or gray; it is 'red'\."),
        ({"names": 3}, r"names should be a list of texts with commas between; it is 3\."),
    ],
)
def test_an_option_that_does_not_fit_is_named(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_point(**options)


def test_options_are_told_with_their_help() -> None:
    options = {option.name: option for option in list_options(Point)}
    assert options["speed"].help == "The longest step, in units of the plane."
    assert options["speed"].default == 0.25
    assert options["color"].kind == "white or gray"
    assert options["limit"].kind == "a whole number or none"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("tabletpo", r"no environment is named 'tabletpo'. Did you mean tabletop\? pirl has tabletop, aloha"),
        ("pirl/Tabletop-v3", r"no environment 'pirl/Tabletop-v3' is registered .* Did you mean pirl/Tabletop-v0\?"),
        ("CartPole-v1", r"CartPole-v1 is an environment .* --env\.adapter"),
        ("nobody/Nothing-v0", r"Install the package .* as in my_package:nobody/Nothing-v0"),
        ("no_such_module:x/Y-v0", r"needs the module no_such_module, which cannot be imported"),
    ],
)
def test_an_unknown_environment_is_answered_with_what_to_do(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_env(EnvConfig(name))


ADAPTER = """
from helper_of_adapter import PROMPT
from pirl.data import Robot
from pirl.envs import EnvAdapter

class Pole(EnvAdapter):
    robot = Robot("pole", cameras={}, state=("state",), actions=("action",), state_dim=4, action_dim=1)
    fps = 50
    prompt = PROMPT
    def observe(self, observation, info):
        return {"state": observation}
    def action(self, action):
        return int(action[0] > 0)
    def success(self, reward, terminated, info):
        return False

class NoAdapter:
    pass
"""


@pytest.fixture
def adapter_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "helper_of_adapter.py").write_text("PROMPT = 'hold the pole'")
    file = tmp_path / "pole_adapter.py"
    file.write_text(ADAPTER)
    yield file
    for module in ("pole_adapter", "helper_of_adapter", "broken_adapter"):
        sys.modules.pop(module, None)


def test_an_adapter_is_found_by_file_or_by_module_in_the_current_directory(
    adapter_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_file = make_env(EnvConfig("CartPole-v1", f"{adapter_file}:Pole"))
    assert isinstance(by_file, EnvAdapter)
    assert by_file.tasks == ("hold the pole",)
    monkeypatch.chdir(adapter_file.parent)
    assert make_env(EnvConfig("CartPole-v1", "pole_adapter:Pole")).name == "Pole"
    assert make_env(EnvConfig("CartPole-v1", "pole_adapter.py:Pole")).name == "Pole"


def test_options_of_a_foreign_environment_are_literals_where_they_are_ones(adapter_file: Path) -> None:
    options = {"sutton_barto_reward": "True", "render_mode": "rgb_array", "max_episode_steps": "7"}
    env = make_env(EnvConfig("CartPole-v1", f"{adapter_file}:Pole", options))
    assert isinstance(env, EnvAdapter)
    assert env.env.unwrapped._sutton_barto_reward is True  # type: ignore[attr-defined]
    assert env.render_mode == "rgb_array"
    assert env.max_steps == 7
    with pytest.raises(ConfigError, match="CartPole-v1 does not take these options: .*'gravitas'"):
        make_env(EnvConfig("CartPole-v1", f"{adapter_file}:Pole", {"gravitas": "1"}))


def test_an_environment_as_flags_is_read_back_as_the_same(adapter_file: Path) -> None:
    known = EnvConfig(POINT, options={"size": 16, "speed": 0.5, "shy": False, "names": ("a", "b"), "limit": None})
    assert find_env_class(_from_flags(known.flags()))[1] == known.options
    values = {"number": 7, "yes": True, "nothing": None, "word": "rgb_array", "digits": "7", "pair": [1, "x"]}
    foreign = EnvConfig("CartPole-v1", f"{adapter_file}:Pole", values)
    assert find_env_class(_from_flags(foreign.flags()))[1] == values


def _from_flags(flags: Sequence[str]) -> EnvConfig:
    """As the command line reads them."""
    said = dict(zip(flags[::2], flags[1::2], strict=True))
    name, adapter = said.pop("--env"), said.pop("--env.adapter", None)
    options = {flag.removeprefix("--env.").replace("-", "_"): text for flag, text in said.items()}
    return EnvConfig(name, adapter, options)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("pole_adapter", "'pole_adapter' names no adapter: give module:Class"),
        ("{file}:Poel", r"has no class 'Poel'. Did you mean Pole\? It has Pole, NoAdapter"),
        ("{file}:NoAdapter", "should be a subclass of pirl.envs.EnvAdapter"),
        ("absent.py:Pole", "there is no adapter file"),
        ("no_such_module:Pole", "needs the module no_such_module"),
        ("{folder}/broken_adapter.py:Pole", "failed with ZeroDivisionError: division by zero"),
    ],
)
def test_an_adapter_that_cannot_be_had_is_named(adapter_file: Path, name: str, complaint: str) -> None:
    (adapter_file.parent / "broken_adapter.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=complaint):
        make_env(EnvConfig("CartPole-v1", name.format(file=adapter_file, folder=adapter_file.parent)))


def test_an_environment_of_ours_needs_no_adapter(adapter_file: Path) -> None:
    with pytest.raises(ConfigError, match="tabletop is an environment of pirl's and needs no adapter: leave out"):
        make_env(EnvConfig("tabletop", f"{adapter_file}:Pole"))


def test_every_environment_explains_each_of_its_options() -> None:
    assert [entry.alias for entry in KNOWN] == ["tabletop", "aloha", "libero", "metaworld"]
    for entry in KNOWN:
        assert entry.summary.endswith(".")
        assert [option.name for option in entry.options if not option.help] == []


def test_gymnasium_may_ask_every_environment_for_its_pictures() -> None:
    """`gymnasium.make(…, render_mode="rgb_array")` hands the mode to the constructor."""
    for known in KNOWN:
        env_class, options = find_env_class(EnvConfig(known.alias, options={"render_mode": "rgb_array"}))
        assert options == {"render_mode": "rgb_array"}
        assert "render_mode" not in {option.name for option in list_options(env_class)}, "there is nothing to choose"
        with pytest.raises(ConfigError, match="render_mode should be rgb_array; it is 'human'"):
            find_env_class(EnvConfig(known.alias, options={"render_mode": "human"}))
    with pytest.raises(ConfigError, match="It has .*, render_size\\.$"):
        find_env_class(EnvConfig("tabletop", options={"mode": "x"}))


def test_importing_the_package_loads_no_jax_and_no_simulator() -> None:
    program = "import sys, pirl.envs; print([m for m in ('jax', 'mujoco') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
