"""Prefix trees: every distinct token once, every sequence on its path."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajectory.prefix_tree import build_tree, shared_prefix_length, subtree_ends, tree_tokens

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=12)


def arrays(sequences):
    return [np.array(ids, dtype=np.int64) for ids in sequences]


def ancestors_of(tree) -> list[set[int]]:
    """For each token of the row those it may attend to, itself included, from nodes and parents alone."""
    bounds, parents = tree.node_bounds.tolist(), tree.node_parents.tolist()
    seen: list[set[int]] = []
    for node, parent in enumerate(parents):
        above = set() if parent < 0 else seen[bounds[parent + 1] - 1]
        for token in range(bounds[node], bounds[node + 1]):
            above = above | {token}
            seen.append(above)
    return seen


def test_the_tree_of_the_module_by_hand():
    tree = build_tree(arrays([[1, 2, 3, 4], [1, 2, 3, 7, 8], [1, 2, 9], [1, 2], [5], [1, 2, 9]]))
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 7, 8, 9, 5]
    assert tree.position_ids.tolist() == [0, 1, 2, 3, 3, 4, 2, 0]
    assert tree.node_bounds.tolist() == [0, 2, 3, 4, 6, 7, 8]
    assert tree.node_parents.tolist() == [-1, 0, 1, 1, 0, -1]
    assert [path.tolist() for path in tree.paths] == [
        [0, 1, 2, 3], [0, 1, 2, 4, 5], [0, 1, 6], [0, 1], [7], [0, 1, 6],
    ]  # fmt: skip
    assert subtree_ends(tree.node_bounds, tree.node_parents).tolist() == [7, 6, 4, 6, 7, 8]


@given(SEQUENCES)
def test_any_tree(sequences):
    tree = build_tree(arrays(sequences))
    prefixes = {tuple(ids[:length]) for ids in sequences for length in range(1, len(ids) + 1)}
    assert tree.num_tokens == len(prefixes) == tree_tokens(arrays(sequences))
    seen = ancestors_of(tree)
    assert [len(tokens) for tokens in seen] == [position + 1 for position in tree.position_ids]
    for ids, path in zip(sequences, tree.paths, strict=True):
        assert tree.token_ids[path].tolist() == ids
        for place, token in enumerate(path.tolist()):
            assert seen[token] == set(path[: place + 1].tolist()), "a token sees its own path and nothing else"
    ends = np.repeat(subtree_ends(tree.node_bounds, tree.node_parents), np.diff(tree.node_bounds))
    for query in range(tree.num_tokens):
        assert seen[query] == {key for key in range(query + 1) if query < ends[key]}


@given(SEQUENCES)
def test_without_sharing_every_sequence_is_a_node(sequences):
    tree = build_tree(arrays(sequences), share=False)
    assert tree.token_ids.tolist() == [token for ids in sequences for token in ids]
    assert tree.position_ids.tolist() == [place for ids in sequences for place in range(len(ids))]
    assert tree.node_bounds.tolist() == np.cumsum([0, *map(len, sequences)]).tolist()
    assert tree.node_parents.tolist() == [-1] * len(sequences)


@pytest.mark.parametrize(
    ("first", "second", "length"), [([], [1], 0), ([1], [1, 2], 1), ([1, 2], [1, 3], 1), ([2], [1], 0)]
)
def test_shared_prefix_length(first, second, length):
    assert shared_prefix_length(np.array(first), np.array(second)) == length
    assert shared_prefix_length(np.array(second), np.array(first)) == length
