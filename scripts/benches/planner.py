"""How long planning a generation takes with 100,000 members, 2 % of them just lost, and how it grows with the number.

Prints one JSON line per figure. `cpu_s` is the best of a few tries, in seconds of one core:

  first     a plan without a previous one
  lost      some members are gone, and nobody has come
  returned  as many newcomers have come, on the hosts of those that are gone
  digest    of the plan after the loss
  growth    `lost` for other numbers of members, with `ns_per_n_log_n`: flat when the cost grows as n log n
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from elasticgang.layout import Member, ParallelLayout, Plan, plan
from scripts.figures import print_figures

T = TypeVar("T")

_HOST_SIZE = 8
_LAYOUTS = (
    ParallelLayout(),
    ParallelLayout(sdp=8),
    ParallelLayout(tp=8),
    ParallelLayout(pp=4, sdp=2, tp=2),
    ParallelLayout(pp=8, sdp=8, tp=2),
    ParallelLayout(pp=16, sdp=16, tp=4),
)
_GROWTH = (1 / 8, 1 / 4, 1 / 2, 1, 2)


def best_of(num_tries: int, work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of the fastest try, and the last result."""
    best = math.inf
    for _ in range(num_tries):
        begin = time.process_time()
        result = work()
        best = min(best, time.process_time() - begin)
    return best, result


def crew(num_members: int, source: random.Random) -> list[Member]:
    """In no order, as reports come."""
    members = [Member(f"m{index:07}", f"host{index // _HOST_SIZE:06}") for index in range(num_members)]
    source.shuffle(members)
    return members


def split(members: Sequence[Member], lost: float) -> tuple[list[Member], list[Member]]:
    num_lost = round(len(members) * lost)
    return list(members[num_lost:]), [Member("new-" + member.id, member.host) for member in members[:num_lost]]


def uncached(planned: Plan) -> Plan:
    """As it comes out of a record."""
    return Plan(planned.shape, planned.seats, planned.spares)


def figures(members: Sequence[Member], layout: ParallelLayout, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    left, newcomers = split(members, args.lost)

    def figure(name: str, cpu_s: float, planned: Plan) -> dict[str, Any]:
        shape = f"pp {layout.pp} sdp {layout.sdp} tp {layout.tp}"
        seats = {"active": planned.size, "spares": len(planned.spares)}
        return {"figure": name, "layout": shape, "members": len(members), "cpu_s": round(cpu_s, 3), **seats}

    cpu_s, first = best_of(args.tries, lambda: plan(members, layout))
    yield figure("first", cpu_s, first)
    cpu_s, after = best_of(args.tries, lambda: plan(left, layout, uncached(first)))
    yield figure("lost", cpu_s, after)
    cpu_s, back = best_of(args.tries, lambda: plan(left + newcomers, layout, uncached(after)))
    yield figure("returned", cpu_s, back)
    cpu_s, _ = best_of(args.tries, lambda: uncached(after).digest)
    yield figure("digest", cpu_s, after)


def growth(args: argparse.Namespace, source: random.Random) -> Iterator[dict[str, Any]]:
    for factor in _GROWTH:
        members = crew(round(args.members * factor), source)
        lost = next(each for each in figures(members, ParallelLayout(), args) if each["figure"] == "lost")
        scale = len(members) * math.log(len(members))
        yield {**lost, "figure": "growth", "ns_per_n_log_n": round(lost["cpu_s"] * 1e9 / scale, 1)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument("--lost", type=float, default=0.02, help="part of them that is lost (default: %(default)s)")
    parser.add_argument("--tries", type=int, default=3, help="the best of these counts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="who is lost, in which order they report")
    args = parser.parse_args()
    if args.members < 8192 or not 0 <= args.lost <= 0.5 or args.tries < 1:
        parser.error("--members must be at least 8192, --lost between 0 and 0.5, --tries at least 1")
    return args


def main() -> int:
    args = parse_args()
    source = random.Random(args.seed)
    members = crew(args.members, source)
    of_layouts = (figure for layout in _LAYOUTS for figure in figures(members, layout, args))
    return print_figures("planner", {}, itertools.chain(of_layouts, growth(args, source)))


if __name__ == "__main__":
    sys.exit(main())
