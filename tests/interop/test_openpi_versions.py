"""What pirl writes is read by the versions OpenPI pins (Orbax 0.11.13, JAX 0.5.3), in an environment of their own."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from builders import MICRO_LORA, random_parameters
from pirl.interop.checkpoint import save_checkpoint

# OpenPI's loading, in its order: the metadata gives the tree, the tree is restored as arrays, a trailing `value` is
# dropped if every path has one.
READER = """
import json, sys
import jax, numpy as np
import orbax.checkpoint as ocp

path, out = sys.argv[1:]
with ocp.PyTreeCheckpointer() as checkpointer:
    tree = {"params": checkpointer.metadata(path)["params"]}
    arguments = jax.tree.map(lambda _: ocp.ArrayRestoreArgs(restore_type=np.ndarray), tree)
    params = checkpointer.restore(path, ocp.args.PyTreeRestore(item=tree, restore_args=arguments))["params"]
flat = {tuple(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
if all(path[-1] == "value" for path in flat):
    flat = {path[:-1]: leaf for path, leaf in flat.items()}
np.savez(out, **{"/".join(path): np.asarray(leaf).astype(np.float32) for path, leaf in flat.items()})
print(json.dumps({"/".join(path): str(leaf.dtype) for path, leaf in flat.items()}))
"""


@pytest.fixture(scope="module")
def openpi_python(tmp_path_factory):
    environment = tmp_path_factory.mktemp("openpi") / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pins = ["jax==0.5.3", "jaxlib==0.5.3", "orbax-checkpoint==0.11.13", "numpy==1.26.4"]
    subprocess.run([environment / "bin" / "pip", "install", "--quiet", *pins], check=True)
    return environment / "bin" / "python"


@pytest.mark.slow
@pytest.mark.parametrize("style", ["released", "trained"])
def test_orbax_of_openpi_reads_our_checkpoints(openpi_python, tmp_path, style):
    params = random_parameters(MICRO_LORA)
    mixed = {path: value.astype(jnp.bfloat16) if "einsum" in path else value for path, value in params.items()}
    save_checkpoint(tmp_path / "policy", mixed, MICRO_LORA, style=style)
    command = [openpi_python, "-c", READER, tmp_path / "policy" / "params", tmp_path / "read.npz"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert json.loads(output.splitlines()[-1]) == {path: str(value.dtype) for path, value in mixed.items()}
    with np.load(tmp_path / "read.npz") as read:
        assert set(read) == set(mixed)
        for path, value in mixed.items():
            np.testing.assert_array_equal(read[path], np.asarray(value, np.float32), err_msg=path)
