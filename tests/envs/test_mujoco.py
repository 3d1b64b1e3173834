"""Choosing GL, and saying what is missing; no simulator is needed for either."""

import ctypes.util
import os
import sys
import types

import pytest

from pirl.envs.mujoco import choose_gl, import_simulator
from pirl.errors import ConfigError


@pytest.fixture
def headless(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    # Set first, so that what the code sets is undone too.
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delitem(sys.modules, "mujoco", raising=False)
    return monkeypatch


@pytest.mark.parametrize(("libraries", "chosen"), [({"EGL", "OSMesa"}, "egl"), ({"OSMesa"}, "osmesa"), (set(), "")])
def test_without_a_screen_the_first_library_that_is_there_renders(headless, libraries, chosen):
    headless.setattr(ctypes.util, "find_library", lambda name: name if name in libraries else None)
    choose_gl()
    assert os.environ["MUJOCO_GL"] == chosen


@pytest.mark.parametrize(("name", "value"), [("MUJOCO_GL", "osmesa"), ("DISPLAY", ":0"), ("WAYLAND_DISPLAY", "w")])
def test_a_screen_or_a_choice_of_the_user_is_left_alone(headless, name, value):
    headless.setenv(name, value)
    before = os.environ["MUJOCO_GL"]
    choose_gl()
    assert os.environ["MUJOCO_GL"] == before


def test_a_mujoco_that_came_first_is_told_of_rather_than_left_to_crash(headless):
    headless.setattr(ctypes.util, "find_library", lambda name: name)
    headless.setitem(sys.modules, "mujoco", types.ModuleType("mujoco"))
    with pytest.raises(ConfigError, match="MUJOCO_GL=egl"):
        choose_gl()


def test_a_missing_simulator_is_named_with_what_installs_it(headless):
    with pytest.raises(ConfigError, match=r"no_such_simulator is not installed.*pip install 'pirl\[aloha\]'"):
        import_simulator("no_such_simulator", "aloha")


def test_gl_that_does_not_load_is_answered_with_its_remedy(headless, tmp_path):
    headless.setenv("MUJOCO_GL", "egl")
    # What PyOpenGL does without the library.
    (tmp_path / "simulator_without_gl.py").write_text("None.eglQueryString")
    headless.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"MUJOCO_GL=egl.*make setup-aloha"):
        import_simulator("simulator_without_gl", "aloha")
