"""Prompts, videos and pictures: tokenisers, codecs, and GL without a screen."""

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from pirl.doctor.findings import Finding
from pirl.doctor.probes import Answer
from pirl.errors import UserError

# What LeRobot datasets have, and what each is written with.
CODECS = {"h264": "h264", "av1": "libsvtav1"}
_CODEC_ADVICE = "pip install --force-reinstall av (its own wheels have both codecs)"
_RENDERERS = "apt-get install libegl1 libosmesa6 libgl1-mesa-dri (or make setup-rendering)"


def examine_tokenizers() -> Iterator[Finding]:
    """The small vocabulary inside the package, and PaliGemma's, which full-size policies need."""
    from pirl.models import Tokenizer, get_model_config
    from pirl.models.tokenizer import PATH_VARIABLE, find_tokenizer

    words = Tokenizer.for_model(get_model_config("tiny")).vocab_size
    yield Finding("media", "tiny tokeniser", "good", f"{words:,} tokens, inside the package", needed=True)
    name, chosen = "π₀ tokeniser", os.environ.get(PATH_VARIABLE)
    try:
        file = find_tokenizer()
        words = Tokenizer.from_file(file, max_len=48).vocab_size
    except UserError as error:
        first, *more = str(error).splitlines()
        commands = [line.strip() for line in more if "curl" in line]
        if commands:
            detail = "no PaliGemma vocabulary, which full-size policies need (the tiny ones do not)"
            yield Finding("media", name, "absent", detail, f"{commands[0]}  (or set ${PATH_VARIABLE})")
        else:
            advice = f"Correct ${PATH_VARIABLE}, or unset it." if chosen else "Download the file again."
            yield Finding("media", name, "bad", first, advice)
    else:
        yield Finding("media", name, "good", f"{words:,} tokens, {file}")


def examine_codecs(answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Whether PyAV reads and writes the videos that LeRobot datasets have; pirl can do without writing them."""
    for codec, answer in answers.items():
        if not answer.failure:
            yield Finding("media", codec, "good", "PyAV reads and writes it", needed=True)
            continue
        reads = {"step": "read"} in answer.said
        verb = "written" if reads else "read"
        detail = f"videos cannot be {verb}: {answer.failure}"
        yield Finding("media", codec, "bad", detail, _CODEC_ADVICE, needed=not reads)


def backends() -> tuple[str, ...]:
    """The ways to render that are looked at: the one that MUJOCO_GL names, else those that need no screen."""
    chosen = os.environ.get("MUJOCO_GL")
    return (chosen,) if chosen in ("egl", "osmesa") else ("egl", "osmesa")


def has_mujoco() -> bool:
    """Whether MuJoCo is installed; importing it would settle how it renders."""
    return find_spec("mujoco") is not None


def examine_rendering(answers: Mapping[str, Answer]) -> Finding:
    """What came of each way to render, by backend."""
    failures = {backend: _failure(answer) for backend, answer in answers.items()}
    works = [backend for backend, failure in failures.items() if not failure]
    fails = "; ".join(f"{backend}: {failure}" for backend, failure in failures.items() if failure)
    if not has_mujoco():
        opened = f"GL works without a display: {', '.join(works)}" if works else f"GL opens no context ({fails})"
        advice = "for simulators: make setup-aloha, make setup-libero or make setup-metaworld"
        return Finding("media", "rendering", "absent", f"no MuJoCo; {opened}", advice)
    if not works:
        return Finding("media", "rendering", "bad", f"MuJoCo cannot render without a display ({fails})", _RENDERERS)
    detail = f"MuJoCo renders without a display: {', '.join(works)}"
    return Finding("media", "rendering", "good", detail + (f" ({fails})" if fails else ""))


def _failure(answer: Answer) -> str:
    if answer.failure:
        return answer.failure
    (said,) = answer.said
    if said.get("brightest") == 0:
        return "the image is black"
    return "" if said.get("opened", True) else "no context opens"
