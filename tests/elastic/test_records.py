"""The codec of records: what is written is read back with its types, and nothing else is read."""

import json
from dataclasses import asdict, replace

import pytest

from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy, ElasticSpec, ReplicaLayout
from hyperpod_plugins.elastic.membership.restart_policy import JobRestart
from hyperpod_plugins.elastic.rendezvous.slots import LeaseState, SlotLease
from hyperpod_plugins.elastic.scaling.adascale import AdaScaleState
from hyperpod_plugins.elastic.scaling.lr_scaling import LRState, Ramp
from hyperpod_plugins.elastic.store.entry_records import EndedEntry
from hyperpod_plugins.elastic.store.records import FailureRecord
from hyperpod_plugins.elastic.store.world import WorldPlan
from hyperpod_plugins.errors import ConfigError

FAILURE = FailureRecord(kind="process", cause='killed by "SIGKILL"\n', worker_id=3)
SPEC = ElasticSpec(
    policy=ElasticPolicy(min_replicas=1, max_replicas=4, replica_sizes=(1, 2, 4)),
    replica_size=2,
    sizes=(1, 2, 4),
    layouts=(ReplicaLayout(shard_degree=2, sizes=(1, 2)), ReplicaLayout(shard_degree=1, tensor_degree=2, sizes=(4,))),
)
RECORDS = [
    FAILURE,
    JobRestart(failure=FAILURE, resume_from="/a/b", step=4, is_own_fault=True),
    WorldPlan(worker_ids=(0, 5, 2), number=3, num_lost=1),  # it lasted for ever, as it was not measured
    SPEC,
    replace(SPEC, layouts=()),
    *(SlotLease(node="host:7", number=2, state=state) for state in LeaseState),
    EndedEntry(number=1, kind="fit", results=[{"loss": 0.5}, None]),
    LRState(reference_batch_size=8, batch_size=16, ramp=Ramp(start=1.0, end=2.0), gains=AdaScaleState(gain=1.5)),
    LRState(reference_batch_size=8, batch_size=8),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda each: type(each).__name__)
def test_a_record_is_read_as_it_was_written(record):
    found = type(record).from_json(record.to_json())
    assert found == record
    assert found.to_json() == record.to_json()
    assert "\n" not in record.to_json()


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (FAILURE, {"worker_id": "3"}),
        (FAILURE, {"worker_id": True}),
        (FAILURE, {"kind": "whim"}),
        (FAILURE, {"cause": None}),
        (FAILURE, {"further": 1}),
        (JobRestart(failure=FAILURE), {"failure": {"kind": "process"}}),
        (JobRestart(failure=FAILURE), {"failure": "process"}),
        (JobRestart(failure=FAILURE), {"failure": {**asdict(FAILURE), "step": 1.5}}),
        (WorldPlan(worker_ids=(0, 1)), {"worker_ids": [0, "1"]}),
        (WorldPlan(worker_ids=(0, 1)), {"worker_ids": "01"}),
        (SPEC, {"layouts": [{"shard_degree": 2}]}),
        (SPEC, {"layouts": [[2, 1]]}),
        (SPEC, {"policy": None}),
        (SlotLease(node="host"), {"state": "TAKEN"}),
        (SlotLease(node="host"), {"state": 1}),
        (LRState(reference_batch_size=8, batch_size=8), {"gains": 1.0}),
    ],
)
def test_any_other_text_is_refused(record, wrong):
    values = {**json.loads(record.to_json()), **wrong}
    with pytest.raises(ValueError, match=r"must be|needs a JSON object|has the fields"):
        type(record).from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000])
def test_a_text_that_is_no_record_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011  (of the parser or of the codec)
        FailureRecord.from_json(text)


def test_values_are_checked_by_their_own_class_too():
    values = json.loads(SPEC.to_json())
    values["policy"]["max_replicas"] = 0
    with pytest.raises(ConfigError, match="min <= max"):
        ElasticSpec.from_json(json.dumps(values))
