"""Errors of the v2 rendezvous that are not in torch's API, under torch's names."""

from __future__ import annotations


class EtcdRendezvousRetryableFailure(Exception):
    """Transition that is no longer or not yet possible: start again after a short pause."""


class EtcdRendezvousRetryImmediately(Exception):
    """Transition that is no longer possible; the state read allows an immediate restart."""
