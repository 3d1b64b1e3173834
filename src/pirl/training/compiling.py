"""JAX as pirl's commands start it: compiled programs are kept, and on the CPU memory is, too."""

import contextlib
import ctypes

import jax

from pirl.files import cache_directory

# mallopt's names in malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def prepare_jax() -> None:
    """Keep compiled programs in pirl's cache directory, unless the user chose another; and keep freed memory.

    On the CPU an update takes its temporary buffers from malloc, tens of MB each time. glibc maps them anew and gives
    them back, and the page faults cost up to a third of the time.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    if jax.default_backend() == "cpu":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(_M_MMAP_MAX, 0)
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
