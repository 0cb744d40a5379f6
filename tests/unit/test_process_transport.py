"""Pipes to worker processes: a worker that does not read its jobs does not hold up the driver."""

from __future__ import annotations

from multiprocessing import Pipe

import pytest

from digenrl.transports.processes import Outbox

LARGE = b"x" * (8 << 20)  # more than any pipe holds


def test_large_messages_wait_for_their_reader_in_order() -> None:
    ours, theirs = Pipe()
    outbox = Outbox(ours)
    for message in (LARGE, "after it", LARGE):
        outbox.put(message)
    assert [theirs.recv() for _ in range(3)] == [LARGE, "after it", LARGE]
    outbox.close()
    ours.close()
    with pytest.raises(EOFError):
        theirs.recv()


def test_messages_to_a_process_that_has_ended_are_dropped() -> None:
    ours, theirs = Pipe()
    outbox = Outbox(ours)
    outbox.put(LARGE)
    theirs.close()
    outbox.put("nobody reads this")
    outbox.close()
