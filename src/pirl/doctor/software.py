"""Python, the packages that pirl needs, and those that it can use."""

import sys
from collections.abc import Iterator, Mapping
from importlib import metadata, resources
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import pirl
from pirl.doctor.findings import Finding
from pirl.doctor.probes import Answer

# Where the name of the module is not that of the package.
_MODULES = {"orbax-checkpoint": "orbax.checkpoint", "pillow": "PIL", "pyyaml": "yaml"}
_PURPOSES = {
    "aloha": "the ALOHA simulator",
    "hub": "datasets of the Hugging Face hub by their id",
    "libero": "the LIBERO simulator",
    "metaworld": "the Meta-World simulator",
    "plan": "pirl plan for TPUs",
    "ray": "rollouts on many machines",
    "sweep": "pirl sweep",
    "tensorboard": "metrics in TensorBoard",
    "trackio": "metrics in Trackio",
    "wandb": "metrics in Weights & Biases",
}
# Simulators come with what the system needs to render, which pip cannot install.
_SIMULATORS = ("aloha", "libero", "metaworld")
_FOR_DEVELOPERS = ("dev", "docs")


def needed_packages() -> list[Requirement]:
    """What pirl cannot do without, as its installation says."""
    requirements = map(Requirement, metadata.requires("pirl") or [])
    return [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": ""})]


def module_of(package: str) -> str:
    """What one imports of a package."""
    return _MODULES.get(package, package.replace("-", "_"))


def pinned_versions() -> dict[str, str]:
    """The versions that pirl's tests run with, by package, of those that this Python can have."""
    versions = {}
    for line in resources.files("pirl.doctor").joinpath("tested.txt").read_text().splitlines():
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate():
            versions[pin.name] = str(pin.specifier).removeprefix("==")
    return versions


def examine_python() -> Iterator[Finding]:
    """The interpreter, and pirl itself."""
    wanted = metadata.metadata("pirl")["Requires-Python"]
    version = ".".join(map(str, sys.version_info[:3]))
    fits = SpecifierSet(wanted).contains(version, prereleases=True)
    advice = "" if fits else f"Install a Python {wanted}, and pirl with it."
    detail = f"{version}, {sys.executable}"
    yield Finding("software", "python", "good" if fits else "bad", detail, advice, needed=True)
    place = Path(pirl.__file__).parent
    yield Finding("software", "pirl", "good", f"{pirl.__version__}, {place}", needed=True)


def examine_packages(imports: Answer) -> Iterator[Finding]:
    """The packages that pirl needs: there, of a version that fits, and importable."""
    tested = pinned_versions()
    failures = _failed_imports(imports)
    for wanted in needed_packages():
        finding = _examine_package(wanted, tested.get(wanted.name))
        failure = failures.get(module_of(wanted.name))
        if finding.state == "good" and failure:
            advice = f"pip install --force-reinstall '{wanted}'"
            finding = Finding("software", wanted.name, "bad", f"cannot be imported: {failure}", advice, needed=True)
        yield finding


def _examine_package(wanted: Requirement, tested: str | None) -> Finding:
    advice = f"pip install '{wanted}'"
    version = installed_version(wanted.name)
    if version is None:
        return Finding("software", wanted.name, "bad", "not installed", advice, needed=True)
    if not wanted.specifier.contains(version, prereleases=True):
        detail = f"{version}; pirl needs {wanted.specifier}"
        return Finding("software", wanted.name, "bad", detail, advice, needed=True)
    detail = f"{version}, as tested" if version == tested else f"{version}; tested with {tested or 'no version'}"
    return Finding("software", wanted.name, "good", detail, needed=True)


def _failed_imports(imports: Answer) -> Mapping[str, str]:
    failures = {line["module"]: line["error"] for line in imports.said if "error" in line}
    if imports.failure and not imports.said:
        raise RuntimeError(f"Python does not start: {imports.failure}")
    if imports.failure:
        # The one that was begun last took the process with it, or never came back.
        failures[imports.said[-1]["module"]] = imports.failure
    return failures


def examine_extras() -> Iterator[Finding]:
    """What `pip install 'pirl[…]'` adds: installed or not, and of a version that fits."""
    for extra in sorted(metadata.metadata("pirl").get_all("Provides-Extra") or []):
        if extra not in _FOR_DEVELOPERS:
            yield _examine_extra(extra)


def how_to_install(extra: str) -> str:
    """What to type for an extra."""
    install = f"pip install 'pirl[{extra}]'"
    return f"make setup-{extra} (or {install})" if extra in _SIMULATORS else install


def missing_packages(extra: str) -> list[str] | None:
    """What an extra needs and is not installed; None where this installation of pirl does not know the extra."""
    packages = _of_extra("pirl", extra)
    # Of jax[tpu], it is what jax calls tpu that is asked for.
    inner = [
        entry
        for package in packages
        for name in package.extras
        if installed_version(package.name)
        for entry in _of_extra(package.name, name)
    ]
    missing = [entry.name for entry in [*packages, *inner] if installed_version(entry.name) is None]
    return missing if packages else None


def _of_extra(package: str, extra: str) -> list[Requirement]:
    """What an extra of a package adds, on this machine."""
    requirements = map(Requirement, metadata.requires(package) or [])
    marked = ((entry, entry.marker) for entry in requirements if entry.marker is not None)
    return [entry for entry, marker in marked if marker.evaluate({"extra": extra}) > marker.evaluate({"extra": ""})]


def _examine_extra(extra: str) -> Finding:
    packages = _of_extra("pirl", extra)
    install = how_to_install(extra)
    versions = {package.name: installed_version(package.name) for package in packages}
    purpose = _PURPOSES.get(extra, f"what pirl[{extra}] is for")
    if missing_packages(extra):
        return Finding("extras", extra, "absent", f"not installed: {purpose}", install)
    detail = f"{purpose}: {', '.join(f'{name} {version}' for name, version in versions.items())}"
    unfit = [entry for entry in packages if not entry.specifier.contains(versions[entry.name] or "", prereleases=True)]
    if unfit:
        detail += f"; pirl needs {', '.join(f'{entry.name} {entry.specifier}' for entry in unfit)}"
        return Finding("extras", extra, "bad", detail, install)
    return Finding("extras", extra, "good", detail)


def installed_version(package: str) -> str | None:
    """The version that is installed, if it is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
