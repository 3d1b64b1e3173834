"""What a compiled program moves, read from its text: bytes between devices, and to and from matrix products."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

# Where the number in the name is not that of bits.
_SIZES = {"pred": 1.0}
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_DEFINITION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"\b(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# What each device sends in a ring of n, per byte that goes in.
_SENT = {
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
_PRODUCTS = ("dot", "convolution")


@dataclass
class Traffic:
    """Bytes per device and run: sent to other devices, by kind, and read or written by matrix products."""

    sent: dict[str, float] = field(default_factory=dict)
    products: float = 0.0

    def add(self, other: "Traffic", times: int = 1) -> None:
        """Count what another program moves, so many times."""
        for kind, size in other.sent.items():
            self.sent[kind] = self.sent.get(kind, 0.0) + times * size
        self.products += times * other.products


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    rest: str


def read_traffic(text: str, devices: int) -> Traffic:
    """Go through a compiled program as it would run: loops as often as is known of them, of branches the dearest."""
    entry, computations = _parse(text)
    known: dict[str, Traffic] = {}

    def total(name: str) -> Traffic:
        if name not in known:
            known[name] = found = Traffic()
            shapes = {instruction.name: instruction.shape for instruction in computations[name]}
            for instruction in computations[name]:
                _count(instruction, shapes, devices, name, found)
                for times, branches in _callees(instruction, computations):
                    found.add(max((total(branch) for branch in branches), key=_weight), times)
        return known[name]

    return total(entry)


def _count(instruction: _Instruction, shapes: dict[str, str], devices: int, where: str, found: Traffic) -> None:
    kind = instruction.kind.removesuffix("-start")
    if kind not in _SENT and kind not in _PRODUCTS:
        return
    size = sum((_bytes(shapes.get(operand, "")) for operand in instruction.operands), 0.0)
    if kind in _PRODUCTS:
        found.products += size + _bytes(instruction.shape)
        return
    if where.startswith("async_collective_fusion"):
        return  # TPUs: a product that runs while something is gathered has that in it, too; it is counted where it starts
    # TPUs do both in one: of the sum over devices each keeps its part.
    kind = "reduce-scatter" if where.startswith("all-reduce-scatter") else kind
    sent = size * _SENT[kind](_group_size(instruction.rest, devices))
    found.sent[kind] = found.sent.get(kind, 0.0) + sent


def _callees(
    instruction: _Instruction, computations: dict[str, list[_Instruction]]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """What an instruction runs: how often, and one of which computations."""
    if instruction.kind.endswith(("-done", "-update")) or instruction.name.startswith("async-collective-done"):
        return  # what was started is counted there
    if branches := _BRANCHES.search(instruction.rest):
        yield 1, tuple(name.strip().lstrip("%") for name in branches[1].split(","))
        return
    names = tuple(name for name in _CALLED.findall(instruction.rest) if name in computations)
    if instruction.kind == "conditional":
        yield 1, names
        return
    times = _trips(instruction.rest, computations) if instruction.kind == "while" else 1
    for name in names:
        yield times, (name,)


def _trips(rest: str, computations: dict[str, list[_Instruction]]) -> int:
    """How often a loop runs: as annotated, or up to the one number its condition compares with; else once."""
    if known := _TRIPS.search(rest):
        return int(known[1])
    condition = re.search(r"\bcondition=%?([\w.\-]+)", rest)
    instructions = computations.get(condition[1], []) if condition else []
    limits = [i.operands[0] for i in instructions if i.kind == "constant" and i.shape.startswith("s32[]")]
    compares = any(i.kind == "compare" and "direction=LT" in i.rest for i in instructions)
    return int(limits[0]) if compares and len(limits) == 1 else 1


def _group_size(rest: str, devices: int) -> int:
    """How many devices take part together, in any of the ways the compiler writes it."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(iota[2])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{('[^}]*)\}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    return devices


def _parse(text: str) -> tuple[str, dict[str, list[_Instruction]]]:
    computations: dict[str, list[_Instruction]] = {}
    entry = name = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := _HEADER.match(line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif definition := _DEFINITION.match(line):
            computations[name].append(_instruction(definition[1], line[definition.end() :]))
    return entry, computations


def _instruction(name: str, line: str) -> _Instruction:
    end = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    kind, _, _ = line[end:].strip().partition("(")
    opening = line.index("(", end)
    closing = _closing(line, opening)
    operands = tuple(word.strip().split(" ")[-1].lstrip("%") for word in line[opening + 1 : closing].split(","))
    return _Instruction(name, line[:end], kind, operands, line[closing + 1 :])


def _closing(text: str, opening: int) -> int:
    """Where the bracket that opens here is closed."""
    depth = 0
    for match in re.finditer(r"[()]", text[opening:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return opening + match.start()
    return len(text)


def _bytes(shape: str) -> float:
    return sum(
        _item(dtype) * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in _ARRAY.findall(shape)
    )


def _item(dtype: str) -> float:
    if dtype in _SIZES:
        return _SIZES[dtype]
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) / 8 if bits else 0.0


def _weight(traffic: Traffic) -> float:
    return sum(traffic.sent.values()) + traffic.products
