"""What is learned from: LeRobot datasets in, chunk batches out."""

from pirl.data.checking import check_dataset
from pirl.data.chunks import ChunkBatch, ChunkShape, Trajectories, cut_chunks
from pirl.data.frames.cache import FrameCacheConfig, open_frames
from pirl.data.frames.entries import delete_frame_cache, list_frame_caches
from pirl.data.labels import Label, parse_episodes, read_csv, read_labels, write_labels
from pirl.data.labels import merge as merge_labels
from pirl.data.lerobot.dataset import Dataset, open_dataset
from pirl.data.lerobot.writer import DatasetWriter
from pirl.data.loader import Loader
from pirl.data.outcomes import OutcomeConfig, Outcomes, read_outcomes
from pirl.data.policy_io import PolicyIO
from pirl.data.prepare import Selection, dataset_norm_stats, load_trajectories
from pirl.data.problems import BrokenDatasetError, Problem
from pirl.data.replay import ReplayBuffer
from pirl.data.replay_episodes import Episode
from pirl.data.robots import Robot, get_robot, list_robots, load_robot
from pirl.data.sampler import AnchorStream, ChunkSampler, DatasetSource
from pirl.data.statistics import compute_norm_stats, degenerate_dimensions
from pirl.data.summary import summarize

__all__ = [
    "AnchorStream",
    "BrokenDatasetError",
    "ChunkBatch",
    "ChunkSampler",
    "ChunkShape",
    "Dataset",
    "DatasetSource",
    "DatasetWriter",
    "Episode",
    "FrameCacheConfig",
    "Label",
    "Loader",
    "OutcomeConfig",
    "Outcomes",
    "PolicyIO",
    "Problem",
    "ReplayBuffer",
    "Robot",
    "Selection",
    "Trajectories",
    "check_dataset",
    "compute_norm_stats",
    "cut_chunks",
    "dataset_norm_stats",
    "degenerate_dimensions",
    "delete_frame_cache",
    "get_robot",
    "list_frame_caches",
    "list_robots",
    "load_robot",
    "load_trajectories",
    "merge_labels",
    "open_dataset",
    "open_frames",
    "parse_episodes",
    "read_csv",
    "read_labels",
    "read_outcomes",
    "summarize",
    "write_labels",
]
