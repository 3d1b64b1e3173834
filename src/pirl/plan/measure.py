"""What an update needs on some hardware: compiled there from shapes alone, in a process of its own, and cached."""

import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pirl.agents.common import Agent
from pirl.agents.config import ACRLPDConfig, RIPTConfig
from pirl.agents.ript import RolloutBatch
from pirl.config import RLTrainConfig, check_layout, format_config, load_config, override_config, to_plain
from pirl.data import ChunkBatch, load_robot
from pirl.errors import TrainingError, UserError
from pirl.files import cache_directory, write_file
from pirl.models import Observation
from pirl.models.config import SIGLIP_SO400M, get_model_config
from pirl.plan.topologies import Topology, environment, find_devices, parse_topology
from pirl.processes import format_exit, last_lines
from pirl.training.dry_run import kind_of
from pirl.training.setup import Setup, agent_shapes, compile_updates
from pirl.training.sharding import named_leaves

Say = Callable[[str], None]
SHARD = "shard one copy of the learner over all devices"
# In words, as options, and the bytes of the learner by kind; none if it is not the learner that becomes smaller.
Change = tuple[str, str, dict[str, int]]


@dataclass(frozen=True)
class Measurement:
    """What an update needs on a topology; sizes are bytes on each device."""

    topology: Topology
    parameters: dict[str, int]
    state: dict[str, int]  # the learner by kind
    batch: int
    padding: int  # of arguments, which some devices store in tiles
    temporary: dict[str, float]  # by compiled batch size: all but the learner and the batch
    flops: int  # of all devices
    sent: dict[str, float] | None  # by kind of collective; None if the memory is too small to compile
    products: float  # read and written by matrix products
    refused: str  # the compiler's message if the memory is too small
    changes: list[Change]
    seconds: float  # to compile


def measure_run(config: RLTrainConfig, topology: Topology, say: Say, *, fresh: bool = False) -> Measurement:
    """Measure in another process, or read from the cache unless `fresh`; `here` is not cached."""
    here = topology.name == "here"
    if not here:
        check_layout(config, topology.count)
    file = cache_directory() / "plans" / f"{cache_key(config, topology)}.json"
    if file.is_file() and not fresh and not here:
        say("was compiled before")
        answer = file.read_text()
    else:
        answer = _measure_apart(config, topology, say)
        if not here:
            write_file(file, answer)
    values = json.loads(answer)
    # Simulated devices stand in for any chip.
    values["topology"] = Topology(**values["topology"]) if here else topology
    values["changes"] = [tuple(change) for change in values["changes"]]
    return Measurement(**values)


def cache_key(config: RLTrainConfig, topology: Topology) -> str:
    """The same for what compiles to the same program."""
    plain = to_plain(config)
    fields = [plain[name] for name in ("name", "model", "agent", "batch_size", "fsdp_devices")]
    target = f"{topology.count} simulated" if topology.simulated else topology.name
    packages = {"jax", "jaxlib", "libtpu", "optax", "flax"}
    versions = sorted((each.name, each.version) for each in metadata.distributions() if each.name in packages)
    facts = [fields, config.health.loss_limit, load_robot(config.data.robot).to_dict(), target, versions]
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16)
    for room in ("agents", "config", "data", "models", "plan", "training"):
        for file in sorted((Path(__file__).parents[1] / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _measure_apart(config: RLTrainConfig, topology: Topology, say: Say) -> str:
    """Run `main` in a process where JAX starts for the topology, and where the compiler may run out of memory."""
    with tempfile.TemporaryDirectory(prefix="pirl-plan-") as directory:
        answer, log = Path(directory, "answer"), Path(directory, "log")
        Path(directory, "config.yaml").write_text(format_config(config))
        command = [sys.executable, "-m", "pirl.plan.measure", topology.name, directory]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        env = os.environ | environment(topology)
        with log.open("wb") as errors, subprocess.Popen(command, stderr=errors, env=env, **pipes) as process:
            try:
                for line in process.stdout or ():
                    say(line.rstrip())
            except BaseException:
                process.kill()
                raise
        if answer.is_file() and process.returncode == 0:
            return answer.read_text()
        if answer.is_file() and process.returncode == UserError.exit_code:
            raise UserError(answer.read_text())
        killed = "most likely, this machine has too little memory for the compiler"
        why = killed if process.returncode == -9 else " ".join(last_lines(log, 3))
        raise TrainingError(f"{topology.name}: the compiler gave up ({format_exit(process.returncode)}): {why}.")


def main(topology: str, directory: str) -> int:
    """Measure the configuration in a directory, print progress, and leave the answer, or what is wrong, there."""

    def exit_with_parent() -> None:
        os.read(0, 1)  # sys.stdin would abort the interpreter at its end, for this thread holds its lock
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    try:
        config, say = load_config(Path(directory, "config.yaml"), None), functools.partial(print, flush=True)
        answer, code = json.dumps(asdict(measure(config, parse_topology(topology), say))), 0
    except UserError as error:
        answer, code = str(error), UserError.exit_code
    write_file(Path(directory, "answer"), answer)
    return code


def measure(config: RLTrainConfig, topology: Topology, say: Say) -> Measurement:
    """Compile the update for two batch sizes, on devices that JAX was started for."""
    topology, devices = find_devices(topology)
    check_layout(config, len(devices))
    setup, began = abstract_setup(config, devices), time.perf_counter()
    agent, batch = abstract_agent(setup), abstract_batch(setup)
    say("tracing the update")
    traced = trace_update(setup)
    flops = count_flops(traced.jaxpr)
    unit = len(devices) * config.agent.accumulation_steps
    other = unit * (config.batch_size // unit // 2 or 2)
    # No products by Triton: their tiles are chosen by trying them on a GPU, and by guessing some do not compile.
    cublas = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_gemm_rewrite_size_threshold": 0}
    options: Any = cublas if topology.described_gpu else None
    temporary: dict[str, float] = {}
    padding, sent, products, refused = 0, None, 0.0, ""
    for size in (config.batch_size, other):
        say(f"compiling the update for a batch of {size}")
        if size == other:
            traced = trace_update(replace(setup, config=replace(config, batch_size=size)))
        try:
            compiled = traced.lower().compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            message = str(error).splitlines()[0]
            refused = refused if size == other else message
            if needed := read_exhausted(message):
                temporary[str(size)] = needed
            continue
        memory: Any = compiled.memory_analysis()
        # The learner is updated in place.
        extra = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
        temporary[str(size)] = float(memory.temp_size_in_bytes + extra)
        if size == config.batch_size:
            padding = max(0, memory.argument_size_in_bytes - device_bytes(agent) - device_bytes(batch))
            sent = read_traffic(compiled.as_text() or "", len(devices))
            products = sent.pop("products", 0.0)
    say("looking for what could be changed")
    return Measurement(
        topology=topology,
        parameters=cast(Any, agent).parameter_counts(),
        state=state_bytes(agent),
        batch=device_bytes(batch),
        padding=padding,
        temporary=temporary,
        flops=flops,
        sent=sent,
        products=products,
        refused=refused,
        changes=list_changes(config, devices),
        seconds=time.perf_counter() - began,
    )


def read_exhausted(message: str) -> float | None:
    """Bytes that a compiler says the program needs, where that is too much."""
    found = re.search(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT])", message)
    return float(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1) if found else None


def list_changes(config: RLTrainConfig, devices: list[jax.Device]) -> list[Change]:
    """What needs less memory, the smallest changes first."""
    agent, name = config.agent, "policy_optimizer" if isinstance(config.agent, ACRLPDConfig) else "optimizer"
    flag, spread = name.replace("_", "-"), replace(config, fsdp_devices=len(devices))
    moments = {name: replace(getattr(agent, name), moments_dtype="bfloat16")}
    frozen = tuple(dict.fromkeys((*agent.freeze, "vision", "language")))
    small, expert = (replace(spread, agent=replace(agent, **fields)) for fields in (moments, {"freeze": frozen}))
    variants = [("keep the optimizer's moments in bfloat16", f"--agent.{flag}.moments-dtype bfloat16", small)]
    if not config.model.language.has_lora and frozen != agent.freeze:
        variants.append(("train only the action expert", f"--agent.freeze {','.join(frozen)}", expert))
        if config.model.vision == SIGLIP_SO400M:
            lora = lora_options(config)
            how = " ".join(f"--{name.replace('_', '-')} {str(value).lower()}" for name, value in lora.items())
            variants.append(("train only low-rank updates (LoRA)", how, override_config(spread, lora)))
    variants, sharing = [variant for variant in variants if variant[2] != spread], ""
    if spread != config:
        variants, sharing = [(SHARD, "", spread), *variants], f" --fsdp-devices {len(devices)}"
    changes = [
        (what, f"{how}{sharing}".strip(), state_bytes(abstract_agent(abstract_setup(changed, devices))))
        for what, how, changed in variants
    ]
    if config.model.remat != "full":
        changes.append(("recompute activations in the backward pass instead of keeping them", "--model.remat full", {}))
    return changes


def lora_options(config: RLTrainConfig) -> dict[str, Any]:
    """The fields that make a full-size policy train OpenPI's LoRA variant: its model preset, and no EMA."""
    model, name = config.model, "pi05_lora" if config.model.pi05 else "pi0_lora"
    lora = get_model_config(name)
    kept = ("action_dim", "action_horizon", "max_token_len", "discrete_state_input", "remat")
    changed = {
        f"model.{field}": getattr(model, field) for field in kept if getattr(model, field) != getattr(lora, field)
    }
    ema = "policy_ema_decay" if isinstance(config.agent, ACRLPDConfig) else "ema_decay"
    return {"model.preset": name, **changed, f"agent.{ema}": None}


def abstract_setup(config: RLTrainConfig, devices: list[jax.Device]) -> Setup:
    """The setup of a run on these devices without its data, which decides no shape."""
    shape = (len(devices) // config.fsdp_devices, config.fsdp_devices)
    mesh = jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    # A robot may leave its width to the dataset; it is at most the model's.
    action_dim = load_robot(config.data.robot).action_dim or config.model.action_dim
    nothing: Any = dict.fromkeys(("policy_io", "norm_stats", "trajectories", "weights", "held_out"))
    return Setup(config=config, action_dim=action_dim, mesh=mesh, **nothing)


def trace_update(setup: Setup) -> jax.stages.Traced:
    """The trainer's update, traced with shapes in the place of arrays."""
    key = _sharded(jax.eval_shape(lambda: jax.random.key(0)), setup, PartitionSpec())
    update: Any = compile_updates(setup)[0]
    return cast(jax.stages.Traced, update.trace(abstract_agent(setup), abstract_batch(setup), key))


def abstract_agent(setup: Setup) -> Agent:
    return cast(Agent, _sharded(agent_shapes(setup), setup, PartitionSpec()))


def abstract_batch(setup: Setup) -> Any:
    model, agent, shape = setup.config.model, setup.config.agent, setup.shape

    def array(dtype: str, *dimensions: int) -> Any:
        return jax.ShapeDtypeStruct((setup.config.batch_size, *dimensions), dtype)

    tokens = model.max_token_len
    prompt: Any = (array("int32", tokens), array("bool", tokens)) if tokens else (None, None)
    observations = Observation(
        images=dict.fromkeys(model.cameras, array("uint8", *model.image_resolution, 3)),
        image_masks=dict.fromkeys(model.cameras, array("bool")),
        state=array("float32", model.action_dim),
        tokenized_prompt=prompt[0],
        tokenized_prompt_mask=prompt[1],
    )
    chunks: Any = ChunkBatch(
        observations=observations,
        actions=array("float32", shape.chunk, model.action_dim),
        valid=array("bool", shape.chunk),
        rewards=array("float32", shape.horizon),
        next_observations=cast(Any, observations if shape.sees_next else None),
        **dict.fromkeys(("terminals", "masks"), array("bool", shape.horizon)),
        **dict.fromkeys(("next_terminal", "sequence_mask", "success", "human"), array("bool")),
        indicated=cast(Any, (array("int32", 2, tokens), array("bool", 2, tokens)) if shape.indicated else None),
        returns=array("float32") if shape.discount is not None else None,
    )
    batch = chunks
    if isinstance(agent, RIPTConfig):
        guided, cloning = agent.weighting == "guidance", agent.bc_loss_weight > 0
        batch = RolloutBatch(
            chunks=chunks,
            advantages=array("float32"),
            included=array("bool"),
            prompts=prompt if guided else None,
            demonstrations=chunks if cloning else None,
            demonstration_prompts=prompt if guided and cloning else None,
        )
    return _sharded(batch, setup, PartitionSpec(("data", "fsdp")))


def _sharded(tree: Any, setup: Setup, spec: PartitionSpec) -> Any:
    """Shapes with their own sharding, or else this one: without, they would be compiled for this machine."""
    default = NamedSharding(setup.mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or default), tree)


def device_bytes(tree: Any) -> int:
    """Bytes of sharded arrays or shapes on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def state_bytes(agent: Agent) -> dict[str, int]:
    """Bytes of the learner on one device, by kind."""
    found: Counter[str] = Counter()
    for name, leaf in named_leaves(agent).items():
        found[kind_of(name)] += device_bytes(leaf)
    return dict(found)


def count_flops(jaxpr: Any) -> int:
    """FLOPs of matrix products and convolutions, on all devices; of branches the largest counts.

    XLA's own count takes the body of a loop once; here, only a loop of unknown length counts once.
    """
    total = 0
    for equation in jaxpr.eqns:
        name, params, shapes = equation.primitive.name, equation.params, [x.aval.shape for x in equation.invars]
        if name == "dot_general":
            depth = math.prod(shapes[0][axis] for axis in params["dimension_numbers"][0][0])
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
        elif name == "conv_general_dilated":
            depth = math.prod(shapes[1]) // shapes[1][params["dimension_numbers"].rhs_spec[0]]
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
        else:
            values = [each for value in params.values() for each in (value if isinstance(value, tuple) else [value])]
            inner = [count_flops(each) for each in values if isinstance(each, ClosedJaxpr | Jaxpr)]
            total += max(inner) if name == "cond" else sum(inner) * (params["length"] if name == "scan" else 1)
    return total


# What each of n devices in a ring sends, per byte that goes in.
_SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
_CALLED = re.compile(r"\b(?:calls|body|to_apply|\w+_computations?)=(\{[^}]*\}|[\w.%\-]+)")


def read_traffic(text: str, devices: int) -> dict[str, float]:
    """Bytes that each device sends, by kind of collective, and that its matrix products move ("products").

    Read from the text of the compiled program (HLO), which alone has them: loops count as often as they run, of
    branches the largest counts.
    """
    computations: dict[str, dict[str, tuple[str, ...]]] = {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            body = computations[header[1] or header[2]] = {}
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)?(.*)", line):
            body[found[1]] = found.groups()[1:]

    @functools.cache
    def total(name: str) -> Any:
        moved: Any = Counter()
        body = computations[name]
        for own, (shape, opcode, operands, attributes) in body.items():
            kind = opcode.removesuffix("-start")
            # On TPUs, products that overlap with a gather repeat its instruction; and a sum of which each device keeps
            # its part is an all-reduce in a computation of this name.
            if kind == "custom-call" and "__cu" in attributes:  # cuBLAS or cuDNN: the result, then a workspace
                kind, shape = "dot", shape.removeprefix("(").split("}", 1)[0]
            if kind in ("dot", "convolution") or (kind in _SENT and not name.startswith("async_collective_fusion")):
                size = sum(_bytes(body[each][0]) for each in re.findall(r"[\w.\-]+", operands) if each in body)
                if kind not in _SENT:
                    moved["products"] += size + _bytes(shape)
                else:
                    kind = "reduce-scatter" if name.startswith("all-reduce-scatter") else kind
                    moved[kind] += size * _SENT[kind](_group_size(attributes, devices))
            if opcode.endswith(("-done", "-update")) or own.startswith("async-collective-done"):
                continue  # counted where it starts
            called = re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(attributes)))
            inner = [total(each) for each in called if each in computations]
            if opcode == "conditional":
                inner = [max(inner, key=Counter.total)]
            times = _trips(attributes, computations) if opcode == "while" else 1
            for each in inner:
                moved.update({kind: times * size for kind, size in each.items()})
        return moved

    return dict(total("ENTRY "))


def _bytes(shape: str) -> float:
    arrays = re.findall(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", shape)
    return sum(int(bits or 8) / 8 * math.prod(map(int, filter(None, sizes.split(",")))) for bits, sizes in arrays)


def _trips(attributes: str, computations: dict[str, dict[str, tuple[str, ...]]]) -> int:
    """How often a loop runs: as annotated, or the one number that its condition compares with; else once."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', attributes):
        return int(known[1])
    condition = re.search(r"\bcondition=%?([\w.\-]+)", attributes)
    body = list(computations[condition[1]].values()) if condition else []
    limits = [value for shape, opcode, value, _ in body if opcode == "constant" and shape.startswith("s32[]")]
    compares = any(opcode == "compare" and "direction=LT" in rest for _, opcode, _, rest in body)
    return int(limits[0]) if compares and len(limits) == 1 else 1


def _group_size(attributes: str, devices: int) -> int:
    """How many devices take part, in each of the ways XLA writes it."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return listed[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(iota[1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{('[^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2]))
    return devices


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
