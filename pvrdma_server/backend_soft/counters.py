"""Counters of the embedded backend, for status and metrics. They only ever grow."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Messages, and what went wrong with them."""

    rx_messages: int = 0
    rx_bytes: int = 0
    tx_messages: int = 0
    tx_bytes: int = 0
    bad_message: int = 0
    """Not a header of ours: unknown kind or version, fields out of bounds."""
    unknown_qp: int = 0
    """For a QP that is gone, of another type, or in a state that hears nothing."""
    wrong_peer: int = 0
    """From somebody who is not that QP's peer, or a GID that is not the sender's."""
    stale_response: int = 0
    """An ACK, NAK or response for nothing outstanding."""
    duplicate: int = 0
    out_of_sequence: int = 0
    no_route: int = 0
    """For a GID that nobody owns."""
    retries: int = 0
    rnr_naks: int = 0
    naks: int = 0
    datagram_qkey: int = 0
    datagram_no_buffer: int = 0
    datagram_too_long: int = 0
    datagram_multicast: int = 0
    blocked: int = 0
    """Times a carrier had no room."""
