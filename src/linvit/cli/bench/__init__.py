"""`linvit bench`: costs of mechanisms and backbones."""

from linvit.errors import UserError, did_you_mean

HELP = """linvit bench: how fast, and in how much memory?

usage: linvit bench attention [NAMES...]   mechanisms over the number of tokens,
                                           beside softmax attention
       linvit bench backbone [NAMES...]    whole backbones over the image size

`linvit bench attention --help` explains one of them.
"""
WHAT = ("attention", "backbone")


def main(argv: list[str]) -> int:
    """Runs `linvit bench`; returns the exit code."""
    what = argv[0] if argv else "--help"
    if what in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if what not in WHAT:
        raise UserError(f"linvit bench measures {', '.join(WHAT)}; got '{what}'.{did_you_mean(what, WHAT)}")
    from linvit.cli.bench import costs

    return {"attention": costs.attention, "backbone": costs.backbone}[what](argv[1:])
