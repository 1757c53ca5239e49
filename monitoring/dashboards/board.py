"""A dashboard: rows of panels under one title, with common variables, links and annotations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as model

from pagemill.monitoring.dashboards.panels import DATASOURCE, Panel

TAG = "pagemill"
FIRING = 'ALERTS{alertname=~"Pagemill.*", alertstate="firing", severity!="info"}'


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]
    is_collapsed: bool = False


Variable = dashboard.DatasourceVariable | dashboard.QueryVariable


def board(
    uid: str, title: str, description: str, rows: Sequence[Row], variables: Sequence[Variable] | None = None
) -> model.Dashboard:
    """Build a dashboard. Panels are numbered in order, and links use the numbers: add panels at the end of their
    row, as only a panel at the very end does not change other numbers. `variables`: replace those of the workers'
    dashboards."""
    builder = (
        dashboard.Dashboard(f"Pagemill: {title}")
        .uid(f"pagemill-{uid}")
        .description(description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("15s")
        .editable()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Pagemill")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(_firing_alerts())
    )
    for variable in workers() if variables is None else variables:
        builder = builder.with_variable(variable)
    for row in rows:
        row_panel = dashboard.Row(row.title).collapsed(row.is_collapsed)
        if row.is_collapsed:
            for panel in row.panels:
                row_panel = row_panel.with_panel(panel)
        builder = builder.with_row(row_panel)
        for panel in () if row.is_collapsed else row.panels:
            builder = builder.with_panel(panel)
    return _numbered(builder.build())


def workers() -> list[Variable]:
    """Return a worker's variables: each narrows the next; `queue` and `model` apply where a metric has them."""
    return [
        _datasource(),
        _from_labels("queue", "Queue", "label_values(pagemill_queue_jobs, queue)"),
        _from_labels(
            "model", "Model", 'label_values(pagemill_queue_serving_workers{queue=~"$queue"}, model)'
        ),
        _from_labels(
            "worker",
            "Worker",
            'label_values(pagemill_worker_info{queue=~"$queue", model=~"$model"}, instance)',
        ),
    ]


def gateways() -> list[Variable]:
    """Return the only variable of the gateway's dashboard, `gateway`: a gateway does not have a worker."""
    return [
        _datasource(),
        _from_labels("gateway", "Gateway", "label_values(pagemill_gateway_requests_in_flight, instance)"),
    ]


def _datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _from_labels(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(model.VariableOption(text="All", value="$__all", selected=True))
    )


def _firing_alerts() -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery()
        .name("Firing alerts")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("red")
        .expr(FIRING)
    )


def _numbered(finished: model.Dashboard) -> model.Dashboard:
    number = 0
    for panel in finished.panels or []:
        inner = panel.panels if isinstance(panel, model.RowPanel) else []
        for item in (panel, *inner):
            number += 1
            item.id_val = number
    return finished
