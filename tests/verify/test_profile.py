"""The time of a step's parts in a trace of jax's profiler, as each kind of device writes it."""

import contextlib
import pathlib

import jax
import pytest

from mlm.verify import profile

PROGRAM = """
ENTRY %main (x: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %dot.1 = f32[] add(%x, %x), metadata={op_name="jit(step)/jvp(M)/encoder/layer/0/attention/self/query/dot_general"}
  %dot.2 = f32[] add(%x, %x), metadata={op_name="jit(step)/jvp(M)/encoder/layer/0/output/dense/dot_general"}
  %while.3 = f32[] add(%x, %x), metadata={op_name="jit(step)/transpose(jvp(M))/lm_head/while"}
  ROOT %all-reduce.4 = f32[] all-reduce(%x), metadata={op_name="jit(step)/psum"}
}
"""
PLANE = """planes {{ name: "{name}"
  event_metadata {{ key: 1 value {{ id: 1 name: "{dot}" }} }}
  event_metadata {{ key: 2 value {{ id: 2 name: "{loop}" }} }}
  stat_metadata {{ key: 3 value {{ id: 3 name: "hlo_op" }} }}
  lines {{ name: "{line}"
    events {{ metadata_id: 2 offset_ps: 1000000 duration_ps: 9000000 {loop_stat} }}
    events {{ metadata_id: 1 offset_ps: 2000000 duration_ps: 3000000 {dot_stat} }} }} }}
"""


def plane(name: str, line: str, dot: str, loop: str, *, stats=("", "")) -> str:
    dot_stat, loop_stat = (op and f'stats {{ metadata_id: 3 str_value: "{op}" }}' for op in stats)
    return PLANE.format(name=name, line=line, dot=dot, loop=loop, dot_stat=dot_stat, loop_stat=loop_stat)


TPU = plane("/device:TPU:0", "XLA Ops", "%dot.1 = f32[] add(%x, %x)", "%while.3 = f32[] add(%x)")
TPU_MODULES = plane("/device:TPU:0", "XLA Modules", "jit_step", "jit_step")
GPU = plane("/device:GPU:0", "Stream #13(Compute)", "kernel_a", "kernel_b", stats=("dot.1", "while.3"))
CPU = plane("/host:CPU", "tf_XLAEigen/1", "dot.1", "while.3", stats=("dot.1", "while.3"))


@pytest.mark.parametrize(("platform", "text"), [("tpu", TPU + TPU_MODULES), ("gpu", GPU + CPU), ("cpu", CPU)])
def test_operations_are_read_once_without_what_runs_inside_them(platform, text):
    """3 us of a product inside a loop of 9 us; of a GPU's host, whose events are named alike, nothing counts."""
    seconds = profile.Counter()
    for line in profile.operations(jax.profiler.ProfileData.from_text_proto(text), platform):
        seconds.update(profile.exclusive(line))
    assert seconds == {"dot.1": pytest.approx(3e-6), "while.3": pytest.approx(6e-6)}


def test_the_time_of_a_part_is_a_step_s_and_a_device_s(monkeypatch):
    """Three steps on eight devices; what the program does not name is other, and a trace without operations nothing."""

    def time_by_part(*planes: str) -> dict[str, float]:
        def trace(folder, profiler_options):
            xspace = jax.profiler.ProfileData.text_proto_to_serialized_xspace("".join(planes))
            pathlib.Path(folder, "host.xplane.pb").write_bytes(xspace)
            return contextlib.nullcontext()

        monkeypatch.setattr(jax.profiler, "trace", trace)
        return profile.time_by_part(lambda count: None, lambda: PROGRAM)

    others = plane("/host:CPU", "tf_XLAEigen/2", "dot.2", "all-reduce.4", stats=("dot.2", "all-reduce.4"))
    unknown = plane("/host:CPU", "tf_XLAEigen/3", "copy.9", "copy.9", stats=("copy.9", "copy.9"))
    seconds = {"attention": 3, "feed-forward": 3, "embeddings": 0, "head": 6, "other": 9, "optimizer": 0}
    expected = {name: pytest.approx(1e-6 * each / 3 / 8) for name, each in (seconds | {"collectives": 6}).items()}
    assert time_by_part(CPU, others, unknown) == expected
    assert time_by_part(TPU_MODULES) == {}
    assert time_by_part(CPU, plane("/host:CPU", "t", "a", "b", stats=("command_buffer_1", "dot.1"))) == {}


def test_a_gpu_s_kernel_that_begins_before_the_last_one_ends_takes_from_it_what_they_share():
    """As kernels on the stream of an H100 do: 10 us, then 10 us of which the first is shared, then 5 us alone."""
    times = profile.exclusive([(0, 10_000, "dot.1"), (9_000, 19_000, "dot.2"), (20_000, 25_000, "dot.1")])
    assert times == {"dot.1": pytest.approx(14e-6), "dot.2": pytest.approx(10e-6)}
