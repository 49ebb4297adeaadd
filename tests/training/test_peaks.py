from mlm.training import peaks


def test_peaks_are_per_device_of_jax():
    assert peaks.peak_flops("TPU v4") == 275e12
    assert 2 * peaks.peak_flops("TPU v3") == 123e12, "jax counts its two cores"
    assert 2 * peaks.peak_flops("TPU v2") == 46e12
    assert 2 * peaks.peak_flops("TPU7x") == 2307e12
    assert peaks.peak_flops("TPU v5 lite") == peaks.peak_flops("TPU v5e") == 197e12
    assert peaks.peak_flops("TPU v6 lite") == 918e12
    assert peaks.peak_flops("NVIDIA H200") == 989e12
    assert peaks.peak_flops("cpu") is None
