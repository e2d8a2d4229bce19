"""Which sample goes into which row: equal numbers of rows on every data rank, rows of similar length."""

import heapq
from collections.abc import Sequence

import numpy as np

ROWS_PER_TRY = 50
"""Of so many rows one more is added where a plan does not fit: few tries, and at most 2% rows too many."""


def assign_rows(lengths: Sequence[int], *, tokens_per_row: int, data_parallel_size: int) -> list[list[int]]:
    """Sample indices of each row; the number of rows is a multiple of `data_parallel_size`, and rows may be empty.

    Longest sample first into the emptiest row (which balances), with as many rows as the budget asks for, and more
    where that does not fit. A sample above the budget gets a row to itself.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    oversized = order[sizes[order] > tokens_per_row]
    regular = order[len(oversized) :]
    # No two samples of more than half a row share one.
    num_rows = max(-(-int(sizes[regular].sum()) // tokens_per_row), int((sizes[regular] * 2 > tokens_per_row).sum()))
    while True:
        total = _round_up(max(1, num_rows + len(oversized)), data_parallel_size)
        rows = _spread(sizes, regular, num_rows=total - len(oversized), tokens_per_row=tokens_per_row)
        if rows is not None:
            return [[int(index)] for index in oversized] + rows
        num_rows += 1 + num_rows // ROWS_PER_TRY


def _spread(sizes: np.ndarray, order: np.ndarray, *, num_rows: int, tokens_per_row: int) -> list[list[int]] | None:
    """`order` (descending sizes) over `num_rows` rows, or None where one does not fit the emptiest row."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    heap = [(0, row) for row in range(num_rows)]
    for index in order.tolist():
        if not heap or heap[0][0] + sizes[index] > tokens_per_row:
            return None
        used, row = heap[0]
        rows[row].append(index)
        heapq.heapreplace(heap, (used + int(sizes[index]), row))
    return rows


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
