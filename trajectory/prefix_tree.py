"""Prefix trees: token sequences that begin alike, with every distinct token once.

    sequences   1 2 3 4          tree   [1 2] - [3] - [4]         row     1 2 3 4 7 8 9
                1 2 3 7 8                    |     \\- [7 8]       depth   0 1 2 3 3 4 2
                1 2 9                         \\- [9]              nodes   [1 2] [3] [4] [7 8] [9]

The sequences, sorted, differ from their neighbours by a tail; the tails one after another are the tree's row, in
preorder. So a node's descendants lie behind it without a gap, a token's position is its depth, and what a token may
attend to is what stands on its path. Without shared prefixes every sequence is a node of its own, and the row is that
of any other packing.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """S sequences in one row of T tokens and K nodes."""

    token_ids: np.ndarray
    """int64 [T]."""
    position_ids: np.ndarray
    """int64 [T]; the number of tokens on the path before each."""
    node_bounds: np.ndarray
    """int64 [K+1]; node k is the tokens from node_bounds[k] up to node_bounds[k+1]."""
    node_parents: np.ndarray
    """int64 [K]; -1 where a node is the beginning of its sequences. A parent comes before its children."""
    paths: tuple[np.ndarray, ...]
    """S arrays int64 [L]: where each token of a sequence lies in the row, in the order of the sequences."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


def sorted_order(sequences: Sequence[np.ndarray]) -> list[int]:
    """Indices in lexicographic order of the token ids, in which sequences with equal beginnings are neighbours."""
    keys = [np.asarray(ids, dtype=">u4").tobytes() for ids in sequences]
    return sorted(range(len(keys)), key=keys.__getitem__)


def shared_prefix_length(first: np.ndarray, second: np.ndarray) -> int:
    """How many leading tokens are equal."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    place = int(differs.argmax()) if length else 0
    return place if length and differs[place] else length


def build_tree(sequences: Sequence[np.ndarray], *, share: bool = True) -> PrefixTree:
    """The tree of `sequences`, each int [L >= 1]; with `share` False each stays by itself, in the given order.

    Time and memory are those of all tokens together.
    """
    order = sorted_order(sequences) if share else range(len(sequences))
    paths: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(sequences)
    tails, tail_starts, branches = [], [], []
    num_tokens = 0
    above, path_above = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for index in order:
        ids = sequences[index]
        shared = shared_prefix_length(above, ids) if share else 0
        if shared < len(ids):
            tails.append((ids, shared))
            tail_starts.append(num_tokens)
            branches.append(int(path_above[shared - 1]) if shared else -1)
        path = np.concatenate([path_above[:shared], np.arange(num_tokens, num_tokens + len(ids) - shared)])
        num_tokens += len(ids) - shared
        paths[index] = path
        above, path_above = ids, path
    bounds, parents = _nodes(np.array(tail_starts, dtype=np.int64), np.array(branches, dtype=np.int64), num_tokens)
    nothing = np.zeros(0, dtype=np.int64)
    return PrefixTree(
        token_ids=np.concatenate([nothing, *(ids[shared:] for ids, shared in tails)]),
        position_ids=np.concatenate([nothing, *(np.arange(shared, len(ids)) for ids, shared in tails)]),
        node_bounds=bounds,
        node_parents=parents,
        paths=tuple(paths),
    )


def _nodes(tail_starts: np.ndarray, branches: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(node_bounds, node_parents) of tails that each continue behind the token `branches` (-1: a sequence's
    beginning). A node ends where a tail does and behind each token that something branches off."""
    starts = np.union1d(tail_starts, branches[branches >= 0] + 1)
    starts = starts[starts < num_tokens]
    # A node that begins in the middle of a tail continues the token before it.
    last_before = starts - 1
    first_of_tail = np.searchsorted(starts, tail_starts)
    last_before[first_of_tail] = branches
    parents = np.where(last_before < 0, -1, np.searchsorted(starts, last_before, side="right") - 1)
    return np.append(starts, num_tokens), parents


def subtree_ends(node_bounds: np.ndarray, node_parents: np.ndarray) -> np.ndarray:
    """int64 [K]: behind the last token of each node's descendants, or its own last where it has none.

    In preorder a token at q may attend to one at k exactly where k <= q < the subtree end of k's node.
    """
    ends = node_bounds[1:].copy()
    for node in range(len(node_parents) - 1, -1, -1):
        parent = node_parents[node]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[node])
    return ends


def tree_tokens(sequences: Sequence[np.ndarray]) -> int:
    """The number of tokens of their tree, which no exact method can do without."""
    ordered = [sequences[index] for index in sorted_order(sequences)]
    shared = sum(shared_prefix_length(one, other) for one, other in itertools.pairwise(ordered))
    return sum(len(ids) for ids in ordered) - shared
