"""Settings for the whole suite, made before JAX starts."""

import os
from collections.abc import Iterator

import pytest

# The suite compiles far more than it computes: leave LLVM's optimiser out, which takes most of that time. Eight devices
# in one process let sharding be tested anywhere.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture
def unchecked_signatures() -> Iterator[None]:
    """The suite checks every call against its signature; this lets stand-ins for arrays, and bad input, through."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
