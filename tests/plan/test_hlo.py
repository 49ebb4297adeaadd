"""Parsing a compiled text, and its cost: a text written by hand, with numbers to count by hand."""

from pathlib import Path

import pytest

from mlm.plan import cost_model, hlo, topology

TEXT = Path(__file__).with_name("step.hlo").read_text()
# A device of v5e: 1,000 cycles are 665 ns; 544.9 bytes of memory a cycle; on 2x4, two links of 33.27 bytes a cycle.
MEMORY, LINKS = 819e9 / (197e12 / 131_072), 2 * 50e9 / (197e12 / 131_072)  # bytes a cycle


@pytest.fixture(scope="module")
def counted() -> cost_model.Cost:
    return cost_model.estimate(hlo.parse(TEXT), topology.find("v5e:2x4"))


def test_loops_run_as_often_as_their_bounds_say(counted):
    """The outer one from 2 to 6, four times; the inner one three times in each: 4 x (3 x 100 + 7) = 1,228."""
    assert counted.cycles["compiler"] == 4 * (3 * 100 + 7) + 50_000, "the dearest branch of the conditional is 50,000"
    where = ("forward", "roberta/encoder/layer/*/output/dense", "mlm/training/train.py:7")
    assert counted.groups[where] == [1228, 16], "layers are one, and our line stands for the library's under it"


def test_a_noted_trip_count_comes_first():
    noted = TEXT.replace("body=%outer_body", 'body=%outer_body, backend_config={"known_trip_count":{"n":"10"}}')
    assert cost_model.estimate(hlo.parse(noted), topology.find("v5e:2x4")).cycles["compiler"] == 10 * 307 + 50_000


def test_a_loop_of_unknown_length_is_reported():
    unknown = TEXT.replace("compare(%get-tuple-element.2, %constant.2), direction=LT", "is-finite(%p.3)")
    found = cost_model.estimate(hlo.parse(unknown), topology.find("v5e:2x4"))
    assert found.cycles["compiler"] == 307 + 50_000 and found.uncosted["loop of unknown length, counted once"] == 1


def test_kernels_cost_what_they_declare(counted):
    assert counted.cycles["kernels"] == 131_072_000 / 131_072, "the FLOPs, longer than the bytes"
    assert counted.uncosted == {"kernel jit(step)/bare": 1}
    assert counted.groups["backward", "roberta/encoder/layer/*/attention/self", "mlm/training/train.py:7"] == [1000, 1]


@pytest.mark.parametrize(("name", "cycles"), [("forward", 123), ("backward", 204)])
def test_an_attention_kernel_costs_the_cycles_of_its_schedule(name, cycles):
    """16 rows, 3 blocks of 2 heads, rows of 128 tokens, on a v5e."""
    text = TEXT.replace("self/pallas_call", f"self/fused_attention_{name}_0/pallas_call")
    text = text.replace(
        "kernel_metadata={\n", "kernel_metadata={}}, operand_layout_constraints={f32[16,3,2,128]{3,2,1,0}\n"
    )
    assert cost_model.estimate(hlo.parse(text), topology.find("v5e:2x4")).cycles["kernels"] == 16 * 3 * 2 * cycles


def test_other_instructions_cost_their_bytes(counted):
    assert counted.cycles["bytes"] == pytest.approx((4 * 1000 * 1000 + 40) / MEMORY)


def test_copies_cost_what_nothing_hides(counted):
    """4 MB take 7,341 cycles; the loops beside them 1,228."""
    assert counted.cycles["waits"] == pytest.approx(4e6 / MEMORY - 1228)


def test_collectives(counted):
    """The gather of 128,000 bytes runs beside 50,000 cycles; the reduction of 4,096 bytes over 4 stands alone.

    A second reduction, of 96 bytes over 8, runs on a SparseCore, and nothing runs beside it.
    """
    gather, reduction = counted.collectives["all-gather"], counted.collectives["all-reduce"]
    assert (gather["count"], gather["overlapping"], gather["bytes"], gather["exposed"]) == (1, 1, 128_000, 0)
    assert gather["cycles"] == pytest.approx(128_000 * 7 / 8 / LINKS)
    assert (reduction["count"], reduction["overlapping"], reduction["bytes"]) == (2, 1, 4096 + 96)
    assert reduction["exposed"] == reduction["cycles"] == pytest.approx((4096 * 2 * 3 / 4 + 96 * 2 * 7 / 8) / LINKS)
    assert counted.cycles["collectives"] == reduction["exposed"]
    alone = TEXT.replace('"estimated_cycles":"50000"', '"estimated_cycles":"500"')
    found = cost_model.estimate(hlo.parse(alone), topology.find("v5e:2x4")).collectives["all-gather"]
    assert found["exposed"] == pytest.approx(gather["cycles"] - 500)


def test_everything_is_in_a_group(counted):
    cycles = sum(cycles for cycles, _ in counted.groups.values())
    assert cycles == pytest.approx(counted.total - counted.cycles["waits"])
    assert sum(counted.parts.values()) == pytest.approx(counted.total), "and in a part"
    expected = {"attention": 1000, "feed-forward": 1228, "collectives": counted.cycles["collectives"]}
    assert {name: counted.parts[name] for name in expected} == pytest.approx(expected)


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
    instruction = hlo.Instruction("%x", "f32[]", "all-reduce", "%y", f", {written}, dimensions={{0}}")
    assert hlo.group_size(instruction, 8) == size


def test_sizes_of_shapes():
    assert hlo.size("(f32[2,3]{1,0:T(8,128)}, /*index=5*/(u32[], bf16[4]{0}), pred[7], s4[3])") == 24 + 4 + 8 + 7 + 2
    assert hlo.elements("(f32[2]{0:T(8)}, (u32[], s32[4]{0}))") == ["f32[2]{0:T(8)}", "(u32[], s32[4]{0})"]
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule nothing")


@pytest.mark.parametrize(
    ("op_name", "part", "module"),
    [
        ("jit(step)/transpose(jvp(lm_head))/dense/dot_general", "backward", "lm_head/dense"),
        (
            "jit(step)/transpose(jvp(RobertaForMaskedLMModule))/RobertaForMaskedLMModule.encode/roberta/encoder/layer/0/"
            "0.feed_forward/jvp(RobertaForMaskedLMModule)/RobertaForMaskedLMModule.encode/roberta/encoder/layer/0/"
            "0.feed_forward/checkpoint/rematted_computation/0.block/intermediate/dense/dot_general",
            "recompute",
            "roberta/encoder/layer/*/intermediate/dense",
        ),
        ("", "update", "(unnamed)"),
    ],
)
def test_groups(op_name, part, module):
    instruction = hlo.Instruction("%x", "f32[]", "add", "", f', metadata={{op_name="{op_name}" stack_frame_id=7}}')
    program = hlo.Module("", {}, {}, {"7": "a.py:1"})
    assert cost_model.group(program, instruction) == (part, module, "a.py:1")


@pytest.mark.parametrize(("rows", "cycles"), [(4096, 2 * 4096 * 1024 * 2048 / 540_672), (8, 4_243_456 / 1832)])
def test_on_a_gpu_a_fused_product_takes_its_flops_or_its_bytes(rows, cycles):
    """[rows, 1024] x [1024, 2048] in bfloat16, of an H100: 540,672 FLOPs and 1,832 bytes a cycle."""
    product = f"bf16[{rows},1024] parameter(0)", "bf16[1024,2048] parameter(1)"
    axes = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = f"""
%fused (a: bf16[], b: bf16[]) -> bf16[] {{
  %a = {product[0]}
  %b = {product[1]}
  ROOT %dot = bf16[{rows},2048] dot(%a, %b), {axes}
}}

ENTRY %main (x: bf16[], y: bf16[]) -> bf16[] {{
  %x = {product[0]}
  %y = {product[1]}
  ROOT %fusion = bf16[{rows},2048] fusion(%x, %y), kind=kCustom, calls=%fused
}}
"""
    place = topology.Topology("h100:1", topology.FAMILIES["h100"], (1,), [None])
    assert cost_model.estimate(hlo.parse(text), place).total == pytest.approx(cycles, rel=1e-3)
