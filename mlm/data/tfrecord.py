"""Rows of tokens as the bytes of a TFRecord file, without TensorFlow: it takes seconds to start, and rows one by one.

A record is a tf.train.Example with the features attention_mask and input_ids, an Int64List each, as transformers'
TF-TPU example writes them (prepare_tfrecord_shards.py). Formats: tensorflow.org/tutorials/load_data/tfrecord (framing,
masked CRC-32C) and protobuf.dev/programming-guides/encoding (varints, length-delimited fields).

Dimensions: N rows, L tokens in a row.
"""

from __future__ import annotations

import re
import struct

import numpy as np
from google_crc32c import value as crc32c

from mlm.errors import DamageError


def encode(ids_NxL: np.ndarray) -> list[bytes]:
    """Returns the framed record of each row; every token is real, so attention_mask is all ones."""
    attention = _feature(b"attention_mask", b"\x01" * ids_NxL.shape[1])
    flat, sizes_N = varints(ids_NxL)
    ends = np.cumsum(sizes_N)
    rows = (flat[end - size : end] for end, size in zip(ends.tolist(), sizes_N.tolist(), strict=True))
    return [_framed(_delimited(0x0A, attention + _feature(b"input_ids", row))) for row in rows]


def varints(ids_NxL: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Returns the varints of all numbers (from 0 to 2^35 - 1), row after row, and the bytes that each row takes."""
    numbers = ids_NxL.astype(np.uint64)
    most = max(int(numbers.max(initial=0)).bit_length() + 6, 7) // 7
    groups = (numbers[..., None] >> np.arange(0, 7 * most, 7, dtype=np.uint64)) & np.uint64(0x7F)
    sizes_NxL = np.ones(numbers.shape, np.int64)
    for group in range(1, most):
        sizes_NxL += numbers >= np.uint64(1 << (7 * group))
    used = np.arange(most) < sizes_NxL[..., None]
    more = np.arange(most) < sizes_NxL[..., None] - 1
    encoded = groups.astype(np.uint8) | (more.astype(np.uint8) << 7)
    return encoded[used].tobytes(), sizes_NxL.sum(-1)


def _feature(name: bytes, packed: bytes) -> bytes:
    """Returns an entry of Features.feature: a map entry of the name and an Int64List."""
    value = _delimited(0x12, _delimited(0x1A, _delimited(0x0A, packed)))
    return _delimited(0x0A, _delimited(0x0A, name) + value)


def _delimited(tag: int, body: bytes) -> bytes:
    size, number = bytearray([tag]), len(body)
    while number > 0x7F:
        size.append(number & 0x7F | 0x80)
        number >>= 7
    size.append(number)
    return bytes(size) + body


def _framed(record: bytes) -> bytes:
    size = struct.pack("<Q", len(record))
    return b"".join((size, _masked_crc(size), record, _masked_crc(record)))


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def first_length(data: bytes, file: str) -> int:
    """Returns L of the first record of a file, from the file's first bytes.

    Raises:
      DamageError: there is no such record in them.
    """
    found = re.search(rb"input_ids\x12", data)
    try:
        position = found.end()
        for tag in (None, 0x1A, 0x0A):  # Feature, Int64List, its packed values
            if tag is not None:
                assert data[position] == tag
                position += 1
            size, shift = 0, 0
            while True:
                byte = data[position]
                position += 1
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
        packed = data[position : position + size]
        assert len(packed) == size
        return sum(byte < 0x80 for byte in packed)
    except (AttributeError, IndexError, AssertionError):
        raise DamageError(f"{file}: its first record is no tf.train.Example with input_ids.") from None
