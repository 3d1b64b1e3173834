"""LeRobot's side of `loader.py`: the CPU time of one sample of LeRobotDataset, with each video backend that works here.

Run by the Python of an environment that has LeRobot, never by pirl's; it prints one JSON object per backend.
"""

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
import time
import warnings
from types import ModuleType
from typing import Any

WARM_UP = 10  # samples before the clock starts: they open the files and fill LeRobot's cache of decoders


def main() -> None:
    """Measure every backend and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", help="a LeRobot dataset of the format the installed LeRobot reads")
    parser.add_argument("--samples", type=int, default=200, help="how many are timed (default: 200)")
    parser.add_argument("--horizon", type=int, default=20, help="steps in an action chunk (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the samples (default: 0)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:  # LeRobot converts the whole dataset to arrow files and keeps them here
        os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=home)
        warnings.simplefilter("ignore")  # torchvision and datasets have much to say, none of it about time
        lerobot = import_lerobot()
        importlib.import_module("torch").set_num_threads(1)  # as in the workers of a torch DataLoader
        metadata = lerobot.LeRobotDatasetMetadata("benchmark/dataset", root=options.root)
        for backend in backends(metadata):
            dataset = lerobot.LeRobotDataset(
                "benchmark/dataset",
                root=options.root,
                delta_timestamps=delta_timestamps(metadata, options.horizon),
                video_backend=backend,
            )
            milliseconds = cpu_milliseconds(dataset, options.samples, options.seed)
            result = {"backend": backend, "cpu_ms_per_sample": round(milliseconds, 3), "samples": options.samples}
            print(json.dumps(result), flush=True)


def backends(metadata: Any) -> list[str]:
    """The video backends that work here; a dataset that stores images has no use for one."""
    if not metadata.video_keys:
        return ["image"]
    try:
        importlib.import_module("torchcodec.decoders")
    except (ImportError, OSError, RuntimeError) as error:
        print(f"torchcodec (it needs the system's FFmpeg) does not work here: {error}", file=sys.stderr)
        return ["pyav"]
    return ["torchcodec", "pyav"]


def delta_timestamps(metadata: Any, horizon: int) -> dict[str, list[float]]:
    """What Q-learning on action chunks asks for: the chunk with its rewards, the observations before and after it."""
    chunk = [step / metadata.fps for step in range(horizon)]
    ends = [0.0, horizon / metadata.fps]
    observations = ("observation.state", *metadata.camera_keys)
    return dict.fromkeys(("action", "next.reward", "next.done"), chunk) | dict.fromkeys(observations, ends)


def cpu_milliseconds(dataset: Any, samples: int, seed: int) -> float:
    """CPU time of one sample, all threads of this process together (LeRobotDataset starts no process of its own)."""
    order = random.Random(seed)
    for _ in range(WARM_UP):
        dataset[order.randrange(len(dataset))]
    indices = [order.randrange(len(dataset)) for _ in range(samples)]
    start = time.process_time()
    for index in indices:
        dataset[index]
    return 1000 * (time.process_time() - start) / samples


def import_lerobot() -> ModuleType:
    """LeRobot's dataset module, also beside a torchvision whose compiled operators do not fit the installed torch.

    Such a torchvision stops at its first missing operator. LeRobot needs none of them: declared is enough.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        signature = "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor"
        importlib.import_module("torch").library.define("torchvision::nms", signature)
    return importlib.import_module("lerobot.datasets.lerobot_dataset")


if __name__ == "__main__":
    main()
