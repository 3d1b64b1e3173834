"""Who it talks to: OpenPI checkpoints. Each name is loaded when it is used."""

from typing import TYPE_CHECKING

from pirl.lazy import lazy_names

if TYPE_CHECKING:
    from pirl.interop.agreement import check_agreement
    from pirl.interop.comparing import Difference, check_values, compare
    from pirl.interop.norm_stats import NormStats, read_norm_stats, write_norm_stats
    from pirl.interop.reading import (
        Checkpoint,
        check_fit,
        check_match,
        find_params,
        load_policy,
        open_checkpoint,
        resolve_config,
    )
    from pirl.interop.writing import OWN_KEYS, check_target, resolve_target, save_checkpoint, save_policy

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "agreement": ("check_agreement",),
        "comparing": (
            "Difference",
            "check_values",
            "compare",
        ),
        "norm_stats": (
            "NormStats",
            "read_norm_stats",
            "write_norm_stats",
        ),
        "reading": (
            "Checkpoint",
            "check_fit",
            "check_match",
            "find_params",
            "load_policy",
            "open_checkpoint",
            "resolve_config",
        ),
        "writing": (
            "OWN_KEYS",
            "check_target",
            "resolve_target",
            "save_checkpoint",
            "save_policy",
        ),
    },
)
