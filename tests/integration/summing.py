"""A process with a row of a block of sums: python -m tests.integration.summing FD NUM_RANKS ROW WHAT."""

from __future__ import annotations

import os
import signal
import sys
import time

from elasticgang.process.sum_block import SumBlock, SumBlockEnded

NUM_SUMS = 300
GUARD_S = 60.0


def values_of(row: int, number: int) -> list[float]:
    return [float(row * 1000 + number)] * (1 + number % 7)


def main() -> int:
    fd, num_ranks, row = map(int, sys.argv[1:4])
    block, deadline_s = SumBlock(fd, num_ranks), time.monotonic() + GUARD_S
    match sys.argv[4]:
        case "sum":
            for number in range(1, NUM_SUMS + 1):
                block.write(row, number, values_of(row, number))
                block.publish(row, number)
                for other in range(num_ranks):
                    assert block.read(other, number, deadline_s) == values_of(other, number)
        case "die half-way":
            block.write(row, 1, [1.0])
            os.kill(os.getpid(), signal.SIGKILL)
        case "die":
            block.write(row, 1, [2.0, 3.0])
            block.publish(row, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            block.publish(row, 1)
            try:
                block.read(0, 1, deadline_s)
            except SumBlockEnded:
                return 7
    return 0


if __name__ == "__main__":
    sys.exit(main())
