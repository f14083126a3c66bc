"""Agent Attention's and InLine's models: the official names and shapes of what their attention adds to its hosts."""

from collections.abc import Callable, Mapping, Sequence

from tests.official import conv
from tests.official.cswin import cswin
from tests.official.pvt import pvt
from tests.official.swin import swin

Shapes = dict[str, tuple[int, ...]]
AGENTS = (9, 16, 49, 49)


def agent(name: str, dim: int, heads: int, side: int, agents: int, *, cls: bool = False) -> Shapes:
    """The biases of a map of side^2 patches, and the convolution."""
    shapes: Shapes = {
        f"{name}.an_bias": (heads, agents, 7, 7),
        f"{name}.na_bias": (heads, agents, 7, 7),
        f"{name}.ah_bias": (1, heads, agents, side, 1),
        f"{name}.aw_bias": (1, heads, agents, 1, side),
        f"{name}.ha_bias": (1, heads, side, 1, agents),
        f"{name}.wa_bias": (1, heads, 1, side, agents),
    }
    if cls:
        shapes |= {f"{name}.ac_bias": (1, heads, agents, 1), f"{name}.ca_bias": (1, heads, 1, agents)}
    return shapes | conv(f"{name}.dwc", dim, 1, 3, 3)


def inline(name: str, dim: int, heads: int, side: int, agents: int) -> Shapes:
    """The two convolutions that make the kernels."""
    return conv(f"{name}.residual.0", dim, dim // heads, 1) | conv(f"{name}.residual.2", 9 * dim, dim // heads, 1)


def agent_pvt(
    mechanism: str,
    embed_dims: Sequence[int],
    depths: Sequence[int],
    num_heads: Sequence[int],
    mlp_ratios: Sequence[int],
) -> Shapes:
    """No reduction, class token or final norm."""
    sizes = {"embed_dims": embed_dims, "depths": depths, "num_heads": num_heads, "mlp_ratios": mlp_ratios}
    shapes = pvt(**sizes, sr_ratios=(1, 1, 1, 1), class_token=False)
    for s, depth in enumerate(depths):
        for i in range(depth):
            shapes |= ADDED[mechanism](f"block{s + 1}.{i}.attn", embed_dims[s], num_heads[s], 56 >> s, AGENTS[s])
    return {name: shape for name, shape in shapes.items() if not name.startswith("norm.")}


def agent_swin(mechanism: str, embed_dim: int, depths: Sequence[int], num_heads: Sequence[int]) -> Shapes:
    """The mechanism in the first three stages."""
    shapes = swin(embed_dim, depths, num_heads)
    for s, depth in enumerate(depths[:3]):
        for i in range(depth):
            block = f"layers.{s}.blocks.{i}.attn"
            del shapes[f"{block}.relative_position_bias_table"]
            shapes |= ADDED[mechanism](block, embed_dim << s, num_heads[s], 56 >> s, AGENTS[s])
    return shapes


def agent_cswin(mechanism: str, embed_dim: int, depths: Sequence[int], num_heads: Sequence[int]) -> Shapes:
    """The mechanism in the first two stages, on the whole map; LePE takes the place of agent's convolution."""
    shapes = cswin(embed_dim, depths, branches=(1, 1, 2, 1))
    for s, depth in enumerate(depths[:2]):
        for i in range(depth):
            added = ADDED[mechanism](f"stage{s + 1}.{i}.attns.0", embed_dim << s, num_heads[s], 56 >> s, AGENTS[s])
            shapes |= {name: shape for name, shape in added.items() if ".dwc." not in name}
    return shapes


def agent_deit(mechanism: str, dim: int, depth: int, heads: int, host: Mapping[str, tuple[int, ...]]) -> Shapes:
    """The mechanism in every block of a DeiT with class token and 14 x 14 patches."""
    shapes = dict(host)
    for i in range(depth):
        options = {"cls": True} if mechanism == "agent" else {}
        shapes |= ADDED[mechanism](f"blocks.{i}.attn", dim, heads, 14, 49, **options)
    return shapes


ADDED: dict[str, Callable[..., Shapes]] = {"agent": agent, "inline": inline}
