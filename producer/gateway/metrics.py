"""The metrics of a gateway. Only this module of the producer imports monitoring, and so prometheus_client."""

from __future__ import annotations

from pagemill.monitoring.metrics.gateway import GatewayMetrics
from pagemill.monitoring.metrics.metric import choose_encoding

__all__ = ["GatewayMetrics", "choose_encoding"]
