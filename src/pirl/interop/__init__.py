"""Who pirl talks to: OpenPI checkpoints and their statistics."""

from pirl.interop.comparing import Difference, check_values, compare
from pirl.interop.norm_stats import NormStats, read_norm_stats, write_norm_stats
from pirl.interop.reading import Checkpoint, check_fit, load_policy, open_checkpoint, resolve_config
from pirl.interop.writing import OWN_KEYS, check_target, save_checkpoint, save_policy

__all__ = [
    "OWN_KEYS",
    "Checkpoint",
    "Difference",
    "NormStats",
    "check_fit",
    "check_target",
    "check_values",
    "compare",
    "load_policy",
    "open_checkpoint",
    "read_norm_stats",
    "resolve_config",
    "save_checkpoint",
    "save_policy",
    "write_norm_stats",
]
