"""``shardproof replay``."""

from __future__ import annotations

from dataclasses import replace as changed

import click

from harness.exit_codes import EXIT_CODES, Command, end
from harness.report.streams import CannotPrint


@click.command(cls=Command, epilog=EXIT_CODES)
@click.argument("case")
@click.option("--deadline", default=30.0, show_default=True, help="Seconds for the case.")
def replay(case: str, deadline: float) -> None:
    """Run a failing CASE again in new processes: the JSON line that a failure printed, or the file that it saved."""
    from harness.world import terminate_cleanly

    terminate_cleanly()
    from harness.bench import CandidateUnusable
    from harness.case_file import read
    from harness.events import Failure
    from harness.replay import DELAYS
    from harness.replay import replay as run
    from harness.report.console import print_line, result_console
    from harness.report.terminal import print_failure
    from harness.verdict import Verdict

    reproducer, console = read(case), result_console()
    try:
        verdict = run(reproducer, deadline=deadline)
    except CandidateUnusable as error:
        verdict = Verdict(error.findings)
    code, unwritten = 0, None
    try:
        if verdict.findings:
            code = 2 if verdict.kind == "harness" else 1
            late = verdict.facts.get(DELAYS)
            if late is not None:
                print_line(console, f"holds where no rank is late, and fails with delays of seed {late}: a race")
                reproducer = changed(reproducer, delays=late)
            print_failure(console, Failure(reproducer, verdict))
        elif verdict.rejected is not None:
            code = 3
            print_line(console, f"nothing ran: the candidate refuses the case: {verdict.rejected}")
        else:
            print_line(console, f"holds, with delays too: {reproducer.candidate}, {reproducer.subject}", "green")
    except CannotPrint as error:
        unwritten = error
    end(code, unwritten)
