"""Panels in the project's style: one function per kind of panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as dashboard_model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models import prometheus as prometheus_model

from pagemill.monitoring.dashboards.queries import WORKER, Query, series

DATASOURCE = dashboard_model.DataSourceRef(type_val="prometheus", uid="${datasource}")

COUNT = "short"
SECONDS = "s"
RATIO = "percentunit"
BYTES = "bytes"
PER_SECOND = "ops"
TOKENS_PER_SECOND = "suffix:tok/s"

Panel = Builder[dashboard_model.Panel]
_Kind = TypeVar("_Kind", timeseries.Panel, stat.Panel, heatmap.Panel)
Step = tuple[float | None, str]
"""A threshold and the color from there on; None: from the start."""


def lines(
    title: str,
    unit: str,
    about: str,
    *queries: Query,
    stacked: bool = False,
    most: float | None = None,
    width: int = 8,
) -> Panel:
    """Lines over time; `stacked` for parts of a total. `most`: the axis' maximum, if known."""
    panel = (
        _framed(timeseries.Panel(), title, about, width=width, height=8)
        .unit(unit)
        .min(0)
        .line_width(1)
        .fill_opacity(30 if stacked else 8)
        .show_points(common_model.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_model.LegendDisplayMode.LIST)
            .placement(common_model.LegendPlacement.BOTTOM)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_model.TooltipDisplayMode.MULTI)
            .sort(common_model.SortOrder.DESCENDING)
        )
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    if most is not None:
        panel = panel.max(most)
    for i, query in enumerate(queries):
        panel = panel.with_target(_target(query, i))
    return panel


def number(
    title: str, unit: str, about: str, query: Query, *, steps: Sequence[Step] = (), width: int = 3
) -> Panel:
    """The last value, large, over a sparkline of its history."""
    return (
        _framed(stat.Panel(), title, about, width=width, height=4)
        .unit(unit)
        .color_mode(common_model.BigValueColorMode.VALUE)
        .graph_mode(common_model.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(steps or [(None, "text")]))
        .with_target(_target(query, 0))
    )


def heat(title: str, unit: str, about: str, metric: str, *, width: int = 8, selector: str = WORKER) -> Panel:
    """A histogram over time: the number of observations per bucket."""
    expr = f"sum by (le) (increase({series(metric + '_bucket', selector)}[$__rate_interval]))"
    target = _target(Query(expr, "{{le}}"), 0).format(prometheus_model.PromQueryFormat.HEATMAP)
    return (
        _framed(heatmap.Panel(), title, about, width=width, height=8)
        .unit("short")
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_model.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .steps(64)
        )
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .with_target(target)
    )


def _framed(panel: _Kind, title: str, about: str, *, width: int, height: int) -> _Kind:
    """Set the common properties of panels: title, description, source, and size on the grid."""
    return panel.title(title).description(about).datasource(DATASOURCE).span(width).height(height)


def _target(query: Query, index: int) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .expr(query.expr)
        .legend_format(query.legend)
        .ref_id(chr(ord("A") + index))
        .datasource(DATASOURCE)
    )


def _thresholds(steps: Sequence[Step]) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(dashboard_model.ThresholdsMode.ABSOLUTE)
        .steps([dashboard_model.Threshold(value=value, color=color) for value, color in steps])
    )
