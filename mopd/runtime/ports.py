"""A port to meet at, chosen before the process that will listen there does."""

from __future__ import annotations

import random
import socket

LOW, HIGH = 20_000, 32_000
"""Below the range that systems hand out to outgoing connections (Linux: from 32,768): a port from
that range, free now, is often taken a second later on a machine where much starts at once."""


def free_port(host: str) -> int:
    """A port that nobody listens on at `host` now.

    Raises:
        OSError: a hundred random ones were all taken, or `host` is not this machine.
    """
    for attempt in range(100):
        port = random.SystemRandom().randrange(LOW, HIGH)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError:
                if attempt == 99:
                    raise
    raise AssertionError("unreachable")
