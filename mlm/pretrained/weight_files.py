"""The weights of a transformers folder: which file transformers would load, and the parameters in it.

A folder may be hostile: it is only ever read as data, a pickle is never opened, and no file outside
it is followed.
"""

import flax.serialization
import jax
import numpy as np
import safetensors.flax
from flax.traverse_util import flatten_dict, unflatten_dict

from mlm import logs
from mlm.errors import InputError
from mlm.model import weights
from mlm.model.module import Params
from mlm.paths import UPath, inside
from mlm.pretrained.locate import (
    MSGPACK_INDEX,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    weight_file,
    weight_files,
)
from mlm.text import printable


def read_params(folder: UPath, body: str, where: str, *, headers: bool = False) -> Params:
    """Returns all parameters of a local folder, float32, by our names, which start with the family's `body`.

    With `headers`, those of safetensors are zeros, which take no memory.
    """
    name = weight_file(weight_files(folder), where)
    try:
        files = [folder / name]
        if name in (SAFETENSORS_INDEX, MSGPACK_INDEX):
            parts = set(logs.read_object(folder / name)["weight_map"].values())
            files = [inside(folder, part) for part in sorted(parts)]
        flat = {}
        if name in (SAFETENSORS, SAFETENSORS_INDEX):
            # numpy's knows no bfloat16
            load_file = _zeros_of if headers else safetensors.flax.load_file
            for file in files:
                flat |= load_file(str(file))
            params = weights.from_torch(flat)
        else:
            for file in files:  # a part of several is flat already
                flat |= flatten_dict(flax.serialization.msgpack_restore(file.read_bytes()), sep="/")
            params = unflatten_dict(flat, sep="/")
        params = jax.tree.map(lambda value: np.asarray(value, np.float32), params)
    # whatever the libraries raise at a file that is not what its name says
    except Exception as error:
        reason = printable(str(error))[:300]
        raise InputError(
            f"{where}: its weights can't be read ({reason}); use an undamaged copy."
        ) from None
    if "embeddings" in params and body not in params:  # of the body alone
        return {body: params}
    if body not in params:
        raise InputError(
            f"{where}: its parameters are named {printable(min(flat))[:120]} and so on; remove the prefix, or save the "
            f"model itself, so that their names start with {body}.embeddings."
        )
    return params


def _zeros_of(file: str) -> dict[str, np.ndarray]:
    """Returns zeros of the shapes in the header of a safetensors file."""
    with safetensors.safe_open(file, framework="np") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
