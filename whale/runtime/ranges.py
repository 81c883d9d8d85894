"""Named ranges in ``torch.profiler`` and, under ``torch.autograd.profiler.emit_nvtx``, in NVTX.

Without a profiler a range costs a call and a comparison: its name is not made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from whale.ir.range_names import PREFIX

__all__ = ["named"]

_NOTHING = nullcontext()


def named(name: str, *values: object) -> AbstractContextManager[object]:
    """A range in a profile with the name ``whale:`` and *name* % *values*."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(PREFIX + name % values)
