"""The row of a new run, and what its trials read from it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone

from harness.host.environment import environment
from harness.record.device_speed import SpeedMeasurement
from harness.record.plan import Plan
from harness.record.run import RunRecord
from harness.record.schema import VERSION
from harness.record.store import Store
from harness.strategy.registry import required_packages


def new_run(plan: Plan, measure_gpu: Callable[[], SpeedMeasurement]) -> RunRecord:
    """Builds the row; measures the GPU if any cell of the plan needs one."""
    speed = measure_gpu().as_json if plan.needs_gpu else None
    return RunRecord(
        schema_version=VERSION,
        run_id=plan.run_id,
        started_at=datetime.now(timezone.utc),
        matrix=plan.matrix,
        plan=plan.to_json(),
        device_speed=speed,
        **environment(required_packages()),
    )


def device_speed_of(store: Store, plan: Plan) -> str | None:
    """Returns column `device_speed` of a run; None if no cell needs a GPU, or before schema version
    12."""
    return store.run_row(plan.run_id).get("device_speed") if plan.needs_gpu else None
