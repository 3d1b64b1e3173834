"""Settings for the whole suite, made before JAX starts."""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# How long an example takes says more about the machine than about the code.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# The suite compiles far more than it computes: leave out LLVM's optimizer and the newer, slower way to emit fused loops,
# which take most of that time. Eight devices in one process let sharding be tested anywhere. What somebody has set stays.
given = os.environ.get("XLA_FLAGS", "")
for name, value in {
    "--xla_backend_optimization_level": 0,
    "--xla_cpu_use_fusion_emitters": "false",
    "--xla_cpu_parallel_codegen_split_count": 1,
    "--xla_force_host_platform_device_count": 8,
}.items():
    given += "" if name in given else f" {name}={value}"
os.environ["XLA_FLAGS"] = given.strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What one worker, or a process that a test starts, has compiled the others read. Workers find the variable set.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="pirl-compiled-")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


@pytest.fixture
def unchecked_signatures() -> Iterator[None]:
    """The suite checks every call against its signature; this lets stand-ins for arrays, and bad input, through."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def fresh_modules(monkeypatch):
    """Modules of examples come from where a test puts them, though another test may have loaded them from elsewhere."""
    names = [file.stem for file in (Path(__file__).parents[1] / "examples").glob("*/*.py")]
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = {name: sys.modules.pop(name, None) for name in names}
    yield
    for name, module in loaded.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture
def one_device(monkeypatch):
    """Let the first device be all there are."""
    import jax
    from jax.sharding import AxisType

    def mesh(fsdp_devices):
        axes = (AxisType.Auto, AxisType.Auto)
        return jax.make_mesh((1, 1), ("data", "fsdp"), axis_types=axes, devices=jax.devices()[:1])

    monkeypatch.setattr("pirl.training.setup.make_mesh", mesh)
