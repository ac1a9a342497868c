"""The queue of a device: which collective it waits in, told by the marks that a program leaves in it."""

from hyperpod_plugins.comm.options import GroupKey
from hyperpod_plugins.comm.runtime import DeviceQueue, QueuedCollective

SHARD, REPLICATE = GroupKey("shard"), GroupKey("replicate")


class Device:
    """Has come to a point of its queue, a number."""

    def __init__(self):
        self.at = 0

    def add(self, queue, key, number, *, begins, ends):
        collective = QueuedCollective(key, number, lambda: self.at >= begins, lambda: self.at >= ends)
        queue.add(collective)


def test_the_oldest_collective_that_the_device_has_reached_is_the_one_it_waits_in():
    queue, device = DeviceQueue(), Device()
    assert queue.oldest_wait(0.0) is None
    device.add(queue, SHARD, 4, begins=1, ends=2)
    device.add(queue, REPLICATE, 1, begins=3, ends=4)
    assert queue.oldest_wait(1.0) is None  # it computes what comes before
    device.at = 1
    assert queue.oldest_wait(5.0) == (SHARD, 4, 0.0)  # the wait counts from the first look that sees it
    assert queue.oldest_wait(8.0) == (SHARD, 4, 3.0)
    device.at = 2
    assert queue.oldest_wait(9.0) is None  # it computes, or hangs by itself: nobody else keeps it waiting
    device.at = 3
    assert queue.oldest_wait(10.0) == (REPLICATE, 1, 0.0)
    device.at = 4
    assert queue.oldest_wait(11.0) is None


def test_aborted_collectives_are_forgotten():
    queue, device = DeviceQueue(), Device()
    device.add(queue, SHARD, 1, begins=0, ends=9)
    assert queue.oldest_wait(1.0) is not None
    queue.clear()
    assert queue.oldest_wait(2.0) is None
