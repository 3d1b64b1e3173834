"""Compiled programs that outlive the process, so that a second start does not wait for the compiler."""

import jax

from pirl.files import cache_directory


def use_compilation_cache() -> None:
    """Keep compiled programs in pirl's cache directory, unless the user has chosen another place."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
