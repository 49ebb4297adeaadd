"""Rows of tokens as the bytes of a TFRecord file, without TensorFlow, which takes seconds to start in each process.

A record is a tf.train.Example with the features attention_mask and input_ids, an Int64List each, as transformers'
TF-TPU example writes them. Formats: tensorflow.org/tutorials/load_data/tfrecord (framing, masked CRC-32C) and
protobuf.dev/programming-guides/encoding (varints, length-delimited fields).

Dimensions: N rows, L tokens in a row.
"""

import re
import struct

import numpy as np
from google_crc32c import value as crc32c

from mlm.errors import DamageError


def encode(ids_NxL: np.ndarray, tokens_N: np.ndarray | None = None) -> list[bytes]:
    """Returns the framed record of each row: attention_mask is 1 at its first `tokens_N`, by default at all."""
    length = ids_NxL.shape[1]
    tokens = [length] * len(ids_NxL) if tokens_N is None else tokens_N.tolist()
    masks = {
        n: _feature(b"attention_mask", b"\x01" * n + b"\x00" * (length - n)) for n in set(tokens)
    }
    flat, sizes_N = _varints(ids_NxL)
    ends = np.cumsum(sizes_N)
    rows = (
        flat[end - size : end] for end, size in zip(ends.tolist(), sizes_N.tolist(), strict=True)
    )
    return [
        _framed(_delimited(0x0A, masks[n] + _feature(b"input_ids", next(rows)))) for n in tokens
    ]


def _varints(ids_NxL: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Returns the varints of all numbers (0 to 2^35 - 1), row after row, and the number of bytes of each row."""
    numbers = ids_NxL.astype(np.uint64)
    longest = max(int(numbers.max(initial=0)).bit_length() + 6, 7) // 7  # bytes
    groups = (numbers[..., None] >> np.arange(0, 7 * longest, 7, dtype=np.uint64)) & np.uint64(0x7F)
    sizes_NxL = 1 + (
        numbers[..., None] >= np.uint64(1) << np.arange(7, 7 * longest, 7, dtype=np.uint64)
    ).sum(-1)
    is_used = np.arange(longest) < sizes_NxL[..., None]
    is_continued = np.arange(longest) < sizes_NxL[..., None] - 1
    encoded = groups.astype(np.uint8) | (is_continued.astype(np.uint8) << 7)
    return encoded[is_used].tobytes(), sizes_NxL.sum(-1)


def _feature(name: bytes, packed: bytes) -> bytes:
    """Returns a map entry of Features.feature: the name and an Int64List."""
    value = _delimited(0x12, _delimited(0x1A, _delimited(0x0A, packed)))
    return _delimited(0x0A, _delimited(0x0A, name) + value)


def _delimited(tag: int, body: bytes) -> bytes:
    size = bytearray([tag])
    number = len(body)
    while number > 0x7F:
        size.append(number & 0x7F | 0x80)
        number >>= 7
    size.append(number)
    return bytes(size) + body


def _framed(record: bytes) -> bytes:
    framed = b""
    for data in (struct.pack("<Q", len(record)), record):
        crc = crc32c(data)
        framed += data + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
    return framed


def first_length(data: bytes, file: str) -> int:
    """Returns L of the first record of a file, from the file's first bytes; DamageError if there is none."""
    varint = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
    header = re.search(
        rb"input_ids\x12%b\x1a%b\x0a(%b)" % (varint, varint, varint), data, re.DOTALL
    )
    if header:
        size = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(header[1]))
        packed = data[header.end() : header.end() + size]
        if len(packed) == size:
            return sum(byte < 0x80 for byte in packed)
    raise DamageError(f"{file}: its first record is not a tf.train.Example with input_ids.")
