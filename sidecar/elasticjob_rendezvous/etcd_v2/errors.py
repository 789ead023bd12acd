"""The errors of the v2 rendezvous that torch's API does not have, by torch's names."""

from __future__ import annotations


class EtcdRendezvousRetryableFailure(Exception):
    """Too late for a transition, or it is not possible yet: start again after a moment."""


class EtcdRendezvousRetryImmediately(Exception):
    """Too late for a transition, and what was read says that one can start again at once."""
