"""Cameras of MuJoCo simulators: GL without a screen, and images that software rendering can afford."""

import atexit
import ctypes.util
import importlib
import os
import sys
import weakref
from types import ModuleType
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from pirl.errors import ConfigError

# "fast": no shadows, reflections or multisampling, several times cheaper on a CPU. "stock": as the simulator has it.
Quality = Literal["fast", "stock"]
MAX_SIZE = 4096


def import_simulator(module: str, extra: str) -> ModuleType:
    """Import a package that uses MuJoCo, with a way to render; says what to install when one of them is missing.

    Call it before anything else imports mujoco: MUJOCO_GL is read once, then.
    """
    choose_gl()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The package and its dependencies all come with the extra.
        raise ConfigError(
            f"{error.name} is not installed, which this environment needs: pip install 'pirl[{extra}]' "
            f"(`make setup-{extra}` also installs what the system needs to render)."
        ) from error
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # PyOpenGL fails in all these ways
        raise _no_gl(error, extra) from error


def choose_gl() -> None:
    """Where there is no screen and MUJOCO_GL is unset, set it to EGL, or to OSMesa where EGL is missing."""
    if os.environ.get("MUJOCO_GL") or _may_have_screen():
        return
    for backend, library in (("egl", "EGL"), ("osmesa", "OSMesa")):
        if ctypes.util.find_library(library):
            if "mujoco" in sys.modules:  # it has settled for a screen, and asking it to render may end the process
                raise ConfigError(
                    "mujoco was imported before pirl could tell it to render without a screen: set "
                    f"MUJOCO_GL={backend} in the environment, or call pirl.envs.mujoco.choose_gl() first."
                )
            os.environ["MUJOCO_GL"] = backend
            return


def _may_have_screen() -> bool:
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


class CameraRenderer:
    """Renders the cameras of one MuJoCo model (an MjModel) at one size.

    It writes its image size and quality into the visual settings of the model, which do not affect the physics.
    """

    def __init__(self, model: Any, height: int, width: int, quality: Quality = "fast", *, extra: str) -> None:
        for name, size in (("height", height), ("width", width)):
            if not 1 <= size <= MAX_SIZE:
                raise ConfigError(f"{name} = {size} should be between 1 and {MAX_SIZE} pixels.")
        import mujoco

        # MuJoCo would not raise, but end the process.
        context = getattr(mujoco.gl_context, "GLContext", None)
        if context is not None and context.__module__ == "mujoco.glfw" and not _may_have_screen():
            raise _no_gl("it looks for a screen; MUJOCO_GL has to be set before mujoco is first imported", extra)
        model.vis.global_.offheight, model.vis.global_.offwidth = height, width
        if quality == "fast":
            model.vis.quality.offsamples = 0
            model.vis.quality.shadowsize = 0
        try:
            self._renderer = mujoco.Renderer(model, height, width)
        except (ImportError, AttributeError, OSError, RuntimeError, mujoco.FatalError) as error:
            raise _no_gl(error, extra) from error
        if quality == "fast":
            flags = self._renderer.scene.flags
            flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
            flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        # Registered after MuJoCo's own handlers, hence run before them: a context freed after its display complains.
        if not _open:
            atexit.register(_close_all)
        _open.add(self)

    def render(self, data: Any, camera: str) -> UInt8[np.ndarray, "height width 3"]:
        self._renderer.update_scene(data, camera)
        image: np.ndarray = self._renderer.render()
        return image

    def close(self) -> None:
        self._renderer.close()


_open: "weakref.WeakSet[CameraRenderer]" = weakref.WeakSet()


def _close_all() -> None:
    for renderer in list(_open):
        renderer.close()


def _no_gl(error: BaseException | str, extra: str) -> ConfigError:
    backend = os.environ.get("MUJOCO_GL")
    tried = f"MUJOCO_GL={backend}" if backend else "MUJOCO_GL is not set and neither EGL nor OSMesa was found"
    return ConfigError(
        f"MuJoCo cannot render here ({tried}: {error}). Without a screen it needs EGL or OSMesa: "
        f"`make setup-{extra}` installs them (apt-get install libegl1 libosmesa6 libgl1-mesa-dri); "
        "MUJOCO_GL=egl or MUJOCO_GL=osmesa chooses one."
    )
