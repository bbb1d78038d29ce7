"""The two rules without balancing: micro-batches are dealt to ranks as chance has it.

They are what `balanced` is measured against, and useful on one rank, where there is nothing to balance.
"""

from al_deepspeed.scheduling.arrangement import Arrangement, Task, whole_steps
from al_deepspeed.scheduling.constraints import batch_sizes, memory_batch_sizes
from al_deepspeed.scheduling.pieces import shuffled


def equal_token(task: Task) -> Arrangement:
    """B from memory alone: every micro-batch holds about max_tokens, whatever it costs."""
    return _dealt_at_random(task, memory_batch_sizes(task.corpus.tokens, task.limits))


def dual_constraint(task: Task) -> Arrangement:
    """B from memory and cost: the paper's rule."""
    return _dealt_at_random(task, batch_sizes(task.corpus.tokens, task.cost, task.limits))


def _dealt_at_random(task: Task, sizes) -> Arrangement:
    pieces = task.cut_all(sizes)
    return whole_steps(task, pieces.take(shuffled(len(pieces), task.bits)))
