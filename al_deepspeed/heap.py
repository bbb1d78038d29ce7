"""Keeps Python's garbage collector from stalling the ranks.

A full collection walks every object that may be part of a cycle. After a trainer's imports and the making of
an engine that is half a million, and takes 0.2 to 0.4 s; each rank's comes in another micro-step, and under
ZeRO-3 all others wait for it in the next all-gather. What is there when training starts stays anyway: frozen,
it is not walked again, and a collection looks only at what came after.
"""

import gc


def freeze_heap() -> None:
    """Collects once, then exempts all that is left from later collections.

    To free an engine before the process ends, call `gc.unfreeze()` first; the next `initialize` does.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
