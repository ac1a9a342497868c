"""Elastic membership: which workers belong to a job, and how they agree on it."""

from hyperpod_plugins.elastic.membership.elastic_events import elastic_event_detected, watch_elastic_events
from hyperpod_plugins.elastic.membership.elastic_spec import ElasticPolicy
from hyperpod_plugins.elastic.scaling.lr_scaling import LRScalingRule
from hyperpod_plugins.elastic.store.job_store import JobStore
from hyperpod_plugins.elastic.store.records import FailureRecord

__all__ = [
    "ElasticPolicy",
    "FailureRecord",
    "JobStore",
    "LRScalingRule",
    "elastic_event_detected",
    "watch_elastic_events",
]
