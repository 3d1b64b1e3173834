"""Looks that may crash or hang, each in a process of its own: `python -m pirl.doctor.probes NAME WORD…`."""

import ctypes
import ctypes.util
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pirl.processes import exit_in_words, kill_process, last_lines, start_process


@dataclass(frozen=True)
class Answer:
    """What a probe said, one object per line, and how it ended: `failure` is empty if it ended well."""

    said: list[dict[str, Any]]
    failure: str


class Probe:
    """A probe at work. It is ended, and all that it started, when the block is left."""

    def __init__(self, name: str, *words: str, environment: Mapping[str, str] | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="pirl-doctor-")
        self._log = Path(self._directory.name) / "log"
        self._answer = Path(self._directory.name) / "answer"
        command = [sys.executable, "-m", "pirl.doctor.probes", name, str(self._answer), *words]
        self._process = start_process(command, self._log, environment=environment)

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None:
        kill_process(self._process)
        self._process.wait()
        self._directory.cleanup()

    def answer(self, deadline: float) -> Answer:
        """Wait for it, until a time of `time.monotonic` at the latest."""
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            failure = "no answer in time"
        else:
            last = "".join(f": {line}" for line in last_lines(self._log))
            failure = "" if code == 0 else exit_in_words(code) + last
        lines = self._answer.read_text().splitlines() if self._answer.exists() else []
        return Answer([json.loads(line) for line in lines], failure)


Say = Callable[[dict[str, Any]], None]


def probe_imports(say: Say, *modules: str) -> None:
    """Import modules one by one; each is named before, so that a crash has a name."""
    for module in modules:
        say({"module": module})
        try:
            importlib.import_module(module)
        except Exception as error:
            say({"module": module, "error": f"{type(error).__name__}: {error}".splitlines()[0]})


def probe_devices(say: Say) -> None:
    """The devices that JAX finds, after they have computed something."""
    import jax
    import jax.numpy as jnp

    for device in jax.devices():
        if int(jax.device_put(jnp.arange(5), device).sum()) != 10:
            raise RuntimeError(f"{device} does not compute what it should")
        memory = (device.memory_stats() or {}).get("bytes_limit")
        say({"platform": device.platform, "kind": device.device_kind, "memory": memory})


def probe_codec(say: Say, encoder: Literal["h264", "libsvtav1"]) -> None:
    """Find the decoder of a codec, then write a short video and read it back."""
    import av
    import numpy as np

    from pirl.data.lerobot.video_writer import CODEC_NAMES, encode_video

    av.Codec(CODEC_NAMES[encoder], "r")
    say({"step": "read"})
    frames = np.linspace(0, 255, 3 * 64 * 64 * 3).astype(np.uint8).reshape(3, 64, 64, 3)
    encode_video(frames, fps=10, codec=encoder)


def probe_rendering(say: Say) -> None:
    """Render a white floor with MuJoCo by the backend that MUJOCO_GL names."""
    import mujoco

    floor = '<geom type="plane" size="9 9 1" rgba="1 1 1 1"/>'
    model = mujoco.MjModel.from_xml_string(f'<mujoco><worldbody><light pos="0 0 3"/>{floor}</worldbody></mujoco>')
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, 32, 32) as renderer:
        renderer.update_scene(data)
        say({"brightest": int(renderer.render().max())})


def probe_context(say: Say) -> None:
    """Open what MUJOCO_GL names without MuJoCo: the first display that EGL has, or a context of OSMesa's."""
    name = {"egl": "EGL", "osmesa": "OSMesa"}[os.environ["MUJOCO_GL"]]
    path = ctypes.util.find_library(name)
    if path is None:
        raise FileNotFoundError(f"there is no lib{name}")
    library = ctypes.CDLL(path)
    say({"opened": _open_egl(library) if name == "EGL" else _open_osmesa(library)})


def _open_egl(library: ctypes.CDLL) -> bool:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.eglGetProcAddress.restype = pointer
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, number, ctypes.POINTER(pointer), ctypes.POINTER(number))
    get_display = ctypes.CFUNCTYPE(pointer, ctypes.c_uint, pointer, pointer)
    devices, count = (pointer * 16)(), number()
    query_devices(library.eglGetProcAddress(b"eglQueryDevicesEXT"))(16, devices, ctypes.byref(count))
    library.eglInitialize.argtypes = [pointer, pointer, pointer]
    for device in devices[: count.value]:
        # 0x313F is EGL_PLATFORM_DEVICE_EXT, which needs no screen.
        display = get_display(library.eglGetProcAddress(b"eglGetPlatformDisplayEXT"))(0x313F, device, None)
        if display and library.eglInitialize(display, None, None):
            return True
    return False


def _open_osmesa(library: ctypes.CDLL) -> bool:
    library.OSMesaCreateContext.restype = ctypes.c_void_p
    # 0x1908 is OSMESA_RGBA.
    return library.OSMesaCreateContext(0x1908, None) is not None


_PROBES: dict[str, Callable[..., None]] = {
    "imports": probe_imports,
    "devices": probe_devices,
    "codec": probe_codec,
    "rendering": probe_rendering,
    "context": probe_context,
}


def main(name: str, answer: str, *words: str) -> None:
    """Run a probe; what it says goes to a file, since libraries print what they like."""
    with open(answer, "w") as file:

        def say(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        _PROBES[name](say, *words)


if __name__ == "__main__":
    main(*sys.argv[1:])
