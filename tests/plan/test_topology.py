"""The TPUs that can be compiled for: every name answers, chips are told from devices, and what is wrong is said."""

import math

import jax
import pytest
from jax.experimental import topologies
from pods import settings

from mlm.errors import InputError
from mlm.model import flops
from mlm.plan import topology

TPUS = [name for name, family in topology.FAMILIES.items() if not family.target]
EVERY = [name for family in TPUS for name in topology.names(family)]


def test_every_listed_name_answers():
    """With one table of peaks, by jax's own name of the device, and as many hosts as the launcher rents.

    libtpu's default for 8 chips of v5e and v6e is two hosts; one rents them as one.
    """
    assert {"v3:32x32", "v4:16x16x16", "v5e:16x16", "v5p:16x20x28", "tpu7x:2x2x1"} <= set(EVERY)
    for name in EVERY:
        place = topology.find(name)
        (family, _, sizes) = name.partition(":")
        assert place.chips == math.prod(map(int, sizes.split("x"))), name
        assert len(place.devices) == place.chips * place.family.cores, name
        assert flops.peak_flops(place.devices[0].device_kind) == place.peak_flops, name
        hosts = len({device.process_index for device in place.devices})
        if family == "tpu7x":  # no TPU VM; GKE's tpu7x-standard-4t has four chips
            assert hosts == place.chips // 4, name
            continue
        prefix = {"v5e": "v5litepod"}.get(family, family)
        accelerator_type = f"{prefix}-{place.chips * settings.GENERATIONS[prefix][0]}"
        rented = settings.Settings(accelerator_type=accelerator_type)
        assert (rented.chips, rented.host_count) == (place.chips, hosts), name
        assert topology.find(accelerator_type).name == name


@pytest.mark.parametrize(("name", "same"), [("v3-8", "v3:2x2"), ("v5e-16", "v5e:4x4")])
def test_accelerator_types_are_slices(name, same):
    assert topology.find(name).name == same


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("v3-7", "v3:2x2"),
        ("v5litepod-3", "v5e:16x16"),
        ("v9:2x2", "tpu7x:2x2x1"),
        ("v5e:3x3", "v5e:2x4"),
        ("v5e", "v5e:2x4"),
        ("h100:9", "h100:8"),
    ],
)
def test_an_unknown_name_gets_the_families_or_the_slices_of_its_own(name, known):
    with pytest.raises(InputError, match=rf"--topology={name}: .*{known}"):
        topology.find(name)


def test_links_of_a_slice():
    """One link along an axis, two where it is closed to a ring; within a chip the memory carries it."""
    rates = {"v5e:2x4": 100e9, "v5e:16x16": 200e9}
    for name, rate in rates.items():
        place = topology.find(name)
        assert place.link_bytes_per_cycle * place.hertz == pytest.approx(rate)
    single = topology.find("v3:1x1")
    assert single.link_bytes_per_cycle == single.hbm_bytes_per_cycle


@pytest.mark.parametrize(
    ("name", "package"),
    [("v5e:2x4", "-r requirements.txt"), ("h100:8", f"jax-cuda12-plugin=={jax.__version__}")],
)
def test_a_missing_compiler_is_one_sentence_with_the_command_that_installs_it(
    monkeypatch, name, package
):
    def missing(*args, **options):
        raise NotImplementedError("no such plugin")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(InputError, match=rf"--topology={name}: .*no such plugin.* {package}"):
        topology.find(name)


@pytest.mark.parametrize(
    ("name", "slices"),
    [
        ("v3:2x2", 1),
        ("v5e:2x4", 2),
        ("v5p:2x2x4", 1),
    ],
)
def test_an_attached_tpu_has_libtpu_s_name(name, slices):
    """Whatever the order of its devices; a CPU has none."""
    place = topology.find(name, slices)
    assert (place.slices, place.chips * place.family.cores) == (slices, len(place.devices))
    attached = topology.attached(place.devices[::-1])
    assert topology.dataclasses.replace(attached, devices=place.devices) == place
    assert topology.attached(jax.devices()) is None


def test_figures_of_a_device_and_of_a_chip():
    v3 = topology.find("v3:2x2")
    assert v3.hbm_bytes_per_cycle * v3.hertz == pytest.approx(450e9)
    assert v3.capacity * 2 == pytest.approx(33.2e9, rel=0.01)
    assert (flops.peak_flops("TPU v4"), 2 * flops.peak_flops("TPU7x")) == (275e12, 2307e12)


def test_slices_of_a_single_host():
    assert len({device.process_index for device in topology.find("v5e:2x4", 2).devices}) == 2
