"""Put old faults back into the package, one by one, and see that a rehearsal of a program finds and names each.

    python tests/recovery/putback.py [A1 A2 ...]

Prints a table: the fault, the rehearsed phase, and what the rehearsal said. `none` is the package as it is, with all of
the program's features and all phases. See `program_putback.py` for the faults.
"""

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

try:
    from faults import PRELOAD
except ImportError:  # collected by pytest
    from recovery.faults import PRELOAD

from hyperpod_plugins.errors import RecoveryError
from hyperpod_plugins.recovery.rehearsal_jobs import REHEARSED_PHASES, RehearsalPlan, rehearse

PROGRAM = Path(__file__).with_name("program_putback.py")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault that is put back."""

    fault: str
    phase: str
    """Phase in which a rank is killed."""
    said: str
    """Pattern of what the rehearsal must say."""
    adapter: str = "session"
    num_ranks: int = 2


CASES = (
    Case(fault="A1", phase="optimizer", said=r"optimizer 0\.first\.weight\.momentum"),
    Case(fault="A2", phase="backward", said=r"buffer scale.*no longer the tensor that was registered"),
    Case(fault="A3", phase="batch_end", said=r"callback \S*Average\.values", adapter="lightning", num_ranks=4),
    Case(fault="A4", phase="forward", said=r"batch 0.*hook of the batch", adapter="lightning"),
    Case(fault="A5", phase="vote_result", said=r"parameter teacher\.weight", num_ranks=4),
    Case(fault="A6", phase="forward", said=r"optimizer LBFGS evaluated its closure", adapter="lightning"),
    Case(fault="A7", phase="forward", said=r"buffer norm\.running_mean"),
    Case(fault="I3", phase="forward", said=r"unowned gradient unowned\.bias.*no optimizer has"),
)
CONTROLS = (
    Case(fault="", phase=",".join(REHEARSED_PHASES), said="", num_ranks=4),
    Case(fault="", phase=",".join(REHEARSED_PHASES), said="", adapter="lightning"),
    Case(fault="", phase="batch_end", said="", adapter="lightning", num_ranks=4),
)


def run(case: Case) -> tuple[str, bool]:
    """What the rehearsal of a case said, and whether that is right."""
    plan = RehearsalPlan(
        program=(str(PROGRAM),),
        num_ranks=case.num_ranks,
        phases=tuple(case.phase.split(",")),
        timeout_s=240,
        launcher=PRELOAD if case.adapter == "session" else (),
    )
    environ = {"PUT_BACK": case.fault, "ADAPTER": case.adapter, "OMP_NUM_THREADS": "1"}
    with patch.dict(os.environ, environ):
        try:
            results = rehearse(plan, lambda line: None)
        except RecoveryError as error:
            told = [line for line in str(error).splitlines() if line.strip()]
            found = next((line for line in told if case.said and re.search(case.said, line)), told[-1])
            return found.strip(), bool(case.said and re.search(case.said, found))
    bad = [each for each in results if not each.is_good]
    if not bad:
        told = ", ".join(f"{each.phase}: {each.cells()[3]}" for each in results if each.step is None)
        return f"all recovered {told}", not case.said
    told = "; ".join(f"{each.phase}: {each.cells()[3]}" for each in bad)
    return told, bool(case.said) and re.search(case.said, told) is not None


def main(wanted: list[str]) -> None:
    all_right = True
    for case in (*CONTROLS, *CASES):
        if wanted and not {case.fault or "none", f"{case.fault or 'none'}-{case.adapter}"} & set(wanted):
            continue
        began_s = time.monotonic()
        told, is_right = run(case)
        all_right &= is_right
        head = f"{case.fault or 'none':5} {case.adapter:10} {case.num_ranks} ranks  {time.monotonic() - began_s:4.0f} s"
        print(f"{head}  {'as expected' if is_right else 'NOT AS EXPECTED'}  {told}", flush=True)
    sys.exit(not all_right)


if __name__ == "__main__":
    main(sys.argv[1:])
