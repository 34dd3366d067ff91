"""The teachers of a run, started or asked as the run would, and put to the test."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from mopd.build import Prepared
from mopd.checking.rows import FAILED, OK, WARNING, Row
from mopd.config.teachers import asked_teachers
from mopd.errors import MopdError
from mopd.model_folders import teacher_folders
from mopd.runtime.cluster import LOOPBACK, ray_cluster
from mopd.runtime.startup import Startup
from mopd.runtime.teacher_examining import examined
from mopd.runtime.teacher_fleet import TeacherFleet, for_user


def live_rows(prepared: Prepared, show: Callable[[Row], None], note: Callable[[str], None]) -> None:
    """A row for each question to each teacher; `note` is told what is being waited for.

    Everything that was started has ended when this returns. The servers' logs are kept, and named
    in the error, where one did not start.
    """
    config = prepared.config
    managed = any(not config.teachers[name].endpoints for name in asked_teachers(config))
    logs = Path(tempfile.mkdtemp(prefix="mopd-check-"))
    good = False
    with ExitStack() as stack:
        host = LOOPBACK
        if managed or config.ray.address is not None:
            try:
                note("starting ray")
                host = stack.enter_context(ray_cluster(config))
                show(Row("placement", "ray", OK, "has what the run reserves"))
            except MopdError as error:
                show(Row("placement", "ray", FAILED, str(error)))
                return
        good = asyncio.run(_live(prepared, logs, host, show, note))
    if good:
        shutil.rmtree(logs, ignore_errors=True)


async def _live(
    prepared: Prepared,
    logs: Path,
    host: str,
    show: Callable[[Row], None],
    note: Callable[[str], None],
) -> bool:
    config, folders = prepared.config, teacher_folders(prepared.config)
    fleet = TeacherFleet.of_run(prepared, logs, host)
    startup = Startup(
        lambda waiting: note(f"waiting for {', '.join(sorted(waiting))}") if waiting else None,
        note,
        lambda text: show(Row("teachers", "", WARNING, text)),
    )
    good = True
    try:
        reference = config.objective.kl.reference
        for name, error in (
            await fleet.start_each(startup, [reference] if reference else [])
        ).items():
            part = f"teacher {name}"
            if error is None:
                note(f"{part} is put to the test")
                try:
                    student = Path(config.student.model)
                    findings = await examined(
                        fleet.client(name), config.teachers[name], folders.get(name), student, note
                    )
                    for finding in findings:
                        good &= finding.good
                        status = OK if finding.good else FAILED
                        show(Row(part, finding.what, status, finding.detail))
                    continue
                except Exception as caught:
                    error = for_user(caught)
            if not isinstance(error, MopdError):
                raise error
            good = False
            show(Row(part, "answers", FAILED, str(error)))
    finally:
        await fleet.close()
    return good
