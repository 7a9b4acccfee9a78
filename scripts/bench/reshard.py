"""Compare megarl's resharding with gathering everything and with megatron-core's own, on gloo: time, bytes and memory.

See docs/bench/reshard.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

from megarl.types import UserError  # noqa: E402
from scripts.bench.resharding import wire  # noqa: E402

TARGETS = ("tp", "ep")
QUIET = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, help="default: both, with --json tp")
    parser.add_argument("--processes", type=int, choices=(8, 16), default=8)
    parser.add_argument(
        "--nodes", type=int, choices=(1, 2, 4), help="default: one for each 4 processes"
    )
    parser.add_argument("--layers", type=int, default=4, help="decoder layers, a multiple of 2")
    parser.add_argument(
        "--hidden", type=int, default=1024, help="hidden size; the model's bytes grow with it"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each method")
    parser.add_argument("--round-mb", type=float, default=16, help="megarl's round")
    parser.add_argument("--bucket-mb", type=float, default=16, help="the bucket of gathering")
    parser.add_argument(
        "--throttle", type=int, metavar="MBIT", help="limit the loopback, in a network namespace"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one object, and the table to stderr"
    )
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    # starts the command anew: before the imports that take seconds
    own_namespace = wire.enter_namespace()
    if args.throttle:
        if not own_namespace:
            raise UserError(
                "--throttle",
                "this machine permits no network namespace",
                "run as root, or without it",
            )
        wire.throttle(args.throttle)
    os.environ.update(QUIET)
    from scripts.bench.resharding import compare, report
    from scripts.bench.resharding.case import make_case
    from scripts.bench.resharding.ours import cost

    targets = [args.target] if args.target else TARGETS[:1] if args.json else TARGETS
    for target in targets:
        case = make_case(
            target, args.processes, args.nodes or args.processes // 4, args.layers, args.hidden
        )
        minimum = cost(case)
        figures = compare.compare(
            case, args.repeats, round(args.round_mb * 1e6), round(args.bucket_mb * 1e6)
        )
        table = report.show(target, case, figures, minimum, own_namespace)
        table += report.bounds(figures, args.throttle) if args.throttle else []
        print("\n".join(table), file=sys.stderr if args.json else sys.stdout, flush=True)
        if args.json:
            print(json.dumps(report.as_json(target, case, figures, minimum)))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
