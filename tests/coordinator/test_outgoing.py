"""Open tasks: when each is due again, whatever was sent, claimed and withdrawn meanwhile."""

import math
import random

from wired import MESSAGES

from fedquilt import wire
from fedquilt.coordinator.delivery.executor import TaskDispatcher
from fedquilt.core import Task
from fedquilt.transport.memory_link import MemoryBroker

TASK = next(each for each in MESSAGES if isinstance(each, Task))


def test_the_next_repetition_is_that_of_the_earliest_open_task():
    issues, draw = TaskDispatcher(MemoryBroker().connect(), wire.Topics("f")), random.Random(0)
    for step in range(2000):
        now_s, device = float(step), f"d{draw.randrange(12)}"
        match draw.randrange(4):
            case 0:
                issues.send_task(device, TASK, b"x", now_s)
            case 1:
                issues.cancel_task(device)
            case 2:
                issues.slow_resends(device)
            case _:
                due = [name for name, issue in issues._open.items() if now_s >= issue.due_s]
                assert sorted(issues.take_due_devices(now_s)) == sorted(due)
        assert issues.next_repetition_s() == min((issue.due_s for issue in issues._open.values()), default=math.inf)
    assert len(issues._agenda) < 200
