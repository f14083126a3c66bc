"""`linvit leaderboard`: merges runs of any machines to tables and Pareto fronts."""

from pathlib import Path

from linvit.terminal import argument_parser

EPILOG = """examples:
  linvit leaderboard checkpoints
  linvit leaderboard checkpoints/compare/flatten_table_4 from_the_gpu_machine
  linvit leaderboard a/result.json b/result.json --output docs/leaderboard

A finished run has a file result.json (docs/results.md describes it), and linvit
compare writes what it has measured of its variants to costs.json, as linvit
bench backbone does over the sizes of images. All can be copied from other
machines, alone or with their folders. To measure runs on this machine:
linvit compare --report DIR.
"""


def main(argv: list[str]) -> int:
    """Runs `linvit leaderboard`; prints the tables, returns 0."""
    parser = argument_parser("linvit leaderboard", __doc__, EPILOG)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a run, a folder of runs, or a file")
    parser.add_argument("--output", type=Path, default=Path("leaderboard"), metavar="FOLDER", help="(%(default)s)")
    args = parser.parse_args(argv)
    from linvit.errors import UserError
    from linvit.experiments.leaderboard import NAME, collect, write

    board = collect(args.folders)
    for line in board.left_out:
        print(f"left out: {line}")
    if not board.sections:
        raise UserError("there is no finished run in " + ", ".join(f"'{folder}'" for folder in args.folders))
    print(write(board, args.output))
    print(f"\nthe page, which sorts and filters, is {args.output / NAME}.html")
    return 0
