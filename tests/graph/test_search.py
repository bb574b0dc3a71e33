"""The two searches, compared with what is true of any graph by definition."""

from __future__ import annotations

import ast
import pathlib

from hypothesis import given
from hypothesis import strategies as st

from npu_bridge.base.search import dependency_order, search
from tests.sources import nodes_of

GRAPHS = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=10, max_size=10)
STARTS = st.lists(st.integers(0, 9), max_size=3)


def distances(graph, starts):
    """Returns the number of edges to every reachable node, by relaxing all edges again and again."""
    found = dict.fromkeys(starts, 0)
    for _ in graph:
        for node, others in enumerate(graph):
            for other in others if node in found else ():
                found[other] = min(found.get(other, 10), found[node] + 1)
    return found


@given(GRAPHS, STARTS)
def test_everything_is_reached_once_and_the_near_ones_first(graph, starts):
    order, expected = list(search(starts, graph.__getitem__)), distances(graph, starts)
    assert sorted(order) == sorted(expected)
    assert [expected[node] for node in order] == sorted(expected.values())


def test_a_search_looks_no_further_than_it_is_asked_to():
    asked = []
    assert next(node for node in search([0], lambda node: asked.append(node) or [node + 1]) if node == 3) == 3
    assert asked == [0, 1, 2]


@given(GRAPHS, STARTS)
def test_needed_nodes_come_first_where_there_are_no_cycles(graph, starts):
    acyclic = [[other for other in others if other < node] for node, others in enumerate(graph)]
    order = dependency_order(starts, acyclic.__getitem__)
    assert sorted(order) == sorted(distances(acyclic, starts))
    place = {node: number for number, node in enumerate(order)}
    assert all(place[other] < place[node] for node in order for other in acyclic[node])


@given(GRAPHS, STARTS)
def test_cycles_end_and_nothing_is_lost(graph, starts):
    assert sorted(dependency_order(starts, graph.__getitem__)) == sorted(distances(graph, starts))


def test_nodes_are_visited_in_the_order_they_are_given():
    assert dependency_order([2, 1], {1: [], 2: [5, 4], 4: [], 5: [4]}.__getitem__) == [4, 5, 2, 1]


def searches_in(path):
    """Yields lines of loops that run until a list they take from is empty: hand-written walks."""
    for loop in nodes_of(path):
        if isinstance(loop, ast.While):
            names = {name.id for name in ast.walk(loop.test) if isinstance(name, ast.Name)}
            for part in ast.walk(loop):
                is_taken = isinstance(part, ast.Attribute) and part.attr in ("pop", "popleft", "popitem")
                if is_taken and isinstance(part.value, ast.Name) and part.value.id in names:
                    yield loop.lineno


def test_nobody_else_walks_graphs_by_hand():
    """Code that needs a walk uses one of the two searches, which end at cycles and give one order everywhere."""
    root = pathlib.Path(__file__).resolve().parents[2]
    found = {
        str(path.relative_to(root)): len(list(searches_in(path)))
        for package in ("npu_bridge", "npu_run", "hccl", "tensorflow1_compat")
        for path in (root / package).rglob("*.py")
    }
    assert {path: count for path, count in found.items() if count} == {
        "npu_bridge/gradients/inner/ownership.py": 1,  # sizes in order, no graph
        "npu_bridge/base/search.py": 2,
        "npu_run/trials/replay_tf1.py": 1,  # has TensorFlow alone
    }
