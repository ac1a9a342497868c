"""A loop written by hand, of two ranks; one of them is told between two steps that the job is about to change."""

import json
import os
import signal
import sys

import torch.distributed as dist

from hyperpod_plugins.elastic import elastic_event_detected, watch_elastic_events


def main(rank, folder):
    own = []
    signal.signal(signal.SIGUSR2, lambda *_: own.append("heard"))
    watch_elastic_events()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    for step in range(100):
        if (rank, step) == (1, 5):
            os.kill(os.getpid(), signal.SIGUSR2)
        if elastic_event_detected():
            break
    dist.destroy_process_group()
    os.kill(os.getpid(), signal.SIGTERM)  # which no longer ends it
    print(json.dumps([step, own, elastic_event_detected()]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
