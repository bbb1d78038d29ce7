import gc

from al_deepspeed.heap import freeze_heap


class Knot:
    """An object that only a collection can free."""

    freed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Knot.freed += 1


def test_a_full_collection_walks_only_what_came_after():
    Knot()
    try:
        freeze_heap()
        assert Knot.freed == 1  # garbage from before is not kept
        before = len(gc.get_objects())  # what a full collection walks
        kept = Knot()
        assert before < 1000 < gc.get_freeze_count()
        del kept
        gc.collect()
        assert Knot.freed == 2
    finally:
        gc.unfreeze()


def test_what_was_frozen_is_freed_at_the_next_time():
    Knot.freed = 0
    kept = Knot()
    try:
        freeze_heap()
        del kept
        gc.collect()
        assert Knot.freed == 0
        freeze_heap()
        assert Knot.freed == 1
    finally:
        gc.unfreeze()
