"""Figures to monitor an attached model by, what is healthy, and their export to Prometheus.

collector = OvalCollector(handle)               # pip install -e ".[metrics]"
REGISTRY.register(collector)                    # prometheus_client's, then start_http_server(9090)
health(readings(snapshot := collector.watch.snapshot), snapshot.device_type)  # what is out of range
"""

from oval_core.metrics.figures import HEALTHY, HEALTHY_ON_CUDA, MEANINGS, OvalCollector, health, readings
from oval_core.metrics.watch import Snapshot, Watch

__all__ = ["HEALTHY", "HEALTHY_ON_CUDA", "MEANINGS", "OvalCollector", "Snapshot", "Watch", "health", "readings"]
