"""Partition of a batch: the samples of a step, and the slots of each rank.

Pure. A position counts samples from the start of training: with one `size` throughout, step `s` takes the positions
`[s*size, (s+1)*size)`. Pass `p` over the data consists of the positions `[p*n, (p+1)*n)`, in its own order. So a pass
omits and repeats no sample: where `size` does not divide `n`, the tail of a pass and the head of the next share a
batch.
"""

from __future__ import annotations


def slots_of(num_slots: int, index: int, count: int, group_size: int = 1) -> range:
    """The slots of part `index` of `count`. Each `group_size` consecutive parts form a group. Its slots are
    consecutive, and its parts take turns at them, so that they are equally large. Otherwise the parts are as even as
    possible.

    Raises:
        ValueError: `index` is not below `count`, or `num_slots` or `count` is not a multiple of `group_size`.
    """
    if not 0 <= index < count:
        raise ValueError(f"`index` must be at least 0 and less than `count` ({count}), but is {index} instead.")
    if num_slots % group_size or count % group_size:
        raise ValueError(
            f"{num_slots} slots in {count} parts cannot be divided so that each {group_size} parts are equally large."
        )
    group, place = divmod(index, group_size)
    first, last = (at * (num_slots // group_size) // (count // group_size) for at in (group, group + 1))
    return range(first * group_size + place, last * group_size + place, group_size)


def likely_parts(index: int, count: int, group_size: int = 1) -> list[tuple[int, int]]:
    """Which part `index` of `count` can become when one group leaves or joins: pairs `(index, count)`."""
    group, place = divmod(index, group_size)
    num_groups = count // group_size
    found = []
    for following in (num_groups - 1, num_groups + 1):
        # A group before this one takes or makes a place there, or one behind it does.
        moved = group + following - num_groups
        found += [
            (at * group_size + place, following * group_size) for at in sorted({group, moved}) if 0 <= at < following
        ]
    return found
