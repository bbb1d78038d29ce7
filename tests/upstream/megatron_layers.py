"""Layers of Megatron-Bridge releases on megatron-core, patched beside unpatched: prints one JSON object.

    python megatron_layers.py CORE_ROOT BRIDGE_ROOT=PART,...

of each release; a part is norms, wan_layer or flux_layers.

No Transformer Engine: linear layers are megatron-core's own, attention is torch's (megatron-core's wants a
GPU). Bridge's packages are entered without their __init__, which want all of its dependencies. jit_fuser
is torch.compile, which would only add its compile time: it is off, and every method runs as written.
"""

import importlib
import json
import os
import sys
import types
import warnings
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"
CORE = Path(sys.argv[1])
RELEASES = {Path(root): parts.split(",") for root, parts in (given.split("=") for given in sys.argv[2:])}
sys.path.insert(0, str(CORE))
warnings.simplefilter("ignore")

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.attention import SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules  # noqa: E402
from twins import Twins, difference, module_name  # noqa: E402

MODELS = "megatron/bridge/diffusion/models/"
WAN_LAYER, WAN_MODEL, FLUX_LAYER = (
    MODELS + file for file in ("wan/wan_layer_spec.py", "wan/wan_model.py", "flux/flux_layer_spec.py")
)
TOKENS, SAMPLES, FEATURES = 6, 2, 16
FILES = [WAN_LAYER, WAN_MODEL, FLUX_LAYER]
PACKAGES = (
    "",
    ".diffusion",
    ".diffusion.models",
    *(f".diffusion.models.{m}" for m in ("wan", "flux", "common")),
)


def enter(bridge: Path) -> None:
    """The release's modules are those that imports find from here on."""
    for name in [name for name in sys.modules if name.startswith("megatron.bridge")]:
        del sys.modules[name]
    for name in PACKAGES:
        package = types.ModuleType(f"megatron.bridge{name}")
        package.__path__ = [str(bridge.joinpath(*package.__name__.split(".")))]
        sys.modules[package.__name__] = package


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def both(file: str, name: str, *args, **kwargs) -> list:
    modules = (importlib.import_module(module_name(file)), twins[module_name(file)])
    return [getattr(module, name)(*args, **kwargs) for module in modules]


def settings() -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=FEATURES,
        num_attention_heads=2,
        ffn_hidden_size=32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=True,
        layernorm_epsilon=1e-6,
    )


class PlainAttention(torch.nn.Module):
    """Megatron's core attention, [S, B, heads, features], on the CPU."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__()

    def forward(self, query, key, value, attention_mask, **kwargs):
        heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(*heads_first)
        return attended.permute(2, 0, 1, 3).flatten(2)


def norms() -> None:
    x, branch = random(TOKENS, SAMPLES, FEATURES), random(TOKENS, SAMPLES, FEATURES)
    row = random(1, SAMPLES, FEATURES)

    def wan(adaln, x, branch, timestep, norm):
        shift, scale, gate, *others = adaln(timestep)
        y = adaln.normalize_modulate(norm, x, shift=shift, scale=scale)
        return y, adaln.scale_add(residual=x, x=branch, gate=gate), others

    norm = torch.nn.LayerNorm(FEATURES, elementwise_affine=False, eps=1e-6)
    adaln = both(WAN_LAYER, "WanAdaLN", settings())
    timestep = random(SAMPLES, 6, FEATURES)
    errors["WanAdaLN"] = difference(*adaln, x, branch, timestep, norm, call=wan)

    def expanded(adaln, x, branch, timestep, norm):
        shift, scale, gate, *_ = (part.expand_as(x) for part in adaln(timestep))
        return adaln.normalize_modulate(norm, x, shift, scale), adaln.scale_add(x, branch, gate)

    errors["WanAdaLN, expanded rows"] = difference(*adaln, x, branch, timestep, norm, call=expanded)

    head = both(WAN_MODEL, "Head", FEATURES, 4, (1, 2, 2))
    errors["Head"] = difference(*head, x.transpose(0, 1), random(SAMPLES, FEATURES))

    def flux(adaln, x, branch, timestep):
        shift, scale, gate, shift2, scale2, _ = adaln(timestep)
        first = adaln.modulated_layernorm(x, shift=shift, scale=scale, layernorm_idx=0)
        return first, adaln.scaled_modulated_layernorm(x, branch, gate, shift2, scale2, layernorm_idx=1)

    adaln = both(
        FLUX_LAYER, "AdaLN", settings(), n_adaln_chunks=6, modulation_bias=True, use_second_norm=True
    )
    errors["AdaLN"] = difference(*adaln, x, branch, row, call=flux)
    for kind in ("layer_norm", "rms_norm"):
        norms = both(FLUX_LAYER, "AdaLNContinuous", settings(), FEATURES, norm_type=kind)
        errors[f"AdaLNContinuous {kind}"] = difference(*norms, x, random(SAMPLES, FEATURES))


def wan_layer() -> None:
    """The layer of Wan with local linear layers and attention in place of Transformer Engine's."""
    layer = importlib.import_module(module_name(WAN_LAYER))
    mask = {"attn_mask_type": AttnMaskType.no_mask}
    linear = {"linear_proj": RowParallelLinear, "core_attention": PlainAttention}
    norm = {"q_layernorm": WrappedTorchNorm, "k_layernorm": WrappedTorchNorm}
    submodules = layer.WanWithAdaLNSubmodules(
        norm1=torch.nn.LayerNorm,
        norm2=torch.nn.LayerNorm,
        norm3=torch.nn.LayerNorm,
        full_self_attention=ModuleSpec(
            module=layer.DiTSelfAttention,
            params=mask,
            submodules=SelfAttentionSubmodules(linear_qkv=ColumnParallelLinear, **linear, **norm),
        ),
        cross_attention=ModuleSpec(
            module=layer.DiTCrossAttention,
            params=mask,
            submodules=layer.DiTCrossAttentionSubmodules(
                linear_q=ColumnParallelLinear, linear_kv=ColumnParallelLinear, **linear, **norm
            ),
        ),
        mlp=ModuleSpec(
            module=MLP,
            submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        ),
    )

    def call(layer, x, timestep, context):
        unpacked = {"self_attention": None, "cross_attention": None}
        return layer(x, attention_mask=timestep, context=context, packed_seq_params=unpacked)[0]

    layers = both(WAN_LAYER, "WanLayerWithAdaLN", settings(), submodules)
    inputs = (random(TOKENS, SAMPLES, FEATURES), random(SAMPLES, 6, FEATURES), random(4, SAMPLES, FEATURES))
    errors["WanLayerWithAdaLN"] = difference(*layers, *inputs, call=call)


def flux_layers() -> None:
    """FLUX's double and single block, of the same stand-ins."""
    layer = importlib.import_module(module_name(FLUX_LAYER))
    mask = {"attn_mask_type": AttnMaskType.no_mask}
    linear = {"linear_proj": RowParallelLinear, "core_attention": PlainAttention}
    mlp = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    joint = layer.JointSelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, added_linear_qkv=ColumnParallelLinear, **linear
    )
    attention = ModuleSpec(module=layer.JointSelfAttention, params=mask, submodules=joint)
    image, text, row = (random(count, SAMPLES, FEATURES) for count in (TOKENS, 4, 1))

    def double(block, image, text, row):
        return block(image, text, emb=row)

    submodules = TransformerLayerSubmodules(self_attention=attention, mlp=mlp)
    blocks = both(FLUX_LAYER, "MMDiTLayer", settings(), submodules)
    errors["MMDiTLayer"] = difference(*blocks, image, text, row, call=double)

    def single(block, image, row):
        return block(image, emb=row)[0]

    plain = SelfAttentionSubmodules(linear_qkv=ColumnParallelLinear, **linear)
    attention = ModuleSpec(module=layer.FluxSingleAttention, params=mask, submodules=plain)
    submodules = TransformerLayerSubmodules(self_attention=attention, mlp=mlp)
    blocks = both(FLUX_LAYER, "FluxSingleTransformerBlock", settings(), submodules)
    errors["FluxSingleTransformerBlock"] = difference(*blocks, image, row, call=single)


torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
PARTS = {"norms": norms, "wan_layer": wan_layer, "flux_layers": flux_layers}
printed = []
for bridge, parts in RELEASES.items():
    enter(bridge)
    twins, errors = Twins(bridge, FILES), {}
    for part in parts:
        PARTS[part]()
    printed.append({"errors": errors, "reached": sorted(twins.reached)})
print(json.dumps(printed))
