"""Make a virtual environment with the real LeRobot that reads a format, for tests and benchmarks; pirl needs none."""

import argparse
import subprocess
import sys
from pathlib import Path

# LeRobot's own requirements ask for much that reading a dataset does not need, so these are named one by one. torch
# 2.13.0 is newer than LeRobot declares, and of torchvision the pinned release is the last that LeRobot accepts; it is
# made for an older torch, see import_lerobot in benchmarks/loader_lerobot.py.
LEROBOT = {
    "v2.1": ("lerobot==0.3.3", ["datasets==3.6.0", "jsonlines==4.0.0"]),
    "v3.0": ("lerobot==0.4.4", ["datasets==4.8.5", "accelerate==1.10.1", "pandas==2.3.3"]),
}
NEEDED = ["torch==2.13.0", "numpy==2.2.6", "av==15.1.0", "pillow==12.0.0", "huggingface-hub==0.35.3", "packaging==25.0"]
VIDEO = ["torchvision==0.25.0", "torchcodec==0.13.0"]


def make(version: str, directory: Path) -> Path:
    """Make the environment and return its interpreter; raises CalledProcessError if pip cannot."""
    package, needed = LEROBOT[version]
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    for packages in ([*NEEDED, *needed], ["--no-deps", package, *VIDEO]):
        command = [str(directory / "bin" / "pip"), "install", "--quiet", *packages]
        subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
    return directory / "bin" / "python"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", choices=LEROBOT, help="the dataset format it should read")
    parser.add_argument("directory", type=Path, help="where to make it")
    options = parser.parse_args()
    try:
        print(make(options.version, options.directory))
    except subprocess.CalledProcessError as error:
        sys.exit(f"the environment cannot be made: {error.stderr or error}")
