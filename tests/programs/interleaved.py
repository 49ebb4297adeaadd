"""`python -m mlm` on a mesh whose hosts interleave as those of v4:2x2x2 in jax.make_mesh's: 0, 1, 0, 1, ..."""

import sys

from jax.sharding import Mesh

from mlm import __main__
from mlm.training import sharding

make_mesh = sharding.make_mesh


def interleaved(**axes) -> Mesh:
    mesh = make_mesh(**axes)  # on CPU in the order of the hosts
    hosts = len({device.process_index for device in mesh.devices.flat})
    devices = mesh.devices.reshape(hosts, -1).T.reshape(mesh.devices.shape)
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


if __name__ == "__main__":
    sharding.make_mesh = interleaved
    sys.exit(__main__.main(sys.argv[1:]))
