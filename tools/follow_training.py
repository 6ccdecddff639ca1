"""Turns the output of a training run on standard input into a progress bar; keeps all of it in a file.

    torchrun ... pretrain_gpt.py ... 2>&1 | python tools/follow_training.py train.log

If the run ends before its last logged iteration, the end of the log is printed. Whether it failed is for the run's
own exit status to say: set -o pipefail.
"""

import argparse
import re
import sys
from collections import deque
from pathlib import Path

from tqdm import tqdm

ITERATION = re.compile(r"iteration +(\d+)/ *(\d+) .*\| lm loss: ([0-9.E+-]+|nan|inf) ", re.I)
VALIDATION = re.compile(r"validation loss at iteration (\d+) .* lm loss value: ([0-9.E+-]+) ")


def main() -> int:
    """Follows one run; returns 0, or 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path, help="file that takes the whole output")
    log = parser.parse_args().log
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"Starting; the whole output goes to {log}", flush=True)
    last: deque[str] = deque(maxlen=40)
    shown: dict[str, str] = {}
    evaluated = ""  # the iteration of the validation loss shown
    with log.open("w") as file, tqdm(unit="it", dynamic_ncols=True, leave=True) as bar:
        try:
            for line in sys.stdin:
                file.write(line)
                file.flush()
                last.append(line)
                if found := ITERATION.search(line):
                    bar.total = int(found[2])
                    bar.update(int(found[1]) - bar.n)
                    shown["loss"] = f"{float(found[3]):.3f}"
                elif (found := VALIDATION.search(line)) and found[1] != evaluated:
                    # After the last iteration stock evaluates twice more, once on the test set.
                    evaluated = found[1]
                    shown["validation"] = f"{float(found[2]):.3f}"
                bar.set_postfix(shown)
        except KeyboardInterrupt:
            bar.close()
            print(f"Stopped at iteration {bar.n}; the whole output is in {log}", file=sys.stderr)
            return 130
    if not bar.total or bar.n < bar.total:
        print(f"The run ended at iteration {bar.n}. The last lines of {log}:", file=sys.stderr)
        print("".join(last), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
