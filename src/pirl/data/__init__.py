"""What is learned from: LeRobot datasets in, chunk batches out. Each name is imported when it is used."""

from typing import TYPE_CHECKING

from pirl.imports import lazy_names

if TYPE_CHECKING:
    from pirl.data.chunks import ChunkBatch, ChunkShape, Trajectories, gather_chunks
    from pirl.data.frame_cache import FrameCacheConfig, delete_frame_cache, list_frame_caches, open_frames
    from pirl.data.labels import Label, merge_labels, parse_episodes, read_csv, read_labels, write_labels
    from pirl.data.lerobot.reader import Dataset, open_dataset
    from pirl.data.lerobot.writer import DatasetWriter
    from pirl.data.norm_stats import compute_norm_stats, degenerate_dimensions
    from pirl.data.outcomes import OutcomeConfig, Outcomes, read_outcomes
    from pirl.data.policy_io import PolicyIO
    from pirl.data.prepare import Selection, dataset_norm_stats, load_trajectories, summarize
    from pirl.data.problems import BrokenDatasetError, Problem
    from pirl.data.replay import Episode, ReplayBuffer
    from pirl.data.robots import Robot, get_robot, list_robots, load_robot
    from pirl.data.sampler import ChunkIndexSampler, ChunkSampler, DatasetSource, Loader
    from pirl.data.validate import check_dataset, scan_episodes

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
