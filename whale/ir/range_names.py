"""Names of what a rank does, in profiles: the runtime records ranges of these names, and ``whale trace`` reads them.

A range that starts something has its name; the one that waits for it is ``wait for`` and that name.
"""

from __future__ import annotations

__all__ = [
    "BACKWARD",
    "BUCKET_GATHER",
    "BUCKET_SUM",
    "COMPARISON_SUM",
    "FORWARD",
    "FORWARD_STEP",
    "INPUT_BACKWARD",
    "LOSS_SUM",
    "PREFIX",
    "RECEIVE",
    "SEND",
    "TRAIN_STEP",
    "WAIT",
    "WEIGHT_BACKWARD",
]

PREFIX = "whale: "

FORWARD = "forward stage %d micro-batch %d"
BACKWARD = "backward stage %d micro-batch %d"
INPUT_BACKWARD = "input backward stage %d micro-batch %d"
WEIGHT_BACKWARD = "weight backward stage %d micro-batch %d"
SEND = "send %s%s to rank %d micro-batch %d"
RECEIVE = "receive %s%s from rank %d micro-batch %d"
BUCKET_SUM = "all-reduce bucket %d"
BUCKET_GATHER = "gather bucket %d"
WAIT = "wait for "

LOSS_SUM = "all-reduce loss"
COMPARISON_SUM = "all-reduce comparison of batches"
"""Both over all ranks, so that no rank has one before every rank began it."""

TRAIN_STEP = "train step"
FORWARD_STEP = "forward-only step"
