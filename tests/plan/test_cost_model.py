"""The cost of a compiled text: one written by hand, with numbers to count by hand."""

from pathlib import Path

import pytest

from mlm.plan import cost_model, hlo, topology

TEXT = Path(__file__).with_name("step.hlo").read_text()
# A device of v5e: 1,000 cycles are 665 ns; 544.9 bytes of memory a cycle; on 2x4, two links of 33.27 bytes a cycle.
MEMORY = 819e9 / (197e12 / 131_072)
LINKS = 2 * 50e9 / (197e12 / 131_072)  # bytes a cycle


def cost_of(*changes: tuple[str, str]) -> cost_model.Cost:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return cost_model.Cost(hlo.parse(text), topology.find("v5e:2x4"))


@pytest.fixture(scope="module")
def counted() -> cost_model.Cost:
    return cost_of()


def test_loops_run_as_often_as_their_bounds_say(counted):
    """The outer one from 2 to 6, four times; the inner one three times in each: 4 x (3 x 100 + 7) = 1,228."""
    assert counted.cycles["compiler"] == 4 * (3 * 100 + 7) + 50_000


@pytest.mark.parametrize(
    ("bound", "other"),
    [
        ("compare(%get-tuple-element.2, %constant.2), direction=LT", "is-finite(%p.3)"),
        ("constant(2)", "parameter(2)"),
    ],
)
def test_a_loop_of_unknown_length_is_counted_once_and_reported(bound, other):
    found = cost_of((bound, other))
    assert found.cycles["compiler"] == 307 + 50_000
    assert found.uncosted["loop of unknown length, counted once"] == 1


def test_kernels_cost_what_they_declare_and_what_has_no_cost_is_reported(counted):
    assert counted.cycles["kernels"] == 131_072_000 / 131_072, "the FLOPs, longer than the bytes"
    assert counted.uncosted == {"kernel jit(step)/bare": 1}
    found = cost_of(
        ('"bytes_accessed":"1000"', '"bytes_accessed":"999999999"'), ("ConcatBitcast", "mine")
    )
    assert found.cycles["kernels"] == pytest.approx(999_999_999 / MEMORY)
    assert found.uncosted["call of mine"] == 1


def test_other_instructions_cost_their_bytes(counted):
    """A result and an operand; of a gathered operand no more than the result."""
    assert counted.cycles["bytes"] == pytest.approx((4 * 1000 * 1000 + 40) / MEMORY)
    found = cost_of(
        ("u32[1000,1000]{1,0} rng", "u32[10]{0} rng"),
        ("generator(%kernel.1)", "generator(%copy-done.1)"),
    )
    assert found.cycles["bytes"] == pytest.approx(2 * 40 / MEMORY)


def test_collectives(counted):
    """The gather of 128,000 bytes runs beside 50,000 cycles; the reduction of 4,096 bytes over 4 stands alone.

    A second reduction, of 96 bytes over 8, runs on a SparseCore, and nothing runs beside it.
    """
    gather = counted.collectives["all-gather"]
    reduction = counted.collectives["all-reduce"]
    assert (gather["count"], gather["overlapping"], gather["bytes"]) == (1, 1, 128_000)
    assert gather["cycles"] == pytest.approx(128_000 * 7 / 8 / LINKS) and gather["exposed"] == 0
    assert (reduction["count"], reduction["overlapping"], reduction["bytes"]) == (2, 1, 4096 + 96)
    cycles = (4096 * 2 * 3 / 4 + 96 * 2 * 7 / 8) / LINKS
    assert reduction["exposed"] == reduction["cycles"] == pytest.approx(cycles)
    assert counted.cycles["collectives"] == reduction["exposed"]
    assert sum(counted.cycles.values()) == counted.total
    found = cost_of(('"estimated_cycles":"50000"', '"estimated_cycles":"500"'))
    exposed = found.collectives["all-gather"]["exposed"]
    assert exposed == pytest.approx(gather["cycles"] - 500)


@pytest.mark.parametrize(
    ("opcode", "shape", "whole"),
    [
        ("all-gather-start", "(bf16[8,1000]{1,0}, bf16[64,1000]{1,0})", 128_000),
        ("reduce-scatter", "bf16[1,1000]{1,0}", 16_000),
        ("all-reduce-start", "bf16[8,1000]{1,0}", 16_000),
    ],
)
def test_the_bytes_of_a_collective_are_those_of_the_whole_array(opcode, shape, whole):
    started = f"%x.1 = {shape} {opcode}(%p.4), channel_id=77\n  ROOT %rng"
    kind = opcode.removesuffix("-start")
    assert (
        cost_of(("ROOT %rng", started)).collectives[kind]["bytes"]
        - cost_of().collectives[kind]["bytes"]
        == whole
    )


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", 2),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=3,'axis_2'=5] {'axis_2','axis_1'}", 15),
        ("channel_id=1", 8),
    ],
)
def test_groups_of_a_collective(written, size):
    instruction = hlo.Instruction(
        "%x", "f32[]", "all-reduce", "%y", f", {written}, dimensions={{0}}"
    )
    assert hlo.group_size(instruction, 8) == size


def test_sizes_of_shapes():
    assert (
        hlo.size("(f32[2,3]{1,0:T(8,128)}, /*index=5*/(u32[], bf16[4]{0}), pred[7], s4[3])")
        == 24 + 4 + 8 + 7 + 2
    )
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule nothing")
