"""`pirl doctor`: checks what this machine has of what pirl needs, and says how to fix what is missing.

Checks that may crash or hang run in another process: `python -m pirl.doctor FILE PROBE…` writes JSON lines to FILE.
"""

import contextlib
import ctypes.util
import fcntl
import importlib
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata, resources, util
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

import pirl
from pirl.errors import UserError, in_one_line
from pirl.files import cache_directory, expand_home
from pirl.processes import format_exit, last_lines, machine_memory, read_host, usable_cores
from pirl.text import format_size

_PURPOSES = {
    "aloha": "the ALOHA simulator",
    "cuda12": "NVIDIA GPUs with a driver from 525 on",
    "cuda13": "NVIDIA GPUs with a driver from 580 on",
    "hub": "datasets of the Hugging Face hub by their id",
    "libero": "the LIBERO simulator",
    "metaworld": "the Meta-World simulator",
    "plan": "pirl plan for TPUs",
    "plan-gpu": "pirl plan for NVIDIA GPUs, without one",
    "ray": "rollouts on many machines",
    "sweep": "pirl sweep",
    "tensorboard": "metrics in TensorBoard",
    "tpu": "training on TPUs",
    "trackio": "metrics in Trackio",
    "wandb": "metrics in Weights & Biases",
}
_MODULES = {"orbax-checkpoint": "orbax.checkpoint", "pillow": "PIL", "pyyaml": "yaml"}
_OPEN_FILES, _LEAST_SPACE = 1024, 2**30


@dataclass(frozen=True)
class CheckResult:
    """One line of `pirl doctor`: what is `absent` is optional; pirl does not work without what is `needed`."""

    name: str
    state: Literal["good", "absent", "bad"]
    detail: str
    advice: str = ""
    needed: bool = False
    section: str = ""


# What a probe found, and how it failed; empty if it did not.
Answer = tuple[Any, str]


def run_checks(runs: Path = Path("runs"), timeout: float = 60.0) -> Iterator[CheckResult]:
    """All checks, section by section; nothing is left behind."""
    chosen = os.environ.get("MUJOCO_GL", "")
    backends = [chosen] if chosen in ("egl", "osmesa") else ["egl", "osmesa"]
    names = [f"import {package.name}" for package in needed_packages()]
    names += ["read h264", "write h264", "read av1", "write av1", "devices"]
    with ThreadPoolExecutor() as pool:
        # Else JAX would take most of a GPU's memory, which a run may be using.
        probes = pool.submit(run_probes, timeout, names, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        rendering = {
            name: pool.submit(run_probes, timeout, ["rendering"], MUJOCO_GL=name)
            for name in backends
            if util.find_spec("mujoco") is not None
        }
        checks: list[tuple[str, Callable[[], Iterable[CheckResult]]]] = [
            ("machine", check_machine),
            ("machine", lambda: check_devices(*probes.result()["devices"])),
            ("software", lambda: check_packages({name: failure for name, (_, failure) in probes.result().items()})),
            ("extras", check_extras),
            ("storage", lambda: check_storage(runs)),
            ("media", check_tokenizers),
            ("media", lambda: [check_codec(name, probes.result()) for name in ("h264", "av1")]),
            ("media", lambda: [check_rendering({name: one.result()["rendering"] for name, one in rendering.items()})]),
        ]
        for section, check in checks:
            try:
                yield from (replace(result, section=section) for result in check())
            except Exception as error:
                detail = f"could not be checked: {type(error).__name__}: {in_one_line(error)}"
                yield CheckResult(section, "bad", detail, "Fix the other lines first.", True, section)


def run_probes(timeout: float, names: Sequence[str], **environment: str) -> dict[str, Answer]:
    """Run probes one by one in another process, which is started again behind one that crashed or hung."""
    answers: dict[str, Answer] = {}
    while rest := [name for name in names if name not in answers]:
        with tempfile.TemporaryDirectory(prefix="pirl-doctor-") as directory:
            file, log = Path(directory, "answers"), Path(directory, "log")
            command = [sys.executable, "-m", "pirl.doctor", str(file), *rest]
            options: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "timeout": timeout}
            try:
                with log.open("wb") as output:
                    code = subprocess.run(command, stdout=output, env=os.environ | environment, **options).returncode
                failure = ": ".join([format_exit(code), *last_lines(log)])
            except subprocess.TimeoutExpired:
                failure = "no answer in time"
            for line in file.read_text().splitlines() if file.exists() else ():
                name, found, error = json.loads(line)
                answers[name] = (found, error)
        if unanswered := [name for name in rest if name not in answers]:
            answers[unanswered[0]] = (None, failure)
    return answers


def check_machine() -> Iterator[CheckResult]:
    container = ""
    with contextlib.suppress(OSError, ValueError):  # no container, or "max", which is no limit
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        container = f"; the container may use {quota / period:.1f}"
    yield CheckResult("cores", "good", f"{usable_cores()} of {os.cpu_count()}{container}")
    host, machine = read_host(), machine_memory()
    detail = format_size(machine)
    if host.available is not None:
        detail += f", {format_size(host.available)} available"
    if host.total is not None and host.total < machine:
        detail += f"; the container may use {format_size(host.total)}"
    yield CheckResult("memory", "good", detail)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if limit == resource.RLIM_INFINITY else limit for limit in limits)
    detail = "no limit" if soft == sys.maxsize else f"at most {soft:,}"
    advice = f"ulimit -n {min(hard, 4 * _OPEN_FILES)}, in the shell that runs pirl" if soft < _OPEN_FILES else ""
    yield CheckResult("open files", "bad" if advice else "good", detail, advice)


def check_devices(devices: list[list[Any]] | None, failure: str) -> Iterator[CheckResult]:
    chosen = os.environ.get("JAX_PLATFORMS")
    if not devices:
        advice = "Is another process using the device? JAX_PLATFORMS=cpu avoids it."
        advice = f"JAX_PLATFORMS={chosen} is set: unset it, or install what it names." if chosen else advice
        detail = f"JAX finds no device that computes: {failure or 'it names none'}"
        yield CheckResult("devices", "bad", detail, advice, needed=True)
        return
    kinds = Counter((platform, kind, memory) for platform, kind, memory in devices)
    for (platform, kind, memory), count in kinds.items():
        words = f"{count} × {kind}{f', {format_size(memory)} each' if memory else ''}"
        yield CheckResult(f"{platform} devices", "good", words, needed=True)
    if {platform for platform, *_ in kinds} == {"cpu"}:
        gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
        detail, advice = "no GPU or TPU is visible: full-size policies need one to train", ""
        if gpu or any(Path("/dev").glob("accel*")):
            detail = f"there is {'an NVIDIA GPU' if gpu else 'a TPU'}, but JAX does not use it"
            advice = "make setup ACCELERATOR=" + ("cuda13 (a driver before 580: cuda12)" if gpu else "tpu")
            advice = f"JAX_PLATFORMS={chosen} is set: unset it" if chosen else advice
        yield CheckResult("accelerator", "absent", detail, advice)


def check_packages(failures: Mapping[str, str]) -> Iterator[CheckResult]:
    """Python, pirl, and the packages that it needs: installed, of a version that fits, and importable."""
    wanted, version = metadata.metadata("pirl")["Requires-Python"], ".".join(map(str, sys.version_info[:3]))
    fits = Requirement(f"python{wanted}").specifier.contains(version, prereleases=True)
    advice = "" if fits else f"Install a Python {wanted}, and pirl with it."
    yield CheckResult("python", "good" if fits else "bad", f"{version}, {sys.executable}", advice, needed=True)
    yield CheckResult("pirl", "good", f"{pirl.__version__}, {Path(pirl.__file__).parent}", needed=True)
    tested = tested_versions()
    for package in needed_packages():
        name, found = package.name, installed_version(package.name)
        detail, advice = f"{found}, as tested", f"pip install '{package}'"
        if found is None:
            detail = "not installed"
        elif not package.specifier.contains(found, prereleases=True):
            detail = f"{found}; pirl needs {package.specifier}"
        elif failure := failures.get(f"import {name}"):
            detail, advice = f"cannot be imported: {failure}", f"pip install --force-reinstall '{package}'"
        else:
            advice = ""
            if found != tested.get(name):
                detail = f"{found}; tested with {tested.get(name, 'no version')}"
        yield CheckResult(name, "bad" if advice else "good", detail, advice, needed=True)


def needed_packages() -> list[Requirement]:
    requirements = map(Requirement, metadata.requires("pirl") or [])
    return [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": ""})]


def tested_versions() -> dict[str, str]:
    pins = map(Requirement, resources.files("pirl").joinpath("constraints.txt").read_text().splitlines())
    return {pin.name: str(pin.specifier)[2:] for pin in pins if pin.marker is None or pin.marker.evaluate()}


def installed_version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def check_extras() -> Iterator[CheckResult]:
    """What `pip install 'pirl[…]'` adds: installed or not, and of a version that fits."""
    for extra in sorted({*(metadata.metadata("pirl").get_all("Provides-Extra") or [])} - {"dev", "docs"}):
        purpose, packages = _PURPOSES.get(extra, f"what pirl[{extra}] is for"), _of_extra("pirl", extra)
        if missing_packages(extra):
            yield CheckResult(extra, "absent", f"not installed: {purpose}", how_to_install(extra))
            continue
        found = {package: installed_version(package.name) or "" for package in packages}
        detail = f"{purpose}: {', '.join(f'{package.name} {version}' for package, version in found.items())}"
        unfit = [entry for entry, version in found.items() if not entry.specifier.contains(version, prereleases=True)]
        if unfit:
            detail += f"; pirl needs {', '.join(f'{entry.name} {entry.specifier}' for entry in unfit)}"
        yield CheckResult(extra, "bad" if unfit else "good", detail, how_to_install(extra) if unfit else "")


def how_to_install(extra: str) -> str:
    """What to type for an extra; the targets of make also install what simulators need of the system."""
    install = f"pip install 'pirl[{extra}]'"
    return f"make setup-{extra} (or {install})" if extra in ("aloha", "libero", "metaworld") else install


def missing_packages(extra: str) -> list[str] | None:
    """What of an extra is not installed; None where this installation of pirl does not know the extra."""
    packages = _of_extra("pirl", extra)
    # Of jax[tpu], also what jax calls tpu.
    inner = [(entry.name, name) for entry in packages for name in entry.extras if installed_version(entry.name)]
    wanted = [*packages, *(entry for package, name in inner for entry in _of_extra(package, name))]
    return [entry.name for entry in wanted if installed_version(entry.name) is None] if packages else None


def _of_extra(package: str, extra: str) -> list[Requirement]:
    marked = ((entry, entry.marker) for entry in map(Requirement, metadata.requires(package) or []))
    return [entry for entry, m in marked if m and m.evaluate({"extra": extra}) > m.evaluate({"extra": ""})]


def check_storage(runs: Path) -> Iterator[CheckResult]:
    """The directories of runs and of the cache, and what the latter holds."""
    advice = "Run pirl in a directory on a local or fully featured network file system, or choose one with --runs-dir."
    yield check_directory("runs", expand_home(runs).absolute(), advice)
    cache, sizes = cache_directory(), Counter[str]()
    yield check_directory("cache", cache, "Choose another directory with the environment variable PIRL_CACHE.")
    for file in cache.rglob("*"):
        with contextlib.suppress(OSError):  # deleted meanwhile
            sizes[file.relative_to(cache).parts[0]] += file.lstat().st_blocks * 512
    parts = ", ".join(f"{name} {format_size(count)}" for name, count in sorted(sizes.items()))
    yield CheckResult("cached", "good", f"{format_size(sizes.total())} in total: {parts}" if sizes else "empty")


def check_directory(name: str, place: Path, elsewhere: str) -> CheckResult:
    """Whether files can be written, renamed, locked and memory-mapped where `place` is or will be."""
    existing, verb = next(parent for parent in (place, *place.parents) if parent.exists()), "written"
    try:
        free = shutil.disk_usage(existing).free
        with tempfile.TemporaryDirectory(prefix=".pirl-doctor-", dir=existing) as directory:
            new, old = Path(directory, "new"), Path(directory, "old")
            new.write_bytes(b"pirl")
            verb = "renamed"
            os.replace(new, old)
            verb = "locked"
            with old.open("rb") as file, old.open("rb") as other:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    raise OSError("a lock has no effect")
                verb = "memory-mapped"
                with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
                    if content[:] != b"pirl":
                        raise OSError("they do not hold what was written")
    except OSError as error:
        detail = f"{place}: files cannot be {verb}: {error.strerror or error}"
        return CheckResult(name, "bad", detail, elsewhere, needed=True)
    detail = f"{place}: {format_size(free)} free"
    if free < _LEAST_SPACE:  # the first checkpoint of a small run may fail
        return CheckResult(name, "bad", detail, f"Make space. {elsewhere}")
    detail += "; files can be written, renamed, locked, memory-mapped"
    return CheckResult(name, "good", detail, needed=True)


def check_tokenizers() -> Iterator[CheckResult]:
    """The vocabulary inside the package, and PaliGemma's, which full-size policies need."""
    from pirl.models import Tokenizer, get_model_config
    from pirl.models.tokenizer import PATH_VARIABLE, find_tokenizer

    words = Tokenizer.for_model(get_model_config("tiny")).vocab_size
    yield CheckResult("tiny tokenizer", "good", f"{words:,} tokens, inside the package", needed=True)
    name, chosen = "π₀ tokenizer", os.environ.get(PATH_VARIABLE)
    try:
        file = find_tokenizer()
        words = Tokenizer.from_file(file, max_len=48).vocab_size
        yield CheckResult(name, "good", f"{words:,} tokens, {file}")
    except UserError as error:
        first, *more = str(error).splitlines()
        if commands := [line.strip() for line in more if "curl" in line]:
            detail = "no PaliGemma vocabulary, which full-size policies need (the tiny ones do not)"
            yield CheckResult(name, "absent", detail, f"{commands[0]}  (or set ${PATH_VARIABLE})")
        else:
            advice = f"Correct ${PATH_VARIABLE}, or unset it." if chosen else "Download the file again."
            yield CheckResult(name, "bad", first, advice)


def check_codec(name: str, answers: Mapping[str, Answer]) -> CheckResult:
    """Whether PyAV reads and writes videos of LeRobot datasets; pirl can do without writing them."""
    for verb, done in (("read", "read"), ("write", "written")):
        if failure := answers[f"{verb} {name}"][1]:
            advice = "pip install --force-reinstall av (its own wheels have both codecs)"
            return CheckResult(name, "bad", f"videos cannot be {done}: {failure}", advice, needed=verb == "read")
    return CheckResult(name, "good", "PyAV reads and writes it", needed=True)


def check_rendering(answers: Mapping[str, Answer]) -> CheckResult:
    """Whether MuJoCo renders without a display, by backend; no answers without MuJoCo."""
    if not answers:
        found = [name for name in ("EGL", "OSMesa") if ctypes.util.find_library(name)]
        detail = f"no MuJoCo; libraries to render without a display: {', '.join(found) or 'none'}"
        advice = "for simulators: make setup-aloha, make setup-libero or make setup-metaworld"
        return CheckResult("rendering", "absent", detail, advice)
    failures = {name: failure for name, (_, failure) in answers.items() if failure}
    fails, works = "; ".join(f"{name}: {why}" for name, why in failures.items()), sorted(answers.keys() - failures)
    if not works:
        advice = "apt-get install libegl1 libosmesa6 libgl1-mesa-dri (or make setup-rendering)"
        return CheckResult("rendering", "bad", f"MuJoCo cannot render without a display ({fails})", advice)
    detail = f"MuJoCo renders without a display: {', '.join(works)}{f' ({fails})' if fails else ''}"
    return CheckResult("rendering", "good", detail)


def probe(name: str) -> Any:
    """What a probe finds; it raises if something is broken."""
    kind, _, what = name.partition(" ")
    if kind == "import":
        importlib.import_module(_MODULES.get(what, what.replace("-", "_")))
    elif kind == "devices":
        return probe_devices()
    elif kind == "rendering":
        probe_rendering()
    else:
        probe_video(kind, "libsvtav1" if what == "av1" else "h264")
    return None


def probe_devices() -> list[list[Any]]:
    """The platform, kind and memory of each device."""
    import jax
    import jax.numpy as jnp

    for device in jax.devices():
        if int(jax.device_put(jnp.arange(5), device).sum()) != 10:
            raise RuntimeError(f"{device} does not compute what it should")
    return [[one.platform, one.device_kind, (one.memory_stats() or {}).get("bytes_limit")] for one in jax.devices()]


def probe_video(verb: str, encoder: Literal["h264", "libsvtav1"]) -> None:
    import av
    import numpy as np

    from pirl.data.lerobot.video import CODEC_NAMES, encode_video

    if verb == "read":
        av.Codec(CODEC_NAMES[encoder], "r")
    else:
        frames = np.linspace(0, 255, 3 * 64 * 64 * 3).astype(np.uint8).reshape(3, 64, 64, 3)
        encode_video(frames, fps=10, codec=encoder)


def probe_rendering() -> None:
    import mujoco

    floor = '<geom type="plane" size="9 9 1" rgba="1 1 1 1"/>'
    model = mujoco.MjModel.from_xml_string(f'<mujoco><worldbody><light pos="0 0 3"/>{floor}</worldbody></mujoco>')
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, 32, 32) as renderer:
        renderer.update_scene(data)
        if not renderer.render().max():
            raise RuntimeError("the image is black")


if __name__ == "__main__":
    path, *probes = sys.argv[1:]
    with open(path, "w", buffering=1) as answers:  # a file, since libraries print what they like
        for one in probes:
            found, failure = None, ""
            try:
                found = probe(one)
            except Exception as error:
                failure = f"{type(error).__name__}: {in_one_line(error)}"
            answers.write(json.dumps([one, found, failure]) + "\n")
