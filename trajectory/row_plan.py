"""Which sample goes into which row of which data rank.

    samples -> families (those of one prompt group, neighbours share prefixes) -> pieces -> rows -> data ranks

A family that stays together shares most; one that is cut balances better, and computes the prefix once for each piece.
So the plan is made for several sizes of piece, and the one whose busiest data rank has least to do is taken.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trajectory.prefix_tree import shared_prefix_length, sorted_order

PIECE_SIZES = (1.0, 0.5, 0.25, 0.125)
"""Largest pieces that are tried, beside what their samples share, as a share of the mean cost of a row."""
BALANCED_ENOUGH = 1.01
"""No smaller pieces are tried once the busiest rank has at most this many times its part of what is to be done when
nothing is cut."""
ROWS_PER_TRY = 50
"""Of so many rows one more is added where a plan does not fit: few tries, and at most 2% rows too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """A plan for D data ranks."""

    rows: list[list[list[int]]]
    """[D][M][...] sample indices; as many rows, at least one, on each rank; rows may be empty."""
    costs: list[list[float]]
    """[D][M] in tokens: the row's distinct tokens, and its attention by `pair_cost`."""

    @property
    def balance(self) -> float:
        """Cost of the busiest rank over the mean; 1 where all have as much to do."""
        of_ranks = [sum(costs) for costs in self.costs]
        return max(of_ranks) * len(of_ranks) / max(sum(of_ranks), 1.0)


@dataclass(frozen=True, slots=True)
class _Forest:
    """All samples, family after family and sorted within each, so that what shares a prefix is neighbours."""

    order: np.ndarray
    """int64 [S]; the sample at each place."""
    lengths: np.ndarray
    """int64 [S]; tokens of the sample at each place."""
    shared: np.ndarray
    """int64 [S]; leading tokens it has in common with the place before; 0 for the first of a family."""
    pair_cost: float

    def cost(self, num_tokens: np.ndarray | int) -> np.ndarray:
        """Of the first tokens of a sequence: each one's own, and its attention to itself and all before it."""
        tokens = np.asarray(num_tokens, dtype=np.float64)
        return tokens + self.pair_cost * tokens * (tokens + 1) / 2

    def row_cost(self, places: Sequence[int]) -> float:
        """Of the tree of the samples at these places."""
        if not places:
            return 0.0
        at = np.sort(np.asarray(places))
        shared = np.array([0] + [self.shared[a + 1 : b + 1].min() for a, b in itertools.pairwise(at)])
        return float((self.cost(self.lengths[at]) - self.cost(shared)).sum())


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring samples of one family that go into the same row."""

    places: range
    num_tokens: int
    cost: float


def plan_rows(
    token_ids: Sequence[np.ndarray],
    families: Sequence[int] | np.ndarray | None,
    *,
    tokens_per_row: int,
    data_parallel_size: int,
    pair_cost: float = 0.0,
) -> RowPlan:
    """The plan for samples of these `token_ids`, each int [L]; samples with equal numbers in `families` (default: none)
    are kept together as far as that pays.

    A row has at most `tokens_per_row` distinct tokens, except that a longer sample has one to itself. `pair_cost` is
    what one query-key pair of attention costs, in units of what one token costs beside its attention.
    """
    forest = _forest(token_ids, families, pair_cost)
    whole = _pieces(forest, tokens_per_row, np.inf)
    num_tokens, cost = sum(piece.num_tokens for piece in whole), sum(piece.cost for piece in whole)
    least_rows = _round_up(max(1, -(-num_tokens // tokens_per_row)), data_parallel_size)
    plans = []
    # First nothing is cut that fits; on one rank there is nothing to balance.
    for size in (None, *PIECE_SIZES) if data_parallel_size > 1 else (None,):
        pieces = whole if size is None else _pieces(forest, tokens_per_row, size * cost / least_rows)
        rows = _fill_rows(pieces, tokens_per_row=tokens_per_row, multiple=data_parallel_size)
        costs = [forest.row_cost(row) for row in rows]
        ranks = _spread_over_ranks(costs, data_parallel_size)
        plans.append(
            RowPlan(
                rows=[[forest.order[rows[index]].tolist() for index in rank] for rank in ranks],
                costs=[[costs[index] for index in rank] for rank in ranks],
            )
        )
        if max(sum(costs) for costs in plans[-1].costs) <= BALANCED_ENOUGH * cost / data_parallel_size:
            break
    return min(plans, key=lambda plan: max(sum(costs) for costs in plan.costs))


def _forest(token_ids: Sequence[np.ndarray], families: Sequence[int] | np.ndarray | None, pair_cost: float) -> _Forest:
    if families is None:
        order = np.arange(len(token_ids))
        shared = np.zeros(len(token_ids), dtype=np.int64)
    else:
        family = np.asarray(families, dtype=np.int64)
        by_content = np.array(sorted_order(token_ids), dtype=np.int64)
        order = by_content[np.argsort(family[by_content], kind="stable")]
        shared = np.zeros(len(order), dtype=np.int64)
        in_order = [token_ids[index] for index in order.tolist()]
        for place in (np.flatnonzero(family[order][1:] == family[order][:-1]) + 1).tolist():
            shared[place] = shared_prefix_length(in_order[place - 1], in_order[place])
    lengths = np.array([len(token_ids[index]) for index in order.tolist()], dtype=np.int64)
    return _Forest(order, lengths, shared, pair_cost)


def _pieces(forest: _Forest, tokens_per_row: int, largest_cost: float) -> list[_Piece]:
    """Families cut so that no piece is above the budget, or above `largest_cost` beside what all its samples share,
    unless it is one sample. What they share is computed again by every other piece, however small.

    A cut costs what the samples on its two sides share, so of the places that leave at least half a piece the one with
    least in common is taken: between two episodes rather than within one.
    """
    pieces: list[_Piece] = []
    whole_cost, saved_cost = forest.cost(forest.lengths).tolist(), forest.cost(forest.shared).tolist()
    lengths, shared = forest.lengths.tolist(), forest.shared.tolist()
    # Of the samples from `first` up to each place, that place included.
    first, tokens, costs = 0, [], []
    place, least_shared = 0, 0
    while place < len(lengths):
        if place == first:
            tokens, costs, least_shared = [lengths[place]], [whole_cost[place]], place
            place += 1
            continue
        more_tokens, more_cost = lengths[place] - shared[place], whole_cost[place] - saved_cost[place]
        if least_shared == first or shared[place] < shared[least_shared]:
            least_shared = place
        own_cost = costs[-1] + more_cost - saved_cost[least_shared]
        if shared[place] and tokens[-1] + more_tokens <= tokens_per_row and own_cost <= largest_cost:
            tokens.append(tokens[-1] + more_tokens)
            costs.append(costs[-1] + more_cost)
            place += 1
            continue
        if shared[place]:
            half = next(
                number for number, tokens_so_far in enumerate(tokens, start=1) if 2 * tokens_so_far >= tokens[-1]
            )
            place = min(range(place, first + half - 1, -1), key=lambda at: shared[at])
        pieces.append(_Piece(range(first, place), tokens[place - first - 1], costs[place - first - 1]))
        first = place
    if lengths:
        pieces.append(_Piece(range(first, len(lengths)), tokens[-1], costs[-1]))
    return pieces


def _fill_rows(pieces: Sequence[_Piece], *, tokens_per_row: int, multiple: int) -> list[list[int]]:
    """Places of each row; the number of rows is a multiple of `multiple`, and rows may be empty.

    The most costly piece first into the row with least to do, with as many rows as the budget asks for, and more where
    that does not fit.
    """
    oversized = [list(piece.places) for piece in pieces if piece.num_tokens > tokens_per_row]
    regular = sorted((p for p in pieces if p.num_tokens <= tokens_per_row), key=lambda p: (-p.cost, p.places.start))
    tokens = sum(piece.num_tokens for piece in regular)
    # No two pieces of more than half a row share one.
    num_rows = max(-(-tokens // tokens_per_row), sum(piece.num_tokens * 2 > tokens_per_row for piece in regular))
    while True:
        total = _round_up(max(1, num_rows + len(oversized)), multiple)
        rows = _spread(regular, num_rows=total - len(oversized), tokens_per_row=tokens_per_row)
        if rows is not None:
            return oversized + rows
        num_rows += 1 + num_rows // ROWS_PER_TRY


def _spread(pieces: Sequence[_Piece], *, num_rows: int, tokens_per_row: int) -> list[list[int]] | None:
    """`pieces` (descending cost) over `num_rows` rows, or None where one does not fit the row with least to do."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    heap = [(0.0, row, 0) for row in range(num_rows)]
    for piece in pieces:
        if not heap or heap[0][2] + piece.num_tokens > tokens_per_row:
            return None
        cost, row, tokens = heap[0]
        rows[row].extend(piece.places)
        heapq.heapreplace(heap, (cost + piece.cost, row, tokens + piece.num_tokens))
    return rows


def _spread_over_ranks(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Row indices of each rank, as many on every one, the costliest first.

    Largest differencing (Karmarkar and Karp 1982) on sets of one row for each rank, of similar cost each, so that the
    ranks also finish every microbatch at about the same time: the two sets with the widest spread are laid together,
    the dear end of one on the cheap end of the other, until one set is left.
    """
    order = sorted(range(len(costs)), key=lambda row: -costs[row])
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, first in enumerate(range(0, len(order), num_ranks)):
        ranks = [(costs[row], [row]) for row in order[first : first + num_ranks]]
        heap.append((ranks[-1][0] - ranks[0][0], number, ranks))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        both = [(a + b, rows + more) for (a, rows), (b, more) in zip(one, reversed(other), strict=True)]
        both.sort(key=lambda rank: -rank[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], number, both))
    return [sorted(rows, key=lambda row: -costs[row]) for _, rows in heap[0][2]]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
