"""The fault table: `python tests/process/faults.py [--repeat N] [--only WORDS]`.

Causes every fault N times and prints what each left behind: processes of ours, GPUs that cannot be used and should be,
finished results lost, processes of strangers signalled. Exits 0 if all four are zero everywhere and every outcome was
the right one.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from fault_suite import FAULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fault_suite import Fault, Result

SHOWN = 3
HEAD = ("left", "GPUs", "lost", "hit")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1, metavar="N")
    parser.add_argument("--only", default="", metavar="WORDS", help="faults whose name holds this text")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at once")
    parser.add_argument("--fast", action="store_true", help="without the slow ones")
    options = parser.parse_args()
    chosen = [one for one in FAULTS if options.only in one.name and not (options.fast and one.slow)]
    if not chosen:
        parser.error(f"no fault's name holds {options.only!r}")
    width = max(len(one.name) for one in chosen)
    print(
        f"{'fault':<{width}}  {'right':>7}  {'  '.join(f'{word:>4}' for word in HEAD)}  {'median':>7}  {'longest':>7}"
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        work = {
            one: [pool.submit(one.perform) for _ in range(0 if one.missing() else options.repeat)] for one in chosen
        }
        try:
            sound = [_row(one, [result.result() for result in results], width) for one, results in work.items()]
        except BaseException:
            # Those under way come to their end and clean up; the others never begin.
            pool.shutdown(cancel_futures=True)
            raise
    print(
        f"{len(chosen)} faults x {options.repeat} in {time.monotonic() - began:.0f} s: "
        f"{'nothing left, lost or hit' if all(sound) else f'{sound.count(False)} rows are not as they should be'}"
    )
    print("left: processes of ours; GPUs: unusable; lost: finished results; hit: processes of strangers signalled")
    return 0 if all(sound) else 1


def _row(one: Fault, results: Sequence[Result], width: int) -> bool:
    """Prints the row of a fault; what was not right follows it."""
    if not results:
        print(f"{one.name:<{width}}  skipped: {one.missing()}", flush=True)
        return True
    sums = [sum(column) for column in zip(*(result.counts.numbers() for result in results), strict=True)]
    seconds = [result.seconds for result in results]
    right = sum(not result.wrong for result in results)
    print(
        f"{one.name:<{width}}  {f'{right}/{len(results)}':>7}  {'  '.join(f'{number:>4}' for number in sums)}  "
        f"{statistics.median(seconds):>6.1f}s  {max(seconds):>6.1f}s",
        flush=True,
    )
    bad = [(number, result) for number, result in enumerate(results, 1) if not result.sound]
    for number, result in bad[:SHOWN]:
        text = "\n".join(filter(None, [str(result.counts), result.wrong]))
        print(f"  {number}: " + text.replace("\n", "\n     "), flush=True)
    return all(result.sound for result in results)


if __name__ == "__main__":
    sys.exit(main())
