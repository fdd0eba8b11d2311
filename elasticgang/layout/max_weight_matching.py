"""Maximum-weight matching of claims, where each row and each column has a limited capacity ("room").

Pure and independent of hosts and plans. In a plan, a claim is a block to keep in place, its row is the host, and its
column is the position of the block. The algorithm is primal-dual minimum-cost flow (Ford and Fulkerson).

MATCHING-1  The chosen claims have the greatest sum of weights that the capacities allow. Weights are positive integers.
MATCHING-2  Equal arguments give equal choices, in every Python version: no set is iterated.

First every row takes its heaviest claims, as if columns had unlimited capacity. Then overfull columns drop claims along
cheapest paths: a column drops a claim, its row takes another one instead, whose column drops one, and so on, until a
row leaves a place empty or a column has room. A row with room for all of its claims can only end a path, so only the
other rows, the crowded ones, are nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    row: str
    column: int
    weight: int


def max_weight_matching(claims: Sequence[Claim], row_room: Mapping[str, int], column_room: Sequence[int]) -> list[bool]:
    """For each of `claims` whether it is chosen (MATCHING-1)."""
    return _Matching(claims, row_room, column_room).solve()


class _Matching:
    """Nodes are columns (0 and up) and crowded rows (-1 and down); `price` is the potential of each, the sink's is 0.

    `free`: by column, taken claims of rows that are not crowded, heaviest first. `held`: by column, taken claims of
    crowded rows; dicts, because a set has no stable order (MATCHING-2).
    """

    def __init__(self, claims: Sequence[Claim], row_room: Mapping[str, int], column_room: Sequence[int]) -> None:
        self.claims = claims
        self.room = column_room
        self.taken = [True] * len(claims)
        self.load = [0] * len(column_room)
        self.free: list[list[int]] = [[] for _ in column_room]
        self.held: list[dict[int, None]] = [{} for _ in column_room]
        self.rows: list[list[int]] = []
        self.row_of: dict[int, int] = {}
        self.price: dict[int, int] = dict.fromkeys(range(len(column_room)), 0)
        by_row: dict[str, list[int]] = {}
        for index, claim in enumerate(claims):
            by_row.setdefault(claim.row, []).append(index)
        for row, wanting in by_row.items():
            self._start(wanting, row_room[row])
        for taken in self.free:
            taken.sort(key=lambda index: -claims[index].weight)

    def _start(self, wanting: list[int], room: int) -> None:
        """Take the heaviest claims of one row. A crowded row's price lies between those it took and those it left."""
        if len(wanting) > room:
            wanting.sort(key=lambda index: -self.claims[index].weight)
            node = -1 - len(self.rows)
            self.rows.append(wanting)
            self.price[node] = self.claims[wanting[room]].weight
            for index in wanting:
                self.row_of[index] = node
            for index in wanting[room:]:
                self.taken[index] = False
        for index in wanting[:room]:
            column = self.claims[index].column
            self.load[column] += 1
            if index in self.row_of:
                self.held[column][index] = None
            else:
                self.free[column].append(index)

    def solve(self) -> list[bool]:
        while overfull := [column for column, load in enumerate(self.load) if load > self.room[column]]:
            self._raise_prices(overfull)
            self._shed(overfull)
        return self.taken

    def _raise_prices(self, overfull: list[int]) -> None:
        """Dijkstra from the overfull columns to the sink; afterwards the cheapest paths cost nothing."""
        distance = dict.fromkeys(overfull, 0)
        heap = [(0, column) for column in overfull]
        nearest: int | None = None
        while heap:
            far, node = heapq.heappop(heap)
            if nearest is not None and far >= nearest:
                break
            if far > distance[node]:
                continue
            exit_cost = self._exit_cost(node)
            if exit_cost is not None:
                nearest = far + exit_cost if nearest is None else min(nearest, far + exit_cost)
            for target, _, cost in self._arcs(node):
                if far + cost < distance.get(target, far + cost + 1):
                    distance[target] = far + cost
                    heapq.heappush(heap, (far + cost, target))
        assert nearest is not None  # an overfull column has a taken claim, and dropping that is a path
        for node, far in distance.items():
            self.price[node] += min(far, nearest) - nearest

    def _shed(self, overfull: list[int]) -> None:
        """Swap along paths of cost 0 until none is left."""
        found = True
        while found:
            found = False
            visited: set[int] = set()
            for column in overfull:
                while self.load[column] > self.room[column] and self._walk(column, visited):
                    found = True

    def _walk(self, start: int, visited: set[int]) -> bool:
        """Find a path of cost 0 by depth-first search, and swap the claims on it."""
        visited.add(start)
        walk = [self._arcs(start)]
        nodes, path = [start], list[int]()
        while walk:
            if self._exit_cost(nodes[-1]) == 0:
                self._swap(nodes, path)
                visited.difference_update(nodes)
                return True
            for target, index, cost in walk[-1]:
                if cost == 0 and target not in visited:
                    visited.add(target)
                    walk.append(self._arcs(target))
                    nodes.append(target)
                    path.append(index)
                    break
            else:
                walk.pop()
                nodes.pop()
                if path:
                    path.pop()
        return False

    def _swap(self, nodes: list[int], path: list[int]) -> None:
        self.load[nodes[0]] -= 1
        for index in path:
            column = self.claims[index].column
            if self.taken[index]:
                del self.held[column][index]
            else:
                self.held[column][index] = None
            self.taken[index] = not self.taken[index]
        end = nodes[-1]
        if end < 0:
            return
        if len(nodes) > 1 and self.load[end] < self.room[end] and self.price[end] == 0:
            self.load[end] += 1
        else:
            self.taken[self.free[end].pop()] = False

    def _exit_cost(self, node: int) -> int | None:
        """The reduced cost of ending a path at `node`; None: it cannot end there."""
        if node < 0 or self.load[node] < self.room[node]:
            return self.price[node]
        if self.free[node]:
            return self.claims[self.free[node][-1]].weight + self.price[node]
        return None

    def _arcs(self, node: int) -> Iterator[tuple[int, int, int]]:
        """The arcs from `node`: the next node, the swapped claim, and the reduced cost."""
        price = self.price[node]
        if node < 0:
            for index in self.rows[-1 - node]:
                if not self.taken[index]:
                    _, column, weight = self.claims[index]
                    yield column, index, price - weight - self.price[column]
        else:
            for index in self.held[node]:
                row = self.row_of[index]
                yield row, index, self.claims[index].weight + price - self.price[row]
