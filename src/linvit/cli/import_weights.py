"""`linvit import-weights`: writes an official checkpoint as a safetensors file with linvit's names."""

import argparse
import importlib
import json
import shlex
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save

from linvit.cli.spec import read_spec
from linvit.errors import UserError
from linvit.io.files import check_new_file, write_bytes
from linvit.io.reading import read_regular
from linvit.io.terminal import argument_parser
from linvit.registry import backbones, heads
from linvit.weights.load import load_weights, parts
from linvit.weights.read import WRITTEN_BY, read

EPILOG = """examples:
  linvit import-weights FLatten_Swin_T.pth --backbone flatten_swin_tiny \\
    -o flatten_swin_tiny.safetensors
  linvit import-weights hf-hub:timm/deit_tiny_patch16_224.fb_in1k \\
    --backbone deit_tiny -o deit_tiny.safetensors
  linvit import-weights upernet_swin_tiny.pth --backbone swin_tiny \\
    --head upernet -o upernet_swin_tiny.safetensors
then:
  linvit fit --config images --data.source=FOLDER \\
    --model.backbone=flatten_swin_tiny \\
    --model.pretrained=flatten_swin_tiny.safetensors
or in Python:
  linvit.load_pretrained(model, "flatten_swin_tiny.safetensors")

Nothing in SOURCE is executed. The output contains only tensors of SOURCE, no
randomly initialised ones.
"""
CLASSIFIERS = ("head.weight", "head.fc.weight", "fc.weight", "classifier.weight")


def main(argv: list[str]) -> int:
    """Runs `linvit import-weights`; prints the result for every tensor."""
    parser = argument_parser("linvit import-weights", __doc__, EPILOG)
    parser.add_argument("source", metavar="SOURCE", help="a file, or a repository of the hub (hf-hub:owner/name)")
    backbone = "or {name: ..., option: value}; see linvit list backbones"
    parser.add_argument("--backbone", metavar="NAME", required=True, help=backbone)
    parser.add_argument("--head", metavar="NAME", help="head of a whole network, see linvit list heads")
    parser.add_argument("-o", "--output", metavar="OUT.safetensors", type=Path, required=True, help="the file to write")
    parser.add_argument("--num_classes", metavar="N", type=int, help="number of classes (default: that of SOURCE)")
    parser.add_argument("--img_size", metavar="SIDE", type=int, help="side of the images (default: the backbone's)")
    ema = "use averaged weights (default: the published ones; for a linvit .ckpt the plain weights)"
    parser.add_argument("--ema", action=argparse.BooleanOptionalAction, help=ema)
    fraction = "minimum fraction of the backbone in SOURCE (0.9)"
    parser.add_argument("--min_fraction", metavar="FRACTION", type=float, default=0.9, help=fraction)
    args = parser.parse_args(argv)

    output: Path = args.output
    if output.suffix != ".safetensors":
        option = f"-o {shlex.quote(output.with_suffix('.safetensors').as_posix())}"
        raise UserError(f"the output is a .safetensors file; got '{output}'. Write {option}")
    check_new_file(output)
    spec = read_spec(backbones, args.backbone)
    name, options = backbones.parse(spec)
    weights = read(args.source, args.ema)
    _, _, beside = parts(weights)
    if args.head is not None and not beside:
        raise UserError(f"{weights.source} has no head; remove --head")
    size = {} if args.img_size is None else {"img_size": args.img_size}
    classes = args.num_classes
    if args.head is None:
        found = next((weights.state[key] for key in CLASSIFIERS if key in weights.state), None)
        if classes is None:
            classes = len(found) if found is not None and found.ndim else 0
        model = backbones.create(spec, num_classes=classes, **size)
    else:
        head = read_spec(heads, args.head)
        kind: Any = heads.get(heads.parse(head)[0])
        if classes is None:
            classes = kind.classes_in({key.removeprefix("head."): tensor for key, tensor in beside.items()})
        create = getattr(importlib.import_module("linvit"), kind.maker)  # the public function of this kind of head
        model = create(spec, head, classes, **size)
    report = load_weights(model, weights, args.min_fraction)
    print(report)
    if beside and args.head is None:
        print("The source also has a head: add --head NAME, see linvit list heads")

    state = model.state_dict()
    # Copies, since layers may share a parameter, which the format does not support.
    written = {key: state[key].clone().contiguous() for key in (*report.loaded, *report.resized)}
    metadata = {
        "format": "pt",
        WRITTEN_BY: version("linvit"),
        "backbone": name,
        "head": args.head or "",
        "options": json.dumps({**options, **size, "num_classes": classes}),
        "source": args.source if weights.file is None else weights.file.name,
        "source_layout": report.layout,
        "source_key": report.key,
        "source_sha256": "" if weights.file is None else sha256(read_regular(weights.file)).hexdigest(),
    }
    write_bytes(output, save(written, metadata))
    print(f"wrote {output}: {len(written)} tensors, {sum(tensor.numel() for tensor in written.values()):,} numbers")
    return 0
