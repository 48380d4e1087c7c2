"""Components of elements that meet."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stamppruner.elements import components, spread


def test_chains_and_loners():
    edges = np.array([[4, 2], [2, 1], [5, 6]])
    assert components(7, edges).tolist() == [0, 1, 1, 3, 1, 5, 5]
    assert components(3, np.empty((0, 2), dtype=np.int64)).tolist() == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=40))
def test_components_are_those_of_union_find(edges):
    parent = list(range(20))

    def find(i):
        while parent[i] != i:
            i = parent[i]
        return i

    for a, b in edges:
        low, high = sorted((find(a), find(b)))
        parent[high] = low
    label = components(20, np.array(edges, dtype=np.int64).reshape(-1, 2))
    assert label.tolist() == [find(i) for i in range(20)]


def test_marks_spread_over_whole_components():
    label = np.array([0, 0, 2, 2, 4])
    marked = np.array([False, True, False, False, False])
    assert spread(marked, label).tolist() == [True, True, False, False, False]
