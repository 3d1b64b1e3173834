"""What happens to the runs of a soak. Each fault says what was odd about how the process took it, or nothing."""

import contextlib
import errno
import functools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from soak.runs import Place, Segment, lines_in, states

DISK_MIB = 96  # of the small disk: a run needs a quarter of it
_GRACE = 300.0  # seconds for a process to end by itself, on a machine with other work
_HOURS = 12


class UncleanError(Exception):
    """The process did not do what it has to do, whether or not the run can go on."""


class NotInjectedError(Exception):
    """The fault did not come to pass: the run was over before, or this machine does not allow it."""


@dataclass(frozen=True)
class Scene:
    """A run under way, and what chance has in store for it."""

    place: Place
    run: Path
    segment: Segment
    chance: random.Random


def kill(scene: Scene) -> str | None:
    """kill -9, at any moment: some come in the middle of a save, some before the first update."""
    scene.segment.kill()
    return None


def terminate(scene: Scene) -> str | None:
    """SIGTERM: it has to save, say so, and end with 0."""
    scene.segment.process.send_signal(signal.SIGTERM)
    code = scene.segment.finish(_GRACE)
    if code == 0 and "continue with --resume" in scene.segment.words and states(scene.run):
        return None
    if code in (0, -signal.SIGTERM) and "done after" in scene.segment.words:
        raise NotInjectedError("the run was just over")
    raise UncleanError(f"after SIGTERM it ended with {code}")


def fill_disk(scene: Scene) -> str | None:
    """No room for another byte: it has to end with a message, and leave what it had saved."""
    ballast = scene.run.parent / "ballast"
    try:
        with ballast.open("ab", buffering=0) as file:
            # Again and again: what the run deletes would make room for what it writes.
            scene.segment.wait(lambda: _fill(file.fileno()), _GRACE)
            ended = scene.segment.finish(0)
    finally:
        ballast.unlink(missing_ok=True)
    if ended == 0:
        raise NotInjectedError("the run had written everything")
    if ended is None:
        raise UncleanError(f"it went on for {_GRACE:.0f} s on a full disk")
    return "on a full disk it ended with a traceback" if "Traceback" in scene.segment.words else None


def corrupt(scene: Scene) -> str | None:
    """A file of the newest state is cut or overwritten while the run is down."""
    scene.segment.kill()
    if len(states(scene.run)) < 2:
        raise NotInjectedError("there is no other state to go on from")
    files = sorted(path for path in states(scene.run)[-1].rglob("*") if path.is_file() and path.stat().st_size)
    # Most bytes are those of arrays, most files are small ones about them.
    largest = max(files, key=lambda path: path.stat().st_size)
    damage(largest if scene.chance.random() < 0.5 else scene.chance.choice(files), scene.chance)
    return None


def delete_cache(scene: Scene) -> str | None:
    """The cache vanishes under the run, which goes on; then it is killed, and finds no cache when it starts again."""
    shutil.rmtree(scene.place.cache, ignore_errors=True)
    time.sleep(5 * scene.chance.random())
    code = scene.segment.process.poll()
    scene.segment.kill()
    shutil.rmtree(scene.place.cache, ignore_errors=True)
    return None if code in (None, 0) else f"without its cache it ended with {code}"


def shift_clock(scene: Scene) -> str | None:
    """The wall clock jumps by hours, forward and back, under the run, which goes on."""
    seen = Path(f"{scene.place.clock}.seen")
    for _ in range(3):
        seconds = scene.chance.randrange(-_HOURS * 3600, _HOURS * 3600)
        scene.place.clock.write_text(str(seconds))
        line = f"{scene.segment.process.pid} {seconds}\n"
        if not scene.segment.wait(functools.partial(_holds, seen, line), _GRACE):
            break
    else:
        return None
    if scene.segment.process.poll() in (None, 0):
        raise NotInjectedError("the run did not look at its clock any more")
    return f"after a jump of its clock it ended with {scene.segment.process.poll()}"


FAULTS: dict[str, Callable[[Scene], str | None]] = {
    "kill -9": kill,
    "SIGTERM": terminate,
    "full disk": fill_disk,
    "damaged checkpoint": corrupt,
    "deleted cache": delete_cache,
    "clock jumps": shift_clock,
}


def moment(fault: str, run: Path, segment: Segment, line: int, chance: random.Random) -> Callable[[], bool]:
    """When a fault strikes: around a line of the metrics; kill -9 also while starting, or while a state is written."""
    if fault == "kill -9":
        choice, after = chance.random(), 20 * chance.random()
        if choice < 0.25:
            return lambda: segment.seconds > after
        if choice < 0.5:
            return lambda: segment.is_learning and any((run / "checkpoints").glob(".*.partial*"))
    needed = 2 if fault == "damaged checkpoint" else 0
    return lambda: segment.is_learning and lines_in(run) >= line and len(states(run)) >= needed


def damage(file: Path, chance: random.Random) -> None:
    """Cut a file, or change some of its bytes."""
    content = bytearray(file.read_bytes())
    if chance.random() < 0.5:
        file.write_bytes(content[: chance.randrange(len(content))])
        return
    start = chance.randrange(len(content))
    for index in range(start, min(len(content), start + chance.randrange(1, 65))):
        content[index] ^= chance.randrange(1, 256)
    file.write_bytes(content)


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A disk of its own that can be filled without harm to others."""
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "soak", str(directory)], check=True, capture_output=True
    )
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, capture_output=True)


def can_mount(directory: Path) -> bool:
    """Whether there can be a small disk here."""
    try:
        with small_disk(directory):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _holds(file: Path, line: str) -> bool:
    return file.exists() and line in file.read_text()


def _fill(file: int) -> bool:
    """Write until there is no room; never done before the process has ended."""
    with contextlib.suppress(OSError):
        while True:
            try:
                os.write(file, bytes(1 << 16))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                os.write(file, bytes(1))  # what is left of the last page
    return False
