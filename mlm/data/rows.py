"""The documents of a shard -> its rows, as config.shards.rows says.

    concatenated  all tokens, one document after the other, cut into rows without padding
    lines         a document a row, cut at the row's length: run_mlm's --line_by_line
    documents     documents packed best fit decreasing (Ding et al., 2024, "Fewer Truncations Improve Language
                  Modeling"), whole if they fit into a row; longer ones in pieces, each with cls and sep

Dimensions: D documents, P pieces of documents, N rows, L tokens in a row, T tokens.
"""

import heapq
from typing import NamedTuple

import numpy as np

from mlm.config_rules import DOCUMENTS

WINDOW = 2**21  # tokens that are packed, and in memory, together; a block more at most


class Rows(NamedTuple):
    """Some documents as rows. A piece is a document, or what lines keep of it, or one of those that it is cut into."""

    ids_NxL: np.ndarray
    tokens_N: np.ndarray  # without padding
    document_P: np.ndarray  # in the order of the rows
    start_P: np.ndarray  # the place of the piece's first token, counted through the rows
    cut_tokens: int  # that are not in the row where their document starts


def concatenate(
    rest_T: np.ndarray, ids_T: np.ndarray, sizes_D: np.ndarray, length: int
) -> tuple[Rows, np.ndarray]:
    """Returns the rows of documents that follow the tokens `rest_T`, and the tokens of the last, partial row."""
    start_D = len(rest_T) + np.cumsum(sizes_D) - sizes_D
    ids_T = np.concatenate([rest_T, ids_T])
    ids_T, rest_T = np.split(ids_T, [len(ids_T) - len(ids_T) % length])
    cut_tokens = int(np.maximum(start_D % length + sizes_D - length, 0).sum())
    ids_NxL = ids_T.reshape(-1, length)
    document_P = np.arange(len(sizes_D))
    return Rows(ids_NxL, np.full(len(ids_NxL), length), document_P, start_D, cut_tokens), rest_T


def arrange(kind: str, ids_T: np.ndarray, sizes_D: np.ndarray, *, length: int, pad_id: int) -> Rows:
    """Returns the padded rows of documents of `sizes_D` tokens, as "lines" or "documents"."""
    room = length - 2  # without cls and sep
    count_D = (
        np.maximum(-(-(sizes_D - 2) // room), 1) if kind == DOCUMENTS else np.ones_like(sizes_D)
    )
    document_P = np.repeat(np.arange(len(sizes_D)), count_D)
    first_P = room * (np.arange(len(document_P)) - np.repeat(np.cumsum(count_D) - count_D, count_D))
    size_P = np.minimum(sizes_D[document_P] - first_P, length)
    row_P = np.arange(len(document_P))
    if kind == DOCUMENTS:
        row_P = best_fit(size_P, length)
        # In the order of their first documents, so that the first rows are a fair sample of all.
        row_P = np.argsort(np.argsort(np.unique(row_P, return_index=True)[1]))[row_P]
    order_P = np.argsort(row_P, kind="stable")
    document_P, first_P, size_P, row_P = (
        column[order_P] for column in (document_P, first_P, size_P, row_P)
    )
    tokens_N = np.bincount(row_P, size_P).astype(np.int64)
    end_P = np.cumsum(size_P)
    begin_P = end_P - size_P  # in all rows' tokens
    stop_P = np.cumsum(sizes_D)[document_P]  # in ids_T
    start_P = stop_P - sizes_D[document_P]
    source_T = np.arange(size_P.sum()) + np.repeat(start_P + first_P - begin_P, size_P)
    source_T[begin_P] = start_P
    source_T[end_P - 1] = stop_P - 1  # cls and sep, of all pieces of a document
    ids_NxL = np.full((len(tokens_N), length), pad_id, ids_T.dtype)
    ids_NxL[np.arange(length) < tokens_N[:, None]] = ids_T[source_T]
    place_P = row_P * length + begin_P - (np.cumsum(tokens_N) - tokens_N)[row_P]
    return Rows(ids_NxL, tokens_N, document_P, place_P, int(np.maximum(sizes_D - length, 0).sum()))


def best_fit(sizes_P: np.ndarray, length: int) -> np.ndarray:
    """Returns the row of each piece: the largest first, each goes where it leaves the least room, or opens a row."""
    # heaps: of several such rows, the first
    rows_with_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0
    count = 0  # bit r of `rooms`: some row has room for r more tokens
    order_P = np.argsort(-sizes_P, kind="stable")
    row_P = np.zeros(len(sizes_P), np.int64)
    for piece, size in zip(order_P.tolist(), sizes_P[order_P].tolist(), strict=True):
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            row = heapq.heappop(rows_with_room[room])
            rooms ^= 0 if rows_with_room[room] else 1 << room
        else:
            room = length
            row = count
            count = count + 1
        row_P[piece] = row
        heapq.heappush(rows_with_room[room - size], row)
        rooms |= 1 << (room - size)
    return row_P
