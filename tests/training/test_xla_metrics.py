"""What XLA did: compilations as jax reports them, executions, and the devices' waits."""

import random
import threading
import time

import jax
import jax.numpy as jnp

from mlm.training import xla_metrics


def compile_double(number: float):
    def double_it(x):
        return 2 * x + number

    return jax.jit(double_it)(jnp.arange(3.0))


def test_compilations_are_counted_until_the_end():
    """A program that is compiled again, by another function of the same text, comes from the persistent cache."""
    numbers = [random.random() for _ in range(2)]  # no earlier run of the tests has cached them
    compile_double(0.5)  # with what it calls
    with xla_metrics.Compilations() as compilations:
        for number in (numbers[0], *numbers):
            compile_double(number)
    compile_double(random.random())
    assert (compilations.counts["programs"], compilations.counts["from_cache"]) == (3, 1)
    assert compilations.counts["seconds"] > 0


class Output:
    """Of a step that ends when it is told to."""

    def __init__(self):
        self.end = threading.Event()

    def block_until_ready(self):
        self.end.wait(10)
        raise RuntimeError("as of a step that failed")


def test_devices_wait_only_without_a_step():
    waits = xla_metrics.Waits()
    output = Output()
    waits.running.put(output)
    time.sleep(0.03)
    waits.add("input_wait")
    assert waits.seconds == {"input_wait": 0, "host_wait": 0}, "the step ran all the time"
    output.end.set()
    while waits.running.unfinished_tasks:
        time.sleep(0.001)
    time.sleep(0.05)
    waits.add("input_wait")
    time.sleep(0.03)
    waits.add("host_wait")
    assert waits.seconds["input_wait"] >= 0.05 and waits.seconds["host_wait"] >= 0.03
    waits.running.put(None)
