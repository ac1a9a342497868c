"""What experiment trackers have written, read back through their own libraries."""

import json
import struct
from collections import defaultdict
from pathlib import Path

_BLOCK = 32768


def of_tensorboard(folder):
    """Return for each metric its steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = defaultdict(dict)
    for path in Path(folder).rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path)).Reload()
        for name in events.Tags()["scalars"]:
            found[name] |= {each.step: each.value for each in events.Scalars(name)}
    return found


def of_mlflow(uri):
    """Return for each metric its steps and values, of the only run."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    [run] = client.search_runs([each.experiment_id for each in client.search_experiments()])
    return {
        name: {each.step: each.value for each in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }


def of_wandb(folder, *, step_name):
    """Return for each metric its steps and values, of the only run, from the file that `wandb sync` would upload."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = Path(folder).glob("wandb/offline-run-*/*.wandb")
    found = defaultdict(dict)
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        row = {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in record.history.item}
        if step_name in row:
            for name, value in row.items():
                found[name][row[step_name]] = value
    return found


def _records(content):
    """Yield the records of a file in LevelDB's log format, after W&B's header of 7 bytes."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
