"""Published fp8 and int4 checkpoints: read in layouts that cut tiles and groups, against a cast by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megarl.checkpoints.hf_files import Slices
from megarl.checkpoints.hf_import import check_hf, load_hf
from megarl.checkpoints.quantised import file_bytes, fill
from megarl.model.hf_config import HfFacts
from megarl.model.precision import FP8_TILES
from megarl.model.quantisation import HINT, Quantisation
from megarl.model.shape import MlaShape, ModelShape
from megarl.model.tensors import hf_tensors, is_projection
from megarl.model.tensors import tensors as logical_tensors
from megarl.placement.engine_layout import EngineLayout
from megarl.placement.train_layout import TrainLayout
from megarl.resharding import fp8, megatron_map, sglang_map
from megarl.resharding.shards import LayoutError, Shard, param_table
from megarl.types import UserError
from tests.resharding.test_sglang_map import fill as placed

Tensors = dict[str, torch.Tensor]
SHAPE = ModelShape(
    2, 192, 4, 4, 40, 300, num_experts=4, experts_per_token=2, moe_ffn_size=72, num_dense_layers=1, ffn_size=264,
    num_shared_experts=1, router_bias=True, qk_norm=False, num_mtp_layers=1, mla=MlaShape(136, 130, 40, 24, 40),
)  # fmt: skip
WHOLE_TILES = dataclasses.replace(
    SHAPE, hidden_size=256, ffn_size=512, moe_ffn_size=256, mla=MlaShape(256, 128, 64, 64, 64)
)
LAYOUTS = {  # of which the slices begin and end inside tiles of 128, groups of 32 and words of 8
    "one rank": TrainLayout(1, 1, 1, 1),
    "tp4 etp4": TrainLayout(4, 4, 1, 1),
    "tp2 pp2 ep2": TrainLayout(4, 2, 2, 2),
    "tp2 ep2 etp2": TrainLayout(4, 2, 1, 2, expert_tp=2),
}
FORMATS = ("fp8", "fp8 bf16 scales", "fp8 powers of two", "fp8 exponents", "int4")
UP = "model.layers.1.mlp.experts.2.up_proj.weight"


def weights(shape: ModelShape = SHAPE) -> Tensors:
    """Weights in bfloat16; magnitudes differ by rows and columns, so that a scale of another tile shows."""
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for name, size in hf_tensors(shape).items():
        grown = torch.randn(size, generator=generator)
        for dim, length in enumerate(size):
            grown *= torch.linspace(0.1, 3.0, length).reshape(
                [-1 if dim == axis else 1 for axis in range(len(size))]
            )
        tensors[name] = grown.bfloat16()
    return tensors


def in_tiles(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in float8_e4m3fn and the scales of its tiles, made tile by tile."""
    rows, cols = weight.shape
    codes, scales = (
        torch.empty(rows, cols, dtype=fp8.FP8),
        torch.empty(-(-rows // 128), -(-cols // 128)),
    )
    for (top, left), tile in tiles_of(weight):
        scale = tile.float().abs().max() / 448
        if kind in ("fp8 powers of two", "fp8 exponents"):
            scale = 2 ** torch.log2(scale).ceil()
        if kind == "fp8 bf16 scales":
            scale = scale.bfloat16().float()
        codes[top : top + 128, left : left + 128] = (
            (tile.float() / scale).clamp(-448, 448).to(fp8.FP8)
        )
        scales[top // 128, left // 128] = scale
    dtypes = {"fp8 bf16 scales": torch.bfloat16, "fp8 exponents": torch.float8_e8m0fnu}
    return codes, scales.to(dtypes.get(kind, torch.float32))


def tiles_of(matrix: torch.Tensor) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    for top in range(0, matrix.shape[0], 128):
        for left in range(0, matrix.shape[1], 128):
            yield (top, left), matrix[top : top + 128, left : left + 128]


def cast(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """DeepSeek's fp8_cast_bf16.py: weight.float() x scale of each tile, then rounded."""
    weight = torch.empty(codes.shape, dtype=dtype)
    for (top, left), tile in tiles_of(codes):
        product = tile.float() * scales[top // 128, left // 128].float()
        weight[top : top + 128, left : left + 128] = product.to(dtype)
    return weight


def in_int4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """What compressed-tensors writes of a weight, by suffix, and what it reads again, in bfloat16."""
    rows, cols = weight.shape
    values, scales, read = (
        [],
        torch.empty(rows, -(-cols // 32), dtype=torch.bfloat16),
        torch.empty_like(weight),
    )
    for group, left in enumerate(range(0, cols, 32)):
        part = weight[:, left : left + 32]
        scales[:, group] = (part.float().abs().amax(1) / 7.5).bfloat16()
        values.append(
            (part.float() / scales[:, group : group + 1].float()).round().clamp(-8, 7).int()
        )
        read[:, left : left + 32] = values[-1].bfloat16() * scales[:, group : group + 1]
    packed = torch.zeros(rows, -(-cols // 8), dtype=torch.int64)
    for col, value in enumerate(torch.cat(values, 1).T):
        packed[:, col // 8] |= (value.long() + 8) << (4 * (col % 8))
    signed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    return {
        "_packed": signed,
        "_scale": scales,
        "_shape": torch.tensor([rows, cols], dtype=torch.int32),
    }, read


def publish(
    plain: Tensors, kind: str, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensors, Tensors]:
    """The tensors of a checkpoint in a format, and what the publisher's own cast to a data type makes of them."""
    files, read = dict(plain), {name: tensor.to(dtype) for name, tensor in plain.items()}
    for name in filter(is_projection, plain):
        if kind != "int4":
            files[name], files[name + "_scale_inv"] = in_tiles(plain[name], kind)
            read[name] = cast(files[name], files[name + "_scale_inv"], dtype)
        elif ".experts." in name:
            parts, read[name] = in_int4(files.pop(name))
            files |= {name + suffix: tensor for suffix, tensor in parts.items()}
    return files, read


def write(folder: Path, tensors: Tensors, num_files: int = 1) -> Path:
    """A weight and its scales may lie in different files."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    weight_map = {
        name: f"model-{index % num_files}.safetensors" for index, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in names if weight_map[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def published(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, Tensors, Tensors]]:
    """Of a format: the folder, its tensors, and the same cast by hand to bfloat16."""
    by_kind: dict[str, tuple[Path, Tensors, Tensors]] = {}

    def get(kind: str) -> tuple[Path, Tensors, Tensors]:
        if kind not in by_kind:
            files, read = publish(weights(), kind)
            by_kind[kind] = (
                write(tmp_path_factory.mktemp("published"), files, num_files=3),
                files,
                read,
            )
        return by_kind[kind]

    return get


def params_of(shards: list[Shard], dtype: torch.dtype) -> Tensors:
    """Uninitialised parameters as the map says; those of vocabulary tensors without padding."""
    dtypes = {shard.param: shard.dtype for shard in shards if shard.dtype}
    params = {}
    for name, size in param_table(shards).items():
        params[name] = torch.zeros(
            size[1:] if size[0] == 1 else size, dtype=getattr(torch, dtypes.get(name, ""), dtype)
        )
    return params


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("fp8", layout) for layout in LAYOUTS]
    + [(kind, "tp4 etp4") for kind in FORMATS[1:]]
    + [("int4", "tp2 ep2 etp2")],
)
def test_every_layout_gets_the_publishers_own_cast(
    published: Callable[[str], tuple[Path, Tensors, Tensors]],
    tmp_path: Path,
    kind: str,
    layout: str,
) -> None:
    folder, _, read = published(kind)
    assert check_hf(folder, SHAPE) == []
    plain = write(tmp_path / "bf16", read)
    for rank in range(LAYOUTS[layout].world_size):
        shards = megatron_map.shards(SHAPE, LAYOUTS[layout], rank)
        params, expected = params_of(shards, torch.bfloat16), params_of(shards, torch.bfloat16)
        load_hf(folder, shards, params)
        load_hf(plain, shards, expected)
        different = [name for name in params if not torch.equal(params[name], expected[name])]
        assert different == []


@pytest.fixture(scope="module")
def matrices(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Slices, dict[tuple[str, torch.dtype], torch.Tensor]]:
    """A matrix of ragged size in every format, and its whole cast, by format and data type."""
    matrix = torch.randn(300, 280, generator=torch.Generator().manual_seed(1)).bfloat16()
    files: Tensors = {}
    read = {}
    for kind in FORMATS:
        name = f"m.experts.{kind}.up_proj.weight"
        for dtype in (torch.bfloat16, torch.float32):
            stored, casts = publish({name: matrix}, kind, dtype)
            files |= stored
            read[kind, dtype] = casts[name]
    folder = write(tmp_path_factory.mktemp("matrices"), files)
    return Slices(folder, ExitStack()), read


def ranges(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True).map(sorted)


# of int4 the product is one of bfloat16, also where it is read in float32
CASTS = [(kind, torch.bfloat16) for kind in FORMATS] + [
    (kind, torch.float32) for kind in FORMATS[:4]
]


@settings(max_examples=60)
@given(st.sampled_from(CASTS), ranges(300), ranges(280))
def test_any_box_is_the_box_of_the_whole(
    matrices: tuple[Slices, dict[tuple[str, torch.dtype], torch.Tensor]],
    cast_of: tuple[str, torch.dtype],
    rows: list[int],
    cols: list[int],
) -> None:
    slices, read = matrices
    kind, dtype = cast_of
    plane = torch.zeros(rows[1] - rows[0], cols[1] - cols[0], dtype=dtype)
    name = f"m.experts.{kind}.up_proj.weight"
    assert fill(plane, slices, name, (rows[0], rows[1]), (cols[0], cols[1]))
    assert torch.equal(plane, read[cast_of][slice(*rows), slice(*cols)])


@pytest.mark.slow
@pytest.mark.nightly
def test_int4_is_what_compressed_tensors_reads() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    parts, read = in_int4(weight)
    values = helpers.unpack_from_int32(parts["_packed"], 4, torch.Size(weight.shape))
    assert torch.equal(helpers.pack_to_int32(values, 4), parts["_packed"])
    assert torch.equal(values.bfloat16() * parts["_scale"].repeat_interleave(32, 1), read)


# --- what is wrong -----------------------------------------------------------------------------------------------


def change(files: Tensors, **changed: torch.Tensor | None) -> Tensors:
    changes = {UP + suffix: tensor for suffix, tensor in changed.items()}
    return {name: tensor for name, tensor in (files | changes).items() if tensor is not None}


ERRORS: dict[str, tuple[str, Mapping[str, torch.Tensor | None], str]] = {
    "no scales": ("fp8", {"_scale_inv": None}, f"the checkpoint has no tensor {UP}_scale_inv; use a complete"),
    "one scale a weight": (
        "fp8", {"_scale_inv": torch.ones(1, 1)},
        f"{UP}_scale_inv is [1, 1]; for tiles of 128 x 128 it would be [1, 2]; {HINT}",
    ),
    "scales of another type": ("fp8", {"_scale_inv": torch.ones(1, 2).half()}, f"{UP}_scale_inv is F16; {HINT}"),
    "another fp8": ("fp8", {"": torch.ones(72, 192).to(torch.float8_e5m2)}, f"{UP} is F8_E5M2; {HINT}"),
    "fp8 of another size": ("fp8", {"": torch.ones(72, 190).to(fp8.FP8)}, f"{UP} is [72, 190], config.json says"),
    "no group scales": ("int4", {"_scale": None}, f"the checkpoint has no tensor {UP}_scale; use a complete"),
    "groups of 64": (
        "int4", {"_scale": torch.ones(72, 3).bfloat16()},
        f"{UP}_scale is [72, 3]; for groups of 32 it would be [72, 6]; {HINT}",
    ),
    "zero points": ("int4", {"_zero_point": torch.ones(9, 6, dtype=torch.int32)}, f"has {UP}_zero_point; {HINT}"),
    "8 bits": ("int4", {"_packed": torch.ones(72, 48, dtype=torch.int32)}, f"{UP}_packed is [72, 48], config.json"),
    "neither": ("int4", {"_packed": None}, f"the checkpoint has no tensor {UP}; use a complete"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_told_once_and_by_name(
    published: Callable[[str], tuple[Path, Tensors, Tensors]], tmp_path: Path, case: str
) -> None:
    kind, changed, words = ERRORS[case]
    folder = write(tmp_path, change(published(kind)[1], **changed))
    (error,) = check_hf(folder, SHAPE)
    assert words in str(error)
    if "config.json" not in words:
        rows, cols = hf_tensors(SHAPE)[UP]
        shard = Shard(UP, (0, rows), (0, cols), "p")
        # torch can convert it, and only the check says that its scales are not known
        if case != "another fp8":
            with pytest.raises(UserError) as caught:
                load_hf(folder, [shard], {"p": torch.empty(rows, cols)})
            assert words in str(caught.value)


# --- published bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp8", "fp8 exponents"])
def test_an_fp8_engines_own_map_gets_the_bytes_of_the_files(tmp_path: Path, kind: str) -> None:
    """Weights and scales in the fused parameters of a TP2 EP2 engine whose parts do not cut tiles."""
    shape = dataclasses.replace(WHOLE_TILES, num_mtp_layers=0)
    files, _ = publish(weights(shape), kind)
    folder, engine = write(tmp_path, files), EngineLayout(1, 2, 2, precision=FP8_TILES)
    whole = {name: tensor.float() for name, tensor in files.items()}
    for rank in range(2):
        shards = sglang_map.shards(shape, engine, rank)
        params = params_of(shards, torch.bfloat16)
        load_hf(folder, shards, params)
        for name, tensor in placed(shards, whole, {}).items():
            assert torch.equal(params[name].float().flatten(), tensor.flatten()), name


def test_a_plain_weight_does_not_become_fp8_without_scales(tmp_path: Path) -> None:
    folder = write(tmp_path, {UP: weights()[UP]})
    with pytest.raises(LayoutError, match="does not have it in fp8"):
        load_hf(
            folder, [Shard(UP, (0, 72), (0, 192), "p")], {"p": torch.zeros(72, 192, dtype=fp8.FP8)}
        )


@pytest.mark.parametrize(
    ("dtype", "moved"), [(torch.bfloat16, 2**-9), (torch.float32, 2**-23)], ids=str
)
def test_quantising_anew_gives_the_published_codes(dtype: torch.dtype, moved: float) -> None:
    """Where scales are amax / 448: a scale moves by the rounding of the tile's largest element alone."""
    for name, weight in weights().items():
        if is_projection(name):
            codes, scales = in_tiles(weight, "fp8")
            block = cast(codes, scales, dtype)[None]
            assert torch.equal(fp8.quantise(block)[0].view(torch.uint8), codes.view(torch.uint8)), (
                name
            )
            assert ((fp8.tile_scales(block)[0] / scales - 1).abs() <= moved).all(), name


# --- sizes -------------------------------------------------------------------------------------------------------

EXCLUDED = (
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
)
INT4_EXPERTS = Quantisation("int4", excluded=EXCLUDED)  # as Kimi-K2-Thinking has it


@pytest.mark.parametrize(
    ("kind", "quantisation"), [("fp8", Quantisation("fp8")), ("int4", INT4_EXPERTS), ("none", None)]
)
def test_bytes_are_those_of_the_files(kind: str, quantisation: Quantisation | None) -> None:
    shape = dataclasses.replace(SHAPE, num_mtp_layers=0)
    files = weights(shape) if kind == "none" else publish(weights(shape), kind)[0]
    files = {
        name: tensor.float() if "correction_bias" in name else tensor
        for name, tensor in files.items()
    }
    facts = HfFacts(1e-6, 1e4, True, 1, quantisation=quantisation)
    assert file_bytes(shape, facts) == sum(tensor.nbytes for tensor in files.values())


def test_what_is_quantised_is_what_an_fp8_engine_quantises() -> None:
    shards = sglang_map.shards(WHOLE_TILES, EngineLayout(1, 1, 1, precision=FP8_TILES, draft=1), 0)
    in_fp8 = {shard.name.format(0) for shard in shards if shard.dtype == "float8_e4m3fn"}
    assert in_fp8 == {
        name.format(0) for name in logical_tensors(WHOLE_TILES) if is_projection(name)
    }
