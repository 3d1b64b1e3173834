"""OpenPI checkpoints and norm_stats.json. Each name is loaded when it is used."""

from typing import TYPE_CHECKING

from pirl.imports import lazy_names

if TYPE_CHECKING:
    from pirl.interop.checkpoint import Checkpoint, load_policy, open_checkpoint, save_checkpoint, save_policy
    from pirl.interop.norm_stats import NormStats, read_norm_stats, write_norm_stats

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
