"""Rehearse Lightning programs of many kinds: schedules, samplers, callbacks, two optimizers, a teacher and others.

    python tests/recovery/gallery.py [--only one_cycle,plateau] [--phases forward,commit]

Not collected by pytest: about a minute each. Prints the table of each program, and exits with 1 if one is not recovered
exactly, but for what is known. `test_rehearsal.py` runs one.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from program_gallery import PROGRAMS

PROGRAM = Path(__file__).with_name("program_gallery.py")
KNOWN = {
    "logged_after": "a rank that is lost between such a value and its next step makes all restart from a checkpoint; "
    "what they show is missing until it is logged again (docs/guides/recovery.md)"
}
"""What is documented of programs that are not recovered exactly in each phase."""
PHASES = "setup,dataloader,forward,vote,commit,batch_end,validation,checkpoint"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PROGRAMS), help="names of programs, with commas between them")
    parser.add_argument("--phases", default=PHASES, help="see `hyperpod rehearse --help`")
    args = parser.parse_args()
    failed = []
    for name in args.only.split(","):
        with tempfile.TemporaryDirectory(prefix="gallery-") as folder:
            command = [
                sys.executable,
                "-m",
                "hyperpod_plugins.cli",
                "rehearse",
                "--timeout",
                "120",
                "--phases",
                args.phases,
            ]
            done = subprocess.run([*command, str(PROGRAM), name, folder], capture_output=True, text=True)
        is_known = done.returncode == 1 and name in KNOWN
        print(f"{name}: {'ok' if done.returncode == 0 else KNOWN[name] if is_known else 'FAILED'}", flush=True)
        print(re.sub("^", "    ", (done.stdout + done.stderr).rstrip(), flags=re.MULTILINE), flush=True)
        failed += [name] * (done.returncode != 0 and not is_known)
    print(f"{len(args.only.split(','))} programs, {len(failed)} failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
