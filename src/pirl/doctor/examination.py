"""The examination as a whole: what may crash or hang goes on in other processes while the rest is looked at."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pirl.doctor.findings import Finding
from pirl.doctor.machine import examine_devices, examine_machine
from pirl.doctor.media import CODECS, backends, examine_codecs, examine_rendering, examine_tokenizers, has_mujoco
from pirl.doctor.probes import Answer, Probe
from pirl.doctor.software import examine_extras, examine_packages, examine_python, module_of, needed_packages
from pirl.doctor.storage import examine_storage


def examine(runs: Path = Path("runs"), timeout: float = 60.0) -> Iterator[Finding]:
    """Look at everything; findings come as they are known, section by section. Nothing is left behind."""
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as probes:
        # Without this, JAX would take most of a GPU's memory, which somebody may be training on.
        devices = probes.enter_context(Probe("devices", environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}))
        modules = [module_of(package.name) for package in needed_packages()]
        imports = probes.enter_context(Probe("imports", *modules))
        codecs = {name: probes.enter_context(Probe("codec", encoder)) for name, encoder in CODECS.items()}
        render = "rendering" if has_mujoco() else "context"
        rendering = {
            backend: probes.enter_context(Probe(render, environment={"MUJOCO_GL": backend})) for backend in backends()
        }
        yield from _examine("machine", examine_machine)
        yield from _examine("machine", lambda: examine_devices(devices.answer(deadline)))
        yield from _examine("software", examine_python)
        yield from _examine("software", lambda: examine_packages(imports.answer(deadline)))
        yield from _examine("extras", examine_extras)
        yield from _examine("storage", lambda: examine_storage(runs))
        yield from _examine("media", examine_tokenizers)
        yield from _examine("media", lambda: examine_codecs(_answers(codecs, deadline)))
        yield examine_rendering(_answers(rendering, deadline))


def _answers(probes: Mapping[str, Probe], deadline: float) -> dict[str, Answer]:
    return {name: probe.answer(deadline) for name, probe in probes.items()}


def _examine(section: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What is found; a look that itself fails, for want of a package, say, is a finding and not the end."""
    try:
        yield from look()
    except Exception as error:
        detail = f"could not be checked: {type(error).__name__}: {error}".splitlines()[0]
        yield Finding(section, section, "bad", detail, "Fix the other lines first.", needed=True)
