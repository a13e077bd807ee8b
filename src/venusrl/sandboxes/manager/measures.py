"""The service's own figures, for Prometheus.

Owns: counters of requests, and the gauges read from the manager when somebody asks.

Must not know: routes, what an operator does with them.

Guarantees: the number of label values is bounded: routes, states, nodes, templates; never a sandbox's id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from venusrl.sandboxes.manager.service import Service

_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Measures(Collector):
    """One registry a service, so that two in one process do not meet."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._requests = Histogram(
            "venusrl_env_request_seconds",
            "Requests of the control plane, until answered.",
            ("method", "route", "status"),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(self)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._sandboxes()
        yield from self._nodes()
        done = CounterMetricFamily("venusrl_env_operations", "What was done with sandboxes.", labels=["what"])
        for what, number in sorted(self._service.manager.counters.items()):
            done.add_metric([what], number)
        yield done
        traffic = CounterMetricFamily(
            "venusrl_env_gateway", "Requests for sandboxes, by what became of them.", labels=["what"]
        )
        for what, count in sorted(self._service.gateway.counters.items()):
            traffic.add_metric([what], count)
        yield traffic
        parked = GaugeMetricFamily("venusrl_env_gateway_parked_now", "Requests that wait for a sandbox in transit.")
        parked.add_metric([], self._service.gateway.parked)
        yield parked

    def _sandboxes(self) -> Iterator[Metric]:
        found = GaugeMetricFamily("venusrl_env_sandboxes", "Living sandboxes.", labels=["state", "node"])
        counts = Counter((one.state, one.host) for one in self._service.manager.book.records.values())
        for (state, host), number in sorted(counts.items()):
            found.add_metric([state, host], number)
        yield found
        snapshots = GaugeMetricFamily("venusrl_env_snapshots", "Snapshots kept.")
        snapshots.add_metric([], len(self._service.manager.snapshots))
        yield snapshots

    def _nodes(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("venusrl_env_node_up", "Whether a node answers.", labels=["node"])
        memory = GaugeMetricFamily(
            "venusrl_env_node_memory_bytes",
            "Memory of a node: total, reserve, capacity, available, private (of sandboxes), shared (templates, once).",
            labels=["node", "kind"],
        )
        counters = CounterMetricFamily("venusrl_env_node_operations", "A node's own counters.", labels=["node", "what"])
        for name, node in sorted(self._service.fleet.nodes.items()):
            up.add_metric([name], 0.0 if node.lost or node.status is None else 1.0)
            if node.status is None:
                continue
            view = node.status.view
            kinds = {
                "total": node.status.memory_total,
                "reserve": node.status.memory_reserve,
                "capacity": view.capacity,
                "available": view.available,
                "private": sum(one.footprint.total for one in node.status.held),
                "shared": sum(view.shared.values()),
            }
            for kind, size in kinds.items():
                memory.add_metric([name, kind], size)
            for what, count in sorted(node.status.counters.items()):
                counters.add_metric([name, what], count)
        yield up
        yield memory
        yield counters
