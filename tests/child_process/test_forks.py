"""What its customers know of a fork server."""

from __future__ import annotations

import os
import socket

from explorer.child_process.forks import Forked, Forks


def test_a_server_that_a_process_has_lost_is_not_asked_again() -> None:
    """Its line may hang up a moment later than the process ends."""
    own, its = socket.socketpair()
    ear, voice = os.pipe()
    with own, its:
        server = Forks(own)
        forked = Forked(ear, server)
        assert server.alive and not forked.ended
        os.close(voice)
        assert forked.ended and forked.code is None and not server.alive
    forked.close()
