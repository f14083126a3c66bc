"""`linvit push`: pushes a trained network to the Hugging Face hub or to a folder, for linvit, timm and transformers."""

from pathlib import Path

from linvit.errors import UserError
from linvit.inference.description import run_in
from linvit.inference.hub import check_licence, push, write_folder
from linvit.io.terminal import argument_parser

EPILOG = """examples:
  linvit push checkpoints/quickstart/version_0 me/digits --license=apache-2.0
  linvit push RUN --to folder --license=cc-by-nc-4.0
then:
  linvit.load("hf-hub:me/digits"), or linvit.load("folder")
  timm.create_model("hf-hub:me/digits", pretrained=True), or local-dir:folder,
  after `import linvit.backbones`

It writes model.safetensors, config.json and a card, README.md, with the run's
configuration without local paths: check it. A repository that does not
exist is created as public; create it yourself to keep it private.
"""


def main(argv: list[str]) -> int:
    """Runs `linvit push`; prints the address or folder of the network."""
    parser = argument_parser("linvit push", __doc__, EPILOG)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("repository", nargs="?", metavar="OWNER/NAME", help="repository of the hub")
    parser.add_argument("--to", type=Path, metavar="DIR", help="write to a new folder instead of the hub")
    parser.add_argument("--license", metavar="NAME", help="licence of the weights, by the hub's name; required")
    args = parser.parse_args(argv)
    if (args.repository is None) == (args.to is None):
        raise UserError("name either a repository of the hub, OWNER/NAME, or a folder, --to DIR")
    licence, run = check_licence(args.license), run_in(args.run)
    run.check_complete()
    if args.to is None:
        print(f"pushed to {push(run, args.repository, licence)}")
    else:
        name = args.to.name
        write_folder(run, args.to, licence, {"linvit": name, "timm": f"local-dir:{name}", "name": name})
        print(f"wrote {args.to}: {', '.join(sorted(path.name for path in args.to.iterdir()))}")
    return 0
