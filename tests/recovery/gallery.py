"""Rehearse programs of many kinds: schedules, samplers, callbacks, two optimizers, a teacher, evaluations and others.

    python tests/recovery/gallery.py [--adapter session,accelerate] [--only one_cycle,plateau] [--phases forward,commit]

Not collected by pytest: about a minute each. Prints the table of each program, and exits with 1 if one is not recovered
exactly, but for what is known, or if one that is refused, or is wrong, is not told so. `test_rehearsal.py` runs some.
"""

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS_OF = {
    "lightning": "program_gallery",
    "session": "program_gallery_session",
    "accelerate": "program_gallery_accelerate",
}
KNOWN = {
    "logged_after": "a rank that is lost between such a value and its next step makes all restart from a checkpoint; "
    "what they show is missing until it is logged again (docs/guides/recovery.md)"
}
"""What is documented of programs that are not recovered exactly in each phase."""
PHASES = "setup,dataloader,forward,vote,commit,batch_end,validation,checkpoint,second_fit"
PRELOAD = ["--preload", "torchmetrics"]
"""Replacements of these programs import little else that takes long."""


def rehearse(adapter, name, phases):
    """Exit code and output."""
    command = [sys.executable, "-m", "hyperpod_plugins.cli", "rehearse", "--timeout", "120", "--phases", phases]
    program = Path(__file__).with_name(f"{PROGRAMS_OF[adapter]}.py")
    with tempfile.TemporaryDirectory(prefix="gallery-") as folder:
        preload = [] if adapter == "lightning" else PRELOAD
        done = subprocess.run([*command, *preload, str(program), name, folder], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapter", default=",".join(PROGRAMS_OF), help="names of adapters, with commas between them")
    parser.add_argument("--only", default="", help="names of programs, with commas between them; by default all")
    parser.add_argument("--phases", default=PHASES, help="see `hyperpod rehearse --help`")
    args = parser.parse_args()
    failed, num_programs = [], 0
    for adapter in args.adapter.split(","):
        module = importlib.import_module(PROGRAMS_OF[adapter])
        told = getattr(module, "TOLD", {})
        for name in module.PROGRAMS:
            if args.only and name not in args.only.split(","):
                continue
            code, text = rehearse(adapter, name, args.phases)
            if name in told:
                is_good, result = code != 0 and told[name] in text, f"told: {told[name]}"
            else:
                is_known = code == 1 and name in KNOWN
                is_good, result = code == 0 or is_known, KNOWN[name] if is_known else "ok"
            print(f"{adapter} {name}: {result if is_good else 'FAILED'}", flush=True)
            print(re.sub("^", "    ", text.rstrip(), flags=re.MULTILINE), flush=True)
            num_programs += 1
            failed += [f"{adapter} {name}"] * (not is_good)
    print(f"{num_programs} programs, {len(failed)} failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
