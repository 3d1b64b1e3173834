"""Sizes and times as people say them."""


def size(count: int | float, digits: int = 1) -> str:
    """Bytes: 512 B, 12.5 KiB, 1.0 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if count >= 1024:
            count, unit = count / 1024, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:,.{digits}f} {unit}"


def duration(seconds: int | float) -> str:
    """A time that somebody waits for: 35 s, 4 min, 2 h 05 min, 3 d 04 h."""
    if round(seconds) < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60:02d} h"


def short_duration(seconds: int | float) -> str:
    """A time that a computation takes: 250 µs, 12.3 ms, 1.25 s."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.3g} µs"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
