"""Exports a report by third-party libraries: spans for OpenTelemetry, and a scrape endpoint for Prometheus."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hyperpod_plugins.errors import MissingExtraError
from hyperpod_plugins.ledger import goodput_metrics
from hyperpod_plugins.report.run_report import RunReport

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

_NS = 1_000_000_000
_PREFIX = "hyperpod_"


def export_spans(report: RunReport, exporter: Any) -> int:
    """Export a run as one trace: a span for the run, for each rank, each incident, and each span of a category.

    Args:
        report: of the run.
        exporter: an OpenTelemetry `SpanExporter`, such as `OTLPSpanExporter` or `ConsoleSpanExporter`.

    Returns:
        The number of spans.

    Raises:
        MissingExtraError: opentelemetry-sdk is not installed.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.trace import set_span_in_context
    except ImportError as error:
        raise MissingExtraError("opentelemetry.sdk", "report", "exporting spans") from error
    resource = Resource.create({"service.name": "hyperpod", "hyperpod.run_id": report.run_id})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("hyperpod_plugins.report")
    num_spans = 0

    def export(name: str, begin_s: float, end_s: float, parent: Any, attributes: dict[str, Any]) -> Any:
        nonlocal num_spans
        context = None if parent is None else set_span_in_context(parent)
        span = tracer.start_span(name, context, attributes=attributes, start_time=round(begin_s * _NS))
        span.end(round(max(begin_s, end_s) * _NS))
        num_spans += 1
        return span

    headline = report.headline
    figures = {"hyperpod.goodput": headline.goodput, "hyperpod.ettr": headline.ettr}
    run = export("run", report.began_at_s, report.ended_at_s, None, figures)
    for incident in report.incidents:
        attributes = {
            "hyperpod.step": incident.step,
            "hyperpod.cause": incident.cause,
            "hyperpod.level": incident.level,
        }
        export(incident.kind, incident.at_s, incident.at_s + incident.total_s, run, attributes)
    for rank in report.ranks:
        spans = [*rank.spans]
        begin_s = spans[0][0] if spans else report.began_at_s
        lane = export(f"rank {rank.rank}", begin_s, begin_s + rank.wall_s, run, {"hyperpod.rank": rank.rank})
        for from_s, duration_s, category in spans:
            export(category, from_s, from_s + duration_s, lane, {"hyperpod.rank": rank.rank})
    provider.shutdown()
    return num_spans


class _GoodputCollector:
    """What Prometheus collects in each scrape."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels

    def collect(self) -> Iterator["GaugeMetricFamily"]:
        """Yield the figures of this process, as they are now."""
        from prometheus_client.core import GaugeMetricFamily

        names = [*self._labels]
        seconds = GaugeMetricFamily(
            f"{_PREFIX}seconds", "Time of this process by category", labels=[*names, "category"]
        )
        for name, value in _figures():
            if name.startswith("seconds/"):
                seconds.add_metric([*self._labels.values(), name.removeprefix("seconds/")], value)
            else:
                gauge = GaugeMetricFamily(f"{_PREFIX}{name}", f"{name} of this process", labels=names)
                gauge.add_metric([*self._labels.values()], value)
                yield gauge
        yield seconds


def _figures() -> Iterable[tuple[str, float]]:
    return goodput_metrics().items()


def serve_prometheus(port: int, *, address: str = "127.0.0.1", rank: int = 0) -> tuple[int, Any]:
    """Serve this process's goodput and categories of time for Prometheus, in a thread of its own.

    Args:
        port: to listen on; 0 for one that the system chooses. Each rank of a node needs its own.
        address: of the interface; with any but the loopback address, anyone who can reach it can read the figures.
        rank: a label of all figures.

    Returns:
        The port, and a function that ends the server.

    Raises:
        MissingExtraError: prometheus_client is not installed.
        OSError: the port is taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise MissingExtraError("prometheus_client", "report", "an endpoint for Prometheus") from error
    registry = CollectorRegistry()
    registry.register(_GoodputCollector({"rank": str(rank)}))  # pyright: ignore[reportArgumentType]
    server, thread = start_http_server(port, addr=address, registry=registry)

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

    return int(server.server_port), end
